"""Per-iteration numbers of a tree run, in full precision.

Megatron's console line rounds and skips negative losses; the metrics file does neither.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from .batch import RowStatistics
from .stream import Preparation


@dataclass(frozen=True)
class IterationRecord:
    """Totals of one iteration over the whole global batch."""

    iteration: int
    consumed_samples: int
    loss_sum: float
    """Sum over entries of weight * nll."""
    count: int
    """Integer denominator: trained entries, or trajectories for sequence and group means."""
    loss: float
    grad_norm: float | None
    learning_rate: float | None
    skipped: int
    rows: int
    trajectories: int
    stored_tokens: int
    logical_tokens: int
    visible_pairs: float
    island_rows: int
    """Rows whose recurrent layers had a layout of their own."""
    predicted_ms: float
    """The planner's time of the layers of a stage, summed over the rows of the replica with most.
    """
    elapsed_ms: float
    exposed_preparation_ms: float
    """Longest time that any rank's training loop waited for a planned row."""
    planning_cpu_ms: float
    """Processor time of planner processes, summed over a node's ranks; of the node with most."""
    peak_memory_gib: float
    """Most device memory that any rank has held in tensors since the run began; 0 on CPU."""

    def rates(self) -> dict[str, float]:
        """Throughput of this iteration, per second over the whole job."""
        seconds = self.elapsed_ms / 1e3
        return {
            "stored tokens/s": self.stored_tokens / seconds,
            "logical tokens/s": self.logical_tokens / seconds,
            "trajectories/s": self.trajectories / seconds,
            "exposed preparation (ms)": self.exposed_preparation_ms,
            "planning of a node (CPU ms)": self.planning_cpu_ms,
            "peak memory (GiB)": self.peak_memory_gib,
        }

    def line(self) -> str:
        """The console line."""
        shown = " | ".join(f"{name}: {value:.1f}" for name, value in self.rates().items())
        return f" tree iteration {self.iteration} | {shown}"


@dataclass
class IterationRecorder:
    """Collects one iteration's numbers on this rank and reduces them over the job."""

    path: Path | None = None
    nodes: int = 1
    """Hosts of the job; ranks of one host follow each other, equally many on each."""
    _loss: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _rows: list[RowStatistics] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)
    _planning: torch.Tensor | None = None
    _waited_ms: float = 0.0
    _finished: int = 0

    def add_row(self, statistics: RowStatistics) -> None:
        """A microbatch entered the forward pass."""
        self._rows.append(statistics)

    def add_loss(self, loss_sum: torch.Tensor, count: torch.Tensor) -> None:
        """A microbatch's loss on this shard (last pipeline stage only); kept on the device."""
        self._loss.append((loss_sum.detach(), count.detach()))

    def finish(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        grad_norm: float | None,
        learning_rate: float | None,
        skipped: int,
        preparation: Preparation,
        chunks: int,
        group: dist.ProcessGroup,
        cp_size: int,
        device: torch.device,
    ) -> IterationRecord:
        """Reduce over ``group`` (data x context parallel) and start the next iteration.

        Every rank of the job calls this: the extremes are over all of them.

        ``chunks``: virtual pipeline chunks; each one has seen every row.
        """
        pairs = sum(r.visible_pairs for r in self._rows)
        rows = [
            len(self._rows),
            sum(r.trajectories for r in self._rows),
            sum(r.stored_tokens for r in self._rows),
            sum(r.logical_tokens for r in self._rows),
            pairs,
            sum(r.islands for r in self._rows),
        ]
        predicted = sum(r.predicted_ms for r in self._rows) / chunks
        loss_sum = sum((s.double() for s, _ in self._loss), torch.zeros((), dtype=torch.float64))
        count = sum((c.double() for _, c in self._loss), torch.zeros((), dtype=torch.float64))
        sums = torch.tensor([0.0, 0.0, *rows], dtype=torch.float64).to(device)
        sums[0], sums[1] = loss_sum, count
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        extremes = [preparation.waited_ms, peak, predicted]
        most = torch.tensor(extremes, dtype=torch.float64, device=device)
        planning = torch.zeros(self.nodes, dtype=torch.float64)
        planning[dist.get_rank() * self.nodes // dist.get_world_size()] = (
            preparation.planning_cpu_ms
        )
        planning = planning.to(device)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(planning)
        longest_wait, peak, predicted = most.tolist()
        planning = planning.cpu()
        self._planning = planning if self._planning is None else self._planning + planning
        self._waited_ms += longest_wait
        self._finished += 1
        total, counted, *seen = sums.tolist()
        shared = [value / (cp_size * chunks) for value in seen]
        now = time.perf_counter()
        elapsed, self._started = (now - self._started) * 1e3, now
        self._loss.clear()
        self._rows.clear()
        return IterationRecord(
            iteration=iteration,
            consumed_samples=consumed_samples,
            loss_sum=total,
            count=round(counted),
            loss=total / counted if counted else 0.0,
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=None if learning_rate is None else float(learning_rate),
            skipped=int(skipped),
            rows=round(shared[0]),
            trajectories=round(shared[1]),
            stored_tokens=round(shared[2]),
            logical_tokens=round(shared[3]),
            visible_pairs=shared[4],
            island_rows=round(shared[5]),
            predicted_ms=predicted,
            elapsed_ms=elapsed,
            exposed_preparation_ms=longest_wait,
            planning_cpu_ms=float(planning.max()),
            peak_memory_gib=peak,
        )

    def summary(self) -> str:
        """What rows have cost over all iterations."""
        planning = 0.0 if self._planning is None else float(self._planning.max()) / 1e3
        return (
            f" tree rows of {self._finished} iterations | planning of a node (CPU s): "
            f"{planning:.2f} | exposed preparation (s): {self._waited_ms / 1e3:.3f}"
        )

    def write(self, record: IterationRecord) -> None:
        """Append one JSON object; a number that JSON has no name for becomes null."""
        if self.path is None:
            return
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in vars(record).items()
        }
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(values) + "\n")
