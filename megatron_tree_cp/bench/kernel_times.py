"""Which kernels a call runs, and for how long: torch's profiler, summed by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..tree.errors import InputError

REPEATS = 3
NAME_WIDTH = 90


@dataclass(frozen=True)
class KernelTime:
    """One kernel of a call."""

    name: str
    launches: float
    ms: float


def kernel_times(call: Callable[[], Any], device: torch.device) -> list[KernelTime]:
    """Kernels of one call on this rank's device, longest first; means over some calls.

    Every rank of a distributed call makes it as often. Raises InputError without a CUDA device.
    """
    if device.type != "cuda":
        raise InputError("--kernels reads a GPU's kernels: leave it out with --device cpu")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    call()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(REPEATS):
            call()
            torch.cuda.synchronize(device)
    on_device = (e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return add_up(((e.name, e.device_time / 1e3) for e in on_device), REPEATS)


def add_up(launches: Iterable[tuple[str, float]], calls: int) -> list[KernelTime]:
    """Kernels of (name, ms) of every launch in so many calls, longest first."""
    found: dict[str, list[float]] = {}
    for name, ms in launches:
        found.setdefault(name, []).append(ms)
    times = [KernelTime(n, len(each) / calls, sum(each) / calls) for n, each in found.items()]
    return sorted(times, key=lambda one: (-one.ms, one.name))


def kernel_lines(times: list[KernelTime], most: int) -> list[str]:
    """The longest kernels, a line each, and a line for all."""
    lines = [
        f"{one.ms:9.3f} ms {one.launches:6.1f}x  {one.name[:NAME_WIDTH]}" for one in times[:most]
    ]
    launches = sum(one.launches for one in times)
    return [*lines, f"{sum(one.ms for one in times):9.3f} ms {launches:6.1f}x  all kernels"]
