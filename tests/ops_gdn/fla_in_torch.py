"""What we expect of the FLA functions that `fla_kernels` calls, block by block in plain torch.

With it the module and our Triton passes run on CPU. Tensors are [1, n, heads, dim] as in FLA, gates
are base-2 logs where FLA's are, gradients are of the natural logs. What FLA leaves unwritten, rows
that no run has, is NaN.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch


def _blocks(cu_seqlens, chunk_indices, chunk_size=64):
    for run, number in chunk_indices.tolist():
        first = int(cu_seqlens[run]) + number * chunk_size
        yield slice(first, min(first + chunk_size, int(cu_seqlens[run + 1])))


def _unwritten(x):
    return torch.full_like(x, float("nan"))


def _heads(x, heads):
    """[1, n, Hk, D] rows -> [Hv, n, D]."""
    return x[0].repeat_interleave(heads // x.shape[2], dim=1).transpose(0, 1)


def cumsum(g, chunk_size, scale=None, reverse=False, **where):
    out = _unwritten(g)
    for rows in _blocks(chunk_size=chunk_size, **where):
        part = g[0, rows]
        part = part.flip(0).cumsum(0).flip(0) if reverse else part.cumsum(0)
        out[0, rows] = part if scale is None else part * scale
    return out


def _system(k, beta, total):
    """[H, c, c]: I + strictly lower part; k [H, c, D], beta and total [H, c]."""
    between = (total[:, :, None] - total[:, None, :]).tril().exp()
    lower = ((k * beta[:, :, None]) @ k.mT * between).tril(-1)
    return torch.eye(k.shape[1], dtype=k.dtype, device=k.device) + lower


def solve(k, v, g, beta, chunk_size, **where):
    heads = v.shape[2]
    solved = v.new_zeros(*v.shape[:3], chunk_size)
    for rows in _blocks(chunk_size=chunk_size, **where):
        total = g[0, rows].T * math.log(2)
        inverse = torch.linalg.inv(_system(_heads(k[:, rows], heads), beta[0, rows].T, total))
        solved[0, rows, :, : inverse.shape[2]] = inverse.transpose(0, 1)
    return *recompute_w_u(k, v, beta, solved, g, **where), solved


def recompute_w_u(k, v, beta, A, g, **where):
    heads = v.shape[2]
    w, u = _unwritten(k).repeat_interleave(heads // k.shape[2], dim=2), _unwritten(v)
    for rows in _blocks(chunk_size=A.shape[3], **where):
        b = beta[0, rows].T[:, :, None]
        inverse = A[0, rows].transpose(0, 1)[:, :, : b.shape[1]]
        grown = (g[0, rows].T * math.log(2)).exp()[:, :, None]
        w[0, rows] = (inverse @ (b * grown * _heads(k[:, rows], heads))).transpose(0, 1)
        u[0, rows] = (inverse @ (b * v[0, rows].transpose(0, 1))).transpose(0, 1)
    return w, u


def _read(q, k, total, state, writes, scale):
    between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    scores = (q @ k.mT) * between
    return scale * (total.exp()[:, :, None] * (q @ state) + scores @ writes)


def output(q, k, v, h, g, scale, chunk_size, **where):
    out, heads = _unwritten(v), v.shape[2]
    for block, rows in enumerate(_blocks(chunk_size=chunk_size, **where)):
        parts = (_heads(q[:, rows], heads), _heads(k[:, rows], heads), g[0, rows].T * math.log(2))
        read = _read(*parts, h[0, block], v[0, rows].transpose(0, 1), scale)
        out[0, rows] = read.transpose(0, 1)
    return out


def local_gradient(q, k, g, do, scale, chunk_size, **where):
    dv, heads = _unwritten(do), do.shape[2]
    for rows in _blocks(chunk_size=chunk_size, **where):
        total = g[0, rows].T * math.log(2)
        between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        scores = scale * (_heads(q[:, rows], heads) @ _heads(k[:, rows], heads).mT) * between
        dv[0, rows] = (scores.mT @ do[0, rows].transpose(0, 1)).transpose(0, 1)
    return dv


class _SolveGradient:
    """A kernel: called with a grid, it fills dk by value head, dv, db and dg."""

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, k, v, beta, g, A, dw, du, dk, dv, db, dg, cu_seqlens, chunk_indices, BT, **_):
        k, heads = k.repeat_interleave(v.shape[1] // k.shape[1], dim=1), v.shape[1]
        for rows in _blocks(cu_seqlens, chunk_indices, BT):
            with torch.enable_grad():
                leaves = [x[rows].detach().requires_grad_() for x in (k, v, beta, g)]
                keys, b = leaves[0].transpose(0, 1), leaves[2].T
                total = leaves[3].T * math.log(2)
                right = [b * total.exp(), b]
                right = [
                    r[:, :, None] * x for r, x in zip(right, (keys, leaves[1].transpose(0, 1)))
                ]
                made = torch.linalg.solve(_system(keys, b, total), torch.cat(right, dim=2))
            grad = torch.cat([dw[rows], du[rows]], dim=2).transpose(0, 1)
            for x, part in zip((dk, dv, db, dg), torch.autograd.grad(made, leaves, grad)):
                x[rows] = part
            dg[rows] /= math.log(2)
        assert dk.shape[1] == heads


FLA = SimpleNamespace(
    cumsum=cumsum,
    to_base_2=1 / math.log(2),
    solve=solve,
    recompute_w_u=recompute_w_u,
    output=output,
    local_gradient=local_gradient,
    solve_gradient=_SolveGradient(),
)
