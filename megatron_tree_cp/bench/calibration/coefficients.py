"""From fitted costs of features to coefficients of the profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...tree.errors import InputError

STEPS = ("merge", "delta", "pack", "assemble", "accumulate")
"""Steps of the executor that move rows through device memory."""


def needed_cost(coefficients: Mapping[str, float], name: str, component: str) -> float:
    """A coefficient that must not vanish."""
    if coefficients[name] <= 0:
        raise InputError(
            f"{component}: the fit gives {name} no cost; measure larger work (without --quick)"
        )
    return coefficients[name]


def copy_fields(c: Mapping[str, float], _: float | None, __: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``copies``: the memory rate, passes and fixed costs of the steps."""
    byte_ms = needed_cost(c, "copy_bytes", "copies")
    return {
        "memory_bytes_per_ms": 1 / byte_ms,
        **{f"{step}_launch_ms": c[f"{step}_launch"] for step in STEPS},
        **{f"{step}_passes": c[f"{step}_bytes"] / byte_ms for step in STEPS},
    }


def _pair_costs(c: Mapping[str, float], component: str) -> tuple[float, float, float]:
    """ms per FLOP of pairs in local and in remote stages, and of hidden pairs.

    What pairs share, what they share with hidden ones (``tile_flops``), and each one's own.
    """
    shared = c["flops"] + c["tile_flops"]
    local, remote = (shared + c[f"{place}_flops"] for place in ("local", "remote"))
    costs = {"local pairs": local, "remote pairs": remote}
    for name in costs:
        needed_cost(costs, name, component)
    return local, remote, c["tile_flops"] + c["hidden_flops"]


def forward_fields(
    c: Mapping[str, float], ramp: float | None, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Of ``attention_forward``."""
    pair, remote, hidden = _pair_costs(c, "attention_forward")
    return {
        "forward_flops_per_ms": 1 / pair,
        "forward_hidden_factor": hidden / pair,
        "forward_idle_factor": c["idle_flops"] / pair,
        "remote_pair_factor": remote / pair,
        "forward_window_factor": 1 + c["window_flops"] / pair,
        "forward_window_row_ms": c["window_rows"],
        "forward_launch_ms": c["launch"],
        "forward_row_passes": c["row_bytes"] * known["memory_bytes_per_ms"],
        "underfill_ms": c.get("short", 0.0),
        "fill_flops": ramp,
    }


def backward_fields(
    c: Mapping[str, float], ramp: float | None, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Of ``attention_backward``."""
    pair, remote, hidden = _pair_costs(c, "attention_backward")
    return {
        # The profile counts 2.5 times the forward's FLOPs in the backward.
        "backward_flops_per_ms": 2.5 / pair,
        "backward_hidden_factor": hidden / pair,
        "backward_idle_factor": c["idle_flops"] / pair,
        "backward_remote_factor": remote / pair,
        "backward_window_factor": 1 + c["window_flops"] / pair,
        "backward_window_row_ms": c["window_rows"],
        "backward_launch_ms": c["launch"],
        "backward_row_passes": c["row_bytes"] * known["memory_bytes_per_ms"],
        "backward_key_passes": c["key_bytes"] * known["memory_bytes_per_ms"],
        "backward_underfill_ms": c.get("short", 0.0),
        "backward_fill_flops": ramp,
    }


def token_fields(c: Mapping[str, float], _: float | None, __: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``tokens_forward``."""
    return {"token_flops_per_ms": 1 / needed_cost(c, "flops", "tokens_forward")}


def token_back_fields(
    c: Mapping[str, float], _: float | None, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Of ``tokens_backward``."""
    back = needed_cost(c, "flops", "tokens_backward")
    return {"token_backward_factor": back * known["token_flops_per_ms"]}
