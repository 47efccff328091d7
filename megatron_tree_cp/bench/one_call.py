"""A rank's attention as one local call: what distribution is held against.

The pairs of queries and keys are those of a plan's rank, but all keys lie in one buffer from the
start, in the order in which a fused stage finds them: nothing is exchanged, copied or merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..comm.context import TreeContext
from ..ops.attention.backward import backward_pass
from ..ops.attention.interval_mask import IntervalMask
from ..ops.attention.registry import Implementation
from ..ops.attention.stages import build_stage


class OneCall(torch.autograd.Function):
    """A kernel's forward and backward over one mask; returns out [n, Hq, Dv]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: IntervalMask,
        kernel: Any,
    ) -> torch.Tensor:
        ctx.mask, ctx.kernel, ctx.scale = mask, kernel, q.shape[2] ** -0.5
        out, lse = kernel.forward(q, k, v, mask, ctx.scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layer = backward_pass(ctx.kernel, dout, q, out, lse, None, ctx.scale)
        dk, dv = layer.stage(slice(0, q.shape[0]), k, v, ctx.mask)
        return layer.dq(), dk, dv, None, None


def one_call(
    context: TreeContext,
    window: int | None,
    implementation: Implementation,
    inputs: Sequence[torch.Tensor],
) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """(forward, its leaves q, k and v, the output's gradient) of this rank's pairs in one call.

    Args:
        context: of the plan; its own keys, and as many rows as it receives, make up the buffer.
        inputs: the output's gradient [T, Hq, Dv], q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv]; a
            sink behind them is left out.
    """
    real = slice(0, context.num_real)
    plan = context.plan.attention_class(window).rank(context.rank).fused
    mask = build_stage(plan, window, context.positions[real]).mask
    kernel = implementation.load()
    dout, q, k, v = (x[real] for x in inputs[:4])
    received = mask.num_keys - context.num_real
    keys, values = (torch.cat([x.new_ones(received, *x.shape[1:]), x]) for x in (k, v))
    leaves = [x.detach().requires_grad_() for x in (q, keys, values)]
    return lambda *x: OneCall.apply(*x, mask, kernel), leaves, dout
