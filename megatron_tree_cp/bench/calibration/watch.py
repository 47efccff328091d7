"""A stopwatch for cases on a device: the host issues ahead, the slowest rank counts."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from ...tree.errors import InputError
from ..timing import Clock
from .component import Call, Case, Sample

MAX_HEAT_CALLS = 500
"""Calls too short to heat a card in so many do not reach its power limit either."""


class DeviceWatch:
    """Times cases on a device: medians of calls that the host issues ahead, as in training.

    ``group`` holds the ranks that take part (None for this one); all make the same calls, and the
    slowest counts. ``ahead`` matrix products before each call keep the device busy until the host
    has issued it, so that the host's own time is left out; the devices of a group then meet once
    more, so that none waits for another's late start. A case is timed after ``heat_ms`` of itself:
    a card that was idle runs faster until its power limit holds it back.
    """

    def __init__(
        self,
        device: torch.device,
        group: Any = None,
        repeats: int = 5,
        ahead: int = 2,
        heat_ms: float = 0.0,
    ) -> None:
        self.device, self.repeats, self.ahead, self.heat_ms = device, repeats, ahead, heat_ms
        self.clock = Clock(group, device)
        size = 8192 if device.type == "cuda" else 1
        self._busy = torch.ones(size, size, device=device, dtype=torch.bfloat16)
        self._unused = torch.empty_like(self._busy)

    def sample(self, component: str, case: Case) -> Sample:
        """Median ms of a case; for two calls the median of their interleaved differences."""
        try:
            prepared = case.prepare()
        except torch.OutOfMemoryError as error:
            raise InputError(f"{component}: {case.label} does not fit this device") from error
        calls = prepared if isinstance(prepared, tuple) else (prepared,)
        for call in calls:
            call()
        if self.heat_ms:
            for call in calls:
                self.heat(call, self.once(call))
        times = [[self.once(call) for call in calls] for _ in range(self.repeats)]
        if len(calls) == 1:
            ms = statistics.median(t[0] for t in times)
            return Sample(case.label, dict(case.features), ms, ms)
        extra = statistics.median(t[0] - t[1] for t in times)
        return Sample(
            case.label, dict(case.features), extra, statistics.median(t[1] for t in times)
        )

    def heat(self, call: Call, ms: float) -> None:
        """Repeat a call of so many ms, the same on all ranks, for ``heat_ms`` at most."""
        for _ in range(min(int(self.heat_ms / max(ms, 1e-3)), MAX_HEAT_CALLS)):
            call()

    def once(self, call: Call) -> float:
        """ms of one call."""
        return self.marked(lambda mark: (call(), mark()))[0]

    def marked(self, call: Any) -> list[float]:
        """ms between the marks that ``call(mark)`` makes, the first from its start."""
        self.clock.wait()
        self.run_ahead()
        marks = [self.clock.mark()]
        call(lambda: marks.append(self.clock.mark()))
        self.clock.wait()
        return self.clock.spans(marks)

    def run_ahead(self) -> None:
        """Keep the device busy while the host issues what follows, and align the ranks."""
        if self.device.type == "cuda":
            for _ in range(self.ahead):
                torch.mm(self._busy, self._busy, out=self._unused)
        if self.clock.group is not None:
            dist.all_reduce(self._unused[0, 0], group=self.clock.group)
