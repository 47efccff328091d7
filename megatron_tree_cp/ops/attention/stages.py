"""Device side of an attention plan: masks, exchanges and query ranges of one rank's stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.comm.exchange import RangeExchange
from megatron_tree_cp.comm.ranges import DeviceRanges
from megatron_tree_cp.comm.two_level import TwoLevelRangeExchange
from megatron_tree_cp.ops.attention.interval_mask import IntervalMask
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
    return build_stage(plan, window, ctx.positions)


def build_stage(plan: StagePlan, window: int | None, shard_positions: torch.Tensor) -> Stage:
    """A planned stage on the device of ``shard_positions`` int[T], the positions of its shard."""
    # Kernels that share a row-wise accumulator between stages find a stage's rows by tile.
    q_begin = plan.query_range[0] // QUERY_ALIGNMENT * QUERY_ALIGNMENT
    q_end = plan.query_range[1]
    keys = plan.keys
    ranges = DeviceRanges.of(
        keys.length,
        keys.query_lo - q_begin,
        keys.query_hi - q_begin,
        keys.diagonal,
        keys.position,
        device=shard_positions.device,
    )
    lo, hi, own, positions = (ranges.column(i) for i in range(4))
    # A diagonal range's lo may pass its hi inside a tail; kernels want 0 <= lo, hi <= queries.
    lo = (lo + own * ranges.offset).clamp(0, q_end - q_begin)
    hi = hi.clamp(0, q_end - q_begin)
    # Keys that are all the queries' own rows: only a shard's own keys are, and in their order.
    diagonal = q_begin == 0 and bool(keys.diagonal.all())
    if window is None:
        mask = IntervalMask(lo, hi, q_end - q_begin, diagonal=diagonal)
    else:
        queries = shard_positions[q_begin:q_end].to(torch.int32)
        mask = IntervalMask(
            lo, hi, q_end - q_begin, queries, positions + ranges.offset, window, diagonal
        )
    return Stage(mask, q_begin, q_end)
