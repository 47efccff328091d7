"""Measure a Gated DeltaNet layer on trees: every row's times and overheads, by the protocol.

Under torchrun, one process a device. A barrier stands before each timed call and the slowest rank
counts. Before anything is timed, a small row with the preset's branches is checked against fp32
blocks on one rank, outputs and every gradient; a failed check times nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..comm.context import TreeContext
from ..ops.gdn.conv_tables import conv_tables
from ..ops.gdn.tables import recurrence_plan, recurrence_tables
from ..plan.planner import plan_row
from ..plan.profile import CostProfile
from ..plan.row_plan import RowPlan
from ..tree.errors import InputError
from ..tree.packed_tree import PackedTree
from .compilations import compilations
from .gdn_bound import H200_TB_PER_S, bound_ms
from .gdn_layer import (
    TOLERANCE,
    GdnShape,
    LayerInputs,
    draw_inputs,
    expected,
    heads_of,
    layer,
    relative_errors,
    results,
    tree_operators,
)
from .kernel_times import KernelTime, kernel_times
from .presets import crossing_layout
from .timing import Clock

Say = Callable[[str], None]


@dataclass(frozen=True)
class RowResult:
    """One measured row; times in ms, the slowest rank's."""

    row: int
    tokens: int
    forward_ms: float
    backward_ms: float
    fwd_bwd_ms: float
    predicted_ms: float
    """The plan's, forward and backward."""
    conv_ms: float
    """The convolution alone, forward and backward."""
    rule_ms: float
    """The recurrence alone, norm of q and k included."""
    byte_bound_ms: float
    byte_bound_percent: float
    """Of the whole layer's time."""
    runs: int
    """Of all ranks."""
    chained_runs: int
    """Those whose state comes from another rank; the others' comes from their own, or is a root's.
    """
    plan_ms: float
    metadata_ms: float
    peak_gib: float
    compilations: int
    """During this row, of the rank that compiled most."""


class GdnBench:
    """Rows of one CP size on this rank.

    ``group`` holds the CP ranks (None for one rank); every rank of the clock's makes the same
    calls, those of several groups at once where it spans them. Plans are made with ``profile``.
    ``say`` gets a line before whatever may compile.
    """

    def __init__(
        self,
        shape: GdnShape,
        group: Any,
        clock: Clock,
        profile: CostProfile,
        say: Say = lambda text: None,
        tb_per_s: float = H200_TB_PER_S,
    ):
        self.shape, self.group, self.clock, self.profile = shape, group, clock, profile
        self.device, self.say, self.tb_per_s = clock.device, say, tb_per_s
        self.cp = 1 if group is None else dist.get_world_size(group)

    def check(self, tree: PackedTree) -> float:
        """Check a row whose chains cross all ranks; returns the worst relative error.

        Raises InputError on every rank when any tensor is off by more than rounding explains.
        """
        layout = crossing_layout(tree, self.cp)
        plan = plan_row(tree, self.cp, self.shape.model(), layout=layout)
        context = TreeContext(plan, self.group, self.device)
        inputs = draw_inputs(self.shape, tree.num_tokens, self.device, seed=0)
        mine = inputs.rows(context.row_indices)
        self._compile(context, mine)
        got = results(layer(self.shape, *tree_operators(context, self.shape)), mine)
        self.say("check: the same row in fp32 blocks")
        want = expected(tree, self.shape, inputs)
        return self.hold(got, want, context.row_indices, "our layer")

    def hold(
        self,
        got: dict[str, torch.Tensor],
        want: dict[str, torch.Tensor],
        rows: torch.Tensor | None,
        what: str,
    ) -> float:
        """The worst error of some results; InputError on every rank when it is too large."""
        errors = relative_errors(got, want, rows, self.group)
        allowed = TOLERANCE[self.shape.dtype]
        # `not <=`: NaN fails as well.
        wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= allowed]
        if wrong:
            raise InputError(
                f"{what} at CP{self.cp} is off by {', '.join(wrong)} (allowed {allowed:.0e}): "
                "not timed"
            )
        return max(errors.values())

    def measure(self, tree: PackedTree, row: int, repeats: int = 3) -> RowResult:
        """Plan, upload and time one row."""
        before = compilations()
        started = time.perf_counter()
        plan = self._plan(tree)
        planned = time.perf_counter()
        context = TreeContext(plan, self.group, self.device)
        recurrence_tables(context)
        conv_tables(context, self.shape.width)
        self.clock.wait()
        uploaded = time.perf_counter()
        inputs = draw_inputs(self.shape, context.num_tokens, self.device)
        parts = self._parts(context, inputs)
        whole = parts.pop("layer")
        self.clock.timed(*whole)  # exchanges, allocator; a tuner's buffers are no peak of the layer
        self.clock.reset_peak()
        forward, backward = zip(*(self.clock.timed(*whole) for _ in range(repeats)), strict=True)
        peak = self.clock.peak_gib()
        alone = {}
        for name, part in parts.items():
            self.clock.timed(*part)
            alone[name] = statistics.median(sum(self.clock.timed(*part)) for _ in range(repeats))
        total = statistics.median(f + b for f, b in zip(forward, backward, strict=True))
        bound = bound_ms(self.shape, _most_tokens(plan), self.tb_per_s)
        recurrence = recurrence_plan(context)
        host = [(planned - started) * 1e3, (uploaded - planned) * 1e3, peak]
        plan_ms, metadata_ms, peak, new = self.clock.slowest([*host, compilations() - before])
        return RowResult(
            row=row,
            tokens=tree.num_tokens,
            forward_ms=statistics.median(forward),
            backward_ms=statistics.median(backward),
            fwd_bwd_ms=total,
            predicted_ms=float(plan.predicted.total_ms),
            conv_ms=alone["conv"],
            rule_ms=alone["rule"],
            byte_bound_ms=bound,
            byte_bound_percent=100 * bound / total,
            runs=len(recurrence.runs),
            chained_runs=len(recurrence.heads),
            plan_ms=plan_ms,
            metadata_ms=metadata_ms,
            peak_gib=peak,
            compilations=int(new),
        )

    def kernels(self, tree: PackedTree) -> list[KernelTime]:
        """Kernels of one call of the layer forward and backward, on this rank."""
        context = TreeContext(self._plan(tree), self.group, self.device)
        inputs = draw_inputs(self.shape, context.num_tokens, self.device)
        forward, leaves, grad = self._parts(context, inputs)["layer"]
        return kernel_times(
            lambda: torch.autograd.grad(forward(*leaves), leaves, grad), self.device
        )

    def _plan(self, tree: PackedTree) -> RowPlan:
        return plan_row(tree, self.cp, self.shape.model(), self.profile)

    def _parts(self, context: TreeContext, inputs: LayerInputs) -> dict[str, tuple[Any, ...]]:
        """(forward, leaves, output's gradient) of the layer, and of its operators alone."""
        conv, rule = tree_operators(context, self.shape)
        _, alpha, strength, *_ = inputs.leaves
        # As in the layer, q, k and v are apart. x stands in for their values and for the gradients
        # that reach the convolution: memory, not numbers, is what counts here.
        channels = inputs.x.detach().split(self.shape.parts, dim=1)
        channels = tuple(part.contiguous() for part in channels)
        views = heads_of(self.shape, channels)
        rule_leaves = [view.detach().requires_grad_() for view in views]
        rule_leaves += [(-0.05 * alpha.detach().float().abs()).requires_grad_()]
        rule_leaves += [strength.detach().sigmoid().requires_grad_()]
        conv_leaves = [inputs.x.detach().requires_grad_(), inputs.weight.detach().requires_grad_()]
        return {
            "layer": (layer(self.shape, conv, rule), inputs.leaves, inputs.dout),
            "conv": (conv, conv_leaves, channels),
            "rule": (rule, rule_leaves, inputs.dout),
        }

    def _compile(self, context: TreeContext, inputs: LayerInputs) -> None:
        """Run every operator once, with a line before each: compilers may take minutes."""
        for name, (forward, leaves, grad) in self._parts(context, inputs).items():
            if name == "layer":
                continue
            self.say(f"{name}: first forward")
            out = forward(*leaves)
            self.clock.wait()
            self.say(f"{name}: first backward")
            torch.autograd.grad(out, leaves, grad)
            self.clock.wait()


def _most_tokens(plan: RowPlan) -> int:
    return max(plan.layouts["main"].num_real(rank) for rank in range(plan.cp_size))
