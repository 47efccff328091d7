"""Remote keys: which rank needs which keys of whom, and how they are split into waves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .exchange import ExchangePlan
from .runs import RunTable
from .values import Array, ArrayValue, frozen_array

TILE = 128
"""Cuts between waves fall on multiples of a kernel's key tile where there is enough work."""


@dataclass(frozen=True, eq=False)
class RemoteKeys(ArrayValue):
    """Key ranges that ranks need from others; in a plan sorted by (destination, source, row index).

    int64[n]: ``destination`` rank, ``run`` (index into the run table), ``start`` row index and
    ``length`` of the part of the run that is needed.
    """

    destination: Array
    run: Array
    start: Array
    length: Array

    def __post_init__(self) -> None:
        for name in ("destination", "run", "start", "length"):
            object.__setattr__(self, name, frozen_array(getattr(self, name)))

    def __len__(self) -> int:
        return len(self.run)

    def take(self, index: Array) -> RemoteKeys:
        """The entries at ``index`` (integers or booleans)."""
        return RemoteKeys(
            self.destination[index], self.run[index], self.start[index], self.length[index]
        )

    def counts(self, runs: RunTable) -> Array:
        """float64[cp, cp]: keys that go from source (first axis) to destination."""
        size = runs.cp_size
        flat = runs.owner[self.run].astype(np.int64) * size + self.destination
        return np.bincount(flat, weights=self.length, minlength=size * size).reshape(size, size)

    def exchange(self, runs: RunTable) -> ExchangePlan:
        """The all-to-all that brings these keys to their destinations."""
        return ExchangePlan.from_pieces(
            runs.cp_size,
            source=runs.owner[self.run],
            destination=self.destination,
            source_start=runs.local_start[self.run] + self.start - runs.start[self.run],
            length=self.length,
        )


def remote_keys(runs: RunTable, window: int | None) -> RemoteKeys:
    """All keys that some query of another rank sees, once per destination rank."""
    rank = np.repeat(np.arange(runs.cp_size), len(runs.split))
    keys = needed_keys(runs, window, rank, np.tile(runs.split, runs.cp_size))
    return keys.take(np.lexsort((keys.run, runs.owner[keys.run], keys.destination)))


def needed_keys(runs: RunTable, window: int | None, rank: Array, run: Array) -> RemoteKeys:
    """Those of the given (rank, run) pairs that are needed, in the given order.

    With a window only the suffix of a run is needed whose positions are above the oldest reachable
    query's position minus the window.
    """
    begin, end = runs.own_interval(rank, run)
    some = (end > begin) & (runs.owner[run] != rank)
    run, rank, begin, end = run[some], rank[some], begin[some], end[some]
    start, length = runs.start[run], runs.length[run]
    if window is not None and len(run):
        skip = runs.oldest_query(begin, end) - window + 1 - runs.position[run]
        skip = np.clip(skip, 0, length)
        kept = length > skip
        rank, run = rank[kept], run[kept]
        start, length = (start + skip)[kept], (length - skip)[kept]
    return RemoteKeys(rank, run, start, length)


def split_waves(
    keys: RemoteKeys, runs: RunTable, num_waves: int, split: Literal["tokens", "distance"]
) -> tuple[RemoteKeys, ...]:
    """Divide ``keys`` into ``num_waves`` waves, every key in exactly one.

    ``tokens``: each destination takes its keys by growing source distance (so that the ranks read
    from different peers at a time) and row index, in equal shares, cutting runs. ``distance``: wave
    w holds the sources of the w-th group of distances.
    """
    if num_waves == 1:
        return (keys,)
    distance = (runs.owner[keys.run] - keys.destination) % runs.cp_size
    if split == "distance":
        wave = (distance - 1) * num_waves // max(runs.cp_size - 1, 1)
        return tuple(keys.take(wave == w) for w in range(num_waves))
    order = np.lexsort((keys.start, distance, keys.destination))
    length = keys.length[order]
    total = np.zeros(runs.cp_size, dtype=np.int64)
    np.add.at(total, keys.destination, keys.length)
    before = np.cumsum(total) - total
    begin = np.empty_like(length)
    begin[order] = np.cumsum(length) - length
    begin -= before[keys.destination]
    step = np.where(total >= 2 * TILE * num_waves, TILE, 1)
    waves = []
    for w in range(num_waves):
        cut_lo = total * w // num_waves // step * step
        cut_hi = total * (w + 1) // num_waves // step * step if w + 1 < num_waves else total
        waves.append(_between(keys, begin, cut_lo[keys.destination], cut_hi[keys.destination]))
    return tuple(waves)


def split_waves_by_node(
    keys: RemoteKeys, runs: RunTable, num_waves: int, ranks_per_node: int
) -> tuple[RemoteKeys, ...]:
    """Divide all ``remote_keys`` so that the ranks of a node get a row in the same wave.

    A row then crosses to a node in one wave only. Every wave brings its share of every run, so that
    it has work for every rank.
    """
    if num_waves == 1:
        return (keys,)
    # What a rank needs of a run is its end, so a node needs of it what one of its ranks needs.
    node = keys.destination // ranks_per_node
    pair, of = np.unique(node * len(runs) + keys.run, return_inverse=True)
    start = np.full(len(pair), runs.tree.num_tokens)
    np.minimum.at(start, of, keys.start)
    length = runs.start[keys.run] + runs.length[keys.run] - start[of]
    step = np.where(length >= 2 * TILE * num_waves, TILE, 1)
    cuts = [np.zeros_like(length)]
    for w in range(1, num_waves):
        # Runs shorter than the number of waves take turns.
        cuts.append((length * w + of % num_waves) // num_waves // step * step)
    cuts.append(length)
    begin = keys.start - start[of]
    return tuple(_between(keys, begin, lo, hi) for lo, hi in zip(cuts, cuts[1:]))


def _between(keys: RemoteKeys, begin: Array, lo: Array, hi: Array) -> RemoteKeys:
    """The parts of ``keys`` in [lo, hi), counting from ``begin`` at each first key."""
    lo, hi = np.maximum(begin, lo), np.minimum(begin + keys.length, hi)
    part = keys.take(hi > lo)
    lo, hi, at = lo[hi > lo], hi[hi > lo], begin[hi > lo]
    return RemoteKeys(part.destination, part.run, part.start + lo - at, hi - lo)
