"""Triton l2norm of q and k: x / sqrt(sum(x^2) + eps) of every token and head, and its gradient.

Tokens are a runtime extent and nothing is tuned, so that no length compiles anything. Inputs may be
slices of wider rows. Backward needs y and one fp32 number a head: dx = (dy - (dy . y) y) / length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_tree_cp.ops.gdn.reference import NORM_EPS

# Elements of one program: 32 a thread.
_TILE, _WARPS = 4096, 4


def forward(x: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [tokens, H, D] in x's dtype, contiguous; 1 / length fp32 [tokens, H]).

    Args:
        x: [T, H, D] of any strides, fp16, bf16 or fp32; rows from ``tokens`` on are not read.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    heads, dim = x.shape[1:]
    y = x.new_empty(tokens, heads, dim)
    inverse = x.new_empty(tokens, heads, dtype=torch.float32)
    if tokens:
        tile, block = _tile(dim)
        _forward_kernel[(triton.cdiv(tokens * heads, tile),)](
            x,
            y,
            inverse,
            tokens * heads,
            x.stride(0),
            x.stride(1),
            EPS=NORM_EPS,
            H=heads,
            D=dim,
            BT=tile,
            BD=block,
            num_warps=_WARPS,
        )
    return y, inverse


def backward(
    y: torch.Tensor, inverse: torch.Tensor, parts: tuple[torch.Tensor, ...], rows: int
) -> torch.Tensor:
    """dx [rows, H, D] in y's dtype; rows after y's are 0.

    Args:
        y, inverse: what `forward` gave.
        parts: one or two tensors [n, G * H, D], contiguous; dy is their sum, also over the G heads
            of each group, taken in fp32.
        rows: rows of the result, at least n.
    """
    tokens, heads, dim = y.shape
    dx = y.new_empty(rows, heads, dim)
    dx[tokens:].zero_()
    if tokens:
        first, second = (*parts, None)[:2]
        tile, block = _tile(dim)
        _backward_kernel[(triton.cdiv(tokens * heads, tile),)](
            y,
            inverse,
            first,
            second,
            dx,
            tokens * heads,
            GROUP=first.shape[1] // heads,
            D=dim,
            BT=tile,
            BD=block,
            num_warps=_WARPS,
        )
    return dx


def _tile(dim: int) -> tuple[int, int]:
    """Rows and columns of a program."""
    block = triton.next_power_of_2(dim)
    return max(1, _TILE // block), block


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x,
    y,
    inverse,
    rows,
    token_stride,
    head_stride,
    EPS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_t = o_t < rows
    mask = m_t[:, None] & (o_d < D)[None, :]
    at = (o_t // H) * token_stride + (o_t % H) * head_stride
    b_x = tl.load(x + at[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
    b_inverse = 1 / tl.sqrt(tl.sum(b_x * b_x, axis=1) + EPS)
    b_y = b_x * b_inverse[:, None]
    tl.store(y + o_t[:, None] * D + o_d[None, :], b_y.to(y.dtype.element_ty), mask=mask)
    tl.store(inverse + o_t, b_inverse, mask=m_t)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    y,
    inverse,
    first,
    second,
    dx,
    rows,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_t = o_t < rows
    mask = m_t[:, None] & (o_d < D)[None, :]
    at = o_t[:, None] * D + o_d[None, :]
    b_y = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    b_dy = tl.zeros([BT, BD], dtype=tl.float32)
    for member in tl.static_range(GROUP):
        of_member = (o_t[:, None] * GROUP + member) * D + o_d[None, :]
        b_dy += tl.load(first + of_member, mask=mask, other=0.0).to(tl.float32)
        if second is not None:
            b_dy += tl.load(second + of_member, mask=mask, other=0.0).to(tl.float32)
    b_inverse = tl.load(inverse + o_t, mask=m_t, other=0.0)
    along = tl.sum(b_dy * b_y, axis=1)
    b_dx = (b_dy - along[:, None] * b_y) * b_inverse[:, None]
    tl.store(dx + at, b_dx.to(dx.dtype.element_ty), mask=mask)
