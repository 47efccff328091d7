"""Time Gated DeltaNet layers on rows that tell the planner's terms apart, and fit its coefficients.

The price of a layer (`plan.cost_gdn`) is a maximum of sums: whether a level of runs waits for its
longest run or for the chunks of all depends on the coefficients themselves. The features of a
sample are therefore the derivatives of that very price, at the costs found so far, and the fit
repeats until they stand still.

Four shapes take turns, so that the samples held out of every fit are those of the fourth: what is
held out is a shape that no fit has seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from ... import ops
from ...comm.context import TreeContext
from ...plan.cost_gdn import GdnRates
from ...plan.layout import Layout
from ...plan.planner import plan_row
from ...plan.profile import CostProfile
from ...plan.recurrence import CHUNK, RecurrencePlan
from ...plan.recurrence_loads import RecurrenceLoads, recurrence_loads
from ...tree.errors import InputError
from ...tree.packed_tree import PackedTree
from ..gdn_layer import GdnShape, draw_inputs, layer, tree_operators
from .coefficients import needed_cost
from .component import Call, Case, Component, Features, Sample
from .recurrence_passes import KINDS, pass_call, pass_price
from .recurrence_rows import GdnRow, chained_rows, local_rows
from .samples import slab_layout

SHAPES = ((16, 32, 128, 128), (32, 32, 64, 64), (4, 8, 128, 128), (16, 64, 128, 128))
"""Key heads, value heads, key dim, value dim; the last is held out of every fit. Few heads, as a
rank has them under tensor parallelism, tell what a chunk waits for from what it moves."""

QUICK_SHAPES = ((2, 4, 32, 32), (4, 4, 16, 16), (1, 2, 32, 32), (2, 8, 32, 32))

CONV_TOKENS = (2_000, 6_000, 12_000, 20_000, 32_000, 48_000)

INVERSE = {
    "tokens": "gdn_token_bytes_per_ms",
    "states": "gdn_state_bytes_per_ms",
    "gradients": "gdn_gradient_flops_per_ms",
    "summaries": "gdn_summary_flops_per_ms",
}
DIRECT = {
    "layer": "gdn_layer_ms",
    "step": "gdn_step_ms",
    "forks": "gdn_fork_passes",
    "gradient_step": "gdn_gradient_step_ms",
    "gradient_forks": "gdn_gradient_fork_passes",
    "summary_step": "gdn_summary_step_ms",
    "summary_forks": "gdn_summary_fork_passes",
    "levels": "gdn_level_ms",
    "token_back": "gdn_token_backward_factor",
    "padding": "gdn_padding_factor",
    "padding_back": "gdn_padding_backward_factor",
    "carry": "gdn_carry_passes",
    "compose": "gdn_compose_ms",
}
"""Fields of the profile by the feature that they are the cost of, or one over it."""

RATES = ("states", "gradients", "summaries")
PASSES = (
    *("step", "forks", "gradient_step", "gradient_forks", "summary_step", "summary_forks"),
    *("levels", *RATES),
)
LAYER = ("layer", "tokens", "token_back", "padding", "padding_back")
BUMP = 1e-5
"""Relative step of a derivative."""


def recurrent_components(dtype: torch.dtype, scale: int, device: torch.device) -> list[Component]:
    """What Gated DeltaNet layers on one device tell, given the memory rate of ``copies``.

    ``scale`` divides the rows; above 1 heads are small. Raises InputError where the device's own
    kernels cannot run the shapes.
    """
    bench = _Bench(dtype, scale, device, 1, None)
    bench.check()
    conv = ("launch", "bytes", "back_launch", "back_bytes")
    # A device that walks runs one after the other tells no rate of many side by side.
    sets = [PASSES, tuple(name for name in PASSES if name not in RATES)]
    return [
        Component("gdn_conv", bench.convolutions, [conv], conv_fields, held_out=len(SHAPES)),
        Component(
            "gdn_pass",
            bench.passes,
            sets,
            layer_fields,
            explain=bench.explain_pass,
            starts=_starts(),
            held_out=len(SHAPES),
        ),
        Component(
            "gdn",
            bench.layers,
            [LAYER],
            layer_fields,
            explain=bench.explain,
            held_out=len(SHAPES),
        ),
    ]


def chained_components(
    dtype: torch.dtype, scale: int, device: torch.device, size: int, group: Any
) -> list[Component]:
    """What layers tell whose paths cross the ``size`` ranks of ``group``.

    Given what one device and ``exchange_cpN`` tell. A fit of former samples needs no group.
    """
    bench = _Bench(dtype, scale, device, size, group)
    name = f"gdn_chained_cp{size}"
    return [
        Component(
            name,
            bench.layers,
            [("compose", "carry")],
            layer_fields,
            explain=bench.explain,
            held_out=len(SHAPES),
        )
    ]


def conv_fields(
    c: Mapping[str, float], _: float | None, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Of ``gdn_conv``."""
    forward = needed_cost(c, "bytes", "gdn_conv")
    return {
        "gdn_conv_passes": forward * known["memory_bytes_per_ms"],
        "gdn_conv_backward_factor": c["back_bytes"] / forward,
    }


def layer_fields(c: Mapping[str, float], _: float | None, __: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the profile that the costs ``c`` are."""
    return {
        INVERSE.get(name) or DIRECT[name]: (
            1 / needed_cost(c, name, "gdn") if name in INVERSE else cost
        )
        for name, cost in c.items()
    }


def layer_price(
    shape: GdnShape, loads: RecurrenceLoads, backward: bool, profile: CostProfile
) -> float:
    """ms of the slowest rank, as the planner counts them."""
    gdn = shape.model().classes[0]
    both = GdnRates.of(gdn, profile, shape.dtype.itemsize, 1).layer_ms(loads)
    return float(both[backward].max())


def derivatives(
    price: Callable[[CostProfile], float], names: Sequence[str], profile: CostProfile
) -> dict[str, float]:
    """Derivatives of a price by the costs ``names``, and as ``settled`` what they leave of it.

    The price is ``settled + sum of cost * derivative``, exactly so at ``profile``, and around it as
    long as no maximum changes sides.
    """
    here = price(profile)
    found, settled = {}, here
    for name in names:
        field = INVERSE.get(name) or DIRECT[name]
        value, usual = getattr(profile, field), getattr(CostProfile(), field)
        cost, usual = (1 / value, 1 / usual) if name in INVERSE else (value, usual)
        step = BUMP * max(cost, usual)
        moved = 1 / (cost + step) if name in INVERSE else cost + step
        found[name] = (price(replace(profile, **{field: moved})) - here) / step
        settled -= cost * found[name]
    return {**found, "settled": settled}


def _starts() -> list[dict[str, float]]:
    """Where fits begin: how many runs walk side by side for the time of one is not known."""
    usual = CostProfile()
    steps = ("gdn_step_ms", "gdn_gradient_step_ms", "gdn_summary_step_ms")
    return [{name: getattr(usual, name) * by for name in steps} for by in (1, 0.2, 5, 25)]


def _unknown(sample: Sample) -> InputError:
    return InputError(f"{sample.label}: no sample of this release and these options; measure again")


@dataclass(frozen=True)
class _Bench:
    """Cases on the ranks of one group."""

    dtype: torch.dtype
    scale: int
    device: torch.device
    cp_size: int
    group: Any

    @property
    def shapes(self) -> list[GdnShape]:
        """The shapes in turn, the held-out one last."""
        sizes = SHAPES if self.scale == 1 else QUICK_SHAPES
        return [GdnShape(*size, dtype=self.dtype) for size in sizes]

    def check(self) -> None:
        """Raises InputError where a GPU would run the torch form, which takes minutes."""
        if self.device.type != "cuda":
            return
        for shape in self.shapes:
            try:
                replace(shape, impl="triton").kernel(self.device, self.cp_size)
            except ValueError as reason:
                raise InputError(f"--gdn: {shape.name}: {reason}") from reason

    @cached_property
    def rows(self) -> list[tuple[GdnRow, RecurrenceLoads]]:
        """The rows of the layer's samples, with their loads."""
        rows = local_rows(self.scale) if self.cp_size == 1 else chained_rows(self.scale)
        return [
            (row, recurrence_loads(RecurrencePlan(row.tree, self._layout(row)), CHUNK))
            for row in itertools.islice(rows, 0, None, 4 if self.scale > 1 else 1)
        ]

    def _layout(self, row: GdnRow) -> Layout:
        size = self.cp_size
        cuts = np.linspace(0, row.tree.num_tokens, size * row.turns + 1).astype(np.int64)
        return Layout.from_pieces(cuts, np.arange(size * row.turns) % size, size, 1)

    def layers(self) -> Iterator[Case]:
        """Whole layers: shapes in turn, forward and backward."""
        for number, (row, _) in enumerate(self.rows):
            for backward in (False, True):
                for index, shape in enumerate(self.shapes):
                    features = {"row": float(number), "shape": float(index)}
                    yield Case(
                        self._label(row, shape, backward),
                        {**features, "backward": float(backward)},
                        partial(self._layer, row, shape, backward),
                    )

    def _label(self, row: GdnRow, shape: GdnShape, backward: bool) -> str:
        return f"{row.name}, {shape.name}, {'backward' if backward else 'forward'}"

    def passes(self) -> Iterator[Case]:
        """Passes over states by themselves: shapes in turn, every kind."""
        for number, (row, _) in enumerate(self.rows):
            for kind in KINDS:
                for index, shape in enumerate(self.shapes):
                    where = {"row": float(number), "shape": float(index)}
                    yield Case(
                        self._pass_label(row, shape, kind),
                        {**where, "kind": float(KINDS.index(kind))},
                        partial(self._pass, row, shape, kind),
                    )

    def _pass_label(self, row: GdnRow, shape: GdnShape, kind: str) -> str:
        return f"{row.name}, {shape.name}, {kind}"

    def _pass(self, row: GdnRow, shape: GdnShape, kind: str) -> Call:
        return pass_call(self._context(row.tree, shape, self._layout(row)), shape, kind)

    def explain_pass(
        self, sample: Sample, names: Sequence[str], costs: Mapping[str, Any]
    ) -> Features:
        """`explain` of a pass's sample."""
        row, loads, shape = self._case(sample)
        kind = int(sample.features["kind"])
        if kind >= len(KINDS) or sample.label != self._pass_label(row, shape, KINDS[kind]):
            raise _unknown(sample)
        price = partial(pass_price, shape, loads, KINDS[kind])
        return derivatives(price, names, CostProfile(**costs))

    def explain(self, sample: Sample, names: Sequence[str], costs: Mapping[str, Any]) -> Features:
        """Derivatives of a sample's price at ``costs``. Raises InputError for unknown samples."""
        row, loads, shape = self._case(sample)
        backward = bool(sample.features["backward"])
        if sample.label != self._label(row, shape, backward):
            raise _unknown(sample)
        price = partial(layer_price, shape, loads, backward)
        return derivatives(price, names, CostProfile(**costs))

    def _case(self, sample: Sample) -> tuple[GdnRow, RecurrenceLoads, GdnShape]:
        """Of a sample. Raises InputError where there is none such."""
        number, index = (int(sample.features[n]) for n in ("row", "shape"))
        if number >= len(self.rows) or index >= len(self.shapes):
            raise _unknown(sample)
        return *self.rows[number], self.shapes[index]

    def _context(self, tree: PackedTree, shape: GdnShape, layout: Layout) -> TreeContext:
        plan = plan_row(tree, self.cp_size, shape.model(), layout=layout)
        return TreeContext(plan, self.group, self.device)

    def _layer(self, row: GdnRow, shape: GdnShape, backward: bool) -> Call:
        context = self._context(row.tree, shape, self._layout(row))
        inputs = draw_inputs(shape, context.num_tokens, self.device)
        forward = layer(shape, *tree_operators(context, shape))
        leaves = inputs.leaves
        if not backward:
            return lambda: forward(*leaves).detach()
        out = forward(*leaves)
        return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

    def convolutions(self) -> Iterator[Case]:
        """The convolution of single chains: shapes in turn, forward and backward."""
        for tokens in (max(n // self.scale, 16) for n in CONV_TOKENS):
            for backward in (False, True):
                for shape in self.shapes:
                    gdn = shape.model().classes[0]
                    rates = GdnRates.of(gdn, CostProfile(), shape.dtype.itemsize, 1)
                    what = "back_" * backward
                    yield Case(
                        f"{tokens} tokens, {shape.name}, {'backward' if backward else 'forward'}",
                        {f"{what}launch": 1.0, f"{what}bytes": tokens * rates.row_bytes},
                        partial(self._convolution, tokens, shape, backward),
                    )

    def _convolution(self, tokens: int, shape: GdnShape, backward: bool) -> Call:
        tree = PackedTree([tokens], [-1])
        context = self._context(tree, shape, slab_layout(tokens, 1, 1))
        inputs = draw_inputs(shape, tokens, self.device)
        leaves = [inputs.x.requires_grad_(), inputs.weight.requires_grad_()]

        def forward() -> tuple[torch.Tensor, ...]:
            made = ops.tree_causal_conv1d(*leaves, None, context, split=shape.parts)
            assert isinstance(made, tuple)
            return made

        if not backward:
            return lambda: [part.detach() for part in forward()]
        out = forward()
        grads = [torch.randn_like(part) for part in out]
        return lambda: torch.autograd.grad(out, leaves, grads, retain_graph=True)
