"""Hold the planner's predictions against the clock: many plans of one row, none used in a fit.

Every plan runs through `ops.tree_attention`, forward and backward, interleaved with the others; the
host issues ahead of the device as in training, and the slowest rank counts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .. import ops
from ..comm.context import TreeContext
from ..plan.cost import CostModel
from ..plan.layout import Layout
from ..plan.model import ModelShape
from ..plan.planner import plan_row
from ..plan.profile import CostProfile
from ..plan.row_plan import RowPlan
from ..plan.runs import join_only_children
from ..plan.search import ComputeBefore, contiguous_cuts
from ..plan.timeline import layer_timelines
from ..tree.packed_tree import PackedTree
from .attention import Shape
from .calibration.watch import DeviceWatch

MAX_ROW_MS = 4_000.0
"""Measured time from which on a row's plans are not repeated once more. All ranks agree on it."""

CLEAR = 0.01
"""Relative distance of two measured plans from which on their order is no accident of the clock."""


@dataclass(frozen=True)
class PlanResult:
    """One plan of a row: ms forward and backward of the slowest rank, peak bytes of any rank."""

    name: str
    predicted_ms: float
    measured_ms: float
    measured_forward_ms: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """Relative error of the predicted time."""
        return abs(self.predicted_ms - self.measured_ms) / self.measured_ms

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted peak; None where the device does not tell its own."""
        if not self.measured_bytes:
            return None
        return abs(self.predicted_bytes - self.measured_bytes) / self.measured_bytes


@dataclass(frozen=True)
class RowResult:
    """All plans of one row, ``contiguous`` first, ``chosen`` among them."""

    row: int
    tokens: int
    plans: tuple[PlanResult, ...]
    chosen: str
    """Name of the plan that the search chose: of an earlier one where it is the same plan."""

    def find(self, name: str) -> PlanResult:
        """The plan of a name."""
        return next(plan for plan in self.plans if plan.name == name)

    @property
    def regret(self) -> float:
        """How much slower the chosen plan is than the fastest measured."""
        return self.find(self.chosen).measured_ms / min(p.measured_ms for p in self.plans) - 1

    @property
    def gain(self) -> float:
        """How much faster it is than contiguous shards of equal work."""
        return 1 - self.find(self.chosen).measured_ms / self.plans[0].measured_ms

    def ordered(self, apart: float) -> tuple[int, int]:
        """(right, all) pairs of plans whose measured times are at least ``apart`` from equal."""
        right = total = 0
        for a, b in itertools.combinations(self.plans, 2):
            low, high = sorted((a, b), key=lambda plan: plan.measured_ms)
            if high.measured_ms >= (1 + apart) * low.measured_ms:
                total += 1
                right += high.predicted_ms > low.predicted_ms
        return right, total


def distinct_plans(
    tree: PackedTree, cp_size: int, model: ModelShape, profile: CostProfile, row: int
) -> tuple[list[tuple[str, RowPlan]], str]:
    """(different plans of a row, ``contiguous`` first; the name of the planner's own choice).

    Contiguous shards of equal work (waves by cost, fused, 1 to 4 waves, one direction fused),
    longest processing time, folded, two random ownerships, and the planner's own choice.
    """
    layouts = dict(layouts_of(tree, cp_size, CostModel(model, profile, 1), row))
    contiguous = layouts["contiguous"]
    variants: list[tuple[str, Layout | None, int | None]] = [("contiguous", contiguous, None)]
    if cp_size > 1:
        variants.append(("fused", contiguous, 0))
        variants += [(f"{n} wave{'s' * (n > 1)}", contiguous, n) for n in (1, 2, 3, 4)]
        variants += [(n, layout, None) for n, layout in layouts.items() if n != "contiguous"]
    variants.append(("chosen", None, None))
    plans = {
        name: plan_row(tree, cp_size, model, profile, waves=waves, layout=layout, granule=1)
        for name, layout, waves in variants
    }
    chosen = plans["chosen"]
    if cp_size > 1:
        for ahead, back in (("fused", "1 wave"), ("1 wave", "fused")):
            plan = _mixed(plans[ahead], plans[back], profile)
            plans[f"{ahead} forward, {back} backward"] = plan
    found: dict[str, tuple[str, RowPlan]] = {}
    for name, plan in plans.items():
        found.setdefault(plan.digest, (name, plan))
    return list(found.values()), found[chosen.digest][0]


def _mixed(ahead: RowPlan, back: RowPlan, profile: CostProfile) -> RowPlan:
    """The forward of one plan and the backward of another that makes the same exchange."""
    attention = {
        name: replace(part, backward_fused=back.attention[name].backward_fused)
        for name, part in ahead.attention.items()
    }
    mixed = replace(ahead, attention=attention)
    before, after = (_attention_ms(plan, profile) for plan in (ahead, mixed))
    predicted = replace(
        ahead.predicted,
        backward_ms=back.predicted.backward_ms,
        total_ms=ahead.predicted.total_ms + after - before,
        candidates=(),
    )
    return replace(mixed, predicted=predicted)


def _attention_ms(plan: RowPlan, profile: CostProfile) -> float:
    lines = layer_timelines(plan, profile)
    return sum(line.layers * (line.forward_ms + line.backward_ms) for line in lines)


def layouts_of(
    tree: PackedTree, cp_size: int, costs: CostModel, row: int
) -> Iterator[tuple[str, Layout]]:
    """(name, layout) of the ownerships compared, ``contiguous`` first; on one rank it is all."""
    segments, tokens = join_only_children(tree), tree.num_tokens
    compute = ComputeBefore(segments, costs)
    shares = contiguous_cuts(compute, tokens, cp_size)
    yield "contiguous", Layout.from_pieces(shares, np.arange(cp_size), cp_size, 1)
    if cp_size == 1:
        return
    # Segments, long ones in pieces, the most expensive first to the rank with the least so far.
    cuts = np.unique(np.concatenate([segments.start, np.linspace(0, tokens, 4 * cp_size + 1)]))
    cuts = cuts.astype(np.int64)
    price = np.diff(compute.at(cuts))
    load, owner = np.zeros(cp_size), np.zeros(len(price), dtype=np.int64)
    for piece in np.argsort(-price, kind="stable"):
        owner[piece] = np.argmin(load)
        load[owner[piece]] += price[piece]
    yield "longest processing time", Layout.from_pieces(cuts, owner, cp_size, 1)
    cuts = np.linspace(0, tokens, 2 * cp_size + 1).astype(np.int64)
    turn = np.arange(2 * cp_size)
    folded = np.minimum(turn, 2 * cp_size - 1 - turn)
    yield "folded", Layout.from_pieces(cuts, folded, cp_size, 1)
    random = np.random.default_rng(row)
    for i in range(2):
        count = min((3 + 5 * i) * cp_size, tokens)
        inner = random.choice(np.arange(1, tokens), count - 1, replace=False)
        cuts = np.concatenate([[0], np.sort(inner), [tokens]])
        owner = random.permutation(np.arange(count) % cp_size)
        yield f"random {i}", Layout.from_pieces(cuts, owner, cp_size, 1)


class PredictionBench:
    """Rows of one CP size on this rank; every rank of ``group`` makes the same calls."""

    def __init__(
        self,
        shape: Shape,
        cp_size: int,
        group: Any,
        device: torch.device,
        profile: CostProfile,
        repeats: int = 5,
        heat_ms: float = 0.0,
    ) -> None:
        self.shape, self.cp_size, self.group, self.device = shape, cp_size, group, device
        self.profile, self.repeats = profile, repeats
        layer = shape.model()
        self.model = ModelShape(
            layer.classes,
            token_flops=0.0,
            activation_bytes=0.0,
            dtype_bytes=shape.dtype.itemsize,
        )
        self.watch = DeviceWatch(device, group, repeats, ahead=6, heat_ms=heat_ms)

    def plans(self, tree: PackedTree, row: int) -> tuple[list[tuple[str, RowPlan]], str]:
        """What is compared; see `distinct_plans`."""
        return distinct_plans(tree, self.cp_size, self.model, self.profile, row)

    def measure(self, tree: PackedTree, row: int) -> RowResult:
        """Run every plan of a row ``repeats`` times, in turn; twice where these take too long."""
        plans, chosen = self.plans(tree, row)
        contexts = [TreeContext(plan, self.group, self.device) for _, plan in plans]
        rows = max(context.num_tokens for context in contexts)
        pool = self._inputs(rows)
        inputs = [self._shard(pool, context) for context in contexts]
        for context, given in zip(contexts, inputs, strict=True):
            self._run(context, given, lambda: None)  # block tables, kernels, allocator
        times: list[list[list[float]]] = [[] for _ in plans]
        peaks = [0.0] * len(plans)
        spent = 0.0
        while len(times[0]) < self.repeats and (len(times[0]) < 2 or spent < MAX_ROW_MS):
            for index, context in enumerate(contexts):
                spans, peaks[index] = self._timed(context, inputs[index])
                times[index].append(spans)
                spent += sum(spans)
        return RowResult(
            row,
            tree.num_tokens,
            tuple(
                PlanResult(
                    name,
                    plan.predicted.total_ms,
                    statistics.median(sum(spans) for spans in taken),
                    statistics.median(spans[0] for spans in taken),
                    float(plan.predicted.peak_bytes.max()),
                    peak,
                )
                for (name, plan), taken, peak in zip(plans, times, peaks, strict=True)
            ),
            chosen,
        )

    def _inputs(self, tokens: int) -> Any:
        """q, k, v and the output's gradient."""
        heads = (self.shape.query_heads, self.shape.kv_heads)
        sizes = [(tokens, heads[i], self.shape.head_dim) for i in (0, 1, 1, 0)]
        return [torch.randn(size, device=self.device).to(self.shape.dtype) for size in sizes]

    def _shard(self, pool: Any, context: TreeContext) -> Any:
        """The inputs of one plan, views of what all share."""
        return [x[: context.num_tokens] for x in pool]

    def _run(self, context: TreeContext, inputs: Any, mark: Any) -> None:
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        window, impl = self.shape.window, self.shape.impl
        out = ops.tree_attention(*leaves, context, window=window, impl=impl)
        mark()
        torch.autograd.grad(out, leaves, inputs[3])
        mark()

    def _timed(self, context: TreeContext, inputs: Any) -> tuple[list[float], float]:
        """ms of forward and of backward, and the bytes above its inputs that the call held at most
        on the rank that held most (0 on CPU)."""
        cuda = self.device.type == "cuda"
        expected = float(context.plan.predicted.total_ms)
        self.watch.heat(lambda: self._run(context, inputs, lambda: None), expected)
        held = 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            held = torch.cuda.memory_allocated(self.device)
        spans = self.watch.marked(lambda mark: self._run(context, inputs, mark))
        peak = torch.cuda.max_memory_allocated(self.device) - held if cuda else 0
        return spans, self.watch.clock.slowest([float(peak)])[0]


def summarise(rows: list[RowResult]) -> dict[str, dict[str, float]]:
    """Metrics of a preset's rows, in per cent; ``spread`` of every series."""
    from .evidence import spread

    plans = [plan for row in rows for plan in row.plans]
    metrics = {
        "time_error_percent": spread([100 * plan.error for plan in plans]),
        "regret_percent": spread([100 * row.regret for row in rows]),
        "gain_over_contiguous_percent": spread([100 * row.gain for row in rows], True),
        "plans_per_row": spread([float(len(row.plans)) for row in rows], True),
    }
    for name, apart in (("order_right_percent", 0.0), ("clear_order_right_percent", CLEAR)):
        counted = [row.ordered(apart) for row in rows]
        pairs = sum(total for _, total in counted)
        if pairs:
            metrics[name] = {"median": 100 * sum(r for r, _ in counted) / pairs, "pairs": pairs}
    memory = [plan.memory_error for plan in plans]
    known = [100 * error for error in memory if error is not None]
    if known:
        metrics["memory_error_percent"] = spread(known)
    return metrics
