"""Index tensors of one rank's tree convolution: what its taps read, and the transpose of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.comm.exchange import RangeExchange
from megatron_tree_cp.comm.upload import upload_together
from megatron_tree_cp.ops.gdn.tables import recurrence_plan
from megatron_tree_cp.plan.halo import ConvolutionArrays, HaloPlan, RankHalo

PIECE_TOKENS = 61
"""Tokens of a run that one program of a kernel takes at most: with three tokens more, which a
convolution of four taps reads in backward, whole steps of eight."""


@dataclass(frozen=True)
class ConvTables:
    """Taps of one rank for one width K."""

    num_tokens: int
    """Real rows n of the shard."""

    num_received: int
    """Rows h of the halo."""

    taps: torch.Tensor
    """int32[K - 1, n]: rows of [shard; halo] that the taps read, -1 for none."""

    pieces: torch.Tensor
    """int32[3, p]: first row, one past the last, and one past the last of the run, of each piece of
    a run; inside a run tap j of row t reads t - j. Pieces that read the halo come last."""

    num_near_pieces: int
    """How many pieces read no halo."""

    heads: torch.Tensor
    """int32[.]: tokens that read across their run's start, ascending."""

    late_rows: torch.Tensor
    """int32[m]: rows of [shard; halo] that taps across a run's start read, ascending."""

    late_offsets: torch.Tensor
    """int32[m + 1]"""

    late_readers: torch.Tensor
    """int32[.]: tap * heads + head, the readers of each late row, in a fixed order."""

    num_local_late: int
    """How many of the late rows are the shard's own; the others are the halo's."""

    exchange: RangeExchange | None
    """Brings the halo; None when no rank of the row needs any."""

    distributed: bool
    """Rows of this context parallelism may have a halo: what kernels are specialised on, where
    asking this row's halo would compile anew when rows change."""


class ConvolutionCall(NamedTuple):
    """One rank's operands of a convolution: the real rows x [n, C], the received rows halo [h, C],
    weight [C, K], bias [C] or None."""

    x: torch.Tensor
    halo: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    tables: ConvTables
    silu: bool


Receive = Callable[[], torch.Tensor]
"""Waits for the received rows [h, C]."""


def conv_tables(
    ctx: TreeContext, width: int, arrays: ConvolutionArrays | None = None
) -> ConvTables:
    """The tables of this rank, made once a row and width; from ``arrays`` where given."""

    def build() -> ConvTables:
        made = arrays
        if made is None:
            made = ConvolutionArrays.of(HaloPlan(recurrence_plan(ctx), width), ctx.rank)
        return build_conv_tables(made, ctx)

    return ctx.cached(("conv tables", width), build)


def build_conv_tables(arrays: ConvolutionArrays, ctx: TreeContext) -> ConvTables:
    """Tables of the context's rank; the taps of all tokens are made on the device."""
    part, tokens = arrays.part, arrays.num_tokens
    exchange = None
    if arrays.exchange is not None:
        exchange = RangeExchange(arrays.exchange, ctx.cp_group, ctx.device, ctx.stream)
    cut, near = _pieces(part, tokens)
    start, length, before, heads, late_rows, late_offsets, late_readers, pieces = upload_together(
        [
            part.start,
            part.length,
            part.before,
            arrays.heads,
            arrays.late_rows,
            arrays.late_offsets,
            arrays.late_readers,
            cut,
        ],
        ctx.device,
    )
    # output_size: the device need not be asked how many tokens there are.
    run = torch.repeat_interleave(length, output_size=tokens)
    token = torch.arange(tokens, device=ctx.device)
    offset = token - start[run]
    columns = []
    for tap in range(arrays.width - 1):
        across = before[run, (tap - offset).clamp(min=0)]
        columns.append(torch.where(offset > tap, token - tap - 1, across))
    taps = torch.stack(columns) if columns else token.new_zeros(0, tokens)
    return ConvTables(
        num_tokens=tokens,
        num_received=part.num_received,
        taps=taps.int(),
        pieces=pieces,
        num_near_pieces=near,
        heads=heads,
        late_rows=late_rows,
        late_offsets=late_offsets,
        late_readers=late_readers,
        num_local_late=int((arrays.late_rows < tokens).sum()),
        exchange=exchange,
        distributed=ctx.cp_size > 1,
    )


def _pieces(part: RankHalo, tokens: int) -> tuple[np.ndarray, int]:
    """`ConvTables.pieces` and `num_near_pieces`."""
    count = -(-part.length // PIECE_TOKENS)
    run = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    begin = part.start[run] + number * PIECE_TOKENS
    run_end = (part.start + part.length)[run]
    pieces = np.stack([begin, np.minimum(begin + PIECE_TOKENS, run_end), run_end])
    # Only a run's first piece reads across its start: pieces are longer than the taps.
    far = (number == 0) & (part.before >= tokens).any(1)[run]
    order = np.argsort(far, kind="stable")
    return pieces[:, order].astype(np.int32), int((~far).sum())
