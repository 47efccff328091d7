"""Time calls by the published protocol: a barrier before each, and the slowest rank counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class Clock:
    """Marks in time on the ranks of one group.

    ``group`` is None for one rank; every rank of a group makes the same calls. ``pause_ms`` stands
    before each timed call, for a device that shall stay below its power limit.
    """

    def __init__(self, group: Any, device: torch.device, pause_ms: float = 0.0) -> None:
        self.group, self.device, self.pause_ms = group, device, pause_ms

    def wait(self) -> None:
        """Until all ranks and their devices are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(group=self.group)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def pause(self) -> None:
        """Let the device rest before a timed call, where pauses are asked for."""
        if self.pause_ms:
            self.wait()
            time.sleep(self.pause_ms / 1e3)

    def mark(self) -> Any:
        """A point in time of the device's current stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spans(self, marks: Sequence[Any]) -> list[float]:
        """ms between neighbouring marks, each the slowest rank's; call `wait` after the last."""
        return self.slowest(
            [
                begin.elapsed_time(end) if self.device.type == "cuda" else (end - begin) * 1e3
                for begin, end in zip(marks, marks[1:], strict=False)
            ]
        )

    def timed(
        self,
        forward: Callable[..., torch.Tensor],
        leaves: Sequence[torch.Tensor],
        grad: torch.Tensor,
    ) -> tuple[float, float]:
        """(forward, backward) ms of one call, the slowest rank's.

        Args:
            forward: of the leaves, which require gradients; its output has the shape of `grad`.
        """
        self.pause()
        self.wait()
        marks = [self.mark()]
        out = forward(*leaves)
        marks.append(self.mark())
        torch.autograd.grad(out, leaves, grad)
        marks.append(self.mark())
        self.wait()
        there, back = self.spans(marks)
        return there, back

    def slowest(self, values: list[float]) -> list[float]:
        """Every value's maximum over the ranks."""
        if self.group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def peak_gib(self) -> float:
        """Peak of this rank's device memory since the last `reset_peak`, 0 on CPU."""
        if self.device.type != "cuda":
            return 0.0
        return torch.cuda.max_memory_allocated(self.device) / 2**30

    def held_gib(self) -> float:
        """This rank's device memory in tensors now, 0 on CPU."""
        if self.device.type != "cuda":
            return 0.0
        return torch.cuda.memory_allocated(self.device) / 2**30

    def reset_peak(self) -> None:
        """Start a new peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


def summarise_rows(
    rows: Sequence[Any], higher_is_better: Sequence[str] = ("tflops",)
) -> dict[str, dict[str, float]]:
    """Median, p95 and worst of every column but ``row`` over measured rows (dataclasses)."""
    metrics = {}
    for name in (field.name for field in fields(rows[0])):
        values = sorted(asdict(row)[name] for row in rows)
        if name == "row":
            continue
        if name in higher_is_better:
            values.reverse()
        metrics[name] = {
            "median": float(np.median(values)),
            "p95": float(values[round(0.95 * (len(values) - 1))]),
            "worst": float(values[-1]),
        }
    return metrics
