"""Time the real operators on one device: attention stages, row-wise steps, token-local work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...comm.exchange import RangeExchange
from ...comm.upload import upload
from ...ops.attention.backward import backward_pass
from ...ops.attention.interval_mask import IntervalMask
from ...ops.attention.merge import merge_into
from ...ops.attention.registry import AttentionCase, select
from ...ops.attention.stages import build_stage, query_positions
from ...plan.exchange import RankExchange
from ...plan.model import LayerClass
from ...plan.rounds import backward_programs, forward_programs, idle_share
from ...plan.values import frozen_array
from .coefficients import (
    STEPS,
    backward_fields,
    copy_fields,
    forward_fields,
    token_back_fields,
    token_fields,
)
from .component import Call, Case, Component, Features
from .samples import StageCase, stage_cases

RAMPS = (1e9, 4e9, 1.6e10, 3.2e10, 6.5e10, 1.3e11, 2.6e11)
"""Forward FLOPs from which on a device may be full."""


@dataclass(frozen=True)
class Workload:
    """What is measured: the operator's heads, a layer's width, and how small."""

    query_heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    impl: str = "auto"
    hidden_size: int = 4096
    ffn_size: int = 10_880
    scale: int = 1
    """Divides the lengths of all rows."""

    def layer(self, window: int | None = None) -> LayerClass:
        """The layer class that the planner would price."""
        return LayerClass(
            "x",
            window=window,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )

    @property
    def output_bytes(self) -> int:
        """Bytes of one row of outputs."""
        return self.query_heads * self.head_dim * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of one row of keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


def device_components(
    work: Workload, device: torch.device, processors: float | None = None
) -> list[Component]:
    """What one device tells, in the order in which the fits need each other; of ``processors``
    multiprocessors (default: its own)."""
    bench = DeviceBench(work, device, processors)
    pairs = ("launch", "flops", "local_flops", "remote_flops", "window_flops", "window_rows")
    head = (*pairs, "idle_flops")
    tiles = (*head, "tile_flops", "hidden_flops")
    ramps = tuple(ramp / work.scale for ramp in RAMPS)
    return [
        Component("copies", bench.copies, [_COPIES], copy_fields),
        Component(
            "attention_forward",
            partial(bench.stages, False),
            [head, tiles, (*head, "row_bytes"), (*tiles, "row_bytes")],
            forward_fields,
            ramps,
        ),
        Component(
            "attention_backward",
            partial(bench.stages, True),
            [
                (*head, "key_bytes"),
                (*tiles, "key_bytes"),
                (*head, "key_bytes", "row_bytes"),
                (*tiles, "key_bytes", "row_bytes"),
            ],
            backward_fields,
            ramps,
        ),
        *(
            Component(
                f"tokens_{name}",
                partial(bench.tokens, name == "backward"),
                [("launch", "flops")],
                fields,
            )
            for name, fields in (("forward", token_fields), ("backward", token_back_fields))
        ),
    ]


_COPIES = tuple(f"{step}_{what}" for step in ("copy", *STEPS) for what in ("launch", "bytes"))


class DeviceBench:
    """Cases of one workload on one device."""

    def __init__(
        self, work: Workload, device: torch.device, processors: float | None = None
    ) -> None:
        self.work, self.device = work, device
        self.processors = processors or processors_of(device)
        self.scale = work.head_dim**-0.5

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.work.dtype)

    def kernel(self, window: int | None) -> Any:
        case = AttentionCase(
            device_type=self.device.type,
            dtype=self.work.dtype,
            query_heads=self.work.query_heads,
            kv_heads=self.work.kv_heads,
            head_dim=self.work.head_dim,
            value_dim=self.work.head_dim,
            window=window,
        )
        return select(case, self.work.impl).load()

    def stages(self, backward: bool) -> Iterator[Case]:
        every = 4 if self.work.scale > 1 else 1
        for stage in itertools.islice(stage_cases(self.work.scale), 0, None, every):
            yield Case(
                stage.label,
                self.stage_features(stage, backward),
                partial(self.stage_call, stage, backward),
            )

    def stage_features(self, stage: StageCase, backward: bool) -> Features:
        flops, heads = self.work.layer().pair_flops, float(self.work.query_heads)
        begin, end = stage.plan.query_range
        rows, keys = np.asarray(end - begin), np.asarray(stage.plan.keys.num_keys)
        idle = 0.0
        if self.processors is not None:
            programs = (
                backward_programs(keys, heads)
                if backward
                else forward_programs(rows, heads, self.work.kv_heads)
            )
            idle = float(idle_share(programs, self.processors))
        place = "remote" if stage.remote else "local"
        return {
            "launch": 1.0,
            "flops": flops * stage.pairs,
            f"{place}_flops": flops * stage.pairs,
            "hidden_flops": flops * stage.hidden,
            "tile_flops": flops * (stage.pairs + stage.hidden),
            "idle_flops": flops * (stage.pairs + stage.hidden) * idle,
            "window_flops": flops * stage.pairs if stage.window is not None else 0.0,
            "window_rows": (end - begin) * heads if stage.window is not None else 0.0,
            "work": flops * (stage.pairs + stage.hidden),
            "row_bytes": float((end - begin) * self.work.output_bytes),
            "key_bytes": float(stage.plan.keys.num_keys * self.work.kv_bytes),
        }

    def stage_call(self, stage: StageCase, backward: bool) -> Call:
        work, kernel = self.work, self.kernel(stage.window)
        mask, rows = device_mask(stage, self.device)
        q = self.random(stage.queries, work.query_heads, work.head_dim)
        k, v = (self.random(mask.num_keys, work.kv_heads, work.head_dim) for _ in range(2))
        if not backward:
            return lambda: kernel.forward(q[rows], k, v, mask, self.scale)
        part, part_lse = kernel.forward(q[rows], k, v, mask, self.scale)
        out = torch.zeros_like(q)
        lse = torch.zeros(q.shape[:2], dtype=part_lse.dtype, device=self.device)
        out[rows], lse[rows] = part.to(q.dtype).nan_to_num(), part_lse.clamp(min=0)
        layer = backward_pass(kernel, torch.randn_like(q), q, out, lse, None, self.scale)
        return lambda: layer.stage(rows, k, v, mask)

    def copies(self) -> Iterator[Case]:
        work = self.work
        sizes = [max(n // work.scale, 8) for n in (1_000, 3_000, 8_000, 20_000, 45_000, 90_000)]
        for step in ("copy", *STEPS):
            for rows in sizes:
                row_bytes = work.output_bytes if step in ("merge", "delta") else work.kv_bytes
                if step == "copy":
                    row_bytes = 2 * work.output_bytes
                yield Case(
                    f"{step}, {rows} rows",
                    {f"{step}_launch": 1.0, f"{step}_bytes": float(rows * row_bytes)},
                    partial(getattr(self, f"_{step}"), rows),
                )

    def _copy(self, rows: int) -> Call:
        source = self.random(rows, self.work.query_heads, self.work.head_dim)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def _merge(self, rows: int) -> Call:
        heads, dim = self.work.query_heads, self.work.head_dim
        out, part = self.random(rows, heads, dim), self.random(rows, heads, dim)
        lse, part_lse = (torch.randn(rows, heads, device=self.device) for _ in range(2))
        return lambda: merge_into(out, lse, part, part_lse)

    def _delta(self, rows: int) -> Call:
        kernel, heads, dim = self.kernel(None), self.work.query_heads, self.work.head_dim
        dout, q, out = (self.random(rows, heads, dim) for _ in range(3))
        lse = torch.randn(rows, heads, device=self.device)
        return lambda: backward_pass(kernel, dout, q, out, lse, None, self.scale).dq().to(q.dtype)

    def _keys(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (rows, self.work.kv_heads, self.work.head_dim)
        return self.random(*shape), self.random(*shape)

    def _exchange(self, rows: int) -> RangeExchange:
        """This rank's every second of 128 rows, to itself: a gather without a wire."""
        starts = frozen_array(range(0, 2 * rows, 256))
        lengths = frozen_array([min(128, rows - 128 * i) for i in range(len(starts))])
        one = frozen_array([0])
        plan = RankExchange(starts, lengths, (rows,), (rows,), one, frozen_array([rows]))
        return RangeExchange(plan, None, self.device)

    def _pack(self, rows: int) -> Call:
        exchange, (k, v) = self._exchange(rows), self._keys(2 * rows + 256)
        return lambda: exchange.start(k, v)

    def _accumulate(self, rows: int) -> Call:
        exchange, (k, v) = self._exchange(rows), self._keys(2 * rows + 256)
        returned = exchange.start(k, v).wait()
        width = self.work.kv_heads * self.work.head_dim
        parts = [x.unflatten(1, k.shape[1:]) for x in (returned[:, :width], returned[:, width:])]

        def call() -> None:
            for total, part in zip((k, v), parts, strict=True):
                exchange.accumulate(total, part)

        return call

    def _assemble(self, rows: int) -> Call:
        k, v = self._keys(rows)
        packed = torch.cat([k.flatten(1), v.flatten(1)], 1)[: rows // 2]
        parts = [
            (x.unflatten(1, k.shape[1:]), own[: rows - rows // 2])
            for x, own in zip(packed.chunk(2, 1), (k, v), strict=True)
        ]
        return lambda: [torch.cat(part) for part in parts]

    def tokens(self, backward: bool) -> Iterator[Case]:
        work = self.work
        heads = work.query_heads * work.head_dim
        widths = [
            (work.hidden_size, heads + 2 * work.kv_heads * work.head_dim),
            (heads, work.hidden_size),
            (work.hidden_size, 2 * work.ffn_size),
            (work.ffn_size, work.hidden_size),
        ]
        flops = 2 * sum(a * b for a, b in widths)
        for tokens in (1_024, 2_000, 4_096, 7_000, 11_000, 16_384, 24_000, 30_000, 40_960):
            tokens = max(tokens // work.scale, 8)
            yield Case(
                f"{tokens} tokens",
                {"launch": 1.0, "flops": float(flops * tokens)},
                partial(self._block, tokens, widths, backward),
            )

    def _block(self, tokens: int, widths: list[tuple[int, int]], backward: bool) -> Call:
        """Norms, projections and a gated MLP: a layer without its attention."""
        qkv, project, widen, narrow = (
            (self.random(b, a) * a**-0.5).requires_grad_() for a, b in widths
        )
        heads = widths[1][0]
        x = self.random(tokens, self.work.hidden_size).requires_grad_()
        norms = [
            torch.ones(self.work.hidden_size, device=self.device, dtype=x.dtype).requires_grad_()
            for _ in range(2)
        ]

        def forward() -> torch.Tensor:
            mixed = F.linear(F.rms_norm(x, x.shape[1:], norms[0]), qkv)[:, :heads]
            y = x + F.linear(mixed, project)
            gate, up = F.linear(F.rms_norm(y, y.shape[1:], norms[1]), widen).chunk(2, 1)
            return y + F.linear(F.silu(gate) * up, narrow)

        if not backward:
            return lambda: forward().detach()
        out, leaves = forward(), [x, qkv, project, widen, narrow, *norms]
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def processors_of(device: torch.device) -> float | None:
    """Multiprocessors of a GPU; None of a CPU."""
    if device.type != "cuda":
        return None
    return float(torch.cuda.get_device_properties(device).multi_processor_count)


def device_mask(stage: StageCase, device: torch.device) -> tuple[IntervalMask, slice]:
    """The mask of a stage's kernel call, and its queries in the shard."""
    positions = query_positions(upload(stage.positions, device))
    built = build_stage(stage.plan, stage.window, positions)
    return built.mask, built.rows
