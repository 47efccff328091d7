"""Index tensors of one rank's tree convolution: what its taps read, and the transpose of that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.comm.exchange import RangeExchange
from megatron_tree_cp.comm.upload import upload
from megatron_tree_cp.ops.gdn.tables import recurrence_plan
from megatron_tree_cp.plan.halo import HaloPlan, RankHalo
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
    """Tables of the context's rank; only what crosses a run's start is made on the host."""
    part = plan.rank(ctx.rank)
    tokens = int(part.length.sum())
    rows, offsets, readers = _late(part, tokens)
    exchange = None
    if len(plan.exchange.length):
        exchange = RangeExchange(plan.exchange.rank(ctx.rank), ctx.cp_group, ctx.device, ctx.stream)

    def index(values: Array, dtype: type = np.int32) -> torch.Tensor:
        return upload(np.ascontiguousarray(values, dtype=dtype), ctx.device)

    # output_size: the device need not be asked how many tokens there are.
    start, length = index(part.start, np.int64), index(part.length, np.int64)
    run = torch.repeat_interleave(length, output_size=tokens)
    token = torch.arange(tokens, device=ctx.device)
    offset = token - start[run]
    before = index(part.before, np.int64)
    columns = []
    for tap in range(plan.width - 1):
        across = before[run, (tap - offset).clamp(min=0)]
        columns.append(torch.where(offset > tap, token - tap - 1, across))
    taps = torch.stack(columns) if columns else token.new_zeros(0, tokens)
    return ConvTables(
        num_tokens=tokens,
        num_received=part.num_received,
        taps=taps.int(),
        ends=(start + length)[run].int(),
        late_rows=index(rows),
        late_offsets=index(offsets),
        late_readers=index(readers),
        num_local_late=int((rows < tokens).sum()),
        exchange=exchange,
    )


def _late(part: RankHalo, tokens: int) -> tuple[Array, Array, Array]:
    """Rows read across a run's start, and their readers (tap * n + token) in CSR form."""
    reach = part.before.shape[1]
    offset, tap = np.triu_indices(reach)  # the token `offset` rows into a run reads across by `tap`
    row = part.before[:, tap - offset]
    reader = tap * tokens + part.start[:, None] + offset
    valid = (row >= 0) & (offset < part.length[:, None])
    row, reader = row[valid], reader[valid]
    order = np.lexsort((reader, row))
    rows, counts = np.unique(row, return_counts=True)
    return rows, np.concatenate([[0], np.cumsum(counts)]), reader[order]
