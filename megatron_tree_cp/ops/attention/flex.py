"""Tree attention through torch's FlexAttention (Triton): the portable GPU kernel.

The block mask is built on device from the intervals, without `create_block_mask`'s token-by-token
evaluation. Backward under the *global* softmax uses public API only. FlexAttention differentiates a
stage's own (o_s, L_s); the layer's loss reaches them through the merge, with w = exp(L_s - L):

    do_s = w dout,    dL_s = rowsum(do_s * o_s) - w delta

where delta already holds dlse. Forward is run once more for o_s and L_s; a stage's gradients come
in the dtype of q and are widened here. Lengths are runtime values: one graph per head shape serves
every row, see `_attend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megatron_tree_cp.ops.attention.block_mask import block_tables
from megatron_tree_cp.ops.attention.interval_mask import IntervalMask

BLOCK = 128
# torch specialises graphs on lengths of one block and below: shorter inputs are padded to two.
MIN_ROWS = 2 * BLOCK
# Graphs of one process: (forward, backward) x (window or not) x head shapes x dtypes.
_MAX_GRAPHS = 256


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: IntervalMask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local kernel: out [Tq, Hq, Dv] in q's dtype and lse fp32 [Tq, Hq]; see registry."""
    _prime(q, k, v, mask, scale, grad=False)
    with torch.no_grad():
        out, lse = _attend(_heads_first(q), _heads_first(k), _heads_first(v), mask, scale)
    rows = q.shape[0]
    return out[0].transpose(0, 1)[:rows], lse[0].transpose(0, 1)[:rows]


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
    _prime(q, k, v, mask, scale, grad=True)
    q_leaf, k_leaf, v_leaf = (_heads_first(x).detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        stage_out, stage_lse = _attend(q_leaf, k_leaf, v_leaf, mask, scale)
    rows = q.shape[0]
    with torch.no_grad():
        weight = torch.exp(stage_lse[0, :, :rows] - lse.t())
        weighted = (dout.transpose(0, 1) * weight[:, :, None]).to(q.dtype)
        dstage_lse = (weighted.float() * stage_out[0, :, :rows].float()).sum(2)
        dstage_lse -= weight * delta.t()
    grads = torch.autograd.grad(
        (stage_out, stage_lse),
        (q_leaf, k_leaf, v_leaf),
        (_pad_rows(weighted, 1)[None], _pad_rows(dstage_lse, 1)[None]),
    )
    dq, dk, dv = (
        grad[0].transpose(0, 1)[: x.shape[0]].float()
        for grad, x in zip(grads, (q, k, v), strict=True)
    )
    return dq, dk, dv


def block_mask(mask: IntervalMask) -> BlockMask:
    """FlexAttention's block mask of an interval mask, tables on the mask's device.

    Extents are padded to `MIN_ROWS`.
    """
    padded = _padded(mask)
    return BlockMask.from_kv_blocks(
        *block_tables(padded, BLOCK, BLOCK),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_mask_mod(padded),
        seq_lengths=(padded.num_queries, padded.num_keys),
    )


def _mask_mod(mask: IntervalMask) -> Callable[..., torch.Tensor]:
    lo, hi = mask.lo, mask.hi
    if mask.window is None:

        def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (lo[k] <= q) & (q < hi[k])

        return visible
    # The window joins the key's positions: a number in the closure would become part of the graph.
    q_positions, k_limits = mask.window_positions[0], mask.window_positions[1] + mask.window

    def visible_in_window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (lo[k] <= q) & (q < hi[k]) & (q_positions[q] < k_limits[k])

    return visible_in_window


def _padded(mask: IntervalMask) -> IntervalMask:
    """Grow short extents to `MIN_ROWS` with keys that no query sees."""
    queries = max(MIN_ROWS - mask.num_queries, 0)
    keys = max(MIN_ROWS - mask.num_keys, 0)
    lo, hi = F.pad(mask.lo, (0, keys)), F.pad(mask.hi, (0, keys))
    if mask.window is None:
        return IntervalMask(lo, hi, mask.num_queries + queries)
    q_positions, k_positions = mask.window_positions
    return IntervalMask(
        lo,
        hi,
        mask.num_queries + queries,
        F.pad(q_positions, (0, queries)),
        F.pad(k_positions, (0, keys)),
        mask.window,
    )


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D] -> [1, H, max(T, MIN_ROWS), D], a view of contiguous rows where nothing is padded.

    One stride pattern for all inputs, sliced receive buffers included, down to the stride of the
    batch dimension: strides are graph guards.
    """
    return _pad_rows(x, 0).contiguous()[None].transpose(1, 2)


def _pad_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    missing = MIN_ROWS - x.shape[dim]
    if missing <= 0:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: IntervalMask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [1, Hq, Tq, Dv], natural-log lse [1, Hq, Tq]) of one stage, compiled on CUDA."""
    blocks = mask.cached("flex", lambda: block_mask(mask))
    if q.device.type != "cuda":
        return _call(q, k, v, blocks, scale)
    # Over the limit torch would run the unfused operator; `fullgraph` makes that an error.
    with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
        return _compiled()(q, k, v, blocks, scale)


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: BlockMask, scale: float
) -> tuple[Any, Any]:
    result: Any = flex_attention(
        q,
        k,
        v,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    out, aux = result
    return out, aux.lse


@functools.cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_call, dynamic=True, fullgraph=True)


def _prime(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: IntervalMask,
    scale: float,
    grad: bool,
) -> None:
    """Compile the graph of a head shape on lengths that coincide with nothing else.

    torch gives equal sizes one symbol and guards the equality: a graph first met with as many
    queries as keys would not serve a stage where they differ.
    """
    if q.device.type == "cuda":
        shape = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        _prime_once(q.device, q.dtype, shape, scale, mask.window is not None, grad)


@functools.cache
def _prime_once(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    scale: float,
    windowed: bool,
    grad: bool,
) -> None:
    query_heads, kv_heads, dim, value_dim = shape
    taken = {*shape, query_heads // kv_heads}
    q_blocks, k_blocks = [n for n in (11, 13, 17, 19, 23, 29, 31) if n not in taken][:2]
    num_q, num_k = q_blocks * BLOCK - 61, k_blocks * BLOCK - 37
    lo = torch.zeros(num_k, dtype=torch.int32, device=device)
    hi = torch.full_like(lo, num_q)
    if windowed:
        positions = torch.zeros(num_q, dtype=torch.int32, device=device)
        mask = IntervalMask(lo, hi, num_q, positions, torch.zeros_like(lo), 1)
    else:
        mask = IntervalMask(lo, hi, num_q)
    q, k, v = (
        _heads_first(torch.zeros(rows, heads, width, dtype=dtype, device=device))
        .detach()
        .requires_grad_(grad)
        for heads, rows, width in (
            (query_heads, num_q, dim),
            (kv_heads, num_k, dim),
            (kv_heads, num_k, value_dim),
        )
    )
    with torch.set_grad_enabled(grad):
        out, lse = _attend(q, k, v, mask, scale)
    if grad:
        torch.autograd.grad((out, lse), (q, k, v), (torch.zeros_like(out), torch.zeros_like(lse)))
