"""What the runs of a layout make every rank do in a recurrent layer, counted for the cost model.

`RecurrencePlan.rank` lists the same work for the executor, rank by rank; here all ranks are counted
at once, without any list, so that a search can afford it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .recurrence import RecurrencePlan
from .values import Array


@dataclass(frozen=True, eq=False)
class PassLoads:
    """Levels of one pass over states, of all ranks: each is one launch; int64[n] each.

    ``longest`` counts the chunks of a level's longest run, which wait for one another; ``chunks``
    those of all its ``runs``, which walk side by side.
    """

    rank: Array
    longest: Array
    chunks: Array
    runs: Array


@dataclass(frozen=True, eq=False)
class WalkLoads:
    """All chunks and runs of every rank; float64[cp] each."""

    chunks: Array
    runs: Array


@dataclass(frozen=True, eq=False)
class ExchangeLoads:
    """One exchange: states and transfers by [destination, source], float64[cp, cp] each.

    ``products`` float64[cp] counts the steps of each rank's composition.
    """

    states: Array
    transfers: Array
    products: Array


@dataclass(frozen=True, eq=False)
class RecurrenceLoads:
    """Work of one recurrent layer; without ``exchanges`` no rank waits for another."""

    tokens: Array
    """int64[cp]"""

    passes: Mapping[str, PassLoads]
    """By phase of `RankRecurrence`, and ``every``."""

    heads: Array
    """float64[cp, cp]: runs of a destination that continue a source's, which bring a halo."""

    forward: ExchangeLoads
    backward: ExchangeLoads

    @property
    def exchanges(self) -> bool:
        """Whether any path crosses ranks."""
        return bool(self.heads.any())

    @cached_property
    def walk(self) -> WalkLoads:
        """What a pass over everything walks."""
        every, size = self.passes["every"], len(self.tokens)
        return WalkLoads(
            *(
                np.bincount(every.rank, weights=counts, minlength=size)
                for counts in (every.chunks, every.runs)
            )
        )

    @property
    def chained(self) -> int:
        """Runs whose state comes from another rank."""
        return int(self.heads.sum())


def recurrence_loads(plan: RecurrencePlan, chunk: int) -> RecurrenceLoads:
    """Count the work of ``plan`` with blocks of ``chunk`` tokens."""
    runs, size = plan.runs, plan.layout.cp_size
    head, depth = plan.chains
    chunks = -(-runs.length // chunk)
    exporting = np.zeros(len(runs), dtype=bool)
    exporting[head[plan.exports]] = True
    rooted, open_ = plan.parent[head] < 0, exporting[head]
    phases = {
        "every": np.ones(len(runs), dtype=bool),
        "early": rooted & open_,
        "summary": ~rooted & _above(plan, head),
        "rest": rooted & ~open_,
        "late": ~rooted,
        "exact": ~rooted & ~open_,
        "partial": ~rooted & open_,
        "open": open_,
    }
    # Ranks and depths of runs as one number: levels are its distinct values.
    span = int(depth.max(initial=0)) + 1
    level = runs.owner * span + depth
    order = np.argsort(level, kind="stable")
    level, chunks = level[order], chunks[order]
    passes = {}
    for name, chosen in phases.items():
        some = chosen[order]
        passes[name] = _pass(level[some], chunks[some], span)
    above = plan.parent[plan.heads]
    return RecurrenceLoads(
        tokens=np.bincount(runs.owner, weights=runs.length, minlength=size).astype(np.int64),
        passes=passes,
        heads=_matrix(runs.owner[plan.heads], runs.owner[above], size),
        forward=_forward(plan, size),
        backward=_backward(plan, size),
    )


def _above(plan: RecurrencePlan, head: Array) -> Array:
    """bool[runs]: runs on the way from a head to an export."""
    inner = np.zeros(len(plan.runs), dtype=bool)
    step = plan.exports
    while len(step):
        inner[step] = True
        step = np.unique(plan.parent[step[step != head[step]]])
    return inner


def _pass(level: Array, chunks: Array, span: int) -> PassLoads:
    """Loads of runs in ascending order of their levels."""
    if not len(level):
        return PassLoads(level, chunks, chunks, chunks)
    first = np.flatnonzero(np.concatenate([[True], level[1:] != level[:-1]]))
    return PassLoads(
        rank=level[first] // span,
        longest=np.maximum.reduceat(chunks, first),
        chunks=np.add.reduceat(chunks, first),
        runs=np.diff(np.append(first, len(level))),
    )


def _forward(plan: RecurrencePlan, size: int) -> ExchangeLoads:
    head, export = plan.pairs
    _, up, _ = plan.above
    reader, source = plan.head_rank[head], plan.export_rank[export]
    reader, source, export = _distinct(reader, source, export)
    away = reader != source
    transfer = away & (up[export] >= 0)
    return ExchangeLoads(
        states=_matrix(reader[away], source[away], size),
        transfers=_matrix(reader[transfer], source[transfer], size),
        products=np.bincount(reader, minlength=size).astype(np.float64),
    )


def _backward(plan: RecurrencePlan, size: int) -> ExchangeLoads:
    head, export = plan.pairs
    hang, _, export_head = plan.above
    open_ = plan.open_heads[head]
    exports_of = np.bincount(export_head, minlength=len(plan.runs))[plan.heads]
    reader, source = plan.export_rank[export], plan.head_rank[head]
    # A component with exports sends a state of its own, the others of a parent send one together.
    key = np.where(open_, len(plan.exports) + head, hang[head])
    state = _distinct(reader, source, key)
    away = state[0] != state[1]
    matrices = _distinct(reader[open_], source[open_], head[open_])
    counts = exports_of[matrices[2]]
    apart = matrices[0] != matrices[1]
    own = np.bincount(plan.export_rank, minlength=size)
    below = np.bincount(matrices[0], weights=counts, minlength=size)
    return ExchangeLoads(
        states=_matrix(state[0][away], state[1][away], size),
        transfers=_matrix(matrices[0][apart], matrices[1][apart], size, counts[apart]),
        products=own + below,
    )


def _distinct(first: Array, second: Array, third: Array) -> tuple[Array, Array, Array]:
    """The distinct triples of three columns of numbers from 0."""
    inner = int(third.max(initial=0)) + 1
    middle = int(second.max(initial=0)) + 1
    flat = np.unique((first.astype(np.int64) * middle + second) * inner + third)
    return flat // (middle * inner), flat // inner % middle, flat % inner


def _matrix(row: Array, column: Array, size: int, weights: Array | None = None) -> Array:
    flat = np.bincount(row * size + column, weights=weights, minlength=size * size)
    return flat.reshape(size, size).astype(np.float64)
