"""Measure tree attention: every row's times, rates and overheads, by the published protocol.

Under torchrun, one process a device. Rows 0-15 of a preset warm up, rows 16-31 are measured; a
barrier stands before each timed call and the slowest rank counts. Before anything is timed, a
small row of the preset is checked against fp32 tiles on one rank; a failed check times nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import ops
from ..comm.context import TreeContext
from ..comm.transport import Transport
from ..ops.attention.block_mask import tile_classes
from ..ops.attention.registry import AttentionCase, Implementation, select
from ..ops.attention.stages import AttentionStages, attention_stages, prepare_tables
from ..plan.memory import attention_call_bytes
from ..plan.model import LayerClass, ModelShape
from ..plan.planner import plan_row
from ..plan.profile import CostProfile
from ..plan.row_plan import RowPlan
from ..tree.packed_tree import PackedTree
from .kernel_times import KernelTime, kernel_times
from .one_call import one_call
from .presets import crossing_layout
from .silence import without_exchanges
from .timing import Clock

WARMING_S = 6.0
"""Of cards before the dense row is timed: as hot as rows find them, which run for minutes."""

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""Relative norm error that rounding explains: of probabilities, results and rows on the wire; in
fp32 the order of sums."""

Timed = Callable[[], tuple[float, float]]
"""Gives the (forward, backward) ms of one call."""


@dataclass(frozen=True)
class Shape:
    """The operator's heads and head dim, its input dtype and kernel."""

    query_heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    impl: str = "auto"
    window: int | None = None
    sink: bool = False

    @property
    def name(self) -> str:
        """``32/4/128``."""
        return f"{self.query_heads}/{self.kv_heads}/{self.head_dim}"

    def model(self) -> ModelShape:
        """A model of this one layer class, attention work alone."""
        name = "global" if self.window is None else f"w{self.window}"
        layer = LayerClass(
            name,
            window=self.window,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )
        return ModelShape(classes=(layer,), token_flops=0.0, dtype_bytes=self.dtype.itemsize)

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of keys and of values."""
        return self.head_dim, self.head_dim

    def kernel(self, device: torch.device) -> str:
        """Name of the kernel that serves it on a device."""
        return self.implementation(device).name

    def implementation(self, device: torch.device) -> Implementation:
        """The kernel that serves it on a device."""
        case = AttentionCase(
            device_type=device.type,
            dtype=self.dtype,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            window=self.window,
            sink=self.sink,
        )
        return select(case, self.impl)


@dataclass(frozen=True)
class RowResult:
    """One measured row; times in ms, the slowest rank's."""

    row: int
    tokens: int
    pairs: int
    forward_ms: float
    backward_ms: float
    fwd_bwd_ms: float
    predicted_ms: float
    """The plan's, forward and backward."""
    tflops: float
    """On visible pairs, per rank, forward and backward."""
    plan_ms: float
    metadata_ms: float
    """From the plan to a rank's device tables, host and device."""
    tables_ms: float
    """The device's part of it: ranges to block tables."""
    tables_mib: float
    peak_gib: float
    predicted_peak_gib: float
    """What the process held before the row, and what the plan adds."""
    tiles_computed_per_visible: float
    imbalance: float


class AttentionBench:
    """Rows of one CP size on this rank.

    ``group`` holds the CP ranks (None for one rank); every rank of the clock's makes the same
    calls, those of several groups at once where it spans them. Plans are made with ``profile``.
    """

    def __init__(
        self,
        shape: Shape,
        group: Any,
        clock: Clock,
        profile: CostProfile,
        waves: int | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.shape, self.group, self.clock, self.waves = shape, group, clock, waves
        self.device, self.profile, self.transport = clock.device, profile, transport
        self.cp = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def check(self, tree: PackedTree) -> float:
        """Worst relative error of output and gradients on a small row whose paths cross all ranks,
        against fp32 tiles."""
        generator = torch.Generator().manual_seed(0)
        inputs = self._inputs(tree.num_tokens, generator)
        alone = TreeContext(plan_row(tree, 1, self.shape.model()), None, self.device)
        want = self._run(alone, [x.float() for x in inputs], "tiled")
        layout = crossing_layout(tree, self.cp)
        plan = plan_row(
            tree, self.cp, self.shape.model(), self.profile, 1, self.waves, None, layout
        )
        context = TreeContext(plan, self.group, self.device, transport=self.transport)
        rows = context.row_indices
        got = self._run(context, [*(x[rows.clamp(min=0)] for x in inputs[:4]), *inputs[4:]])
        real = rows >= 0
        pairs = [(a[real].float(), b[rows[real]]) for a, b in zip(got[:4], want[:4], strict=True)]
        for ours, theirs in zip(got[4:], want[4:], strict=True):  # the sink: summed over ranks
            total = ours.float()
            if self.group is not None:
                dist.all_reduce(total, group=self.group)
            pairs.append((total, theirs))
        # np.max: NaN stays NaN, where max() may lose it.
        return float(np.max([self._relative_error(ours, theirs) for ours, theirs in pairs]))

    def _relative_error(self, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        sums = torch.stack([(ours - theirs).square().sum(), theirs.square().sum()])
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return float((sums[0] / sums[1]).sqrt())

    def measure(self, tree: PackedTree, row: int, repeats: int = 3) -> RowResult:
        """Plan, upload and time one row."""
        held_before = self.clock.held_gib()
        started = time.perf_counter()
        plan = self._plan(tree)
        planned = time.perf_counter()
        context = TreeContext(plan, self.group, self.device, transport=self.transport)
        marks = [self.clock.mark()]
        stages = attention_stages(context, self.shape.window)
        held = prepare_tables(
            stages, self.shape.implementation(self.device).load(), *self.shape.dims
        )
        marks.append(self.clock.mark())
        self.clock.wait()
        uploaded = time.perf_counter()
        (tables_ms,) = self.clock.spans(marks)
        inputs = self._inputs(context.num_tokens, None)
        self.clock.reset_peak()
        self._run(context, inputs)  # allocator
        forward, backward = zip(
            *(self._timed(context, inputs) for _ in range(repeats)), strict=True
        )
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        pairs = tree.visible_pairs(self.shape.window)
        total = statistics.median(both)
        flops = 14 * pairs * self.shape.query_heads * self.shape.head_dim / self.cp
        times = self.clock.slowest(
            [
                (planned - started) * 1e3,
                (uploaded - planned) * 1e3,
                self.clock.peak_gib(),
                held / 2**20,
                held_before + self._predicted_bytes(plan) / 2**30,
            ]
        )
        return RowResult(
            row=row,
            tokens=tree.num_tokens,
            pairs=pairs,
            forward_ms=statistics.median(forward),
            backward_ms=statistics.median(backward),
            fwd_bwd_ms=total,
            predicted_ms=float(plan.predicted.total_ms),
            tflops=flops / total / 1e9,
            plan_ms=times[0],
            metadata_ms=times[1],
            tables_ms=tables_ms,
            tables_mib=times[3],
            peak_gib=times[2],
            predicted_peak_gib=times[4],
            tiles_computed_per_visible=self._tile_ratio(stages, pairs),
            imbalance=float(plan.predicted.imbalance),
        )

    def _predicted_bytes(self, plan: RowPlan) -> float:
        """What a row adds to this rank's memory at its peak; 0 on CPU, which measures none."""
        if self.device.type != "cuda":
            return 0.0
        return float(attention_call_bytes(plan, self.shape.window)[self.rank])

    def exposed_ms(self, tree: PackedTree, trials: int = 30) -> tuple[float, float]:
        """Time of the exchanges that nothing hides: mean and half-width of its 95 % interval.

        Interleaved pairs of runs with and without the exchanges; without them the same buffers are
        read as they are.
        """
        if self.cp == 1:
            return 0.0, 0.0
        context = self._context(tree)
        silent = without_exchanges(context, self.shape.window)
        inputs = self._inputs(context.num_tokens, None)
        return self._difference(
            lambda: self._timed(context, inputs), lambda: self._timed(silent, inputs), trials
        )

    def over_one_call_ms(self, tree: PackedTree, trials: int = 30) -> tuple[float, float]:
        """Time beyond that of one local call over the same pairs: mean and half-width of its 95 %
        interval, from interleaved pairs of runs. The one call finds all keys of its queries where
        it wants them: no exchange, no copy, no merge.
        """
        context = self._context(tree)
        inputs = self._inputs(context.num_tokens, None)
        one = one_call(context, self.shape.window, self.shape.implementation(self.device), inputs)
        return self._difference(
            lambda: self._timed(context, inputs), lambda: self.clock.timed(*one), trials
        )

    def _difference(self, a: Timed, b: Timed, trials: int) -> tuple[float, float]:
        """Mean of a's ms over b's and half its 95 % interval; both run once before they count."""
        for each in (a, b):
            each()
        differences = [sum(a()) - sum(b()) for _ in range(trials)]
        half = 1.96 * statistics.stdev(differences) / trials**0.5
        return statistics.mean(differences), half

    def kernels(self, tree: PackedTree) -> list[KernelTime]:
        """Kernels of one call forward and backward, on this rank."""
        context = self._context(tree)
        inputs = self._inputs(context.num_tokens, None)
        return kernel_times(lambda: self._run(context, inputs), self.device)

    def _context(self, tree: PackedTree) -> TreeContext:
        return TreeContext(self._plan(tree), self.group, self.device, transport=self.transport)

    def _plan(self, tree: PackedTree) -> RowPlan:
        return plan_row(tree, self.cp, self.shape.model(), self.profile, waves=self.waves)

    def _inputs(self, tokens: int, generator: torch.Generator | None) -> list[torch.Tensor]:
        """The output's gradient, q, k, v, and the sink of a shape that has one."""
        shape = self.shape
        heads = (shape.query_heads, shape.query_heads, shape.kv_heads, shape.kv_heads)
        sizes: list[tuple[int, ...]] = [(tokens, n, shape.head_dim) for n in heads]
        if shape.sink:
            sizes.append((shape.query_heads,))
        place = self.device if generator is None else torch.device("cpu")
        drawn = (torch.randn(size, generator=generator, device=place) for size in sizes)
        return [x.to(self.device, shape.dtype) for x in drawn]

    def _forward(
        self, context: TreeContext, leaves: list[torch.Tensor], impl: str | None = None
    ) -> torch.Tensor:
        q, k, v, *sink = leaves
        return ops.tree_attention(
            q,
            k,
            v,
            context,
            window=self.shape.window,
            sink=sink[0] if sink else None,
            impl=impl or self.shape.impl,
        )

    def _run(
        self, context: TreeContext, inputs: list[torch.Tensor], impl: str | None = None
    ) -> list[torch.Tensor]:
        """The output and the gradients of all inputs."""
        leaves = [x.detach().requires_grad_() for x in inputs[1:]]
        out = self._forward(context, leaves, impl)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[0])]

    def _timed(self, context: TreeContext, inputs: list[torch.Tensor]) -> tuple[float, float]:
        """(forward, backward) ms of one call, the slowest rank's."""
        leaves = [x.detach().requires_grad_() for x in inputs[1:]]
        return self.clock.timed(lambda *x: self._forward(context, list(x)), leaves, inputs[0])

    def _tile_ratio(self, stages: AttentionStages, pairs: int) -> float:
        """Pairs of all touched 128 x 128 tiles of all ranks over the visible pairs; the mean of
        forward and backward where they run apart."""
        calls = [
            stage
            for direction in (stages.forward, stages.backward)
            for stage in (direction.local, *direction.remote)
            if not stage.empty
        ]
        touched = sum(int(tile_classes(c.mask, 128, 128).touched.sum()) for c in calls) / 2
        total = torch.tensor([touched], dtype=torch.float64, device=self.device)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return float(total) * 128 * 128 / pairs


def dense_causal_tflops(
    shape: Shape, clock: Clock, tokens: int = 16_384
) -> tuple[float, float] | None:
    """Forward and backward rate of the same kernels on a dense causal row: (slowest, fastest) card.

    All ranks of the clock's group run at once, as they do in a measured row: cards of one host
    differ by some per cent. None where the kernel is not flash.
    """
    device = clock.device
    if device.type != "cuda" or shape.kernel(device) != "flash":
        return None
    from flash_attn.cute import interface

    sizes = [(1, tokens, h, shape.head_dim) for h in (shape.query_heads, shape.kv_heads)]
    q, k, v, dout = (torch.randn(sizes[i], device=device).to(shape.dtype) for i in (0, 1, 1, 0))

    def call() -> None:
        out, lse = interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True)[:2]
        interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=True)

    # A cold card runs some per cent faster for seconds, until its power limit holds it back.
    warming = 0.1 if clock.pause_ms else WARMING_S
    clock.wait()
    started = time.perf_counter()
    while time.perf_counter() - started < warming:
        call()
        torch.cuda.synchronize(device)
    clock.wait()
    times = []
    for _ in range(15):
        clock.pause()
        marks = [clock.mark()]
        call()
        marks.append(clock.mark())
        torch.cuda.synchronize(device)
        times.append(marks[0].elapsed_time(marks[1]))
    slowest, fastest = clock.slowest([statistics.median(times), -statistics.median(times)])
    flops = 14 * (tokens * (tokens + 1) // 2) * shape.query_heads * shape.head_dim / 1e9
    return flops / slowest, flops / -fastest
