"""Oracle of tree attention: every trajectory alone, plain causal attention in fp64, one process.

Knows nothing of intervals, stages or layouts: it reads the tree's segment lengths and parents only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Expected:
    """Outputs and gradients of the whole row, in row order (fp64)."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None


def paths(lengths: list[int], parents: list[int]) -> list[torch.Tensor]:
    """Row indices of every root-to-leaf path, segments stored one after the other."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    leaves = [i for i in range(len(lengths)) if i not in parents]
    result = []
    for leaf in leaves:
        chain = [leaf]
        while parents[chain[0]] >= 0:
            chain.insert(0, parents[chain[0]])
        rows = [t for s in chain for t in range(starts[s], starts[s] + lengths[s])]
        result.append(torch.tensor(rows))
    return result


def causal(q, k, v, scale, window, sink):
    """Plain causal attention of one trajectory: out [n, Hq, Dv], lse [n, Hq]."""
    n, heads = q.shape[:2]
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    index = torch.arange(n)
    distance = index[:, None] - index[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(heads, n, 1)], 2)
    lse = torch.logsumexp(scores, 2)
    weights = torch.exp(scores - lse[:, :, None])[:, :, :n]
    return torch.einsum("hqk,khd->qhd", weights, v), lse.t()


def expected(lengths, parents, q, k, v, dout, dlse, scale, window=None, sink=None) -> Expected:
    """Run every path alone; a token's upstream gradient counts in the first path that holds it.

    Tokens that several paths share must come out equal in each of them.
    """
    q, k, v, dout, dlse = (x.detach().double() for x in (q, k, v, dout, dlse))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if sink is not None:
        leaves.append(sink.detach().double().clone().requires_grad_())
    out = torch.full((q.shape[0], q.shape[1], v.shape[2]), float("nan"), dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("nan"), dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for rows in paths(lengths, parents):
        o, logsum = causal(
            *(x[rows] for x in leaves[:3]), scale, window, leaves[3] if sink is not None else None
        )
        fresh = torch.isnan(lse[rows, 0])
        torch.testing.assert_close(o.detach()[~fresh], out[rows[~fresh]], rtol=1e-12, atol=1e-12)
        out[rows], lse[rows] = o.detach(), logsum.detach()
        loss = loss + (o * dout[rows])[fresh].sum() + (logsum * dlse[rows])[fresh].sum()
    grads = torch.autograd.grad(loss, leaves)
    return Expected(out, lse, *grads[:3], grads[3] if sink is not None else None)
