"""`tree_gated_delta_rule`: the public gated delta rule over packed prefix trees."""

from __future__ import annotations

import math

import torch

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.ops.gdn import reference
from megatron_tree_cp.ops.gdn.distributed import DistributedDeltaRule
from megatron_tree_cp.ops.gdn.registry import RULES, GdnCase, select
from megatron_tree_cp.ops.gdn.row import leaf_ends, token_parents


def tree_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    ctx: TreeContext,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule along every path: children of a branch start from one state.

        S' = exp(g) S      d = beta (v - S'^T k)      S = S' + k d^T      y = scale S^T q

    All ranks of the CP group call this in the same order; backward does likewise. Padding rows of
    outputs and gradients are exactly 0, whatever the inputs hold there.

    Args:
        q, k: [T, Hk, Dk], this rank's shard in layout order, padding included; fp16, bf16, fp32 or
            fp64. Value head h reads key head h * Hk // Hv.
        v: [T, Hv, Dv], in q's dtype.
        g: [T, Hv], log of the decay (not positive), a float dtype; computed in fp32 or fp64.
        beta: [T, Hv], strength of the write, a float dtype.
        ctx: this rank's context of the row.
        scale: factor of the output, 1 / sqrt(Dk) by default.
        use_qk_l2norm: divide each q and k by its length, sqrt(sum of squares + 1e-6), first.
        initial_state: [roots, Hv, Dk, Dv], in row order of the roots, the same on every rank;
            zeros if None. Its gradient is on the rank that owns a root's first token, 0 elsewhere.
        return_final_state: also return the state at the end of every leaf segment.
        impl: `auto`, or a name of `registry.RULES`.

    Returns:
        out [T, Hv, Dv] in q's dtype, or (out, final_state). final_state is [leaves, Hv, Dk, Dv],
        fp32 (fp64 for fp64), in row order of the leaf segments: filled on the rank that owns the
        leaf's last token, 0 elsewhere, so that a sum over ranks completes it. Differentiable.

    Raises:
        ValueError: shapes, dtypes, devices or implementation do not fit; the message says how.
    """
    _check(q, k, v, g, beta, initial_state, ctx)
    case = GdnCase(
        device_type=q.device.type,
        dtype=q.dtype,
        key_dim=q.shape[2],
        value_dim=v.shape[2],
        cp_size=ctx.cp_size,
    )
    implementation = select(case, impl, RULES)
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    if implementation.name == "reference":
        out, final = _reference(q, k, v, g, beta, ctx, scale, use_qk_l2norm, initial_state)
    else:
        out, final = DistributedDeltaRule.apply(
            *(q, k, v, g, beta, initial_state, ctx, scale, use_qk_l2norm, return_final_state),
            implementation,
        )
    return (out, final) if return_final_state else out


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    ctx: TreeContext,
    scale: float,
    norm: bool,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    rq, rk, rv, rg, rbeta = (x[: ctx.num_real].to(dtype) for x in (q, k, v, g, beta))
    initial = None if initial_state is None else initial_state.to(dtype)
    parents = token_parents(ctx)
    out, states = reference.gated_delta_rule(rq, rk, rv, rg, rbeta, parents, scale, norm, initial)
    padding = v.new_zeros(ctx.num_tokens - ctx.num_real, *v.shape[1:])
    return torch.cat([out.to(q.dtype), padding]), states[leaf_ends(ctx.plan.tree)]


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    ctx: TreeContext,
) -> None:
    for name, x, dims in (("q", q, 3), ("k", k, 3), ("v", v, 3), ("g", g, 2), ("beta", beta, 2)):
        shape = "[T, heads, dim]" if dims == 3 else "[T, heads]"
        if x.dim() != dims:
            raise ValueError(f"{name} must be {shape}, got shape {tuple(x.shape)}")
        if x.shape[0] != ctx.num_tokens:
            raise ValueError(
                f"{name} has {x.shape[0]} rows but rank {ctx.rank}'s shard has {ctx.num_tokens} "
                "(padding included)"
            )
        if x.device != ctx.device:
            raise ValueError(f"{name} is on {x.device} but the context was made for {ctx.device}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must have a float dtype, got {x.dtype}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k and v must share a dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape != k.shape:
        raise ValueError(f"q and k must have one shape: {tuple(q.shape)}, {tuple(k.shape)}")
    heads = v.shape[1]
    if heads % k.shape[1]:
        raise ValueError(f"{heads} value heads are not a multiple of {k.shape[1]} key heads")
    for name, x in (("g", g), ("beta", beta)):
        if x.shape[1] != heads:
            raise ValueError(f"{name} has {x.shape[1]} heads but v has {heads}")
    if initial_state is not None:
        roots = int((ctx.plan.tree.parents < 0).sum())
        want = (roots, heads, q.shape[2], v.shape[2])
        if tuple(initial_state.shape) != want:
            raise ValueError(
                f"initial_state must be [roots, Hv, Dk, Dv] = {list(want)}, "
                f"got shape {tuple(initial_state.shape)}"
            )
        if initial_state.device != ctx.device:
            raise ValueError(
                f"initial_state is on {initial_state.device} but the context is for {ctx.device}"
            )
