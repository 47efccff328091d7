"""Index tensors of one rank's tree convolution: what its taps read, and the transpose of that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.comm.exchange import RangeExchange
from megatron_tree_cp.comm.upload import upload
from megatron_tree_cp.ops.gdn.tables import recurrence_plan
from megatron_tree_cp.plan.halo import HaloPlan
from megatron_tree_cp.plan.values import Array


@dataclass(frozen=True)
class ConvTables:
    """Taps of one rank for one width K."""

    num_tokens: int
    """Real rows n of the shard."""

    num_received: int
    """Rows h of the halo."""

    taps: torch.Tensor
    """int32[K - 1, n]: rows of [shard; halo] that the taps read, -1 for none."""

    ends: torch.Tensor
    """int32[n]: one past the last row of each row's run; inside it tap j of row t reads t - j."""

    late_rows: torch.Tensor
    """int32[m]: rows of [shard; halo] that taps across a run's start read, ascending."""

    late_offsets: torch.Tensor
    """int32[m + 1]"""

    late_readers: torch.Tensor
    """int32[.]: tap * n + token, the readers of each late row, in a fixed order."""

    num_local_late: int
    """How many of the late rows are the shard's own; the others are the halo's."""

    exchange: RangeExchange | None
    """Brings the halo; None when no rank of the row needs any."""


def conv_tables(ctx: TreeContext, width: int, layout: str = "main") -> ConvTables:
    """The tables of this rank, made once a row and width."""

    def build() -> ConvTables:
        plan = HaloPlan(recurrence_plan(ctx, layout), width)
        return build_conv_tables(plan, ctx)

    return ctx.cached(("conv tables", layout, width), build)


def build_conv_tables(plan: HaloPlan, ctx: TreeContext) -> ConvTables:
    """Tables of the context's rank."""
    part = plan.rank(ctx.rank)
    taps = np.asarray(part.taps)
    tokens = taps.shape[1]
    runs = plan.recurrence.runs
    mine = np.flatnonzero(runs.owner == ctx.rank)
    length = runs.length[mine]
    ends = np.repeat(np.cumsum(length), length)
    offset = np.arange(tokens) - np.repeat(np.cumsum(length) - length, length)
    rows, offsets, readers = _late(taps, offset)
    exchange = None
    if len(plan.exchange.length):
        exchange = RangeExchange(plan.exchange.rank(ctx.rank), ctx.cp_group, ctx.device, ctx.stream)

    def index(values: Array) -> torch.Tensor:
        return upload(values.astype(np.int32), ctx.device)

    return ConvTables(
        num_tokens=tokens,
        num_received=part.num_received,
        taps=index(taps),
        ends=index(ends),
        late_rows=index(rows),
        late_offsets=index(offsets),
        late_readers=index(readers),
        num_local_late=int((rows < tokens).sum()),
        exchange=exchange,
    )


def _late(taps: Array, offset: Array) -> tuple[Array, Array, Array]:
    """Rows read across a run's start, and their readers (tap * n + token) in CSR form.

    The last row of a parent may lie right before its child's first: only the tokens' offsets in
    their runs tell such a reader from one inside the run.
    """
    tokens = taps.shape[1]
    crossing = (taps >= 0) & (offset <= np.arange(len(taps))[:, None])
    tap, token = np.nonzero(crossing)
    row = taps[tap, token]
    order = np.lexsort((token, tap, row))
    rows, counts = np.unique(row, return_counts=True)
    return rows, np.concatenate([[0], np.cumsum(counts)]), (tap * tokens + token)[order]
