"""A rank's recurrence as index arrays: blocks of runs, levels of runs, slots of states.

A *block* is a chunk of one run; blocks never cross runs, so that each has one incoming state. A
*slot* is a place for one state [Hv, Dk, Dv] between blocks of different runs. Data workers make
these arrays ahead of time; `ops.gdn.tables` brings them to the device.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from .halo import ConvolutionArrays, HaloPlan
from .model import ModelShape
from .recurrence import CHUNK, Levels, RankRecurrence, RecurrencePlan, climb
from .row_plan import RowPlan
from .values import Array, ArrayValue, freeze_arrays, frozen_array

PHASES = ("early", "summary", "rest", "late", "exact", "partial", "open")
"""Fields of `RankRecurrence` that are levels, in the order of ``BlockArrays.phases``."""


@dataclass(frozen=True, eq=False)
class LevelArrays(ArrayValue):
    """Runs whose states are known once the levels before are done; longest first."""

    runs: Array
    """int32[n]"""

    active: tuple[int, ...]
    """How many of the runs have more than c chunks, for c = 0, 1, .."""

    def __post_init__(self) -> None:
        freeze_arrays(self)


@dataclass(frozen=True, eq=False)
class StateSlotArrays(ArrayValue):
    """Where runs read their incoming state and leave their end state; -1 is zero, and nowhere.

    The first slots are the incoming states of the heads, then those of the local roots if there are
    initial states.
    """

    count: int
    read: Array
    write: Array
    """int32[R] each."""

    def __post_init__(self) -> None:
        freeze_arrays(self)


@dataclass(frozen=True, eq=False)
class GradientSlotArrays(ArrayValue):
    """Slots of gradients: one a run for its dS_in, then one an export, then one a local leaf.

    What enters at the end of run r is the sum of the slots ``sources[offsets[r]:offsets[r + 1]]``,
    in this order.
    """

    count: int
    offsets: Array
    """int32[R + 1]"""
    sources: Array
    """int32[.]"""

    def __post_init__(self) -> None:
        freeze_arrays(self)


@dataclass(frozen=True, eq=False)
class BlockArrays(ArrayValue):
    """Index arrays of one rank; R runs, NB blocks of ``chunk`` tokens."""

    part: RankRecurrence
    num_roots: int
    num_leaves: int
    exchanges: bool
    """Whether any rank of the row exchanges states: all ranks call the exchange, or none does."""

    chunk: int
    starts: Array
    """int32[R + 1]: first token of each run; runs tile the shard's real tokens."""

    block_offsets: Array
    """int32[R + 1]: first block of each run."""

    block_runs: Array
    """int32[NB, 2]: run of each block, and its chunk number there."""

    phases: tuple[tuple[LevelArrays, ...], ...]
    """Levels of each of `PHASES`."""

    every: tuple[LevelArrays, ...]
    """All runs by depth, for a pass when every incoming state is known."""

    summary_slots: StateSlotArrays
    """Slots of the summary pass; no head reads anything."""

    state_slots: tuple[StateSlotArrays, ...]
    """By ``initial + 2 * final``: with slots for initial and for final states."""

    gradient_slots: tuple[GradientSlotArrays, GradientSlotArrays]
    """Without and with slots for gradients of final states."""

    def __post_init__(self) -> None:
        freeze_arrays(self)

    @classmethod
    def of(cls, plan: RecurrencePlan, rank: int, chunk: int = CHUNK) -> BlockArrays:
        """The arrays of ``rank``."""
        part = plan.rank(rank)
        chunks = -(-part.length // chunk)
        offsets = np.concatenate([[0], np.cumsum(chunks)])
        run_of_block = np.repeat(np.arange(len(chunks)), chunks)
        number = np.arange(offsets[-1]) - offsets[run_of_block]

        def levels(groups: Levels) -> tuple[LevelArrays, ...]:
            return tuple(_level(ids, chunks) for ids in groups)

        return cls(
            part=part,
            num_roots=plan.num_roots,
            num_leaves=plan.num_leaves,
            exchanges=len(plan.heads) > 0,
            chunk=chunk,
            starts=_int32(np.concatenate([part.start, [part.length.sum()]])),
            block_offsets=_int32(offsets),
            block_runs=_int32(np.stack([run_of_block, number], axis=1)),
            phases=tuple(levels(getattr(part, phase)) for phase in PHASES),
            every=levels(_by_depth(part.parent)),
            summary_slots=_summary_slots(part),
            state_slots=tuple(
                _state_slots(part, initial, final)
                for final in (False, True)
                for initial in (False, True)
            ),
            gradient_slots=(_gradient_slots(part, False), _gradient_slots(part, True)),
        )


@dataclass(frozen=True, eq=False)
class RecurrentRow(ArrayValue):
    """What one rank's recurrent layers need of a row: made in data workers, shared by all layers.

    ``digest`` is of all ranks' states and halos: equal on two ranks iff they would exchange alike.
    """

    rank: int
    layout: str
    """Name of the layout that the recurrent layers run in."""

    blocks: BlockArrays
    convolutions: tuple[ConvolutionArrays, ...]
    """One a width."""

    digest: str


def recurrent_row(plan: RowPlan, rank: int, chunk: int = CHUNK) -> RecurrentRow | None:
    """The arrays of ``rank`` for a row's plan; None when its model has no recurrent layer."""
    widths = recurrent_widths(plan.model)
    if not widths:
        return None
    recurrence = RecurrencePlan(plan.tree, plan.layouts[plan.recurrent_layout])
    return RecurrentRow(
        rank=rank,
        layout=plan.recurrent_layout,
        blocks=BlockArrays.of(recurrence, rank, chunk),
        convolutions=tuple(
            ConvolutionArrays.of(HaloPlan(recurrence, width), rank) for width in widths
        ),
        digest=_digest(recurrence, widths, chunk),
    )


def recurrent_widths(model: ModelShape) -> tuple[int, ...]:
    """Distinct convolution widths of the model's Gated DeltaNet layers, ascending."""
    return tuple(sorted({layer.conv_width for layer in model.recurrent_classes}))


def _digest(recurrence: RecurrencePlan, widths: tuple[int, ...], chunk: int) -> str:
    state = hashlib.sha256(f"chunk={chunk} widths={widths}".encode())
    runs = recurrence.runs
    for array in (runs.start, runs.owner, recurrence.parent, recurrence.heads, recurrence.exports):
        state.update(f"{array.shape};".encode())
        state.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return state.hexdigest()


def _int32(values: Array) -> Array:
    return frozen_array(values, np.int32)


def _level(ids: Array, chunks: Array) -> LevelArrays:
    ids = ids[np.argsort(-chunks[ids], kind="stable")]
    ordered = chunks[ids]
    longest = int(ordered.max(initial=0))
    active = np.searchsorted(-ordered, -np.arange(longest))
    return LevelArrays(_int32(ids), tuple(active.tolist()))


def _by_depth(parent: Array) -> Levels:
    _, depth = climb(parent)
    if not len(depth):
        return ()
    order = np.argsort(depth, kind="stable")
    return tuple(np.split(order, np.cumsum(np.bincount(depth))[:-1]))


def _state_slots(part: RankRecurrence, initial: bool, final: bool) -> StateSlotArrays:
    writes = np.zeros(len(part.start), dtype=bool)
    writes[part.parent[part.parent >= 0]] = True
    writes[part.exports] = True
    if final:
        writes |= part.leaf >= 0
    roots = np.flatnonzero(part.root >= 0)
    first = len(part.heads) + (len(roots) if initial else 0)
    write = np.where(writes, first + np.cumsum(writes) - 1, -1)
    read = np.where(part.parent >= 0, write[part.parent], -1)
    read[part.heads] = np.arange(len(part.heads))
    if initial:
        read[roots] = len(part.heads) + np.arange(len(roots))
    return StateSlotArrays(first + int(writes.sum()), _int32(read), _int32(write))


def _summary_slots(part: RankRecurrence) -> StateSlotArrays:
    inner = np.zeros(len(part.start), dtype=bool)
    for ids in part.summary:
        inner[ids] = True
    write = np.where(inner, np.cumsum(inner) - 1, -1)
    read = np.where(part.parent >= 0, write[part.parent], -1)
    return StateSlotArrays(int(inner.sum()), _int32(read), _int32(write))


def _gradient_slots(part: RankRecurrence, final: bool) -> GradientSlotArrays:
    runs, exports = len(part.start), len(part.exports)
    children = np.flatnonzero(part.parent >= 0)
    leaves = np.flatnonzero(part.leaf >= 0) if final else np.zeros(0, dtype=np.int64)
    # Of a run's sources, children come first, then its export, then its leaf: ascending slots.
    run = np.concatenate([part.parent[children], part.exports, leaves])
    slot = np.concatenate([children, np.arange(runs, runs + exports + len(leaves))])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(run, minlength=runs))])
    sources = slot[np.lexsort((slot, run))]
    return GradientSlotArrays(runs + exports + len(leaves), _int32(offsets), _int32(sources))
