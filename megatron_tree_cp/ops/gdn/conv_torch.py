"""Causal convolution along tree paths in plain torch: any float dtype, any device.

    pre[t] = bias + sum_j weight[:, K - 1 - j] x[tap_j(t)]        out = activation(pre)

tap_0(t) is t itself, tap_j(t) the token j before it on its path: a row of [shard; halo], or none.
"""

from __future__ import annotations

import torch

from megatron_tree_cp.ops.gdn.conv_tables import ConvTables


def forward(
    x: torch.Tensor,
    halo: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tables: ConvTables,
    silu: bool,
    rows: int,
    sizes: tuple[int, ...],
) -> tuple[torch.Tensor, ...]:
    """[n, size] for each size: the channels, in parts that are contiguous.

    From the real rows x [n, C] and the received rows halo [h, C]. A kernel that can leaves padding
    at 0 and returns [rows, size] instead.
    """
    pre = _pre_activation(x, halo, weight, bias, tables)
    out = (pre * torch.sigmoid(pre) if silu else pre).to(x.dtype)
    return tuple(part.contiguous() for part in out.split(sizes, dim=1))


def backward_local(
    douts: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    halo: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tables: ConvTables,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dpre [n, C], dhalo [h, C], dweight [C, K], dbias [C]): all but the gradient of x.

    From the gradients [n, size] of the parts.
    """
    pre = _pre_activation(x, halo, weight, bias, tables)
    dpre = torch.cat(douts, dim=1).to(pre.dtype)
    if silu:
        gate = torch.sigmoid(pre)
        dpre = dpre * gate * (1 + pre * (1 - gate))
    width, source = weight.shape[1], _source(x, halo, pre.dtype)
    columns = [(dpre * source[rows]).sum(0) for rows in _taps(tables, width)]
    dweight = torch.stack(columns[::-1], dim=1)
    dhalo = _spread(dpre, weight, tables)[len(x) : len(x) + len(halo)]
    return dpre, dhalo, dweight, dpre.sum(0)


def backward_input(
    dpre: torch.Tensor, weight: torch.Tensor, tables: ConvTables, rows: int
) -> torch.Tensor:
    """dx [n, C] of the real rows; a kernel that can leaves padding at 0 and returns [rows, C]."""
    return _spread(dpre, weight, tables)[: len(dpre)]


def _pre_activation(
    x: torch.Tensor,
    halo: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tables: ConvTables,
) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    source, weight = _source(x, halo, dtype), weight.to(dtype)
    pre = torch.zeros_like(x, dtype=dtype)
    if bias is not None:
        pre += bias.to(dtype)
    for tap, rows in enumerate(_taps(tables, weight.shape[1])):
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


def _spread(dpre: torch.Tensor, weight: torch.Tensor, tables: ConvTables) -> torch.Tensor:
    """Gradient of every row of `_source`."""
    rows = tables.num_tokens + tables.num_received + 1
    total = dpre.new_zeros(rows, dpre.shape[1])
    width = weight.shape[1]
    for tap, index in enumerate(_taps(tables, width)):
        total.index_add_(0, index, dpre * weight[:, width - 1 - tap].to(dpre.dtype))
    return total
