"""Round numbers along an axis."""

from __future__ import annotations

import math


def ticks(end: float, count: int = 8) -> list[tuple[float, str]]:
    """About ``count`` round values in [0, end] with short names (``20k``)."""
    raw = end / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if raw <= power * m)
    if end >= 2 * count:
        step = max(step, 1.0)
    values = [i * step for i in range(int(end / step + 1e-9) + 1)]
    return [(value, _name(value, step)) for value in values]


def _name(value: float, step: float) -> str:
    if value >= 1000 and step >= 100:
        return f"{value / 1000:g}k"
    return f"{value:.10g}"
