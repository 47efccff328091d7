"""Recurrent layers on units: longest chains and crossings of an assignment, and of its moves.

A unit continues the units that hold its segments' parents. A rank's states wait for the longest
path through its units, and a rank whose unit continues another rank's waits for an exchange and
walks its chain twice. These are estimates (a unit counts with its longest inner path); schedules
are priced run by run (`cost_gdn`).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from ..tree.packed_tree import PackedTree
from .cost import CostModel, WindowCost
from .recurrence import CHUNK, RecurrencePlan, climb
from .units import UnitGrid
from .values import Array, frozen_array


@dataclass(frozen=True, eq=False)
class UnitChains:
    """How units continue each other.

    ``edges`` int64[E, 3]: (unit, unit that continues it, runs that do); ``above`` int64[U]: the
    unit before each on its longest path, -1 at roots; ``runs`` and ``blocks`` float64[U]: all its
    runs and their chunks; ``chunks`` float64[U]: those of its longest inner path; ``paths``
    float64[leaves, U]: the same on the path to each unit that no other continues, 0 off it.
    """

    edges: Array
    above: Array
    blocks: Array
    runs: Array
    chunks: Array
    paths: Array

    @classmethod
    def of(cls, tree: PackedTree, cuts: Array) -> UnitChains:
        """The chains of the units between ``cuts``."""
        grid = UnitGrid(frozen_array(cuts))
        # Only runs and their parents are asked for, and a grid of units knows its runs.
        plan = RecurrencePlan(tree, grid)  # type: ignore[arg-type]
        runs, parent, size = plan.runs, plan.parent, grid.cp_size
        unit = runs.owner.astype(np.int64)
        within = (parent >= 0) & (unit[parent] == unit)
        head, _ = climb(np.where(within, parent, -1))
        tokens = runs.position + runs.length - runs.position[head]
        chunks = np.zeros(size)
        np.maximum.at(chunks, unit, np.ceil(tokens / CHUNK))
        crossing = np.flatnonzero((parent >= 0) & ~within)
        flat, counts = np.unique(unit[parent[crossing]] * size + unit[crossing], return_counts=True)
        edges = np.stack([flat // size, flat % size, counts], axis=1)
        # Of several units before one, the nearest: parents stand before children in a row.
        above = np.full(size, -1)
        np.maximum.at(above, edges[:, 1], edges[:, 0])
        return cls(
            frozen_array(edges),
            frozen_array(above),
            np.bincount(unit, weights=-(-runs.length // CHUNK), minlength=size),
            np.bincount(unit, minlength=size).astype(np.float64),
            frozen_array(chunks, np.float64),
            frozen_array(_paths(above, chunks), np.float64),
        )


def unit_chains(tree: PackedTree, cuts: Array, costs: CostModel) -> UnitChains | None:
    """The chains of the units between ``cuts``; None for a model without recurrent layers."""
    return UnitChains.of(tree, cuts) if costs.recurrent_rates else None


def _paths(above: Array, chunks: Array) -> Array:
    size = len(chunks)
    inner = np.zeros(size, dtype=bool)
    inner[above[above >= 0]] = True
    paths = np.zeros((size, size))
    for unit, before in enumerate(above.tolist()):
        if before >= 0:
            paths[unit] = paths[before]
        paths[unit, unit] = chunks[unit]
    return paths[~inner]


@dataclass(frozen=True, eq=False)
class ChainLoads:
    """What recurrent layers wait for on each rank: chunks unless said otherwise.

    float64[.., cp]: ``blocks`` of all its ``runs``; ``longest`` path through its units;
    ``incoming`` runs that continue another rank's. float64[cp], around exchanges: of the paths that
    other ranks continue, the longest that starts at a root (``ready``) and at a run of another rank
    (``open``, walked once more as a summary); ``late``: the longest path below another rank;
    ``sent``: states that the busiest rank receives.
    """

    blocks: Array
    runs: Array
    longest: Array
    incoming: Array
    ready: Array
    open: Array
    late: Array
    sent: float


class ChainState:
    """The chains of an assignment, and of its moves.

    A move updates sums, ``longest`` and ``incoming``; the paths around exchanges keep their
    lengths.
    """

    def __init__(self, chains: UnitChains, owner: Array, cp_size: int) -> None:
        self.chains, self.owner, self.cp_size = chains, owner, cp_size
        before, after, count = chains.edges.T
        shape = (len(owner), cp_size)
        self.parents, self.children = np.zeros(shape), np.zeros(shape)
        np.add.at(self.parents, (after, owner[before]), count)
        np.add.at(self.children, (before, owner[after]), count)
        self.on_path = self._on_path()
        self.loads = self._loads()

    def moved(self, unit: int, to: int, owner: Array) -> ChainState:
        """The chains with ``unit`` on rank ``to``, as in ``owner``: only what changes is summed."""
        other, rank = copy(self), self.owner[unit]
        other.owner = owner
        other.parents, other.children = self.parents.copy(), self.children.copy()
        other.on_path = self.on_path.copy()
        before, after, count = self.chains.edges.T
        for sums, ends, others in (
            (other.parents, before, after),
            (other.children, after, before),
        ):
            mine = ends == unit
            sums[others[mine], rank] -= count[mine]
            sums[others[mine], to] += count[mine]
        other.on_path[:, rank] -= self.chains.paths[:, unit]
        other.on_path[:, to] += self.chains.paths[:, unit]
        other.loads = other._loads()
        return other

    def _on_path(self) -> Array:
        """float64[leaves, cp]: chunks of each path on each rank."""
        order = np.argsort(self.owner, kind="stable")
        first = np.searchsorted(self.owner[order], np.arange(self.cp_size))
        some = np.append(first[1:], len(order)) > first
        result = np.zeros((len(self.chains.paths), self.cp_size))
        result[:, some] = np.add.reduceat(self.chains.paths.take(order, 1), first[some], 1)
        return result

    def _loads(self) -> ChainLoads:
        owner, above = self.owner, self.chains.above
        before, after, count = self.chains.edges.T
        crossing = owner[before] != owner[after]
        before, after, count = before[crossing], after[crossing], count[crossing]
        foreign = np.zeros(len(owner), dtype=bool)
        foreign[after] = True
        own = (above >= 0) & (owner[above] == owner)
        head, length = _sums_to_heads(np.where(own, above, -1), self.chains.chunks)
        below = foreign[head]
        incoming, ready, open_, late = np.zeros((4, self.cp_size))
        np.add.at(incoming, owner[after], count)
        sends = before[~below[before]]
        np.maximum.at(ready, owner[sends], length[sends])
        sends = before[below[before]]
        np.maximum.at(open_, owner[sends], length[sends])
        np.maximum.at(late, owner[below], length[below])
        blocks, runs = (
            np.bincount(owner, weights=values, minlength=self.cp_size)
            for values in (self.chains.blocks, self.chains.runs)
        )
        return ChainLoads(
            blocks, runs, self.on_path.max(0), incoming, ready, open_, late, incoming.max()
        )

    @property
    def crosses(self) -> bool:
        """Whether any path crosses ranks."""
        return bool(self.loads.incoming.any())

    def cost(self, tokens: Array, costs: CostModel) -> WindowCost:
        """Price of the recurrent layers; ``tokens`` float64[cp]."""
        return chains_ms(tokens, self.loads, costs)

    def cost_after(
        self, rank: int, unit: Array, to: Array, tokens: Array, costs: CostModel
    ) -> WindowCost:
        """The same [B, cp] after moving ``unit[i]`` from ``rank`` to ``to[i]``, each alone."""
        return chains_ms(tokens, self.loads_after(rank, unit, to), costs)

    def loads_after(self, rank: int, unit: Array, to: Array) -> ChainLoads:
        """Loads [B, cp] after each move."""
        batch, loads = np.arange(len(unit)), self.loads
        longest = np.tile(loads.longest, (len(unit), 1))
        blocks, runs = (np.tile(sums, (len(unit), 1)) for sums in (loads.blocks, loads.runs))
        for sums, values in ((blocks, self.chains.blocks), (runs, self.chains.runs)):
            sums[:, rank] -= values[unit]
            sums[batch, to] += values[unit]
        moved = self.chains.paths[:, unit].T
        longest[:, rank] = (self.on_path[:, rank] - moved).max(1)
        longest[batch, to] = (self.on_path[:, to].T + moved).max(1)
        parents, children = self.parents[unit], self.children[unit]
        every = parents.sum(1)
        incoming = np.tile(loads.incoming, (len(unit), 1))
        incoming[:, rank] += children[:, rank] - (every - parents[:, rank])
        incoming[batch, to] += every - parents[batch, to] - children[batch, to]
        return replace(loads, blocks=blocks, runs=runs, longest=longest, incoming=incoming)


def _sums_to_heads(parent: Array, weights: Array) -> tuple[Array, Array]:
    """Topmost ancestor of each node, and the sum of ``weights`` from there down to it."""
    total, link = weights.copy(), parent.copy()
    head = np.where(parent < 0, np.arange(len(parent)), parent)
    while len(some := np.flatnonzero(link >= 0)):
        up = link[some]
        total[some] = total[some] + total[up]
        head[some] = head[up]
        link[some] = link[up]
    return head, total


def chains_ms(tokens: Array, loads: ChainLoads, costs: CostModel) -> WindowCost:
    """Estimated price of all recurrent layers for ``tokens`` [.., cp]."""
    profile = costs.profile
    ahead, back = costs.token_ms(tokens)
    forward, backward = np.zeros_like(ahead), np.zeros_like(ahead)
    forward_total = backward_total = np.zeros(ahead.shape[:-1])
    latency, rate = profile.exchange_rates(tokens.shape[-1])
    crosses = loads.incoming.any(-1, keepdims=True)
    # Levels around an exchange, its composition, and the halo's exchange.
    extra = 3 * profile.gdn_level_ms + profile.gdn_compose_ms + latency
    for layers, rates in costs.recurrent_rates:
        states, gradients = rates.states, rates.gradients
        walk, walk_back = (
            part.ms(loads.longest, loads.blocks, loads.runs) for part in (states, gradients)
        )
        moved = latency + loads.sent * rates.state_bytes / rate
        # Every rank waits for the slowest path before the exchange, there and back.
        summarised = rates.summaries.step * loads.open
        first = max(states.step * loads.ready.max(), summarised.max())
        there = first + moved + states.step * loads.late + extra
        returned = np.maximum(loads.ready, loads.open)
        back_again = moved + gradients.step * (loads.late.max() + returned) + extra
        padding = loads.blocks * CHUNK - tokens
        one = profile.gdn_layer_ms + ahead + tokens * rates.token_pass_ms(backward=False)
        one = one + padding * rates.padding_ms
        one = one + np.where(crosses, np.maximum(walk + (summarised + extra), there), walk)
        two = profile.gdn_layer_ms + back + tokens * rates.token_pass_ms(backward=True)
        two = two + padding * rates.padding_back_ms
        two = two + walk
        two = two + np.where(crosses, np.maximum(walk_back + extra, back_again), walk_back)
        forward = forward + layers * one
        backward = backward + layers * two
        forward_total = forward_total + layers * one.max(-1)
        backward_total = backward_total + layers * two.max(-1)
    return WindowCost(forward, backward, forward_total, backward_total)
