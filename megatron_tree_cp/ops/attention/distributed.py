"""Distributed tree attention: exchanges, stages, merge and sink around a local kernel.

Q and O stay with their owner; KV rows come to the queries, K and V side by side in one buffer.
Forward starts the first wave's exchange, runs the local stage, then merges the waves in order; each
exchange starts one call ahead of its own, since with one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1) whatever is launched behind a waiting exchange waits as well.
Backward takes the remote stages first, sends each wave's dK and dV back while the next stage
computes, runs the local stage last, and adds the returned rows wave by wave in fp32 at the owner. A
rank without a stage for a wave sends its (empty) part behind the next call that it does make.
Every rank calls the same exchanges in the same order, with or without work of its own.

    rank r forward    start X_0 | local | start X_1, wait X_0, stage 0, merge | start X_2 .. | sink
    rank r backward   stage 0, start R_0 | stage 1, start R_1 | .. | local | wait and add R_0 ..
    without stages    start R_0 | local, start R_1 | start R_2 .. | wait and add R_0 ..

A fused direction has one exchange and makes one call over [received; own] keys. The other direction
need not be fused: both read the same received buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.ops.attention.backward import BackwardPass, backward_pass
from megatron_tree_cp.ops.attention.merge import merge_into
from megatron_tree_cp.ops.attention.registry import Implementation
from megatron_tree_cp.ops.attention.sink import apply_sink, sink_gradient
from megatron_tree_cp.ops.attention.stages import AttentionStages, Stage, attention_stages

Tensors = tuple[torch.Tensor, ...]


class DistributedAttention(torch.autograd.Function):
    """Attention of one layer on one rank; returns (out [T, Hq, Dv], lse [T, Hq])."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        tree: TreeContext,
        window: int | None,
        scale: float,
        implementation: Implementation,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stages = attention_stages(tree, window)
        kernel = implementation.load()
        real = slice(0, tree.num_real)
        out, lse, remote = forward_stages(q[real], k[real], v[real], stages, kernel, scale)
        if sink is not None:
            apply_sink(out, lse, sink)
        out, lse = _pad(out.to(q.dtype), tree.num_tokens), _pad(lse, tree.num_tokens)
        ctx.save_for_backward(q, k, v, sink, out, lse, *remote)
        ctx.tree, ctx.stages, ctx.kernel, ctx.scale = tree, stages, kernel, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sink, out, lse, *remote = ctx.saved_tensors
        tree: TreeContext = ctx.tree
        real = slice(0, tree.num_real)
        dout = torch.zeros_like(out) if dout is None else dout
        lse = lse[real]
        dlse = None if dlse is None else dlse[real]
        layer = backward_pass(ctx.kernel, dout[real], q[real], out[real], lse, dlse, ctx.scale)
        dk, dv = backward_stages(layer, k[real], v[real], tuple(remote), ctx.stages)
        # Before dq is made, where backward holds most: what it takes in between costs no memory.
        dsink = None if sink is None else sink_gradient(lse, layer.delta, sink)
        dq, dk, dv = (
            _pad(grad.to(x.dtype), tree.num_tokens)
            for grad, x in zip((layer.dq(), dk, dv), (q, k, v), strict=True)
        )
        return dq, dk, dv, dsink, None, None, None, None


def forward_stages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    stages: AttentionStages,
    kernel: Any,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """All stages over the real rows of a shard, without the sink.

    Returns out [n, Hq, Dv] in the dtype that the kernel gives, lse [n, Hq] (fp32, fp64 for fp64)
    and the received KV buffers [num_recv, Hkv * (D + Dv)], one per exchange.
    """
    exchanges, calls = stages.exchanges, stages.forward
    ready = exchanges[0].mark() if len(exchanges) > 1 else None
    pending = [exchange.start(k, v) for exchange in exchanges[:1]]
    if calls.fused:
        buffers = [p.wait() for p in pending]
        keys, values = _with_local(buffers[0], k, v)
        out, lse = _first_stage(q, keys, values, calls.local, kernel, scale)
        return out, lse, buffers
    out, lse = _first_stage(q, k, v, calls.local, kernel, scale)
    buffers = []
    for wave, stage in enumerate(calls.remote):
        # Behind the call that overlaps them, and before the one that waits for this wave.
        pending[wave].proceed()
        pending += [e.start(k, v, after=ready) for e in exchanges[wave + 1 : wave + 2]]
        buffer = pending[wave].wait()
        buffers.append(buffer)
        if not stage.empty:
            keys, values = _split(buffer, k, v)
            part_out, part_lse = kernel.forward(q[stage.rows], keys, values, stage.mask, scale)
            merge_into(out[stage.rows], lse[stage.rows], part_out, part_lse)
    return out, lse, buffers


def backward_stages(
    layer: BackwardPass,
    k: torch.Tensor,
    v: torch.Tensor,
    buffers: Tensors,
    stages: AttentionStages,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk, dv [n, ...] of the real rows of a shard, in the dtype that the kernel gives.

    Rows that come home are added in fp32 (fp64 for fp64). dQ gathers in `layer`.

    Args:
        buffers: the KV buffers that forward received.
    """
    calls, returns = stages.backward, _Returns(stages, k.dtype)
    if calls.fused:
        dkeys, dvalues = _stage_backward(layer, calls.local, *_with_local(buffers[0], k, v))
        received = buffers[0].shape[0]
        returns.add(dkeys[:received], dvalues[:received], called=True)
        dk, dv = dkeys[received:], dvalues[received:]
    else:
        for stage, buffer in zip(calls.remote, buffers, strict=True):
            grads = _stage_backward(layer, stage, *_split(buffer, k, v))
            returns.add(*grads, called=not stage.empty)
        dk, dv = _stage_backward(layer, calls.local, k, v)
    for exchange, wave in zip(stages.exchanges, returns.all(), strict=True):
        returned_k, returned_v = _split(wave.wait(), k, v)
        exchange.accumulate(dk, returned_k)
        exchange.accumulate(dv, returned_v)
    return dk, dv


def _stage_backward(
    layer: BackwardPass, stage: Stage, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if stage.empty:
        return torch.zeros_like(keys), torch.zeros_like(values)
    return layer.stage(stage.rows, keys, values, stage.mask)


def _first_stage(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    stage: Stage,
    kernel: Any,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the stage that covers every query (each sees itself): nothing to merge with yet."""
    if stage.rows == slice(0, q.shape[0]) and not stage.empty:
        return kernel.forward(q, k, v, stage.mask, scale)
    if q.shape[0]:
        raise ValueError(
            f"the plan's own stage covers queries {stage.q_begin}:{stage.q_end} of {q.shape[0]}; "
            "every token sees itself: the plan does not belong to this shard"
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_zeros(0, q.shape[1], v.shape[2], dtype=dtype), q.new_zeros(
        0, q.shape[1], dtype=dtype
    )


class _Returns:
    """The way home of every wave's dK and dV, in the dtype of K and V on the wire.

    They start in order, and while calls follow never two without a call between: the second waits
    for the first, which waits for the slowest rank's stage, and with one hardware queue the call
    behind them would wait as well.
    """

    def __init__(self, stages: AttentionStages, dtype: torch.dtype) -> None:
        self.stages, self.dtype = stages, dtype
        self.held: list[Tensors] = []
        self.started: list[Any] = []
        self.behind_call = True

    def add(self, dkeys: torch.Tensor, dvalues: torch.Tensor, called: bool) -> None:
        """Those of the next wave; ``called`` where a kernel was launched for them."""
        self.behind_call = self.behind_call or called
        self.held.append((dkeys.to(self.dtype), dvalues.to(self.dtype)))
        if self.behind_call:
            self._start()

    def all(self) -> list[Any]:
        """Every wave's return, once the last call is launched."""
        while self.held:
            self._start()
        return self.started

    def _start(self) -> None:
        # The second hop of the wave before overlaps the call that was just launched.
        for before in self.started[-1:]:
            before.proceed()
        exchange = self.stages.exchanges[len(self.started)]
        self.started.append(exchange.start_transposed(*self.held.pop(0)))
        self.behind_call = False


def _split(
    buffer: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [R, Hkv, D] and [R, Hkv, Dv] of a packed buffer [R, Hkv * (D + Dv)]."""
    width = k.shape[1] * k.shape[2]
    return (
        buffer[:, :width].unflatten(1, k.shape[1:]),
        buffer[:, width:].unflatten(1, v.shape[1:]),
    )


def _with_local(
    buffer: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a fused stage: the received rows, then the shard's own."""
    keys, values = _split(buffer, k, v)
    return torch.cat([keys, k]), torch.cat([values, v])


def _pad(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Append zero rows up to `rows`: padding comes out exactly 0, whatever the inputs hold."""
    if x.shape[0] == rows:
        return x
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded
