"""Causal convolution along tree paths in plain torch: any float dtype, any device.

    pre[t] = bias + sum_j weight[:, K - 1 - j] x[tap_j(t)]        out = activation(pre)

tap_0(t) is t itself, tap_j(t) the token j before it on its path: a row of [shard; halo], or none.
"""

from __future__ import annotations

import torch

from megatron_tree_cp.ops.gdn.conv_tables import ConvolutionCall, ConvTables, Receive


def forward(
    call: ConvolutionCall, rows: int, sizes: tuple[int, ...], receive: Receive
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """([n, size] for each size: the channels, in parts that are contiguous; the halo received).

    ``call`` has no halo yet. A kernel that can leaves padding at 0 and returns [rows, size]
    instead.
    """
    call = call._replace(halo=receive())
    pre = _pre_activation(call)
    out = (pre * torch.sigmoid(pre) if call.silu else pre).to(call.x.dtype)
    return tuple(part.contiguous() for part in out.split(sizes, dim=1)), call.halo


def backward_heads(
    call: ConvolutionCall, douts: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what `backward_rows` takes of it, dhalo [h, C]), from the gradients [n, size] of the parts.

    Here the former is the gradient of every pre-activation, [n, C].
    """
    pre = _pre_activation(call)
    dpre = torch.cat(douts, dim=1).to(pre.dtype)
    if call.silu:
        gate = torch.sigmoid(pre)
        dpre = dpre * gate * (1 + pre * (1 - gate))
    tokens = len(call.x)
    return dpre, _spread(dpre, call)[tokens : tokens + len(call.halo)]


def backward_rows(
    call: ConvolutionCall, douts: tuple[torch.Tensor, ...], dpre: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx [n, C], dweight [C, K], dbias [C]), without what other ranks return.

    A kernel that can leaves padding at 0 and returns dx [rows, C].
    """
    width, source = call.weight.shape[1], _source(call.x, call.halo, dpre.dtype)
    columns = [(dpre * source[rows]).sum(0) for rows in _taps(call.tables, width)]
    dweight = torch.stack(columns[::-1], dim=1)
    return _spread(dpre, call)[: len(dpre)], dweight, dpre.sum(0)


def _pre_activation(call: ConvolutionCall) -> torch.Tensor:
    x, weight = call.x, call.weight
    dtype = torch.promote_types(x.dtype, torch.float32)
    source, weight = _source(x, call.halo, dtype), weight.to(dtype)
    pre = torch.zeros_like(x, dtype=dtype)
    if call.bias is not None:
        pre += call.bias.to(dtype)
    for tap, rows in enumerate(_taps(call.tables, weight.shape[1])):
        pre += weight[:, weight.shape[1] - 1 - tap] * source[rows]
    return pre


def _source(x: torch.Tensor, halo: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[shard; halo; a zero row]."""
    return torch.cat([x, halo, x.new_zeros(1, x.shape[1])]).to(dtype)


def _taps(tables: ConvTables, width: int) -> list[torch.Tensor]:
    """Rows of `_source` that each tap reads; none is the zero row, the last."""
    taps = tables.taps.long()
    zero = tables.num_tokens + tables.num_received
    own = torch.arange(tables.num_tokens, device=taps.device)
    return [own, *(taps[tap].masked_fill(taps[tap] < 0, zero) for tap in range(width - 1))]


def _spread(dpre: torch.Tensor, call: ConvolutionCall) -> torch.Tensor:
    """Gradient of every row of `_source`."""
    rows = call.tables.num_tokens + call.tables.num_received + 1
    total = dpre.new_zeros(rows, dpre.shape[1])
    width = call.weight.shape[1]
    for tap, index in enumerate(_taps(call.tables, width)):
        total.index_add_(0, index, dpre * call.weight[:, width - 1 - tap].to(dpre.dtype))
    return total
