"""Gradients of the tokens of the gated delta rule, in Triton: dq, dk, dw and dg of every block.

With S the state before a block, P the gradient of the state after it, U its writes, dU their whole
gradient, G the decay from the block's start to each token and L the decay of the block:

    dS_ij = scale G_i / G_j (dO_i . U_j) for j <= i     dw = -dU S^T
    dq = scale G dO S^T + dS k                           dk = L / G U P^T + dS^T q
    dg = q . dq - k . dk, and at the last token L (S . P) + sum over the block of k . (L / G U P^T)

A program takes one block, one value head and some of its key channels; dq and dk stay apart by
value head, and whoever reads them adds those of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_KEY_CHANNELS, _VALUE_CHANNELS = 64, 64
"""Of a program, and of a step of its loop, at most."""

_WARPS = 4


def token_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    writes: torch.Tensor,
    g: torch.Tensor,
    dout: torch.Tensor,
    dwrites: torch.Tensor,
    states: torch.Tensor,
    gradients: torch.Tensor,
    scale: float,
    starts: torch.Tensor,
    blocks: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dw [n, Hv, Dk], dg fp32 [n, Hv]), the last of g as a natural log.

    Args:
        q, k: [n, Hk, Dk].
        writes, dout, dwrites: [n or more, Hv, Dv].
        g: fp32 [n, Hv], base-2 log of the decay from each block's start.
        states, gradients: [NB, Hv, Dk, Dv], of the state before and after each block.
        starts: int32[R + 1], first token of each run.
        blocks: int32[NB, 2], run and number in the run of each block of ``chunk`` tokens.
    """
    tokens, key_heads, key_dim = k.shape
    heads, value_dim = writes.shape[1:]
    tile_k = min(max(16, triton.next_power_of_2(key_dim)), _KEY_CHANNELS)
    tile_v = min(max(16, triton.next_power_of_2(value_dim)), _VALUE_CHANNELS)
    parts = triton.cdiv(key_dim, tile_k)
    dq, dk, dw = (k.new_empty(tokens, heads, key_dim) for _ in range(3))
    dg = g.new_empty(parts, tokens, heads)
    _kernel[(parts, len(blocks), heads)](
        *(q, k, writes, g, dout, dwrites, states, gradients, dq, dk, dw, dg, starts, blocks),
        *(scale, tokens),
        HK=key_heads,
        HV=heads,
        K=key_dim,
        V=value_dim,
        BT=chunk,
        BK=tile_k,
        BV=tile_v,
        num_warps=_WARPS,
        # Loads of a later step overlap dots of an earlier one wrongly on Hopper, with Triton 3.6 at
        # least: gradients are wrong at two stages.
        num_stages=1,
    )
    return dq, dk, dw, dg[0] if parts == 1 else dg.sum(0)


@triton.jit
def _tile(x, rows, m_rows, head, columns, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """[BT, columns] of a head of [n, HEADS, WIDTH]; 0 outside."""
    at = (rows[:, None] * HEADS + head) * WIDTH + columns[None, :]
    return tl.load(x + at, mask=m_rows[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _kernel(
    q,
    k,
    writes,
    g,
    dout,
    dwrites,
    states,
    gradients,
    dq,
    dk,
    dw,
    dg,
    starts,
    blocks,
    scale,
    num_tokens,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    part, block, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    run = tl.load(blocks + 2 * block)
    end = tl.load(starts + run + 1)
    first = tl.load(starts + run) + tl.load(blocks + 2 * block + 1) * BT
    here = tl.arange(0, BT)
    rows = (first + here).to(tl.int64)
    m_rows = rows < end
    last = tl.minimum(first + BT, end) - 1
    o_k = part * BK + tl.arange(0, BK)
    to_k = (rows[:, None] * HV + head) * K + o_k[None, :]
    m_k = m_rows[:, None] & (o_k < K)[None, :]
    states += (block * HV + head) * K * V
    gradients += (block * HV + head) * K * V
    b_dw = tl.zeros([BT, BK], dtype=tl.float32)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_ds = tl.zeros([BT, BT], dtype=tl.float32)
    at_end = tl.zeros([BK], dtype=tl.float32)
    for tile in range((V + BV - 1) // BV):
        o_v = tile * BV + tl.arange(0, BV)
        in_state = o_k[:, None] * V + o_v[None, :]
        m_state = (o_k < K)[:, None] & (o_v < V)[None, :]
        b_s = tl.load(states + in_state, mask=m_state, other=0.0)
        b_p = tl.load(gradients + in_state, mask=m_state, other=0.0)
        b_do = _tile(dout, rows, m_rows, head, o_v, HV, V)
        b_u = _tile(writes, rows, m_rows, head, o_v, HV, V)
        b_du = _tile(dwrites, rows, m_rows, head, o_v, HV, V)
        b_ds = tl.dot(b_do, tl.trans(b_u), b_ds)
        b_dq = tl.dot(b_do, tl.trans(b_s), b_dq)
        b_dk = tl.dot(b_u, tl.trans(b_p), b_dk)
        b_dw = tl.dot(b_du, tl.trans(b_s), b_dw)
        at_end += tl.sum(b_s.to(tl.float32) * b_p.to(tl.float32), axis=1)
    tl.store(dw + to_k, (-b_dw).to(dw.dtype.element_ty), mask=m_k)

    b_g = tl.load(g + rows * HV + head, mask=m_rows, other=0.0)
    g_last = tl.load(g + last.to(tl.int64) * HV + head)
    causal = (here[:, None] >= here[None, :]) & m_rows[:, None] & m_rows[None, :]
    b_ds *= tl.where(causal, tl.exp2(b_g[:, None] - b_g[None, :]) * scale, 0.0)
    b_ds = b_ds.to(k.dtype.element_ty)
    b_k = _tile(k, rows, m_rows, head // (HV // HK), o_k, HK, K)
    b_dq *= (tl.exp2(b_g) * scale)[:, None]
    b_dq = tl.dot(b_ds, b_k, b_dq)
    b_q = _tile(q, rows, m_rows, head // (HV // HK), o_k, HK, K)
    b_dg = tl.sum(b_dq * b_q.to(tl.float32), axis=1)
    tl.store(dq + to_k, b_dq.to(dq.dtype.element_ty), mask=m_k)
    b_dk *= tl.where(m_rows, tl.exp2(g_last - b_g), 0.0)[:, None]
    b_end = tl.sum(at_end) * tl.exp2(g_last) + tl.sum(b_dk * b_k.to(tl.float32))
    b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk)
    b_dg -= tl.sum(b_dk * b_k.to(tl.float32), axis=1)
    b_dg += tl.where(rows == last, b_end, 0.0)
    tl.store(dk + to_k, b_dk.to(dk.dtype.element_ty), mask=m_k)
    tl.store(dg + (part * num_tokens + rows) * HV + head, b_dg, mask=m_rows)
