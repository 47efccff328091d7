"""One Gated DeltaNet layer without its projections, its inputs, and what it must come out as.

    q k v = conv(x, weight)      g = -exp(log_decay) softplus(alpha + dt_bias)
    y = rule(q, k, v, g, sigmoid(strength))

The operators `conv` and `rule` are arguments: ours on a tree, or someone else's on sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .. import ops
from ..comm.context import TreeContext
from ..ops.gdn.registry import RULES, GdnCase, select
from ..plan.model import LayerClass, ModelShape
from ..plan.planner import plan_row
from ..tree.packed_tree import PackedTree

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
"""Relative norm error that rounding explains: outputs, and gradients of some sums over tokens."""

SHARDED = ("out", "x", "alpha", "strength")
"""Results with one row per token; those of parameters are summed over ranks."""


@dataclass(frozen=True)
class GdnShape:
    """Heads and dims of the layer, its input dtype and kernel."""

    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4
    dtype: torch.dtype = torch.bfloat16
    impl: str = "auto"

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def name(self) -> str:
        """``16/32/128/128``."""
        return f"{self.key_heads}/{self.value_heads}/{self.key_dim}/{self.value_dim}"

    def model(self) -> ModelShape:
        """A model of this one layer, without projections."""
        layer = LayerClass(
            "gdn",
            kind="gdn",
            query_heads=self.key_heads,
            kv_heads=self.value_heads,
            head_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_width=self.width,
        )
        return ModelShape(classes=(layer,), token_flops=0.0, dtype_bytes=self.dtype.itemsize)

    def kernel(self, device: torch.device, cp_size: int = 1) -> str:
        """Name of the delta rule's implementation on a device."""
        case = GdnCase(device.type, self.dtype, self.key_dim, self.value_dim, cp_size=cp_size)
        return select(case, self.impl, RULES).name


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of the layer and the gradient of its output."""

    x: torch.Tensor
    """[T, C]: q, k, v before the convolution."""

    alpha: torch.Tensor
    strength: torch.Tensor
    """[T, Hv] each: before the gates."""

    weight: torch.Tensor
    """[C, K]"""

    log_decay: torch.Tensor
    dt_bias: torch.Tensor
    """fp32 [Hv] each."""

    dout: torch.Tensor
    """[T, Hv, Dv]"""

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """All but `dout`, as fresh leaves."""
        tensors = (getattr(self, field.name) for field in fields(self) if field.name != "dout")
        return tuple(x.detach().requires_grad_() for x in tensors)

    def rows(self, index: torch.Tensor) -> LayerInputs:
        """The inputs of some tokens; -1 takes any."""
        index = index.clamp(min=0)
        per_token = ("x", "alpha", "strength", "dout")
        return replace(self, **{name: getattr(self, name)[index] for name in per_token})

    def float(self) -> LayerInputs:
        """In fp32."""
        return replace(self, **{f.name: getattr(self, f.name).float() for f in fields(self)})


NAMES = tuple(field.name for field in fields(LayerInputs) if field.name != "dout")


def draw_inputs(
    shape: GdnShape, tokens: int, device: torch.device, seed: int | None = None
) -> LayerInputs:
    """Random inputs; with a seed equal on every device and rank.

    Decay is slow (g about -0.05), so that a state of the wrong branch shows far down.
    """
    generator, source = None, device
    if seed is not None:
        generator, source = torch.Generator().manual_seed(seed), torch.device("cpu")

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(size, generator=generator, device=source) * scale
        return drawn.to(device, shape.dtype)

    heads = shape.value_heads
    rates = torch.rand(heads, generator=generator, device=source).to(device)
    return LayerInputs(
        normal(tokens, shape.channels),
        normal(tokens, heads),
        normal(tokens, heads),
        normal(shape.channels, shape.width, scale=0.4),
        (0.02 + 0.08 * rates).log(),
        normal(heads, scale=0.1).float(),
        normal(tokens, heads, shape.value_dim),
    )


def layer(
    shape: GdnShape, conv: Callable[..., Any], rule: Callable[..., Any]
) -> Callable[..., torch.Tensor]:
    """The layer's forward, a function of `LayerInputs.leaves`.

    Args:
        conv: (x [T, C], weight) -> [T, C], or q, k and v apart; activation included.
        rule: (q, k [T, Hk, Dk], v [T, Hv, Dv], g, beta [T, Hv]) -> [T, Hv, Dv], q and k normed.
    """

    def forward(
        x: torch.Tensor,
        alpha: torch.Tensor,
        strength: torch.Tensor,
        weight: torch.Tensor,
        log_decay: torch.Tensor,
        dt_bias: torch.Tensor,
    ) -> torch.Tensor:
        made = conv(x, weight)
        q, k, v = heads_of(shape, made if isinstance(made, tuple) else made.split(shape.parts, 1))
        g = -log_decay.exp() * F.softplus(alpha.float() + dt_bias)
        return rule(q, k, v, g, strength.sigmoid())

    return forward


def heads_of(shape: GdnShape, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Views q, k [T, Hk, Dk] and v [T, Hv, Dv] of the channels of q, k and v."""
    q, k, v = parts
    return (
        q.unflatten(1, (shape.key_heads, shape.key_dim)),
        k.unflatten(1, (shape.key_heads, shape.key_dim)),
        v.unflatten(1, (shape.value_heads, shape.value_dim)),
    )


def tree_operators(
    context: TreeContext, shape: GdnShape
) -> tuple[Callable[..., Any], Callable[..., torch.Tensor]]:
    """Our `conv`, which gives q, k and v apart, and `rule` on a row."""

    def conv(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.tree_causal_conv1d(x, weight, None, context, impl=shape.impl, split=shape.parts)

    def rule(*inputs: torch.Tensor) -> torch.Tensor:
        return ops.tree_gated_delta_rule(*inputs, context, impl=shape.impl)

    return conv, rule


def results(forward: Callable[..., torch.Tensor], inputs: LayerInputs) -> dict[str, torch.Tensor]:
    """The output, ``out``, and the gradient of every input, by the input's name."""
    leaves = inputs.leaves
    out = forward(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs.dout)
    return {"out": out.detach(), **dict(zip(NAMES, grads, strict=True))}


def expected(tree: PackedTree, shape: GdnShape, inputs: LayerInputs) -> dict[str, torch.Tensor]:
    """Results of a whole row on one rank, by the blockwise torch form in fp32."""
    device = inputs.x.device
    context = TreeContext(plan_row(tree, 1, shape.model()), None, device)
    return results(
        layer(shape, *tree_operators(context, replace(shape, impl="tiled"))), inputs.float()
    )


def relative_errors(
    got: dict[str, torch.Tensor],
    want: dict[str, torch.Tensor],
    rows: torch.Tensor | None = None,
    group: Any = None,
) -> dict[str, float]:
    """Norm of the difference over the norm of what is wanted, over all ranks, by name.

    Args:
        got: results of this rank's tokens, in the order of `rows`; parameters' as its part.
        want: results of the whole row.
        rows: row indices of the tokens, -1 at padding; None for all in order.
    """
    found = {}
    for name, value in want.items():
        ours = got[name].float().clone(memory_format=torch.contiguous_format)
        if name in SHARDED:
            if rows is not None:
                ours, value = ours[rows >= 0], value[rows[rows >= 0]]
        elif group is not None:
            dist.all_reduce(ours, group=group)
        sums = torch.stack([(ours - value).double().square().sum(), value.double().square().sum()])
        if group is not None and name in SHARDED:
            dist.all_reduce(sums, group=group)
        found[name] = float((sums[0] / sums[1]).sqrt())
    return found
