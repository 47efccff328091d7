"""Device memory of one attention layer on every rank, buffer by buffer in the executor's order.

Backward holds most. It begins with what forward left (q, k, v, the output and its row sums, the
received rows) and the output's gradient. On top come the fp32 sums of dQ throughout, and one moment
of these:

    a call      gradients of its keys in both widths; a fused call also joins its keys in a copy
    its return  gradients of the received rows, packed, and the rows that come home
    the end     dQ in the model's dtype beside its fp32 sums, and the gradients of the last call

Arrays are per rank, [.., cp] or waves first [W, .., cp]. Widths are those of the flash kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .attention import AttentionPlan
from .model import LayerClass
from .remote import TILE
from .row_plan import RowPlan
from .simulate import StageLoads
from .stages import StagePlan
from .values import Array

INDEX_BYTES = 8
"""Of one entry of a row or send index; masks hold two int32 a key."""


@dataclass(frozen=True, eq=False)
class CrossingRows:
    """Rows of K and V that one layer exchanges: ``received`` and ``sent`` [W, .., cp].

    ``fused``: backward makes one call over received and own keys. ``relayed`` [.., cp]: most rows
    that a wave's hops hold beside them, see `StageLoads.relay_rows`.
    """

    received: Array
    sent: Array
    fused: bool
    relayed: Array | float = 0.0

    @classmethod
    def of_loads(cls, loads: StageLoads, fused: bool) -> CrossingRows:
        """Of the loads of a schedule, without batch axes."""
        return cls(loads.received.sum(1), loads.sent.sum(1), fused, loads.relay_rows)

    @classmethod
    def of_plan(cls, plan: AttentionPlan) -> CrossingRows:
        """Of a plan whose waves travel in one hop."""
        counts = [wave.counts(plan.runs) for wave in plan.waves]
        shape = (plan.num_waves, plan.runs.cp_size)
        received, sent = (np.reshape([c.sum(side) for c in counts], shape) for side in (0, 1))
        return cls(received, sent, plan.backward_fused)

    @classmethod
    def one_wave(cls, received: Array) -> CrossingRows:
        """One staged wave in which each rank sends as much as it receives: a guess for a search."""
        return cls(received[None], received[None], fused=False)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one row (a token, or a key) of a layer class, on a rank of ``tp_size``."""

    query: float
    output: float
    key_value: float
    row_sum: float
    """An fp32 number a query head."""
    query_sum: float
    """fp32 sums of dQ; kernels round head dims up to 32."""
    key_value_sum: float
    """fp32 sums of dK and dV over the query heads of a KV head; 0 where it has one."""

    @classmethod
    def of(cls, layer: LayerClass, dtype_bytes: int, tp_size: int) -> LayerBytes:
        """Of ``layer``; a KV head is whole on every rank that needs it."""
        queries, keys = layer.query_heads / tp_size, max(layer.kv_heads / tp_size, 1)
        dims = layer.head_dim, layer.value_width
        rounded = [-(-dim // 32) * 32 for dim in dims]
        return cls(
            query=queries * dims[0] * dtype_bytes,
            output=queries * dims[1] * dtype_bytes,
            key_value=keys * sum(dims) * dtype_bytes,
            row_sum=queries * 4,
            query_sum=queries * rounded[0] * 4,
            key_value_sum=keys * sum(rounded) * 4 if queries > keys else 0.0,
        )

    def backward(self, tokens: Array, rows: CrossingRows) -> Array:
        """Most bytes [.., cp] that backward holds beside what forward left."""
        # The output's gradient, D and the LSE in base 2, and the sums of dQ.
        held = tokens * (self.output + 2 * self.row_sum + self.query_sum)
        moments = self._fused(tokens, rows) if rows.fused else self._staged(tokens, rows)
        most = np.zeros(np.shape(tokens))
        for moment in moments:
            most = np.maximum(most, moment)
        return np.asarray(held + most)

    def _fused(self, tokens: Array, rows: CrossingRows) -> Iterator[Array]:
        received, sent = rows.received.sum(0), rows.sent.sum(0)
        keys = received + tokens
        yield keys * (2 * self.key_value + self.key_value_sum)
        yield (keys + received + sent + rows.relayed) * self.key_value
        yield keys * self.key_value + tokens * self.query

    def _staged(self, tokens: Array, rows: CrossingRows) -> Iterator[Array]:
        home: Array | float = 0.0
        last: Array | float = 0.0  # a stage's gradients live until the next stage's are made
        for received, sent in zip(rows.received, rows.sent, strict=True):
            yield (home + last + received) * self.key_value + received * self.key_value_sum
            yield (home + 2 * received + sent + rows.relayed) * self.key_value
            home, last = home + sent, received
        yield (home + last + tokens) * self.key_value + tokens * self.key_value_sum
        yield tokens * (self.key_value + self.query)


def attention_call_bytes(plan: RowPlan, window: int | None) -> Array:
    """Peak bytes float64[cp] of one attention layer's forward and backward alone.

    Everything on the device counts: inputs and the output's gradient, and the row's index tensors
    and tables. What `tree-cp bench attention` measures, beside what its process held before.
    """
    attention = plan.attention_class(window)
    layer = next(c for c in plan.model.attention_classes if c.window == window)
    sizes = LayerBytes.of(layer, plan.model.dtype_bytes, plan.tp_size)
    rows = CrossingRows.of_plan(attention)
    tokens = plan.predicted.tokens
    left = tokens * (sizes.query + sizes.key_value + sizes.output + sizes.row_sum)
    left = left + rows.received.sum(0) * sizes.key_value
    tables = np.array([_table_bytes(attention, rank) for rank in range(plan.cp_size)])
    # Row indices and positions; what is sent, and sorted by its source for the way home.
    indices = 2 * INDEX_BYTES * tokens + 3 * INDEX_BYTES * rows.sent.sum(0)
    return np.asarray(left + sizes.backward(tokens, rows) + indices + tables)


def _table_bytes(plan: AttentionPlan, rank: int) -> float:
    """Masks of a rank's calls and what kernels make of them: each pair of tiles is listed as
    partial and as full, by query and by key."""
    stages = plan.rank(rank)
    calls: list[StagePlan] = []
    if plan.forward_fused or plan.backward_fused:
        calls.append(stages.fused)
    if not (plan.forward_fused and plan.backward_fused):
        calls += [stages.local, *stages.remote]
    total = 0.0
    for call in calls:
        queries, keys = call.query_range[1] - call.query_range[0], call.keys.num_keys
        total += 4 * 4 * -(-queries // TILE) * -(-keys // TILE) + 2 * 4 * keys
        if plan.window is not None:
            total += 4 * (queries + keys)
    return total
