"""Coefficients of the cost model, in milliseconds and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from ..tree.errors import InputError


@dataclass(frozen=True)
class CostProfile:
    """What one device and its links cost. Times in ms, sizes in bytes, rates per ms.

    The defaults are H200-like (bf16, NVLink), rounded from single measurements; they are no fit.
    `tree-cp calibrate` fits them. Raises ``ValueError`` for coefficients out of range.
    """

    name: str = "uncalibrated"
    """Where the coefficients come from; shown in reports."""

    token_flops_per_ms: float = 6.0e11
    """Achieved FLOPs per ms of token-local work (projections, MLP)."""

    token_backward_factor: float = 2.0
    """Backward over forward time of token-local work."""

    forward_flops_per_ms: float = 5.7e11
    """Achieved FLOPs per ms of the attention forward on visible pairs, full tiles."""

    backward_flops_per_ms: float = 4.75e11
    """The same for the backward, which has 2.5 times the forward's FLOPs."""

    forward_hidden_factor: float = 0.0
    """Forward time of a hidden pair in a touched 128 x 128 tile over one of a visible pair."""

    backward_hidden_factor: float = 0.0
    """The same in the backward. While both factors are 0 no tiles are counted."""

    remote_pair_factor: float = 1.05
    """Time of a pair in a remote stage over one in the local stage."""

    backward_remote_factor: float | None = None
    """The same in the backward; None takes ``remote_pair_factor``."""

    forward_window_factor: float = 1.0
    """Forward time of a pair under a window over one without."""

    backward_window_factor: float = 1.0
    """The same in the backward."""

    forward_window_row_ms: float = 0.0
    """Forward time of one head's query row under a window, beside its pairs: tiles at its edges are
    masked pair by pair."""

    backward_window_row_ms: float = 0.0
    """The same in the backward."""

    processors: float | None = None
    """Multiprocessors, of which each runs one program of an attention kernel at a time; None
    leaves the idle part of a last round without a price."""

    forward_idle_factor: float = 0.0
    """An idle tile of the last round (rounds.py) over a visible pair, pair by pair."""

    backward_idle_factor: float = 0.0
    """The same in the backward."""

    head_dim_factors: tuple[tuple[int, float, float], ...] = ()
    """(key head dim, forward, backward): time of a FLOP of pairs over one at the heads that were
    calibrated. A head dim takes the nearest (by ratio), the smaller of two as near."""

    forward_launch_ms: float = 0.03
    """Fixed cost of one forward stage (mask tables, launches)."""

    backward_launch_ms: float = 0.06
    """Fixed cost of one backward stage."""

    forward_row_passes: float = 0.0
    """Memory passes over a forward stage's outputs beside its pairs; see ``merge_passes``."""

    backward_row_passes: float = 0.0
    """Memory passes over a backward stage's outputs beside its pairs."""

    backward_key_passes: float = 0.0
    """Memory passes over a backward stage's keys and values: its sums of dK and dV."""

    underfill_ms: float = 0.06
    """Extra time of a stage that has too little work to fill the device, at zero work."""

    backward_underfill_ms: float | None = None
    """The same in the backward; None takes ``underfill_ms``."""

    fill_flops: float = 6.5e10
    """Forward FLOPs of a stage from which on nothing is lost to underfill."""

    backward_fill_flops: float | None = None
    """The same in the backward, in forward FLOPs too; None takes ``fill_flops``."""

    memory_bytes_per_ms: float = 3.5e9
    """Achieved memory traffic of a plain copy, reads and writes together."""

    merge_launch_ms: float = 0.0
    """Fixed cost of a merge."""

    merge_passes: float = 5.0
    """Times that a merge moves its outputs at ``memory_bytes_per_ms`` (an fp32 accumulator read
    and written, and the stage's output read)."""

    delta_launch_ms: float = 0.0
    """Fixed cost of a layer's row sums and dQ."""

    delta_passes: float = 2.0
    """The same over a layer's outputs: row sums before the backward, dQ's conversion after it."""

    pack_launch_ms: float = 0.0
    """Fixed cost of gathering what one wave sends."""

    pack_passes: float = 2.0
    """The same over the keys and values that a rank sends."""

    assemble_launch_ms: float = 0.0
    """Fixed cost of putting a fused stage's keys and values together."""

    assemble_passes: float = 2.0
    """The same over all keys and values of a fused stage."""

    accumulate_launch_ms: float = 0.0
    """Fixed cost of adding what one wave returns."""

    accumulate_passes: float = 4.0
    """The same over the gradients of keys and values that return to their owner."""

    exchange_latency_ms: float = 0.1
    """Fixed cost of one all-to-all on one node, also when nothing is sent."""

    exchange_bytes_per_ms: float = 2.2e8
    """Bytes per ms that one rank sends or receives on its node."""

    exchange_sizes: tuple[tuple[int, float, float], ...] = ()
    """(CP size, latency ms, bytes per ms) of the two above as measured; a CP size takes the nearest
    (by ratio), the smaller of two as near."""

    exchange_contention: float = 0.0
    """Compute time lost per ms of an exchange that runs beside it."""

    ranks_per_node: int | None = None
    """CP ranks that share a node (rank // ranks_per_node, in the order of the CP group; with TP
    inside the node its GPUs over the TP size); None is one node."""

    network_latency_ms: float = 0.15
    """Added once for an exchange that crosses nodes."""

    network_bytes_per_ms: float = 4.5e7
    """Bytes per ms that one rank sends or receives across nodes."""

    gdn_token_bytes_per_ms: float = 2.0e9
    """Achieved memory traffic of what a Gated DeltaNet layer does for all tokens at once: blocks of
    64 tokens prepared, outputs read (`plan.cost_gdn`). All `gdn_` defaults are uncalibrated."""

    gdn_token_backward_factor: float = 1.0
    """Backward over forward time of a byte of that work."""

    gdn_padding_factor: float = 0.5
    """Forward time of a row that fills up a run's last block over one of a token's."""

    gdn_padding_backward_factor: float = 0.5
    """The same in the backward."""

    gdn_conv_passes: float = 2.5
    """Memory passes of a forward convolution over its rows at ``memory_bytes_per_ms``."""

    gdn_conv_backward_factor: float = 2.5
    """Backward over forward time of the convolution."""

    gdn_step_ms: float = 0.0025
    """A chunk of 64 tokens that waits for the chunk before it, in a pass over states."""

    gdn_state_bytes_per_ms: float = 2.0e9
    """Achieved memory traffic of such passes when many runs walk side by side."""

    gdn_fork_passes: float = 2.0
    """Memory passes over a run's fp32 state, which its pass reads and leaves behind."""

    gdn_gradient_step_ms: float = 0.003
    """A chunk that waits for the one behind it, in a pass over gradients of states."""

    gdn_gradient_flops_per_ms: float = 1.0e11
    """Achieved FLOPs of such passes when many runs walk side by side."""

    gdn_gradient_fork_passes: float = 2.0
    """Memory passes over a run's fp32 gradient of its state."""

    gdn_summary_step_ms: float = 0.003
    """A chunk that waits for the one before it, in a pass that summarises runs."""

    gdn_summary_flops_per_ms: float = 1.0e11
    """Achieved FLOPs of such passes when many runs walk side by side."""

    gdn_summary_fork_passes: float = 2.0
    """Memory passes over a run's fp32 end state and map."""

    gdn_level_ms: float = 0.01
    """Fixed cost of one level of runs in a pass."""

    gdn_carry_passes: float = 8.0
    """Memory passes over the states and maps that a rank sends or receives."""

    gdn_compose_ms: float = 0.02
    """One product of the composition along exports of other ranks."""

    gdn_layer_ms: float = 0.15
    """Fixed cost of a layer's launches in each direction."""

    memory_limit_bytes: float | None = None
    """Bytes per rank for activations and buffers (weights aside); None does not check."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", *_TABLES) or value is None:
                continue
            positive = field.name.endswith("_per_ms") or field.name in (
                "ranks_per_node",
                "processors",
                "fill_flops",
                "backward_fill_flops",
                "memory_limit_bytes",
            )
            if not (value > 0 if positive else value >= 0):
                bound = "more than 0" if positive else "at least 0"
                raise ValueError(f"CostProfile: {field.name} must be {bound}, got {value}")
        if self.ranks_per_node is not None and self.ranks_per_node != int(self.ranks_per_node):
            raise ValueError(
                "CostProfile: ranks_per_node must be a whole number of CP ranks, got "
                f"{self.ranks_per_node}"
            )
        for name in _TABLES:
            object.__setattr__(self, name, tuple(tuple(entry) for entry in getattr(self, name)))
        sizes, dims = self.exchange_sizes, self.head_dim_factors
        if any(len(e) != 3 or e[0] < 2 or e[1] < 0 or e[2] <= 0 for e in sizes):
            raise ValueError(
                "CostProfile: exchange_sizes must hold (CP size from 2, latency ms from 0, bytes "
                f"per ms above 0), got {sizes}"
            )
        if any(len(e) != 3 or min(e) <= 0 for e in dims):
            raise ValueError(
                "CostProfile: head_dim_factors must hold (head dim, forward and backward factor), "
                f"all above 0, got {dims}"
            )

    @property
    def counts_tiles(self) -> bool:
        """Whether hidden pairs of touched tiles have a price."""
        return self.forward_hidden_factor > 0 or self.backward_hidden_factor > 0

    def exchange_rates(self, cp_size: int) -> tuple[float, float]:
        """(latency ms, bytes per ms) of an all-to-all between ``cp_size`` ranks of a node."""
        default = (self.exchange_latency_ms, self.exchange_bytes_per_ms)
        return _nearest(self.exchange_sizes, cp_size, default)

    def head_dim_factor(self, head_dim: int) -> tuple[float, float]:
        """(forward, backward) factor of a pair's time at a key head dim."""
        return _nearest(self.head_dim_factors, head_dim, (1.0, 1.0))


_TABLES = ("exchange_sizes", "head_dim_factors")
"""Fields that are rows of three numbers, by the first."""


def _nearest(
    table: tuple[tuple[int, float, float], ...], size: int, default: tuple[float, float]
) -> tuple[float, float]:
    """What a table holds for the size nearest by ratio, the smaller of two as near."""

    def distance(entry: tuple[int, float, float]) -> tuple[float, int]:
        return max(entry[0] / size, size / entry[0]), entry[0]

    return min(table, key=distance)[1:] if table else default


def profile_of(coefficients: Mapping[str, Any], origin: str) -> CostProfile:
    """A profile of named coefficients; those left out keep defaults.

    Raises InputError, which begins with ``origin``, for an unknown name or a value out of range.
    """
    kinds = {field.name: str(field.type) for field in fields(CostProfile)}
    values = dict(coefficients)
    for name, value in values.items():
        if name not in kinds:
            raise InputError(f"{origin}: unknown coefficient {name!r}; known: {', '.join(kinds)}")
        if name in _TABLES:
            if not isinstance(value, list) or not all(_is_row_of_numbers(e) for e in value):
                raise InputError(f"{origin}: {name}: {value!r} is no list of number triples")
            values[name] = tuple(tuple(entry) for entry in value)
        elif name == "name":
            if not isinstance(value, str):
                raise InputError(f"{origin}: {name}: {value!r} is no text")
        elif not (_is_number(value) or (value is None and "None" in kinds[name])):
            raise InputError(f"{origin}: {name}: {value!r} is no number")
    try:
        return CostProfile(**values)
    except ValueError as error:
        raise InputError(f"{origin}: {error}") from error


def load_profile(path: str | PathLike[str]) -> CostProfile:
    """Read a profile: what `tree-cp calibrate` wrote, or one JSON object of `CostProfile` fields.

    Fields that are left out keep defaults. Raises InputError for a file that cannot be read, an
    unknown field or version, or a value out of range.
    """
    values = _read(path)
    if "version" not in values:
        return profile_of(values, str(path))
    return ProfileDocument.of(values, str(path)).profile


def load_document(path: str | PathLike[str]) -> ProfileDocument:
    """Read what `tree-cp calibrate` wrote, with its origin and errors. Raises InputError."""
    return ProfileDocument.of(_read(path), str(path))


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{path}{line}: not JSON: {reason}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: a profile is one JSON object of coefficients")
    return values


@dataclass(frozen=True)
class ProfileDocument:
    """A profile with what it was measured on and how well it fits, as its file holds it.

    ``components`` are the records of `bench.calibration.fit.Fit`: name, samples, coefficients, and
    relative errors of the fit and of the samples held out of it. ``unmeasured`` names coefficients
    that keep their defaults because no measurement of this run tells them.
    """

    profile: CostProfile
    device: str
    software: Mapping[str, str]
    date: str
    commit: str
    command: str
    components: tuple[Mapping[str, Any], ...]
    unmeasured: tuple[str, ...] = ()

    VERSION = 1

    @classmethod
    def of(cls, values: Mapping[str, Any], origin: str) -> ProfileDocument:
        """Check a file's JSON object. Raises InputError, which begins with ``origin``."""
        if values.get("version") != cls.VERSION:
            raise InputError(
                f"{origin}: profile version {values.get('version')!r}; this release reads "
                f"{cls.VERSION}: run tree-cp calibrate again"
            )
        kinds: dict[str, type] = {
            **dict.fromkeys(("device", "date", "commit", "command"), str),
            **dict.fromkeys(("coefficients", "software"), dict),
            **dict.fromkeys(("components", "unmeasured"), list),
        }
        for name in values:
            if name not in kinds and name != "version":
                raise InputError(f"{origin}: unknown field {name!r}; known: {', '.join(kinds)}")
        for name, kind in kinds.items():
            if not isinstance(values.get(name), kind):
                word = "a text" if kind is str else "an object" if kind is dict else "a list"
                raise InputError(f"{origin}: {name} must be {word}, got {values.get(name)!r}")
        for component in values["components"]:
            if not isinstance(component, dict) or not _COMPONENT_FIELDS <= set(component):
                wanted = ", ".join(sorted(_COMPONENT_FIELDS))
                raise InputError(f"{origin}: components: each has {wanted}")
        return cls(
            profile_of(values["coefficients"], origin),
            values["device"],
            values["software"],
            values["date"],
            values["commit"],
            values["command"],
            tuple(values["components"]),
            tuple(values["unmeasured"]),
        )

    def to_json(self) -> str:
        """The file's text; `load_profile` reads it back."""
        return json.dumps(
            {
                "version": self.VERSION,
                "device": self.device,
                "software": dict(self.software),
                "date": self.date,
                "commit": self.commit,
                "command": self.command,
                "coefficients": asdict(self.profile),
                "unmeasured": list(self.unmeasured),
                "components": [dict(component) for component in self.components],
            },
            indent=1,
        )


_COMPONENT_FIELDS = {"name", "samples", "coefficients", "fit_error", "held_out_error"}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_row_of_numbers(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(_is_number(x) for x in value)
