"""Device side of an attention plan: masks, exchanges and query ranges of one rank's stages."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.comm.exchange import RangeExchange
from megatron_tree_cp.comm.ranges import expand_columns
from megatron_tree_cp.comm.two_level import TwoLevelRangeExchange
from megatron_tree_cp.ops.attention.interval_mask import HIDDEN, SPARE, IntervalMask
from megatron_tree_cp.plan.two_level import TwoLevelExchange

if TYPE_CHECKING:
    from megatron_tree_cp.plan.exchange import ExchangePlan
    from megatron_tree_cp.plan.stages import StagePlan


QUERY_ALIGNMENT = 128
"""A stage's first query in the shard is a multiple of this; rows before the first reached one see
no key."""


@dataclass(frozen=True, eq=False)
class Stage:
    """One kernel call: queries `[q_begin, q_end)` of the shard over the keys of a buffer.

    The mask counts queries from `q_begin`. A stage without queries or keys makes no call, but its
    wave's exchange still runs.
    """

    mask: IntervalMask
    q_begin: int
    q_end: int

    @property
    def empty(self) -> bool:
        """No query reaches a key."""
        return self.q_begin == self.q_end or self.mask.num_keys == 0

    @property
    def rows(self) -> slice:
        """The stage's queries in the shard."""
        return slice(self.q_begin, self.q_end)


@dataclass(frozen=True, eq=False)
class DirectionStages:
    """One rank's calls in one direction.

    Staged: `local` covers the shard's own keys, and every exchange feeds a remote stage. Fused: one
    exchange, `local` covers the received keys followed by the shard's own, no remote stages.
    """

    local: Stage
    remote: tuple[Stage, ...]
    fused: bool


@dataclass(frozen=True, eq=False)
class AttentionStages:
    """One rank's exchanges and stages of one attention class.

    Both directions read the buffers of the same exchanges. Where they run alike, `forward` and
    `backward` are one object.
    """

    exchanges: tuple[RangeExchange, ...]
    forward: DirectionStages
    backward: DirectionStages

    @property
    def calls(self) -> tuple[Stage, ...]:
        """The different stages of both directions that make a call."""
        directions = dict.fromkeys((self.forward, self.backward))
        stages = (stage for d in directions for stage in (d.local, *d.remote))
        return tuple(stage for stage in stages if not stage.empty)


def attention_stages(ctx: TreeContext, window: int | None) -> AttentionStages:
    """The stages of the plan's attention class for `window`, built once per context.

    Raises:
        ValueError: the plan has no class with this window; the message names the known ones.
    """

    def build() -> AttentionStages:
        plan = ctx.plan.attention_class(window)
        rank = plan.rank(ctx.rank)
        exchanges = tuple(_exchange(ctx, exchange) for exchange in plan.exchanges)

        def direction(fused: bool) -> DirectionStages:
            if fused:
                return DirectionStages(_stage(ctx, rank.fused, window), (), True)
            remote = tuple(_stage(ctx, stage, window) for stage in rank.remote)
            return DirectionStages(_stage(ctx, rank.local, window), remote, False)

        forward = direction(plan.forward_fused)
        alike = plan.backward_fused == plan.forward_fused
        backward = forward if alike else direction(plan.backward_fused)
        return AttentionStages(exchanges, forward, backward)

    return ctx.cached(("attention_stages", window), build)


def prepare_tables(stages: AttentionStages, kernel: Any, head_dim: int, value_dim: int) -> int:
    """Build the kernel's tables of all stages ahead of their first call; returns their bytes."""
    prepare = getattr(kernel, "prepare", None)
    if prepare is None:
        return 0
    return sum(prepare(stage.mask, head_dim, value_dim) for stage in stages.calls)


def _exchange(ctx: TreeContext, plan: ExchangePlan | TwoLevelExchange) -> RangeExchange:
    where = (ctx.cp_group, ctx.device, ctx.stream)
    if isinstance(plan, TwoLevelExchange):
        return TwoLevelRangeExchange(plan.rank(ctx.rank), *where, ctx.transport)
    return RangeExchange(plan.rank(ctx.rank), *where, transport=ctx.transport, counts=plan.counts)


def _stage(ctx: TreeContext, plan: StagePlan, window: int | None) -> Stage:
    positions = ctx.cached("positions of queries", lambda: query_positions(ctx.positions))
    return build_stage(plan, window, positions)


def query_positions(shard_positions: torch.Tensor) -> torch.Tensor:
    """int32[T + SPARE] for `build_stage`, of the positions int[T] of a shard."""
    return F.pad(shard_positions.to(torch.int32), (0, SPARE))


def build_stage(plan: StagePlan, window: int | None, positions: torch.Tensor) -> Stage:
    """A planned stage on the device of ``positions``, the `query_positions` of its shard."""
    # Kernels that share a row-wise accumulator between stages find a stage's rows by tile.
    q_begin = plan.query_range[0] // QUERY_ALIGNMENT * QUERY_ALIGNMENT
    q_end = plan.query_range[1]
    keys, queries = plan.keys, q_end - q_begin
    if not queries or not keys.num_keys:
        nothing = positions[:0]
        return Stage(IntervalMask(nothing, nothing, 0), q_begin, q_begin)
    # One more range of keys that no query sees.
    spare = functools.partial(np.append, values=0)
    still, rising = np.zeros(len(keys) + 1, np.int64), np.ones(len(keys) + 1, np.int64)
    columns = [
        (np.append(keys.query_lo - q_begin, HIDDEN), spare(keys.diagonal)),
        (spare((keys.query_hi - q_begin).clip(0, queries)), still),
    ]
    if window is not None:
        columns.append((spare(keys.position), rising))
    arrays = expand_columns(np.append(keys.length, SPARE), columns, positions.device)
    lo, hi, *k_positions = (x[:-SPARE] for x in arrays)
    # Keys that are all the queries' own rows: only a shard's own keys are, and in their order.
    diagonal = q_begin == 0 and bool(keys.diagonal.all())
    common = functools.partial(IntervalMask, lo, hi, queries, diagonal=diagonal, spare=SPARE)
    if window is None:
        return Stage(common(), q_begin, q_end)
    mask = common(q_positions=positions[q_begin:q_end], k_positions=k_positions[0], window=window)
    return Stage(mask, q_begin, q_end)
