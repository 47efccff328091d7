"""A rank's recurrence as index tensors: blocks of runs, state slots, levels.

A *block* is a chunk of one run; blocks never cross runs, so that each has one incoming state. A
*slot* is a place for one state [Hv, Dk, Dv] between blocks of different runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.comm.upload import upload
from megatron_tree_cp.plan.recurrence import Levels, RankRecurrence, RecurrencePlan
from megatron_tree_cp.plan.values import Array

CHUNK = 64


@dataclass(frozen=True)
class Level:
    """Runs whose states are known once the levels before are done; longest first."""

    runs: torch.Tensor
    """int32[n]"""

    active: tuple[int, ...]
    """How many of the runs have more than c chunks, for c = 0, 1, .."""


@dataclass(frozen=True)
class StateSlots:
    """Where runs read their incoming state and leave their end state; -1 is zero, and nowhere.

    The first slots are the incoming states of the heads, then those of the local roots if there are
    initial states.
    """

    count: int
    read: torch.Tensor
    write: torch.Tensor
    """int32[R] each."""


@dataclass(frozen=True)
class GradientSlots:
    """Slots of gradients: one a run for its dS_in, then one an export, then one a local leaf.

    What enters at the end of run r is the sum of the slots ``sources[offsets[r]:offsets[r + 1]]``,
    in this order.
    """

    count: int
    offsets: torch.Tensor
    sources: torch.Tensor
    lists: tuple[tuple[int, ...], ...]
    """The same on the host, by run."""


@dataclass(frozen=True)
class RecurrenceTables:
    """Index tensors of one rank; R runs, NB blocks of ``chunk`` tokens."""

    part: RankRecurrence
    num_roots: int
    num_leaves: int
    exchanges: bool
    """Whether any rank of the row exchanges states: all ranks call the exchange, or none does."""

    chunk: int
    num_tokens: int
    num_blocks: int
    starts: torch.Tensor
    """int32[R + 1]: first token of each run; runs tile the shard's real tokens."""

    block_offsets: torch.Tensor
    """int32[R + 1]: first block of each run."""

    block_runs: torch.Tensor
    """int32[NB, 2]: run of each block, and its chunk number there."""

    early: tuple[Level, ...]
    summary: tuple[Level, ...]
    rest: tuple[Level, ...]
    late: tuple[Level, ...]
    exact: tuple[Level, ...]
    partial: tuple[Level, ...]
    open: tuple[Level, ...]
    """Levels of the phases, see RankRecurrence."""

    every: tuple[Level, ...]
    """All runs by depth, for a pass when every incoming state is known."""

    root_runs: torch.Tensor
    root_ids: torch.Tensor
    """int64: runs that start roots, and the roots' numbers."""

    export_runs: torch.Tensor
    transfer_runs: torch.Tensor
    transfer_places: torch.Tensor
    """int64: runs of the exports, of those that are not final, and where these stand among all."""

    leaf_runs: torch.Tensor
    leaf_ids: torch.Tensor
    """int64: runs that end leaf segments, and the leaves' numbers."""

    summary_slots: StateSlots
    """Slots of the summary pass; no head reads anything."""

    state_slots: tuple[StateSlots, ...]
    """By ``initial + 2 * final``: with slots for initial and for final states."""

    gradient_slots: tuple[GradientSlots, GradientSlots]
    """Without and with slots for gradients of final states."""


def recurrence_plan(ctx: TreeContext, layout: str = "main") -> RecurrencePlan:
    """The recurrence of the context's row, made once."""
    return ctx.cached(
        ("recurrence", layout), lambda: RecurrencePlan(ctx.plan.tree, ctx.layout(layout))
    )


def recurrence_tables(
    ctx: TreeContext, chunk: int = CHUNK, layout: str = "main"
) -> RecurrenceTables:
    """The tables of this rank, made once a row and chunk size."""
    return ctx.cached(
        ("recurrence tables", layout, chunk),
        lambda: build_tables(recurrence_plan(ctx, layout), ctx.rank, ctx.device, chunk),
    )


def build_tables(
    plan: RecurrencePlan, rank: int, device: torch.device, chunk: int = CHUNK
) -> RecurrenceTables:
    """Tables of ``rank`` on ``device``."""
    part = plan.rank(rank)
    chunks = -(-part.length // chunk)
    offsets = np.concatenate([[0], np.cumsum(chunks)])
    run_of_block = np.repeat(np.arange(len(chunks)), chunks)
    number = np.arange(offsets[-1]) - offsets[run_of_block]

    def levels(groups: Levels) -> tuple[Level, ...]:
        return tuple(_level(ids, chunks, device) for ids in groups)

    def index(values: Array, dtype: type = np.int32) -> torch.Tensor:
        return upload(np.asarray(values, dtype=dtype), device)

    roots, leaves = np.flatnonzero(part.root >= 0), np.flatnonzero(part.leaf >= 0)
    return RecurrenceTables(
        part=part,
        num_roots=plan.num_roots,
        num_leaves=plan.num_leaves,
        exchanges=len(plan.heads) > 0,
        chunk=chunk,
        num_tokens=int(part.length.sum()),
        num_blocks=int(offsets[-1]),
        starts=index(np.concatenate([part.start, [part.length.sum()]])),
        block_offsets=index(offsets),
        block_runs=index(np.stack([run_of_block, number], axis=1)),
        early=levels(part.early),
        summary=levels(part.summary),
        rest=levels(part.rest),
        late=levels(part.late),
        exact=levels(part.exact),
        partial=levels(part.partial),
        open=levels(part.open),
        every=levels(_by_depth(part.parent)),
        root_runs=index(roots, np.int64),
        root_ids=index(part.root[roots], np.int64),
        export_runs=index(part.exports, np.int64),
        transfer_runs=index(part.transfers, np.int64),
        transfer_places=index(np.searchsorted(part.exports, part.transfers), np.int64),
        leaf_runs=index(leaves, np.int64),
        leaf_ids=index(part.leaf[leaves], np.int64),
        summary_slots=_summary_slots(part, device),
        state_slots=tuple(
            _state_slots(part, initial, final, device)
            for final in (False, True)
            for initial in (False, True)
        ),
        gradient_slots=(_gradient_slots(part, False, device), _gradient_slots(part, True, device)),
    )


def _level(ids: Array, chunks: Array, device: torch.device) -> Level:
    ids = ids[np.argsort(-chunks[ids], kind="stable")]
    ordered = chunks[ids]
    active = tuple(int(np.searchsorted(-ordered, -c)) for c in range(int(ordered.max(initial=0))))
    return Level(upload(ids.astype(np.int32), device), active)


def _by_depth(parent: Array) -> Levels:
    depth = np.zeros(len(parent), dtype=np.int64)
    for run, above in enumerate(parent.tolist()):
        if above >= 0:
            depth[run] = depth[above] + 1
    return tuple(np.flatnonzero(depth == d) for d in range(int(depth.max(initial=-1)) + 1))


def _slots(count: int, read: Array, write: Array, device: torch.device) -> StateSlots:
    return StateSlots(
        count, upload(read.astype(np.int32), device), upload(write.astype(np.int32), device)
    )


def _state_slots(
    part: RankRecurrence, initial: bool, final: bool, device: torch.device
) -> StateSlots:
    runs = len(part.start)
    inner = part.parent[part.parent >= 0]
    writes = np.zeros(runs, dtype=bool)
    writes[inner] = True
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
    return _slots(first + int(writes.sum()), read, write, device)


def _summary_slots(part: RankRecurrence, device: torch.device) -> StateSlots:
    inner = np.zeros(len(part.start), dtype=bool)
    for ids in part.summary:
        inner[ids] = True
    write = np.where(inner, np.cumsum(inner) - 1, -1)
    read = np.where(part.parent >= 0, write[part.parent], -1)
    return _slots(int(inner.sum()), read, write, device)


def _gradient_slots(part: RankRecurrence, final: bool, device: torch.device) -> GradientSlots:
    runs, exports = len(part.start), len(part.exports)
    lists: list[list[int]] = [[] for _ in range(runs)]
    for run, above in enumerate(part.parent.tolist()):
        if above >= 0:
            lists[above].append(run)
    for slot, run in enumerate(part.exports.tolist()):
        lists[run].append(runs + slot)
    leaves = np.flatnonzero(part.leaf >= 0) if final else np.zeros(0, dtype=np.int64)
    for slot, run in enumerate(leaves.tolist()):
        lists[run].append(runs + exports + slot)
    offsets = np.cumsum([0, *(len(entries) for entries in lists)])
    sources = np.array([slot for entries in lists for slot in entries], dtype=np.int32)
    return GradientSlots(
        count=runs + exports + len(leaves),
        offsets=upload(offsets.astype(np.int32), device),
        sources=upload(sources, device),
        lists=tuple(tuple(entries) for entries in lists),
    )
