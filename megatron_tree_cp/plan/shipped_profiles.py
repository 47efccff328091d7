"""Profiles that ship with the package, and the one that a device gets."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources

from .profile import CostProfile, load_profile

PEAKS = {
    "A100": (312.0, 2.0),
    "H100": (989.0, 3.35),
    "H200": (989.0, 4.8),
    "B200": (2250.0, 8.0),
}
"""Dense bf16 TFLOP/s and memory TB/s of the makers' data sheets (SXM parts)."""


@cache
def shipped_profiles() -> dict[str, CostProfile]:
    """Profiles of the package by their file's name, in order."""
    folder = resources.files(__package__) / "profiles"
    found = {}
    if folder.is_dir():
        for entry in sorted(folder.iterdir(), key=lambda e: e.name):
            if entry.name.endswith(".json"):
                with resources.as_file(entry) as path:
                    found[entry.name.removesuffix(".json").upper()] = load_profile(path)
    return found


def profile_for(
    device: str, shipped: dict[str, CostProfile] | None = None
) -> tuple[CostProfile, str]:
    """(profile, one line that says where it comes from) for a device by its name.

    ``shipped`` maps device words (``H200``) to profiles; the package's own when None. A device of
    the data sheets takes the shipped one whose peak FLOPs are nearest, scaled by the ratios of both
    peaks; one that nobody knows takes the first unscaled. Links are never scaled.
    """
    shipped = shipped_profiles() if shipped is None else shipped
    known = _word(device)
    if known in shipped:
        return shipped[known], f"{device}: the shipped profile {shipped[known].name}"
    if not shipped:
        profile = CostProfile()
        return profile, f"{device}: {profile.name} default costs; run tree-cp calibrate"
    measured = {word: PEAKS[word] for word in shipped if word in PEAKS}
    if known is None or not measured:
        word, profile = next(iter(shipped.items()))
        return profile, (
            f"{device}: unknown device, the profile of {word} unscaled; run tree-cp calibrate"
        )
    flops, memory = PEAKS[known]
    word = min(measured, key=lambda w: max(measured[w][0] / flops, flops / measured[w][0]))
    ratio, copies = flops / measured[word][0], memory / measured[word][1]
    profile = scaled_profile(shipped[word], ratio, copies)
    return profile, (
        f"{device}: the profile of {word}, compute scaled by {ratio:.2f} and memory by "
        f"{copies:.2f} (data sheets); run tree-cp calibrate"
    )


def scaled_profile(profile: CostProfile, compute: float, memory: float) -> CostProfile:
    """``profile`` of a device whose compute and memory are so many times as fast."""
    filled = profile.backward_fill_flops
    return replace(
        profile,
        name=f"{profile.name}, scaled by {compute:.2f} and {memory:.2f}",
        token_flops_per_ms=profile.token_flops_per_ms * compute,
        forward_flops_per_ms=profile.forward_flops_per_ms * compute,
        backward_flops_per_ms=profile.backward_flops_per_ms * compute,
        forward_window_row_ms=profile.forward_window_row_ms / compute,
        backward_window_row_ms=profile.backward_window_row_ms / compute,
        fill_flops=profile.fill_flops * compute,
        backward_fill_flops=None if filled is None else filled * compute,
        memory_bytes_per_ms=profile.memory_bytes_per_ms * memory,
        gdn_token_bytes_per_ms=profile.gdn_token_bytes_per_ms * memory,
        gdn_gradient_flops_per_ms=profile.gdn_gradient_flops_per_ms * compute,
        gdn_summary_flops_per_ms=profile.gdn_summary_flops_per_ms * compute,
        gdn_state_bytes_per_ms=profile.gdn_state_bytes_per_ms * memory,
    )


def _word(device: str) -> str | None:
    words = device.upper().replace("-", " ").split()
    return next((word for word in PEAKS if word in words), None)
