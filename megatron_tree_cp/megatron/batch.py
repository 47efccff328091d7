"""One microbatch on one rank: this shard's tokens, labels, weights and its tree context."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..comm.context import TreeContext
from ..comm.transport import Transport
from ..comm.upload import upload
from ..ops.attention.stages import attention_stages
from ..ops.gdn.ahead import upload_recurrent_row
from ..plan.row_plan import ISLAND
from .routing_statistics import RoutingStatistics, routing_statistics
from .rows import PlannedRow


@dataclass(frozen=True)
class RowStatistics:
    """Whole-row numbers for logging; the same on every rank that shares the row."""

    stored_tokens: int
    logical_tokens: int
    trajectories: int
    visible_pairs: float
    """(query, key) pairs per attention layer, averaged over the model's layer classes."""
    predicted_ms: float = 0.0
    """The planner's time of the row on the slowest rank, all layers of a stage in both directions.
    """
    islands: bool = False
    """Recurrent layers have a layout of their own."""


@dataclass(frozen=True)
class TreeBatch:
    """Tensors of this rank's shard, ``T`` tokens in layout order, padding at the tail."""

    tokens: torch.Tensor
    """int64 ``[1, T]``; 0 at padding."""
    labels: torch.Tensor
    """int64 ``[1, T]``; 0 where nothing is trained."""
    position_ids: torch.Tensor
    """int64 ``[1, T]`` logical positions; 0 at padding."""
    weights: torch.Tensor
    """float32 ``[T]`` sum of entry weights; exactly 0 at padding."""
    count: torch.Tensor
    """int32 scalar: this shard's part of the loss denominator."""
    context: TreeContext
    statistics: RowStatistics
    routing: RoutingStatistics | None
    """Weights of tokens in router statistics; None for a model without experts."""
    island_routing: RoutingStatistics | None = None
    """The same in the layout of islands, where the plan has one."""

    def forward(self, model):
        """The model's output on this shard: per-token losses ``[1, T]`` on the last stage."""
        island = None
        if ISLAND in self.context.plan.layouts:
            island = _params(self.context.in_layout(ISLAND), self.island_routing)
        return model(
            self.tokens,
            self.position_ids,
            None,
            labels=self.labels,
            packed_seq_params=_params(self.context, self.routing, island),
        )


def _params(context: TreeContext, routing: RoutingStatistics | None, island=None):
    from .params import TreePackedSeqParams  # data workers import this module, not Megatron

    return TreePackedSeqParams(
        tree=context,
        positions=context.positions,
        routing=routing,
        island=island,
        max_seqlen_q=context.num_tokens,
        max_seqlen_kv=context.num_tokens,
    )


def row_statistics(planned: PlannedRow) -> RowStatistics:
    """Whole-row statistics of a planned row."""
    tree, row = planned.row.tree, planned.row
    attention = [c for c in planned.plan.model.classes if c.kind == "attention"]
    layers = sum(c.layers for c in attention)
    pairs = sum(c.layers * tree.visible_pairs(c.window) for c in attention)
    return RowStatistics(
        stored_tokens=row.num_tokens,
        logical_tokens=int(row.multiplicity.sum(dtype=np.int64)),
        trajectories=len(row.trajectories),
        visible_pairs=pairs / layers if layers else 0.0,
        predicted_ms=planned.plan.predicted.total_ms,
        islands=planned.plan.recurrent_layout != "main",
    )


def build_batch(
    planned: PlannedRow,
    cp_group,
    device: torch.device,
    tp_group=None,
    router_statistics: str | None = None,
    per_sequence: bool = False,
    transport: Transport | None = None,
) -> TreeBatch:
    """Select this CP rank's shard of a planned row and upload it (copies do not block), with what
    its layers share: exchanges, masks, recurrent tables.

    ``transport``: how rows travel between CP ranks; by default the group's own all-to-all.
    ``router_statistics`` (``stored`` or ``logical``) and ``per_sequence`` make what routers weigh
    tokens with; None for a model without experts.
    """
    context = TreeContext(planned.plan, cp_group, device, tp_group=tp_group, transport=transport)
    for attention in planned.plan.attention.values():
        attention_stages(context, attention.window)
    if planned.recurrence is not None:
        upload_recurrent_row(context, planned.recurrence)
    indices = context.layout.row_indices(context.rank)
    real = indices >= 0
    source = np.where(real, indices, 0)

    def select(values: np.ndarray, dtype) -> torch.Tensor:
        return upload(np.where(real, values[source], 0).astype(dtype), device)

    row = planned.row

    def routing(name: str) -> RoutingStatistics | None:
        if not router_statistics or name not in planned.plan.layouts:
            return None
        rows = planned.plan.layouts[name].row_indices(context.rank)
        return routing_statistics(row, rows, device, router_statistics, per_sequence)

    return TreeBatch(
        tokens=select(row.tokens, np.int64)[None],
        labels=select(np.maximum(row.labels, 0), np.int64)[None],
        position_ids=context.positions[None],
        weights=select(row.weights, np.float32),
        count=upload(np.array(planned.counts[indices[real]].sum(), np.int32), device),
        context=context,
        statistics=row_statistics(planned),
        routing=routing("main"),
        island_routing=routing(ISLAND),
    )
