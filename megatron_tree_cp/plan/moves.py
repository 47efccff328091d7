"""Prices of unit-to-rank assignments and of single moves, many moves in one numpy call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .cost import CostModel, WindowCost
from .simulate import StageLoads
from .units import UnitWork
from .values import Array

Option = tuple[bool, int]
"""(fused, number of waves)."""

MEAN_WEIGHT = 0.02
"""Weight of the mean rank in the score: moves that shorten waits elsewhere break ties."""


@dataclass(frozen=True, eq=False)
class WindowState:
    """Aggregates of one window's work under an assignment (see the fields' comments)."""

    work: UnitWork
    to_rank: Array  # [U, cp]: pairs of query unit with keys of a rank
    from_rank: Array  # [cp, U]: pairs of a rank's queries with a key unit
    need: Array  # [cp, U]: keys of a unit that the rank's queries see
    fetched: Array  # [cp, cp]: keys that a rank's queries see of another, zero of itself
    total: Array  # [cp]: pairs of a rank's queries
    local: Array  # [cp]: those of them with its own keys
    reached: Array  # [cp]: share of the rank's queries that see a remote key


class Assignment:
    """An owner per unit, with everything needed to price moves away from one rank."""

    def __init__(
        self, owner: Array, sizes: Array, works: list[UnitWork], costs: CostModel, cp_size: int
    ) -> None:
        self.owner, self.sizes, self.works = owner, sizes, works
        self.costs, self.cp_size = costs, cp_size
        self.member = (owner[:, None] == np.arange(cp_size)).astype(np.float64)
        self.tokens = sizes @ self.member

    @cached_property
    def states(self) -> list[WindowState]:
        """Per window, the aggregates of this assignment."""
        return [self._state(work) for work in self.works]

    def _state(self, work: UnitWork) -> WindowState:
        to_rank = self._by_rank(np.add, work.pairs, 1)
        need = self._by_rank(np.maximum, work.keys, 0)
        fetched = self._by_rank(np.add, need, 1)
        fetched[np.diag_indices(self.cp_size)] = 0
        foreign = self.owner[:, None] != self.owner
        touched = (work.keys * foreign).any(1) * self.sizes
        return WindowState(
            work=work,
            to_rank=to_rank,
            from_rank=self._by_rank(np.add, work.pairs, 0),
            need=need,
            fetched=fetched,
            total=work.pairs.sum(1) @ self.member,
            local=(self.member * to_rank).sum(0),
            reached=(touched @ self.member) / np.maximum(self.tokens, 1),
        )

    def _by_rank(self, combine: np.ufunc, matrix: Array, axis: int) -> Array:
        """``matrix`` with its units along ``axis`` combined per rank, zero for empty ranks."""
        order = np.argsort(self.owner, kind="stable")
        ranks, first = np.unique(self.owner[order], return_index=True)
        parts = combine.reduceat(matrix.take(order, axis), first, axis)
        shape = list(matrix.shape)
        shape[axis] = self.cp_size
        result = np.zeros(shape)
        result[(slice(None),) * axis + (ranks,)] = parts
        return result

    def price(self, options: list[Option]) -> tuple[float, list[WindowCost]]:
        """(score, cost per window) of this assignment with ``options`` per window."""
        parts = []
        for window, state, option in zip(self.costs.windows, self.states, options):
            loads = _loads(
                self.tokens, state.local, state.total, state.fetched, state.reached, option
            )
            parts.append(self.costs.window_ms(window, loads, option[0]))
        received = [state.fetched.sum(-1) for state in self.states]
        return float(self._score(self.tokens, parts, received)), parts

    def best_options(self, choices: list[Option]) -> list[Option]:
        """Per window, the cheapest of ``choices`` for this assignment."""
        result = []
        for i in range(len(self.works)):
            prices = []
            for option in choices:
                options = [choices[0]] * len(self.works)
                options[i] = option
                prices.append(float(self.price(options)[1][i].total))
            result.append(choices[int(np.argmin(prices))])
        return result

    def price_moves(self, rank: int, unit: Array, to: Array, options: list[Option]) -> Array:
        """float64[B]: scores after moving ``unit[i]`` from ``rank`` to ``to[i]``."""
        batch = np.arange(len(unit))
        tokens = np.tile(self.tokens, (len(unit), 1))
        tokens[:, rank] -= self.sizes[unit]
        tokens[batch, to] += self.sizes[unit]
        parts, received = [], []
        mine = np.flatnonzero(self.owner == rank)
        for window, state, option in zip(self.costs.windows, self.states, options):
            work = state.work
            total = np.tile(state.total, (len(unit), 1))
            moved = work.pairs.sum(1)[unit]
            total[:, rank] -= moved
            total[batch, to] += moved
            local = np.tile(state.local, (len(unit), 1))
            inner = work.pairs[unit, unit]
            local[:, rank] -= state.to_rank[unit, rank] + state.from_rank[rank, unit] - inner
            local[batch, to] += state.to_rank[unit, to] + state.from_rank[to, unit] + inner
            fetched = self._fetched_after(state, rank, mine, unit, to)
            received.append(fetched.sum(-1))
            loads = _loads(tokens, local, total, fetched, state.reached, option)
            parts.append(self.costs.window_ms(window, loads, option[0]))
        return self._score(tokens, parts, received)

    def _fetched_after(
        self, state: WindowState, rank: int, mine: Array, unit: Array, to: Array
    ) -> Array:
        keys, need = state.work.keys, state.need
        batch = np.arange(len(unit))
        # Needs of the losing rank without the unit: the largest, or the second largest where the
        # unit itself held the maximum.
        rows = keys[mine]
        top = rows.argmax(0)
        rest = rows.copy()
        rest[top, np.arange(keys.shape[1])] = 0
        second = rest.max(0)
        less = np.where(mine[top] == unit[:, None], second, need[rank])
        more = np.maximum(need[to], keys[unit])
        fetched = np.tile(state.fetched, (len(unit), 1, 1))
        fetched[batch, rank] = less @ self.member
        fetched[batch, to] = more @ self.member
        of_unit = need[:, unit].T.copy()
        of_unit[batch, rank] = less[batch, unit]
        of_unit[batch, to] = more[batch, unit]
        fetched[:, :, rank] -= of_unit
        fetched[batch, :, to] += of_unit
        fetched[:, rank, rank] = 0
        fetched[batch, to, to] = 0
        return fetched

    def _score(self, tokens: Array, parts: list[WindowCost], received: list[Array]) -> Array:
        other = self.costs.other_ms(tokens)
        total = other.total + sum(part.total for part in parts)
        ranks = other.forward + other.backward + sum(p.forward + p.backward for p in parts)
        score = total + MEAN_WEIGHT * ranks.mean(-1)
        limit = self.costs.profile.memory_limit_bytes
        if limit is not None:
            peak = self.costs.peak_bytes(tokens, received).max(-1)
            score = score * (1 + 100 * np.maximum(peak / limit - 1, 0))
        return score


def _loads(
    tokens: Array, local: Array, total: Array, fetched: Array, reached: Array, option: Option
) -> StageLoads:
    """Loads with the remote work spread evenly over the option's waves."""
    waves = option[1]
    remote = np.maximum(total - local, 0)[..., None, :] / waves
    return StageLoads(
        queries=tokens,
        local_pairs=local,
        pairs=np.repeat(remote, waves, -2),
        reached=np.repeat((tokens * reached)[..., None, :], waves, -2),
        counts=np.swapaxes(fetched, -1, -2)[..., None, :, :] / waves,
    )
