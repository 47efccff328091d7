"""Time exchanges between the ranks of a group, alone and beside compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...comm.exchange import RangeExchange, exchange_stream
from ...plan.exchange import RankExchange
from ...plan.values import frozen_array
from .coefficients import needed_cost
from .component import Call, Case, Component
from .measure import Workload

ROWS = (0, 64, 512, 2_000, 6_000, 12_000, 20_000, 40_000, 80_000)
"""Rows of keys and values that the busiest rank sends to, or receives from, all others together."""


def link_components(work: Workload, device: torch.device, size: int, group: Any) -> list[Component]:
    """What the ``size`` ranks of ``group`` tell together; all measure the same cases in order.

    A fit of former samples needs no group.
    """
    links = _Links(work, device, size, group)
    return [
        Component(
            f"exchange_cp{size}",
            links.exchanges,
            [("latency", "bytes")],
            partial(_exchange_fields, size),
        ),
        Component(
            f"contention_cp{size}",
            links.contention,
            [("bytes",), ("latency", "bytes")],
            _contention_fields,
        ),
    ]


class _Links:
    def __init__(self, work: Workload, device: torch.device, size: int, group: Any) -> None:
        self.work, self.device, self.size, self.group = work, device, size, group
        self.rank = 0 if group is None else dist.get_rank(group)

    def exchanges(self) -> Iterator[Case]:
        for pattern in ("all", "to 0", "from 0"):
            for per_peer in self._sizes(ROWS):
                yield Case(
                    f"{per_peer} rows a peer, {pattern}",
                    self._features(per_peer),
                    partial(self._alone, per_peer, pattern),
                )

    def contention(self) -> Iterator[Case]:
        for per_peer in self._sizes(ROWS[3:]):
            yield Case(
                f"{per_peer} rows a peer beside compute",
                self._features(per_peer),
                partial(self._beside, per_peer),
            )

    def _sizes(self, rows: Sequence[int]) -> list[int]:
        return [-(-n // (self.work.scale * (self.size - 1))) for n in rows]

    def _features(self, per_peer: int) -> dict[str, float]:
        busiest = per_peer * (self.size - 1) * self.work.kv_bytes
        return {"latency": 1.0, "bytes": float(busiest)}

    def _counts(self, per_peer: int, pattern: str) -> tuple[list[int], list[int]]:
        """Rows that this rank sends to and receives from every rank."""
        every = range(self.size)
        counts = [
            [
                per_peer
                if a != b and (pattern == "all" or (b if pattern == "to 0" else a) == 0)
                else 0
                for b in every
            ]
            for a in every
        ]
        return counts[self.rank], [row[self.rank] for row in counts]

    def _rows(self, rows: int) -> torch.Tensor:
        width = 2 * self.work.kv_heads * self.work.head_dim
        return torch.zeros(rows, width, device=self.device, dtype=self.work.dtype)

    def _alone(self, per_peer: int, pattern: str) -> Call:
        send, received = self._counts(per_peer, pattern)
        source, target = self._rows(sum(send)), self._rows(sum(received))
        return lambda: dist.all_to_all_single(target, source, received, send, group=self.group)

    def _beside(self, per_peer: int) -> tuple[Call, Call]:
        """Matrix products that hide an exchange, and the same products alone."""
        send, received = self._counts(per_peer, "all")
        whole = [frozen_array([n]) for n in (0, sum(send), 0, sum(received))]
        plan = RankExchange(whole[0], whole[1], tuple(send), tuple(received), whole[2], whole[3])
        exchange = RangeExchange(plan, self.group, self.device, exchange_stream(self.device))
        source = self._rows(sum(send))
        size = 4096 if self.device.type == "cuda" else 64
        x = torch.randn(size, size, device=self.device).to(self.work.dtype)

        def compute() -> None:
            for _ in range(16):
                x @ x

        def both() -> None:
            pending = exchange.start(source)
            compute()
            pending.wait()

        return both, compute


def _exchange_fields(
    size: int, c: Mapping[str, float], _: float | None, known: Mapping[str, Any]
) -> dict[str, Any]:
    rate = 1 / needed_cost(c, "bytes", f"exchange_cp{size}")
    sizes = [list(entry) for entry in known.get("exchange_sizes", ())]
    return {
        "exchange_latency_ms": c["latency"],
        "exchange_bytes_per_ms": rate,
        "exchange_sizes": [*sizes, [size, c["latency"], rate]],
    }


def _contention_fields(
    c: Mapping[str, float], _: float | None, known: Mapping[str, Any]
) -> dict[str, Any]:
    return {"exchange_contention": min(c["bytes"] * known["exchange_bytes_per_ms"], 1.0)}
