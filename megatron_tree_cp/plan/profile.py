"""Coefficients of the cost model, in milliseconds and bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path

from ..tree.errors import InputError


@dataclass(frozen=True)
class CostProfile:
    """What one device and its links cost. Times in ms, sizes in bytes, rates per ms.

    The defaults are H200-like (bf16, NVLink), rounded from single measurements; they are no fit.
    Raises ``ValueError`` for coefficients out of range.
    """

    name: str = "h200-default"
    """Where the coefficients come from; shown in reports."""

    token_flops_per_ms: float = 6.0e11
    """Achieved FLOPs per ms of token-local work (projections, MLP)."""

    token_backward_factor: float = 2.0
    """Backward over forward time of token-local work."""

    forward_flops_per_ms: float = 5.7e11
    """Achieved FLOPs per ms of the attention forward on visible pairs, full tiles."""

    backward_flops_per_ms: float = 4.75e11
    """The same for the backward, which has 2.5 times the forward's FLOPs."""

    remote_pair_factor: float = 1.05
    """Time of a visible pair in a remote stage over one in the local stage."""

    forward_launch_ms: float = 0.03
    """Fixed cost of one forward stage (mask tables, launches)."""

    backward_launch_ms: float = 0.06
    """Fixed cost of one backward stage."""

    underfill_ms: float = 0.06
    """Extra time of a stage that has too little work to fill the device, at zero work."""

    fill_flops: float = 6.5e10
    """Forward FLOPs of a stage from which on nothing is lost to underfill."""

    memory_bytes_per_ms: float = 3.5e9
    """Achieved memory traffic of gathers, merges and accumulations."""

    range_ms: float = 2.0e-5
    """Cost of one contiguous range in a gather."""

    exchange_latency_ms: float = 0.1
    """Fixed cost of one all-to-all on one node, also when nothing is sent."""

    exchange_bytes_per_ms: float = 2.2e8
    """Bytes per ms that one rank sends or receives on its node."""

    ranks_per_node: int | None = None
    """CP ranks that share a node (rank // ranks_per_node); None is one node."""

    network_latency_ms: float = 0.15
    """Added once for an exchange that crosses nodes."""

    network_bytes_per_ms: float = 4.5e7
    """Bytes per ms that one rank sends or receives across nodes."""

    memory_limit_bytes: float | None = None
    """Bytes per rank for activations and buffers (weights aside); None does not check."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or value is None:
                continue
            positive = field.name.endswith("_per_ms") or field.name in (
                "ranks_per_node",
                "fill_flops",
                "memory_limit_bytes",
            )
            if not (value > 0 if positive else value >= 0):
                bound = "more than 0" if positive else "at least 0"
                raise ValueError(f"CostProfile: {field.name} must be {bound}, got {value}")


def load_profile(path: str | PathLike[str]) -> CostProfile:
    """Read a profile: one JSON object of `CostProfile` fields; those left out keep defaults.

    Raises InputError for a file that cannot be read, an unknown field or a value out of range.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: a profile is one JSON object of coefficients")
    kinds = {field.name: field.type for field in fields(CostProfile)}
    for name, value in values.items():
        if name not in kinds:
            raise InputError(f"{path}: unknown coefficient {name!r}; known: {', '.join(kinds)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        optional = value is None and "None" in str(kinds[name])
        if not (isinstance(value, str) if name == "name" else number or optional):
            raise InputError(f"{path}: {name}: {value!r} is no number")
    try:
        return CostProfile(**values)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
