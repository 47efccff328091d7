"""Tree attention in plain torch over tiles: the CPU default, and portable anywhere.

A loop over query tiles; for each, the touched key tiles are joined into runs of one class and
handled by one batched matmul per run, all heads at once. Only partial tiles are masked. Memory is
O(T x tile). Accumulation is fp32, or fp64 for fp64 inputs.

Two columns save passes over the score tiles, which are what costs time on a CPU: with
`[q * scale, -lse] @ [k, 1]^T` the exponent's subtraction happens inside the matmul, likewise
`[dout, -delta] @ [v, 1]^T`, and `weights @ [v, 1]` sums the softmax denominator.

Shapes inside: G = Hq / Hkv query heads share a KV head, so queries are [Hkv, Tq * G, D] (row-major
in query, then group) and a tile of n queries is n * G consecutive matrix rows.
"""

from __future__ import annotations

import torch

from megatron_tree_cp.ops.attention.block_mask import tile_classes
from megatron_tree_cp.ops.attention.interval_mask import IntervalMask

Q_TILE = 256
K_TILE = 256
# Keys of one matmul: bounds the score buffer to Q_TILE * Hq * MAX_KEYS elements.
MAX_KEYS = 512
# Stands for -lse where a query sees no key at all: exp(score - huge) is 0, and huge * 1 is finite.
_NEVER = 1e30


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: IntervalMask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local kernel: out [Tq, Hq, Dv] and lse [Tq, Hq] in fp32 (fp64 for fp64); see registry."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_queries, heads, value_dim = q.shape[0], q.shape[1], v.shape[2]
    kv_heads, group = k.shape[1], heads // k.shape[1]
    queries = _by_kv_head(q.to(dtype) * scale, kv_heads)
    keys, values = _by_kv_head(k.to(dtype), kv_heads), _with_ones(v.to(dtype), kv_heads)
    out = q.new_zeros(kv_heads, num_queries * group, value_dim, dtype=dtype)
    lse = q.new_full((kv_heads, num_queries * group), float("-inf"), dtype=dtype)
    for q_begin, q_end, runs in mask.cached("tiled", lambda: _schedule(mask)):
        rows = slice(q_begin * group, q_end * group)
        q_tile = queries[:, rows]
        total: torch.Tensor | None = None
        largest: torch.Tensor | None = None
        for k_begin, k_end, full in runs:
            scores = torch.bmm(q_tile, keys[:, k_begin:k_end].transpose(1, 2))
            if not full:
                _hide(scores, mask, q_begin, q_end, k_begin, k_end, group)
            peak = scores.amax(2, keepdim=True)
            if largest is not None:
                peak = torch.maximum(peak, largest)
            # A query without a visible key so far keeps weights of exp(-inf - 0) = 0.
            anchor = peak.masked_fill(peak == float("-inf"), 0.0)
            weights = scores.sub_(anchor).exp_()
            part = torch.bmm(weights, values[:, k_begin:k_end])
            if total is not None and largest is not None:
                part.add_(total.mul_(torch.exp(largest - anchor)))
            total, largest = part, peak
        if total is not None and largest is not None:
            denominator = total[:, :, value_dim:]
            out[:, rows] = total[:, :, :value_dim] / denominator.masked_fill(denominator == 0, 1.0)
            lse[:, rows] = (largest + denominator.log()).squeeze(2)
    return _by_query(out, group), _by_query(lse[:, :, None], group).squeeze(2)


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
    dtype = torch.promote_types(q.dtype, torch.float32)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    dim, value_dim = q.shape[2], v.shape[2]
    shift = lse.to(dtype).neg()
    shift = shift.masked_fill(shift == float("inf"), -_NEVER)
    queries = _by_kv_head(torch.cat([q.to(dtype) * scale, shift[:, :, None]], 2), kv_heads)
    douts = torch.cat([dout.to(dtype), -delta.to(dtype)[:, :, None]], 2)
    douts = _by_kv_head(douts, kv_heads)
    keys, values = _with_ones(k.to(dtype), kv_heads), _with_ones(v.to(dtype), kv_heads)
    dq = queries.new_zeros(kv_heads, queries.shape[1], dim)
    dk, dv = keys.new_zeros(keys.shape[:2] + (dim,)), keys.new_zeros(keys.shape[:2] + (value_dim,))
    for q_begin, q_end, runs in mask.cached("tiled", lambda: _schedule(mask)):
        rows = slice(q_begin * group, q_end * group)
        q_tile, do_tile = queries[:, rows], douts[:, rows]
        for k_begin, k_end, full in runs:
            columns = slice(k_begin, k_end)
            weights = torch.bmm(q_tile, keys[:, columns].transpose(1, 2))
            if not full:
                _hide(weights, mask, q_begin, q_end, k_begin, k_end, group)
            weights.exp_()
            dv[:, columns] += torch.bmm(weights.transpose(1, 2), do_tile[:, :, :value_dim])
            dscores = torch.bmm(do_tile, values[:, columns].transpose(1, 2)).mul_(weights)
            dq[:, rows] += torch.bmm(dscores, keys[:, columns, :dim])
            dk[:, columns] += torch.bmm(dscores.transpose(1, 2), q_tile[:, :, :dim])
    # queries carry the scale already, so dk needs none; dq does.
    return _by_query(dq.mul_(scale), group), dk.transpose(0, 1), dv.transpose(0, 1)


def _schedule(mask: IntervalMask) -> list[tuple[int, int, list[tuple[int, int, bool]]]]:
    """Query tiles (begin, end) with their runs of touched keys (begin, end, full)."""
    if mask.num_queries == 0 or mask.num_keys == 0:
        return []
    classes = tile_classes(mask, Q_TILE, K_TILE)
    # 0 skip, 1 partial, 2 full; one copy to the host for the whole stage.
    table = (classes.touched.to(torch.int8) + classes.full.to(torch.int8)).tolist()
    schedule = []
    for index, row in enumerate(table):
        runs: list[tuple[int, int, bool]] = []
        for tile, kind in enumerate(row):
            if kind == 0:
                continue
            begin, end, full = tile * K_TILE, min((tile + 1) * K_TILE, mask.num_keys), kind == 2
            last = runs[-1] if runs else None
            if last and last[1] == begin and last[2] == full and end - last[0] <= MAX_KEYS:
                runs[-1] = (last[0], end, full)
            else:
                runs.append((begin, end, full))
        if runs:
            schedule.append((index * Q_TILE, min((index + 1) * Q_TILE, mask.num_queries), runs))
    return schedule


def _hide(
    scores: torch.Tensor,
    mask: IntervalMask,
    q_begin: int,
    q_end: int,
    k_begin: int,
    k_end: int,
    group: int,
) -> None:
    """Set the hidden pairs of a score tile [Hkv, n * G, keys] to -inf, in place."""
    hidden = ~mask.tile(q_begin, q_end, k_begin, k_end)
    bias = scores.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    scores.unflatten(1, (-1, group)).add_(bias[None, :, None, :])


def _by_kv_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[T, H, D] -> contiguous [Hkv, T * (H / Hkv), D]."""
    tokens, heads, dim = x.shape
    x = x.view(tokens, kv_heads, heads // kv_heads, dim).permute(1, 0, 2, 3)
    return x.reshape(kv_heads, tokens * (heads // kv_heads), dim)


def _with_ones(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[K, Hkv, D] -> contiguous [Hkv, K, D + 1] with a last column of ones."""
    return torch.cat([_by_kv_head(x, kv_heads), x.new_ones(kv_heads, x.shape[0], 1)], dim=2)


def _by_query(x: torch.Tensor, group: int) -> torch.Tensor:
    """[Hkv, T * G, D] -> [T, Hkv * G, D]."""
    kv_heads, rows, dim = x.shape
    tokens = rows // group
    x = x.view(kv_heads, tokens, group, dim).permute(1, 0, 2, 3)
    return x.reshape(tokens, kv_heads * group, dim)
