"""`tree_attention`: the public dense attention operator."""

from __future__ import annotations

import math

import torch

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.ops.attention.distributed import DistributedAttention
from megatron_tree_cp.ops.attention.registry import AttentionCase, select


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ctx: TreeContext,
    scale: float | None = None,
    window: int | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over a packed prefix tree: every token reads itself and its ancestors.

    All ranks of the CP group call this in the same order; backward does likewise. Padding rows of
    outputs and gradients are exactly 0, whatever the inputs hold there.

    Args:
        q, k, v: [T, Hq, D], [T, Hkv, D], [T, Hkv, Dv], this rank's shard in layout order, padding
            included; fp16, bf16, fp32 or fp64. Query head h reads KV head h * Hkv // Hq.
        ctx: this rank's context of the row.
        scale: factor of the scores, 1 / sqrt(D) by default.
        window: positions that a query sees, itself included; must be a window of the plan.
        sink: [Hq] logits of an attention sink (zeros: off-by-one softmax). Its gradient holds this
            rank's queries only, like that of any replicated parameter under context parallelism.
        return_lse: also return the natural-log LSE [T, Hq] (fp32, fp64 for fp64), the sink
            included, differentiable.
        impl: `auto`, or a name of `registry.IMPLEMENTATIONS`.

    Returns:
        out [T, Hq, Dv] in q's dtype, or (out, lse).

    Raises:
        ValueError: shapes, dtypes, window or implementation do not fit; the message says how.
    """
    _check(q, k, v, ctx, sink)
    case = AttentionCase(
        device_type=q.device.type,
        dtype=q.dtype,
        query_heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        window=window,
        sink=sink is not None,
    )
    implementation = select(case, impl)
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    out, lse = DistributedAttention.apply(q, k, v, sink, ctx, window, scale, implementation)
    return (out, lse) if return_lse else out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ctx: TreeContext,
    sink: torch.Tensor | None,
) -> None:
    if ctx.layout_name != "main":
        raise ValueError(
            f"attention is planned for layout 'main', the context is in {ctx.layout_name!r}: "
            "exchange q, k and v to 'main' and pass ctx.in_layout('main')"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} must be [T, heads, dim], got shape {tuple(x.shape)}")
        if x.shape[0] != ctx.num_tokens:
            raise ValueError(
                f"{name} has {x.shape[0]} rows but rank {ctx.rank}'s shard has {ctx.num_tokens} "
                "(padding included)"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device: q is {q.dtype} on {q.device}, "
                f"{name} is {x.dtype} on {x.device}"
            )
    if q.device != ctx.device:
        raise ValueError(f"q is on {q.device} but the context was made for {ctx.device}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must have equal head dims, got {q.shape[2]} and {k.shape[2]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must have equal heads, got {k.shape[1]} and {v.shape[1]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads")
    if sink is not None and tuple(sink.shape) != (q.shape[1],):
        raise ValueError(f"sink must be [{q.shape[1]}] logits, got shape {tuple(sink.shape)}")
