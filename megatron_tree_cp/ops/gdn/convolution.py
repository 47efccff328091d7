"""`tree_causal_conv1d`: the public causal convolution along tree paths, and its executor.

forward    start halo exchange | convolve what needs none | wait | convolve the rest
backward   gradients of what reads across runs' starts, of the halo | start halo return
           | gradients of x, weight and bias | wait, add what returned
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch.autograd.function import once_differentiable

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.ops.gdn import reference
from megatron_tree_cp.ops.gdn.conv_tables import ConvolutionCall, ConvTables, conv_tables
from megatron_tree_cp.ops.gdn.distributed import pad
from megatron_tree_cp.ops.gdn.registry import CONVOLUTIONS, GdnCase, select
from megatron_tree_cp.ops.gdn.row import token_parents


@overload
def tree_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: TreeContext,
    activation: str | None = "silu",
    impl: str = "auto",
    split: None = None,
) -> torch.Tensor: ...


@overload
def tree_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: TreeContext,
    activation: str | None = "silu",
    impl: str = "auto",
    *,
    split: Sequence[int],
) -> tuple[torch.Tensor, ...]: ...


def tree_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: TreeContext,
    activation: str | None = "silu",
    impl: str = "auto",
    split: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Depthwise causal convolution of every token with the K - 1 tokens before it on its path.

    All ranks of the CP group call this in the same order; backward does likewise. Padding rows of
    outputs and gradients are exactly 0, whatever the inputs hold there.

    Args:
        x: [T, C], this rank's shard in layout order, padding included; fp16, bf16, fp32 or fp64.
        weight: [C, K]; weight[:, K - 1] multiplies the token itself. Its gradient, like the
            bias's, holds this rank's tokens only, as of any parameter under context parallelism.
        bias: [C] or None.
        ctx: this rank's context of the row.
        activation: "silu", or None for none.
        impl: `auto`, or a name of `registry.CONVOLUTIONS`.
        split: sizes that sum to C: return the channels in so many parts, contiguous each, so that
            neither they nor their gradients are copied where they are used apart.

    Returns:
        [T, C] in x's dtype, or with `split` a tensor [T, size] for each size.

    Raises:
        ValueError: shapes, devices, activation or implementation do not fit; the message says how.
    """
    if x.dim() != 2 or x.shape[0] != ctx.num_tokens:
        raise ValueError(
            f"x must be [{ctx.num_tokens}, C], all rows of rank {ctx.rank}'s shard (padding "
            f"included), got shape {tuple(x.shape)}"
        )
    if weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ValueError(
            f"weight must be [{x.shape[1]}, K], got shape {tuple(weight.shape)}; "
            "a Conv1d weight [C, 1, K] needs squeeze(1)"
        )
    if bias is not None and tuple(bias.shape) != (x.shape[1],):
        raise ValueError(f"bias must be [{x.shape[1]}], got shape {tuple(bias.shape)}")
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    sizes = (x.shape[1],) if split is None else tuple(split)
    if sum(sizes) != x.shape[1] or min(sizes, default=0) < 1:
        raise ValueError(f"split must be positive sizes that sum to {x.shape[1]}, got {sizes}")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != ctx.device:
            raise ValueError(f"{name} is on {tensor.device} but the context is for {ctx.device}")
    case = GdnCase(x.device.type, x.dtype, width=weight.shape[1], cp_size=ctx.cp_size)
    chosen = select(case, impl, CONVOLUTIONS)
    if chosen.name == "reference":
        parents = token_parents(ctx)
        real = reference.causal_conv1d(x[: ctx.num_real], weight, bias, parents, activation)
        padding = x.new_zeros(ctx.num_tokens - ctx.num_real, x.shape[1])
        whole = torch.cat([real.to(x.dtype), padding])
        outs = tuple(part.contiguous() for part in whole.split(sizes, dim=1))
    else:
        tables = conv_tables(ctx, weight.shape[1])
        silu = activation == "silu"
        outs = _TreeConvolution.apply(x, weight, bias, tables, silu, chosen.load(), sizes)
    return outs[0] if split is None else outs


class _TreeConvolution(torch.autograd.Function):
    """Convolution of one layer on one rank."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tables: ConvTables,
        silu: bool,
        kernel: Any,
        sizes: tuple[int, ...],
    ) -> tuple[torch.Tensor, ...]:
        real = x[: tables.num_tokens]
        none = x.new_zeros(0, x.shape[1])
        pending = None if tables.exchange is None else tables.exchange.start(real)
        call = ConvolutionCall(real, none, weight.contiguous(), bias, tables, silu)
        receive = (lambda: none) if pending is None else pending.wait
        outs, halo = kernel.forward(call, x.shape[0], sizes, receive)
        ctx.save_for_backward(x, halo, weight, bias)
        ctx.tables, ctx.silu, ctx.kernel = tables, silu, kernel
        return tuple(pad(out, x.shape[0]) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, halo, weight, bias = ctx.saved_tensors
        tables: ConvTables = ctx.tables
        real = slice(0, tables.num_tokens)
        call = ConvolutionCall(x[real], halo, weight.contiguous(), bias, tables, ctx.silu)
        douts = tuple(dout[real] for dout in douts)
        heads, dhalo = ctx.kernel.backward_heads(call, douts)
        pending = None
        if tables.exchange is not None:
            pending = tables.exchange.start_transposed(dhalo)
        dx, dweight, dbias = ctx.kernel.backward_rows(call, douts, heads, x.shape[0])
        if pending is not None:
            tables.exchange.accumulate(dx[real], pending.wait())
        return (
            pad(dx.to(x.dtype), x.shape[0]),
            dweight.to(weight.dtype),
            None if bias is None else dbias.to(bias.dtype),
            *(None, None, None, None),
        )
