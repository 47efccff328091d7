"""Search for the ownership of a row that the slowest rank finishes first.

Seeds (contiguous by compute time, whole subtrees by longest processing time, folded) are priced on
units; the best descend by moves away from the ranks that set the time, then by splitting these
ranks' units and moving again. Budgets count steps, never wall time: equal inputs give equal plans.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..tree.packed_tree import PackedTree
from .cost import CostModel
from .layout import Layout
from .moves import Assignment, Option
from .row_plan import Candidate
from .runs import Segments, join_only_children
from .schedule import MAX_WAVES, Schedule, schedule
from .units import UnitWork, unit_cuts, unit_work
from .values import Array

MAX_STEPS = 24
"""Accepted moves per descent."""

MAX_BATCH = 128
"""Moves priced per step."""

SPLIT_ROUNDS = 2
"""Times that the slowest ranks' units are split and moved again."""

MIN_GAIN = 1e-5
"""Relative gain of the score that makes a move worthwhile."""


def search_layout(
    tree: PackedTree, cp_size: int, costs: CostModel, waves: int | None, granule: int
) -> tuple[Schedule, tuple[Candidate, ...]]:
    """The best schedule found, and the total ms of what was priced on the way.

    The contiguous seed and the winner of the search are priced exactly; the result is never worse
    than the seed unless the seed does not fit the memory limit.
    """
    segments = join_only_children(tree)
    shares = contiguous_cuts(segments, tree.num_tokens, cp_size, costs)
    ranks = np.arange(cp_size)
    contiguous = Layout.from_pieces(shares, ranks, cp_size, granule)
    chosen = schedule(tree, contiguous, costs, waves)
    tried = [Candidate("contiguous", chosen.total_ms)]
    if cp_size == 1:
        return chosen, tuple(tried)
    cuts = np.union1d(unit_cuts(segments, tree.num_tokens, cp_size), shares)
    works = unit_work(tree, cuts, costs.windows)
    choices = _choices(waves)
    best: tuple[float, str, Array, list[Option]] | None = None
    for name, owner in _seeds(segments, cuts, shares, cp_size, costs):
        seed = Assignment(owner, np.diff(cuts), works, costs, cp_size)
        options = seed.best_options(choices)
        score, parts = seed.price(options)
        tried.append(Candidate(f"seed {name}, on units", _total(seed, parts)))
        if best is None or score < best[0]:
            best = (score, name, owner, options)
    assert best is not None
    _, name, owner, options = best
    cuts, owner = _descend(tree, cuts, owner, works, costs, options, cp_size)
    found = schedule(tree, Layout.from_pieces(cuts, owner, cp_size, granule), costs, waves)
    tried.append(Candidate(f"{name}, moved", found.total_ms))
    if (_excess(found, costs), found.total_ms) < (_excess(chosen, costs), chosen.total_ms):
        chosen = found
    return chosen, tuple(tried)


def _choices(waves: int | None) -> list[Option]:
    if waves is None:
        return [(True, 1)] + [(False, count) for count in range(1, MAX_WAVES + 1)]
    return [(waves == 0, max(waves, 1))]


def _total(assignment: Assignment, parts: list) -> float:
    other = assignment.costs.other_ms(assignment.tokens)
    return float(other.total) + sum(float(part.total) for part in parts)


def _excess(found: Schedule, costs: CostModel) -> float:
    limit = costs.profile.memory_limit_bytes
    if limit is None:
        return 0.0
    received = [window.loads.counts.sum((0, 1)) for window in found.windows]
    return max(float(costs.peak_bytes(found.tokens, received).max()) - limit, 0.0)


def _seeds(
    segments: Segments, cuts: Array, shares: Array, cp_size: int, costs: CostModel
) -> Iterator[tuple[str, Array]]:
    """(name, owner per unit) of every seed; ``cuts`` holds all of ``shares``."""
    yield "contiguous", np.searchsorted(shares, cuts[:-1], side="right") - 1
    middle = (cuts[:-1] + cuts[1:]) // 2
    for count in (2 * cp_size, 4 * cp_size):
        slab = middle * count // cuts[-1] % (2 * cp_size)
        yield f"folded {count}", np.minimum(slab, 2 * cp_size - 1 - slab)
    price = np.diff(row_ms(segments, cuts, costs))
    root = np.searchsorted(segments.start[segments.position == 0], cuts[:-1], side="right")
    for share in (1.0, 0.25):
        # A block is a whole family, or pieces of one that are at most a share of a rank's work.
        first = np.concatenate([[True], root[1:] != root[:-1]])
        inside = np.cumsum(price) - np.maximum.accumulate(
            np.where(first, np.cumsum(price) - price, 0)
        )
        piece = (inside / (share * price.sum() / cp_size)).astype(np.int64)
        starts = np.flatnonzero(first | np.concatenate([[True], piece[1:] != piece[:-1]]))
        weight = np.add.reduceat(price, starts)
        load = np.zeros(cp_size)
        block_owner = np.zeros(len(starts), dtype=np.int64)
        for block in np.argsort(-weight, kind="stable"):
            block_owner[block] = np.argmin(load)
            load[block_owner[block]] += weight[block]
        yield f"subtrees {share}", np.repeat(block_owner, np.diff(np.append(starts, len(price))))


def _descend(
    tree: PackedTree,
    cuts: Array,
    owner: Array,
    works: list[UnitWork],
    costs: CostModel,
    options: list[Option],
    cp_size: int,
) -> tuple[Array, Array]:
    """Moves until none helps, then splits of the slowest ranks' units and moves again."""
    for round_ in range(SPLIT_ROUNDS + 1):
        state = Assignment(owner, np.diff(cuts), works, costs, cp_size)
        for _ in range(MAX_STEPS):
            score, _ = state.price(options)
            move = None
            for rank in _slowest(state, options):
                move = _best_move(state, rank, options, score)
                if move is not None:
                    break
            if move is None:
                break
            owner = state.owner.copy()
            owner[move[0]] = move[1]
            state = Assignment(owner, state.sizes, works, costs, cp_size)
        owner = state.owner
        if round_ == SPLIT_ROUNDS:
            break
        parts = 4
        slow = np.isin(owner, _slowest(state, options)) & (np.diff(cuts) >= 2 * parts)
        begin, size = cuts[:-1][slow], np.diff(cuts)[slow]
        fresh = (begin[:, None] + size[:, None] * np.arange(1, parts) // parts).ravel()
        finer = np.union1d(cuts, fresh)
        owner = owner[np.searchsorted(cuts, finer[:-1], side="right") - 1]
        cuts = finer
        works = unit_work(tree, cuts, costs.windows)
    return cuts, owner


def _slowest(state: Assignment, options: list[Option]) -> list[int]:
    """The ranks that set the backward and the forward time."""
    parts = state.price(options)[1]
    backward = sum(part.backward for part in parts)
    forward = sum(part.forward for part in parts)
    if not parts:
        return [int(state.tokens.argmax())]
    return list(dict.fromkeys([int(np.argmax(backward)), int(np.argmax(forward))]))


def _best_move(
    state: Assignment, rank: int, options: list[Option], score: float
) -> tuple[int, int] | None:
    """The best improving (unit, rank) away from ``rank``, None when there is none."""
    units = np.flatnonzero(state.owner == rank)
    others = np.flatnonzero(np.arange(state.cp_size) != rank)
    if len(others) > 8:
        others = others[np.argsort(state.tokens[others], kind="stable")[:8]]
    count = max(MAX_BATCH // len(others), 1)
    if len(units) > count:
        # Ends of the rank's ranges first: moving them adds no range; then a regular sample.
        edge = np.isin(units - 1, units, invert=True) | np.isin(units + 1, units, invert=True)
        sample = np.linspace(0, len(units) - 1, count).astype(np.int64)
        units = np.concatenate([units[edge], units[sample]])
        units = units[np.sort(np.unique(units, return_index=True)[1])][:count]
    unit = np.repeat(units, len(others))
    to = np.tile(others, len(units))
    if not len(unit):
        return None
    scores = state.price_moves(rank, unit, to, options)
    best = int(np.argmin(scores))
    if scores[best] >= score * (1 - MIN_GAIN):
        return None
    return int(unit[best]), int(to[best])


def row_ms(segments: Segments, rows: Array, costs: CostModel) -> Array:
    """float64: compute ms of all tokens before each of ``rows``, communication aside."""
    at = np.searchsorted(segments.start, rows, side="right") - 1
    total = np.asarray(rows * (costs.token_forward_ms * (1 + costs.profile.token_backward_factor)))
    total = total * costs.model.num_layers
    for window in costs.windows:
        keys = _path_keys(segments.position, segments.position + segments.length, window)
        before = np.concatenate([[0], np.cumsum(keys)])
        inside = segments.position[at] + rows - segments.start[at]
        pairs = before[at] + _path_keys(segments.position[at], inside, window)
        for layer in costs.classes_of(window):
            rates = costs.rates(layer)
            total = total + pairs * (rates.forward_pair_ms + rates.backward_pair_ms) * layer.layers
    return total


def contiguous_cuts(segments: Segments, num_tokens: int, cp_size: int, costs: CostModel) -> Array:
    """int64[cp + 1]: row cuts that give each rank an equal share of compute time."""
    ends = np.append(segments.start, num_tokens)
    # Inside a segment the cost is convex: bisect rows, which needs no per-token array.
    total = row_ms(segments, ends[-1:], costs)[0]
    targets = total * np.arange(1, cp_size) / cp_size
    lo, hi = np.zeros(cp_size - 1, np.int64), np.full(cp_size - 1, num_tokens, np.int64)
    while (hi - lo > 1).any():
        middle = (lo + hi) // 2
        below = row_ms(segments, middle, costs) < targets
        lo, hi = np.where(below, middle, lo), np.where(below, hi, middle)
    nearer = np.abs(row_ms(segments, lo, costs) - targets) <= np.abs(
        row_ms(segments, hi, costs) - targets
    )
    return np.concatenate([[0], np.where(nearer, lo, hi), [num_tokens]])


def _path_keys(begin: Array, end: Array, window: int | None) -> Array:
    """Visible keys of all queries at positions [begin, end)."""

    def before(position: Array) -> Array:
        if window is None:
            return position * (position + 1) // 2
        short = np.minimum(position, window)
        return short * (short + 1) // 2 + (position - short) * window

    return before(end) - before(begin)
