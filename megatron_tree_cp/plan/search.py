"""Search for the ownership of a row that the slowest rank finishes first.

Seeds (contiguous by compute time, whole subtrees by longest processing time, folded) are priced on
units; the best descend by moves away from the ranks that set the time, then by splitting these
ranks' units and moving again. Budgets count steps, never wall time: equal inputs give equal plans.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..tree.packed_tree import PackedTree
from .cost import CostModel, WindowCost
from .layout import Layout
from .moves import Assignment, Option, price_seeds
from .row_plan import Candidate
from .runs import Segments, join_only_children
from .schedule import MAX_WAVES, Schedule, schedule
from .simulate import node_size
from .unit_chains import unit_chains
from .units import unit_cuts, unit_work
from .values import Array

MAX_STEPS = 24
"""Accepted moves per search."""

MAX_BATCH = 96
"""Moves priced per step."""

SPLIT_ROUNDS = 2
"""Times that units of the slowest ranks are split and moved again."""

SPLIT_UNITS = 6
"""Units per rank that are split in a round, into ``SPLIT_PARTS`` each."""

SPLIT_PARTS = 4
"""Pieces of a split unit."""

MIN_GAIN = 1e-5
"""Relative gain of the score that makes a move worthwhile."""

MIN_ESTIMATED_GAIN = 2e-4
"""The same for models with recurrent layers, whose price on units is an estimate."""


BY_NODE = "by node"
"""How the names of seeds end that keep families on a node; they come last."""


def search_layout(
    tree: PackedTree, cp_size: int, costs: CostModel, waves: int | None, granule: int
) -> tuple[Schedule, tuple[Candidate, ...]]:
    """The best schedule found, and the total ms of what was priced on the way.

    The contiguous seed and the winner of the search are priced exactly, with recurrent layers all
    seeds; the result is never worse than these unless they do not fit the memory limit.
    """
    segments = join_only_children(tree)
    compute = ComputeBefore(segments, costs)
    shares = contiguous_cuts(compute, tree.num_tokens, cp_size)
    ranks = np.arange(cp_size)
    contiguous = Layout.from_pieces(shares, ranks, cp_size, granule)
    chosen = schedule(tree, contiguous, costs, waves)
    tried = [Candidate("contiguous", chosen.total_ms)]
    if cp_size == 1:
        return chosen, tuple(tried)
    cuts = np.union1d(unit_cuts(segments, tree.num_tokens, cp_size), shares)
    works = unit_work(tree, cuts, costs.windows, costs.profile.counts_tiles)
    choices = _choices(waves)
    nodes = node_size(cp_size, costs.profile)
    names, owners = zip(*_seeds(compute, cuts, shares, cp_size, nodes))
    sizes = np.diff(cuts)
    chains = unit_chains(tree, cuts, costs)
    seeds = [Assignment(owner, sizes, works, costs, cp_size, chains) for owner in owners]
    scores, totals, options = price_seeds(seeds, choices)
    tried += [Candidate(f"seed {n}, on units", float(t)) for n, t in zip(names, totals)]
    layouts = {}
    # Units know of one hop only: what crosses nodes costs less in two, so that the best seed that
    # is not made for nodes gets its chance too.
    across = [score for score, name in zip(scores, names) if not name.endswith(BY_NODE)]
    for best in dict.fromkeys([int(np.argmin(scores)), int(np.argmin(across))]):
        finer, owner = _descend(tree, cuts, seeds[best], costs, options[best])
        moved = Layout.from_pieces(finer, owner, cp_size, granule)
        layouts[f"{names[best]}, moved"] = moved
    if chains is not None:
        # Units estimate what an exchange of states costs: seeds are priced run by run as well.
        for name, owner in zip(names[1:], owners[1:]):
            layouts[name] = Layout.from_pieces(cuts, owner, cp_size, granule)
    for name, layout in layouts.items():
        if all(map(np.array_equal, layout.ranges, chosen.layout.ranges)):
            continue
        found = schedule(tree, layout, costs, waves)
        tried.append(Candidate(name, found.total_ms))
        if (_excess(found, costs), found.total_ms) < (_excess(chosen, costs), chosen.total_ms):
            chosen = found
    return chosen, tuple(tried)


def _choices(waves: int | None) -> list[Option]:
    if waves is None:
        alike = [Option(True, True, 1)] + [Option(False, False, n) for n in (1, 2, MAX_WAVES)]
        return [*alike, Option(True, False, 1), Option(False, True, 1)]
    return [Option(waves == 0, waves == 0, max(waves, 1))]


def _excess(found: Schedule, costs: CostModel) -> float:
    limit = costs.profile.memory_limit_bytes
    if limit is None:
        return 0.0
    return max(float(found.peak_bytes(costs).max()) - limit, 0.0)


def _seeds(
    compute: ComputeBefore, cuts: Array, shares: Array, cp_size: int, ranks_per_node: int | None
) -> Iterator[tuple[str, Array]]:
    """(name, owner per unit) of every seed; ``cuts`` holds all of ``shares``.

    With several nodes also families, and pieces of them, that stay on one node, contiguous there.
    """
    yield "contiguous", np.searchsorted(shares, cuts[:-1], side="right") - 1
    middle = (cuts[:-1] + cuts[1:]) // 2
    for count in (2 * cp_size, 4 * cp_size):
        slab = middle * count // cuts[-1] % (2 * cp_size)
        yield f"folded {count}", np.minimum(slab, 2 * cp_size - 1 - slab)
    price = np.diff(compute.at(cuts))
    roots = compute.segments.start[compute.segments.position == 0]
    root = np.searchsorted(roots, cuts[:-1], side="right")
    for share in (1.0, 0.25):
        yield f"subtrees {share}", _by_blocks(price, root, share, cp_size)
    if ranks_per_node is None:
        return
    for name, share in (("families", np.inf), ("subtrees", 1.0)):
        node = _by_blocks(price, root, share, -(-cp_size // ranks_per_node))
        owner = np.zeros(len(node), np.int64)
        for n in np.unique(node):
            units = np.flatnonzero(node == n)
            ranks = np.arange(cp_size)[n * ranks_per_node :][:ranks_per_node]
            middle = np.cumsum(price[units]) - price[units] / 2
            owner[units] = ranks[(middle / price[units].sum() * len(ranks)).astype(np.int64)]
        yield f"{name} {BY_NODE}", owner


def _by_blocks(price: Array, root: Array, share: float, bins: int) -> Array:
    """int64[U]: a bin per unit of ``price`` ms, blocks longest first to the least filled bin.

    A block is a whole family (units of one ``root``), or pieces of one that are at most ``share``
    of a bin's work.
    """
    first = np.concatenate([[True], root[1:] != root[:-1]])
    before = np.cumsum(price) - price
    inside = np.cumsum(price) - np.maximum.accumulate(np.where(first, before, 0))
    piece = (inside / (share * price.sum() / bins)).astype(np.int64)
    starts = np.flatnonzero(first | np.concatenate([[True], piece[1:] != piece[:-1]]))
    weight = np.add.reduceat(price, starts)
    load = np.zeros(bins)
    owner = np.zeros(len(starts), dtype=np.int64)
    for block in np.argsort(-weight, kind="stable"):
        owner[block] = np.argmin(load)
        load[owner[block]] += weight[block]
    return np.repeat(owner, np.diff(np.append(starts, len(price))))


def _descend(
    tree: PackedTree, cuts: Array, state: Assignment, costs: CostModel, options: list[Option]
) -> tuple[Array, Array]:
    """Moves until none helps, then splits of the slowest ranks' units and moves again."""
    steps = 0
    for round_ in range(SPLIT_ROUNDS + 1):
        score, parts = state.price(options)
        while steps < MAX_STEPS:
            moves = (_best_move(state, r, options, score) for r in _slowest(state, parts))
            move = next((m for m in moves if m is not None), None)
            if move is None:
                break
            state = state.moved(*move)
            score, parts = state.price(options)
            steps += 1
        if round_ == SPLIT_ROUNDS or steps == MAX_STEPS:
            break
        finer = _split_units(cuts, state.owner, _slowest(state, parts))
        if len(finer) == len(cuts):
            break
        owner = state.owner[np.searchsorted(cuts, finer[:-1], side="right") - 1]
        chains = unit_chains(tree, finer, costs)
        cuts, works = finer, unit_work(tree, finer, costs.windows, costs.profile.counts_tiles)
        state = Assignment(owner, np.diff(cuts), works, costs, state.cp_size, chains)
    return cuts, state.owner


def _split_units(cuts: Array, owner: Array, ranks: list[int]) -> Array:
    """``cuts`` with the largest units of ``ranks`` divided."""
    size = np.diff(cuts)
    pick = []
    for rank in ranks:
        units = np.flatnonzero((owner == rank) & (size >= 2 * SPLIT_PARTS))
        pick.append(units[np.argsort(-size[units], kind="stable")[:SPLIT_UNITS]])
    units = np.concatenate(pick)
    inside = size[units][:, None] * np.arange(1, SPLIT_PARTS) // SPLIT_PARTS
    return np.union1d(cuts, (cuts[units][:, None] + inside).ravel())


def _slowest(state: Assignment, parts: list[WindowCost]) -> list[int]:
    """The ranks that set the backward and the forward time."""
    if not parts:
        return [int(state.tokens.argmax())]
    backward = sum(part.backward for part in parts)
    forward = sum(part.forward for part in parts)
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
    gain = MIN_GAIN if state.chains is None else MIN_ESTIMATED_GAIN
    if scores[best] >= score * (1 - gain):
        return None
    return int(unit[best]), int(to[best])


class ComputeBefore:
    """Compute ms (communication aside) of all tokens before a row."""

    def __init__(self, segments: Segments, costs: CostModel) -> None:
        self.segments = segments
        both = 1 + costs.profile.token_backward_factor
        self._token_ms = costs.token_forward_ms * both * costs.model.num_layers
        for layers, gdn in costs.recurrent_rates:
            self._token_ms += layers * (gdn.token_pass_ms(False) + gdn.token_pass_ms(True))
        self._windows = []
        for window in costs.windows:
            rates = [(costs.rates(layer), layer.layers) for layer in costs.classes_of(window)]
            pair_ms = sum(n * (r.forward_pair_ms + r.backward_pair_ms) for r, n in rates)
            self._token_ms += sum(n * (r.forward_edge_ms + r.backward_edge_ms) for r, n in rates)
            begin = segments.position
            keys = _path_keys(begin, begin + segments.length, window)
            self._windows.append((window, pair_ms, np.concatenate([[0], np.cumsum(keys)])))

    def at(self, rows: Array) -> Array:
        """float64: ms before each row index of ``rows``."""
        segments = self.segments
        of = np.searchsorted(segments.start, rows, side="right") - 1
        begin = segments.position[of]
        end = begin + rows - segments.start[of]
        total = np.asarray(rows * self._token_ms)
        for window, pair_ms, before in self._windows:
            total = total + pair_ms * (before[of] + _path_keys(begin, end, window))
        return total


def contiguous_cuts(compute: ComputeBefore, num_tokens: int, cp_size: int) -> Array:
    """int64[cp + 1]: row cuts that give each rank an equal share of compute time."""
    total = compute.at(np.array([num_tokens]))[0]
    targets = total * np.arange(1, cp_size) / cp_size
    lo, hi = np.zeros(cp_size - 1, np.int64), np.full(cp_size - 1, num_tokens, np.int64)
    while (hi - lo > 1).any():
        middle = (lo + hi) // 2
        below = compute.at(middle) < targets
        lo, hi = np.where(below, middle, lo), np.where(below, hi, middle)
    nearer = np.abs(compute.at(lo) - targets) <= np.abs(compute.at(hi) - targets)
    return np.concatenate([[0], np.where(nearer, lo, hi), [num_tokens]])


def _path_keys(begin: Array, end: Array, window: int | None) -> Array:
    """Visible keys of all queries at positions [begin, end)."""

    def before(position: Array) -> Array:
        if window is None:
            return np.asarray(position * (position + 1) // 2)
        short = np.minimum(position, window)
        return np.asarray(short * (short + 1) // 2 + (position - short) * window)

    return before(end) - before(begin)
