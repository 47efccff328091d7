"""A rank's recurrence on its device: the arrays of `plan.recurrence_tables` as index tensors.

A *block* is a chunk of one run; a *slot* is a place for one state [Hv, Dk, Dv] between blocks of
different runs. Everything that a row needs travels to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.comm.upload import upload_together
from megatron_tree_cp.plan.recurrence import CHUNK, RankRecurrence, RecurrencePlan
from megatron_tree_cp.plan.recurrence_tables import (
    PHASES,
    BlockArrays,
    GradientSlotArrays,
    LevelArrays,
    StateSlotArrays,
)
from megatron_tree_cp.plan.values import Array


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
    host: GradientSlotArrays

    @cached_property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        """The same on the host, by run."""
        parts = np.split(self.host.sources, self.host.offsets[1:-1])
        return tuple(tuple(part.tolist()) for part in parts[: len(self.host.offsets) - 1])


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


def recurrence_plan(ctx: TreeContext) -> RecurrencePlan:
    """The recurrence of the context's row in its layout, made once."""
    return ctx.cached("recurrence", lambda: RecurrencePlan(ctx.plan.tree, ctx.layout))


def recurrence_tables(
    ctx: TreeContext, chunk: int = CHUNK, arrays: BlockArrays | None = None
) -> RecurrenceTables:
    """The tables of this rank, made once a row and chunk size; from ``arrays`` where given."""

    def build() -> RecurrenceTables:
        made = arrays or BlockArrays.of(recurrence_plan(ctx), ctx.rank, chunk)
        return upload_tables(made, ctx.device)

    return ctx.cached(("recurrence tables", chunk), build)


def upload_tables(arrays: BlockArrays, device: torch.device) -> RecurrenceTables:
    """The arrays as tensors on ``device``."""
    part = arrays.part
    roots, leaves = np.flatnonzero(part.root >= 0), np.flatnonzero(part.leaf >= 0)
    indices = {
        "root_runs": roots,
        "root_ids": part.root[roots],
        "export_runs": part.exports,
        "transfer_runs": part.transfers,
        "transfer_places": np.searchsorted(part.exports, part.transfers),
        "leaf_runs": leaves,
        "leaf_ids": part.leaf[leaves],
    }
    host: list[Array] = [array.astype(np.int64) for array in indices.values()]
    host += [arrays.starts, arrays.block_offsets, arrays.block_runs]
    host += _arrays_of(arrays)
    tensors = iter(upload_together(host, device))
    named: dict[str, Any] = {
        name: next(tensors) for name in (*indices, "starts", "block_offsets", "block_runs")
    }
    for phase, levels in zip(PHASES, arrays.phases, strict=True):
        named[phase] = _levels(levels, tensors)
    return RecurrenceTables(
        part=part,
        num_roots=arrays.num_roots,
        num_leaves=arrays.num_leaves,
        exchanges=arrays.exchanges,
        chunk=arrays.chunk,
        num_tokens=int(arrays.starts[-1]),
        num_blocks=len(arrays.block_runs),
        **named,
        every=_levels(arrays.every, tensors),
        summary_slots=_state_slots(arrays.summary_slots, tensors),
        state_slots=tuple(_state_slots(slots, tensors) for slots in arrays.state_slots),
        gradient_slots=(
            _gradient_slots(arrays.gradient_slots[0], tensors),
            _gradient_slots(arrays.gradient_slots[1], tensors),
        ),
    )


def _arrays_of(arrays: BlockArrays) -> Iterator[Array]:
    """The arrays of levels and slots, in the order in which `upload_tables` takes their tensors."""
    for levels in (*arrays.phases, arrays.every):
        yield from (level.runs for level in levels)
    for slots in (arrays.summary_slots, *arrays.state_slots):
        yield from (slots.read, slots.write)
    for gradients in arrays.gradient_slots:
        yield from (gradients.offsets, gradients.sources)


def _levels(levels: tuple[LevelArrays, ...], tensors: Iterator[torch.Tensor]) -> tuple[Level, ...]:
    return tuple(Level(next(tensors), level.active) for level in levels)


def _state_slots(slots: StateSlotArrays, tensors: Iterator[torch.Tensor]) -> StateSlots:
    return StateSlots(slots.count, next(tensors), next(tensors))


def _gradient_slots(slots: GradientSlotArrays, tensors: Iterator[torch.Tensor]) -> GradientSlots:
    return GradientSlots(slots.count, next(tensors), next(tensors), slots)
