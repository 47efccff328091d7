"""What the Gated DeltaNet layers of a row share, brought to the device before the first of them."""

from __future__ import annotations

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.ops.gdn.conv_tables import conv_tables
from megatron_tree_cp.ops.gdn.summaries import summary_exchange
from megatron_tree_cp.ops.gdn.tables import recurrence_tables
from megatron_tree_cp.plan.recurrence_tables import RecurrentRow


def upload_recurrent_row(ctx: TreeContext, row: RecurrentRow) -> None:
    """Fill the context with what `recurrent_row` made of its plan: layers then build nothing.

    The arrays are for layers that run in the layout ``row.layout``. Raises ValueError for arrays of
    another rank, and for a layout that the plan has not.
    """
    if row.rank != ctx.rank:
        raise ValueError(
            f"recurrent arrays are of rank {row.rank} but the context is rank {ctx.rank}'s: "
            "make them with recurrent_row(plan, rank) of the same rank"
        )
    if row.layout != ctx.layout_name:
        ctx.prepare_exchange(ctx.layout_name, row.layout)
        ctx.prepare_exchange(row.layout, ctx.layout_name)
    ctx = ctx.in_layout(row.layout)
    tables = recurrence_tables(ctx, row.blocks.chunk, arrays=row.blocks)
    for arrays in row.convolutions:
        conv_tables(ctx, arrays.width, arrays=arrays)
    if not tables.exchanges:
        return
    part = tables.part
    for layer in ctx.plan.model.recurrent_classes:
        dims = layer.head_dim, layer.value_width
        summary_exchange(ctx, "states", part.forward, len(part.exports), *dims)
        summary_exchange(ctx, "gradients", part.backward, len(part.gradient_bank), *dims)
