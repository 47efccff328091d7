"""Reference of tree attention: the specification, in plain dense torch.

`dense_tree_attention` is the operator on a whole row, differentiable by autograd, any float dtype.
`forward` and `backward` are the same maths as a local kernel (one stage, an interval mask), with
the dense [Tq, K] scores in memory; they serve `impl="reference"`.
"""

from __future__ import annotations

import torch

from megatron_tree_cp.ops.attention.interval_mask import IntervalMask


def dense_tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked softmax attention over full tensors.

    Args:
        q, k, v: [T, Hq, D], [K, Hkv, D], [K, Hkv, Dv]; query head h reads KV head h * Hkv // Hq.
        visible: bool[T, K], e.g. `PackedTree.dense_mask(window)`.
        scale: factor of the scores.
        sink: [Hq] logits that join the softmax denominator with a zero value, once per query.

    Returns:
        out [T, Hq, Dv] and lse [T, Hq] (natural log, the sink included).
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", q * scale, k)
    scores = scores.masked_fill(~visible[:, None, :], float("-inf"))
    if sink is not None:
        column = sink.to(scores.dtype)[None, :, None].expand(q.shape[0], -1, 1)
        scores = torch.cat([scores, column], dim=2)
    lse = torch.logsumexp(scores, dim=2)
    weights = torch.exp(scores - lse[:, :, None])[:, :, : k.shape[0]]
    return torch.einsum("qhk,khd->qhd", weights, v), lse


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: IntervalMask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local kernel: out [Tq, Hq, Dv] and lse [Tq, Hq] in fp32 (fp64 for fp64); see registry."""
    q, k, v, group = _promote(q, k, v)
    scores = torch.einsum("qhd,khd->qhk", q * scale, k.repeat_interleave(group, dim=1))
    scores.masked_fill_(~mask.dense()[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=2)
    weights = torch.exp(scores - _finite(lse)[:, :, None])
    return torch.einsum("qhk,khd->qhd", weights, v.repeat_interleave(group, dim=1)), lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    mask: IntervalMask,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Local kernel: this stage's part of dq, dk, dv under the global lse and delta."""
    q, k, v, group = _promote(q, k, v)
    dout, lse, delta = dout.to(q.dtype), lse.to(q.dtype), delta.to(q.dtype)
    heads_k, heads_v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", q * scale, heads_k)
    scores.masked_fill_(~mask.dense()[:, None, :], float("-inf"))
    weights = torch.exp(scores - _finite(lse)[:, :, None])
    dscores = torch.einsum("qhd,khd->qhk", dout, heads_v).sub_(delta[:, :, None]).mul_(weights)
    dq = torch.einsum("qhk,khd->qhd", dscores, heads_k) * scale
    dk = torch.einsum("qhk,qhd->khd", dscores, q) * scale
    dv = torch.einsum("qhk,qhd->khd", weights, dout)
    return dq, _sum_group(dk, group), _sum_group(dv, group)


def _promote(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.to(dtype), k.to(dtype), v.to(dtype), q.shape[1] // k.shape[1]


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Map -inf (no visible key) to 0: exp(-inf - 0) is the wanted 0, exp(-inf + inf) is NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _sum_group(grad: torch.Tensor, group: int) -> torch.Tensor:
    return grad.unflatten(1, (-1, group)).sum(2)
