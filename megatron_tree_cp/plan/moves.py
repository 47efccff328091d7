"""Prices of unit-to-rank assignments and of single moves, many moves in one numpy call."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .cost import CostModel, WindowCost
from .memory import CrossingRows
from .simulate import StageLoads, link_masks
from .unit_chains import ChainState, UnitChains
from .units import UnitWork
from .values import Array

MEAN_WEIGHT = 0.02
"""Weight of the mean rank in the score: moves that shorten waits elsewhere break ties."""


class Option(NamedTuple):
    """How one window's layers run: which directions are fused, and the number of waves."""

    forward_fused: bool
    backward_fused: bool
    waves: int


@dataclass(frozen=True, eq=False)
class WindowState:
    """Aggregates of one window's work under an assignment (see the fields' comments)."""

    work: UnitWork
    fetched: Array  # [cp, cp]: keys that a rank's queries see of another, zero of itself
    need: Array  # [cp, U]: keys of a unit that the rank's queries see
    total: Array  # [cp]: pairs of a rank's queries
    local: Array  # [cp]: those of them with its own keys
    seen: Array  # [U, cp]: key units of a rank that a query unit sees
    reached: Array  # [cp]: share of the rank's queries that see a remote key
    sent: Array  # [L, cp]: rows of ``fetched`` that leave a rank, per link class
    received: Array  # [L, cp]: rows of it that arrive
    hidden: Array  # [cp]: hidden pairs of its own keys' tiles


class Assignment:
    """An owner per unit, with everything needed to price moves away from one rank."""

    def __init__(
        self,
        owner: Array,
        sizes: Array,
        works: list[UnitWork],
        costs: CostModel,
        cp_size: int,
        chains: UnitChains | None = None,
    ) -> None:
        self.owner, self.sizes = owner, sizes
        self.costs, self.cp_size = costs, cp_size
        self.links = link_masks(cp_size, costs.profile)
        self.tokens = self._sum(sizes)
        self.states = [self._state(work) for work in works]
        self.chains = None if chains is None else ChainState(chains, owner, cp_size)

    def _sum(self, values: Array) -> Array:
        """float64[cp]: sums of ``values`` [U] over the units of each rank."""
        return np.bincount(self.owner, weights=values, minlength=self.cp_size)

    def _sums(self, rows: Array) -> Array:
        """float64[n, cp]: sums of ``rows`` [n, U] over the units of each rank.

        Not a matrix product: small ones on many ranks would wake the threads of a BLAS.
        """
        order = np.argsort(self.owner, kind="stable")
        first = np.searchsorted(self.owner[order], np.arange(self.cp_size))
        some = np.append(first[1:], len(order)) > first
        result = np.zeros((len(rows), self.cp_size))
        result[:, some] = np.add.reduceat(rows.take(order, 1), first[some], 1)
        return result

    def _state(self, work: UnitWork) -> WindowState:
        size, entries = self.cp_size, work.entries
        reader, source = self.owner[entries.query], self.owner[entries.key]
        need = np.zeros((size, len(self.owner)))
        np.maximum.at(need, (reader, entries.key), entries.keys)
        fetched = self._sums(need)
        fetched[np.diag_indices(size)] = 0
        same = reader == source
        local = np.bincount(reader[same], weights=entries.pairs[same], minlength=size)
        sees = entries.keys > 0
        seen = np.bincount((entries.query * size + source)[sees], minlength=len(need[0]) * size)
        return self._finish(
            work,
            fetched=fetched,
            need=need,
            total=self._sum(work.queries),
            local=local,
            seen=seen.reshape(-1, size),
        )

    def _finish(
        self, work: UnitWork, fetched: Array, need: Array, total: Array, local: Array, seen: Array
    ) -> WindowState:
        units = np.arange(len(self.owner))
        touched = (seen.sum(1) > seen[units, self.owner]) * self.sizes
        traffic = self.links * fetched  # [L, destination, source]
        return WindowState(
            work,
            fetched=fetched,
            need=need,
            total=total,
            local=local,
            seen=seen,
            reached=self._sum(touched) / np.maximum(self.tokens, 1),
            sent=traffic.sum(1),
            received=traffic.sum(2),
            hidden=np.zeros(self.cp_size) if work.hidden is None else self._sum(work.hidden),
        )

    def moved(self, unit: int, to: int) -> Assignment:
        """This assignment with ``unit`` on rank ``to``: only what changes is computed."""
        rank = int(self.owner[unit])
        other = copy(self)
        other.owner = self.owner.copy()
        other.owner[unit] = to
        other.tokens = self.tokens.copy()
        other.tokens[rank] -= self.sizes[unit]
        other.tokens[to] += self.sizes[unit]
        other.states = [other._state_after(state, unit, rank, to) for state in self.states]
        if self.chains is not None:
            other.chains = self.chains.moved(unit, to, other.owner)
        return other

    def _state_after(self, state: WindowState, unit: int, rank: int, to: int) -> WindowState:
        work, both = state.work, [rank, to]
        need, seen = state.need.copy(), state.seen.copy()
        total, local = state.total.copy(), state.local.copy()
        need[rank] = work.keys[self.owner == rank].max(0, initial=0)
        need[to] = np.maximum(need[to], work.keys[unit])
        sees = work.keys[:, unit] > 0
        seen[:, rank] -= sees
        seen[:, to] += sees
        fetched = state.fetched.copy()
        fetched[:, rank] -= need[:, unit]
        fetched[:, to] += need[:, unit]
        fetched[both] = self._sums(need[both])
        fetched[both, both] = 0
        total[rank] -= work.queries[unit]
        total[to] += work.queries[unit]
        # Pairs of the unit, as query and as key, with each rank's other units.
        shared = self._sum(work.pairs[unit] + work.pairs[:, unit])
        inner = work.pairs[unit, unit]
        local[rank] -= shared[rank] + inner
        local[to] += shared[to] - inner
        return self._finish(work, fetched, need, total, local, seen)

    def price(self, options: list[Option]) -> tuple[float, list[WindowCost]]:
        """(score, cost per window) of this assignment with ``options`` per window."""
        parts = []
        for window, state, option in zip(self.costs.windows, self.states, options):
            loads = _loads(
                self.tokens,
                state.local,
                state.total,
                state.sent,
                state.received,
                state.reached,
                state.hidden,
                option,
            )
            parts.append(self.costs.window_ms(window, loads, *option[:2]))
        if self.chains is not None:
            parts.append(self.chains.cost(self.tokens, self.costs))
        received = [state.received.sum(-2) for state in self.states]
        return float(_score(self.costs, self.tokens, parts, received)), parts

    def price_moves(self, rank: int, unit: Array, to: Array, options: list[Option]) -> Array:
        """float64[B]: scores after moving ``unit[i]`` from ``rank`` to ``to[i]``."""
        batch = np.arange(len(unit))
        tokens = np.tile(self.tokens, (len(unit), 1))
        tokens[:, rank] -= self.sizes[unit]
        tokens[batch, to] += self.sizes[unit]
        parts, arriving = [], []
        distinct, which = np.unique(unit, return_inverse=True)
        for window, state, option in zip(self.costs.windows, self.states, options):
            work = state.work
            total = np.tile(state.total, (len(unit), 1))
            total[:, rank] -= work.queries[unit]
            total[batch, to] += work.queries[unit]
            local = np.tile(state.local, (len(unit), 1))
            shared = self._sums(work.pairs[distinct] + work.pairs[:, distinct].T)[which]
            inner = work.pairs[unit, unit]
            local[:, rank] -= shared[:, rank] - inner
            local[batch, to] += shared[batch, to] + inner
            hidden = state.hidden
            if work.hidden is not None:
                hidden = np.tile(hidden, (len(unit), 1))
                hidden[:, rank] -= work.hidden[unit]
                hidden[batch, to] += work.hidden[unit]
            sent, received = self._traffic_after(state, rank, unit, to)
            arriving.append(received.sum(-2))
            loads = _loads(tokens, local, total, sent, received, state.reached, hidden, option)
            parts.append(self.costs.window_ms(window, loads, *option[:2]))
        if self.chains is not None:
            parts.append(self.chains.cost_after(rank, unit, to, tokens, self.costs))
        return np.asarray(_score(self.costs, tokens, parts, arriving))

    def _traffic_after(
        self, state: WindowState, rank: int, unit: Array, to: Array
    ) -> tuple[Array, Array]:
        """(sent, received) [B, L, cp] after each move: two rows and two columns of ``fetched``
        change, so only their differences are summed."""
        keys, need, links = state.work.keys, state.need, self.links
        batch = np.arange(len(unit))
        # Needs of the losing rank without the unit: the largest, or the second largest where the
        # unit itself held the maximum.
        mine = np.flatnonzero(self.owner == rank)
        rows = keys[mine]
        top = rows.argmax(0)
        rest = rows.copy()
        rest[top, np.arange(keys.shape[1])] = 0
        distinct, which = np.unique(unit, return_inverse=True)
        less = np.where(mine[top] == distinct[:, None], rest.max(0), need[rank])
        more = np.maximum(need[to], keys[unit])

        left = self._sums(less)[which]
        left[:, rank] = 0
        left[batch, to] += less[which, unit]
        gained = self._sums(more)
        gained[:, rank] -= more[batch, unit]
        gained[batch, to] = 0
        # What the other ranks need of the unit comes from another rank now.
        others = need[:, unit].T.copy()
        others[:, rank] = 0
        others[batch, to] = 0
        outward, inward = links[:, :, rank], links[:, :, to].transpose(2, 0, 1)  # [L,cp], [B,L,cp]
        sent = state.sent + (left - state.fetched[rank])[:, None] * links[:, rank]
        sent += (gained - state.fetched[to])[:, None] * links[:, to].transpose(1, 0, 2)
        sent[:, :, rank] -= others @ outward.T
        sent[batch, :, to] += (others[:, None] * inward).sum(-1)
        received = state.received + others[:, None] * (inward - outward)
        received[:, :, rank] = left @ links[:, rank].T
        received[batch, :, to] = (gained[:, None] * links[:, to].transpose(1, 0, 2)).sum(-1)
        return sent, received


def price_seeds(
    seeds: list[Assignment], choices: list[Option]
) -> tuple[list[float], list[float], list[list[Option]]]:
    """(score, total ms, cheapest of ``choices`` per window) of each of ``seeds``."""
    costs = seeds[0].costs
    tokens = np.stack([seed.tokens for seed in seeds])
    options: list[list[Option]] = [[] for _ in seeds]
    parts, received = [], []
    for i, window in enumerate(costs.windows):
        states = [seed.states[i] for seed in seeds]
        names = ("local", "total", "sent", "received", "reached", "hidden")
        stacked = {name: np.stack([getattr(state, name) for state in states]) for name in names}
        received.append(stacked["received"].sum(-2))
        priced = _price_options(costs, window, tokens, stacked, choices)
        best = np.argmin(np.stack([cost.total for cost in priced]), 0)
        for chosen, option in zip(best, options):
            option.append(choices[chosen])
        rank_ms = [
            np.stack([getattr(priced[b], side)[n] for n, b in enumerate(best)])
            for side in vars(priced[0])
        ]
        parts.append(WindowCost(*rank_ms))
    chains = [seed.chains.cost(seed.tokens, costs) for seed in seeds if seed.chains is not None]
    if chains:
        parts.append(
            WindowCost(*(np.stack([getattr(c, side) for c in chains]) for side in vars(chains[0])))
        )
    total = costs.other_ms(tokens).total + sum(part.total for part in parts)
    return list(_score(costs, tokens, parts, received)), list(total), options


def _price_options(
    costs: CostModel,
    window: int | None,
    tokens: Array,
    states: dict[str, Array],
    choices: list[Option],
) -> list[WindowCost]:
    """Prices of all ``choices``, of which forward and backward are simulated once a kind."""
    alike: dict[tuple[bool, int], WindowCost] = {}
    for fused, waves in dict.fromkeys(
        (fused, c.waves) for c in choices for fused in (c.forward_fused, c.backward_fused)
    ):
        option = Option(fused, fused, waves)
        loads = _loads(tokens, option=option, **states)
        alike[fused, waves] = costs.window_ms(window, loads, fused, fused)
    return [
        alike[c.forward_fused, c.waves].with_backward(alike[c.backward_fused, c.waves])
        for c in choices
    ]


def _score(
    costs: CostModel, tokens: Array, parts: list[WindowCost], received: list[Array]
) -> Array:
    other = costs.other_ms(tokens)
    total = other.total + sum(part.total for part in parts)
    ranks = other.forward + other.backward + sum(p.forward + p.backward for p in parts)
    score = total + MEAN_WEIGHT * ranks.mean(-1)
    limit = costs.profile.memory_limit_bytes
    if limit is not None:
        crossing = [CrossingRows.one_wave(rows) for rows in received]
        peak = costs.peak_bytes(tokens, crossing).max(-1)
        score = score * (1 + 100 * np.maximum(peak / limit - 1, 0))
    return np.asarray(score)


def _loads(
    tokens: Array,
    local: Array,
    total: Array,
    sent: Array,
    received: Array,
    reached: Array,
    hidden: Array,
    option: Option,
) -> StageLoads:
    """Loads with the remote work spread evenly over the option's waves.

    Hidden pairs are spread over the stages as the visible ones are.
    """
    waves = option.waves
    remote = np.maximum(total - local, 0)[..., None, :] / waves
    share = hidden / np.maximum(total, 1)
    return StageLoads(
        queries=tokens,
        local_pairs=local,
        pairs=np.repeat(remote, waves, -2),
        reached=np.repeat((tokens * reached)[..., None, :], waves, -2),
        sent=sent[..., None, :, :] / waves,
        received=received[..., None, :, :] / waves,
        local_hidden=local * share,
        hidden=np.repeat(remote * share[..., None, :], waves, -2),
    )
