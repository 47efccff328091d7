"""Implementations of the Gated DeltaNet kernels, what each can do, and the choice between them.

A module for the delta rule has the functions of `tiled.py`: prepare, restore, pass_states,
summarise, output, begin_backward, pass_gradients, token_gradients. One for the convolution has
those of `conv_torch.py`: forward, backward_local, backward_input.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class GdnCase:
    """What decides whether an implementation can serve a layer."""

    device_type: str
    """`cpu` or `cuda`."""

    dtype: torch.dtype
    """Of q, k and v, or of the convolution's input."""

    key_dim: int = 0
    value_dim: int = 0
    """Head dims of the delta rule."""

    width: int = 0
    """Taps of the convolution."""

    cp_size: int = 1


@dataclass(frozen=True)
class Implementation:
    """One kernel: its name, its module, and why it cannot do a case (None when it can)."""

    name: str
    module: str
    supports: Callable[[GdnCase], str | None]
    in_auto: bool = True

    def load(self) -> ModuleType:
        """Import the kernel module; deferred, since some need a GPU's packages."""
        return importlib.import_module(f"megatron_tree_cp.ops.gdn.{self.module}")


def _any_float(case: GdnCase) -> str | None:
    if case.dtype in (*_FLOATS, torch.float64):
        return None
    return f"needs a float dtype, got {case.dtype}"


def _reference(case: GdnCase) -> str | None:
    if case.cp_size > 1:
        return f"walks whole rows on one rank, this row is on {case.cp_size}"
    return _any_float(case)


def _triton_rule(case: GdnCase) -> str | None:
    if case.device_type != "cuda":
        return "needs a CUDA device"
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 or bf16, got {case.dtype}"
    for name, dim in (("key", case.key_dim), ("value", case.value_dim)):
        if dim < 16 or dim > 256 or dim % 16:
            return f"takes a {name} head dim from 16 to 256 in steps of 16, got {dim}"
    if importlib.util.find_spec("fla") is None:
        return "needs flash-linear-attention: pip install 'megatron-tree-cp[gpu]'"
    return None


def _triton_conv(case: GdnCase) -> str | None:
    if case.device_type != "cuda":
        return "needs a CUDA device"
    if case.dtype not in _FLOATS:
        return f"takes fp16, bf16 or fp32, got {case.dtype}"
    if case.width > 8:
        return f"takes up to 8 taps, got {case.width}"
    return None


# Fastest first: `auto` takes the first that supports the case.
RULES: tuple[Implementation, ...] = (
    Implementation("triton", "fla_kernels", _triton_rule),
    Implementation("tiled", "tiled", _any_float),
    Implementation("reference", "reference", _reference, in_auto=False),
)
CONVOLUTIONS: tuple[Implementation, ...] = (
    Implementation("triton", "conv_triton", _triton_conv),
    Implementation("tiled", "conv_torch", _any_float),
    Implementation("reference", "reference", _reference, in_auto=False),
)


def select(case: GdnCase, impl: str, table: tuple[Implementation, ...]) -> Implementation:
    """Return the implementation `impl` of `table`, or for `auto` the fastest that can do the case.

    Raises:
        ValueError: `impl` is unknown, or cannot do the case (reason and alternatives named).
    """
    if impl == "auto":
        for candidate in table:
            if candidate.in_auto and candidate.supports(case) is None:
                return candidate
        reasons = "; ".join(f"{c.name} {c.supports(case)}" for c in table if c.in_auto)
        raise ValueError(f"no Gated DeltaNet implementation supports this case: {reasons}")
    for candidate in table:
        if candidate.name == impl:
            reason = candidate.supports(case)
            if reason is None:
                return candidate
            able = [c.name for c in table if c.supports(case) is None]
            raise ValueError(
                f"Gated DeltaNet implementation {impl!r} {reason}; "
                f"use one of: auto, {', '.join(able) or 'none supports this case'}"
            )
    known = ", ".join(c.name for c in table)
    raise ValueError(f"unknown Gated DeltaNet implementation {impl!r}; use auto or one of: {known}")


def describe_choice(case: GdnCase, impl: str, table: tuple[Implementation, ...]) -> str:
    """One line for the start-up table: the choice and why faster candidates were passed over."""
    chosen = select(case, impl, table)
    if impl != "auto":
        return f"{chosen.name} (requested)"
    passed = [f"{c.name} {c.supports(case)}" for c in table[: table.index(chosen)] if c.in_auto]
    return f"{chosen.name} (auto{''.join('; ' + text for text in passed)})"
