"""Search for the ownership of a row that the slowest rank finishes first."""

from __future__ import annotations

import numpy as np

from ..tree.packed_tree import PackedTree
from .cost import CostModel
from .layout import Layout
from .row_plan import Candidate
from .runs import Segments, join_only_children
from .schedule import Schedule, schedule
from .values import Array


def search_layout(
    tree: PackedTree, cp_size: int, costs: CostModel, waves: int | None, granule: int
) -> tuple[Schedule, tuple[Candidate, ...]]:
    """The best schedule found, and what was priced on the way."""
    segments = join_only_children(tree)
    cuts = contiguous_cuts(segments, tree.num_tokens, cp_size, costs)
    layout = Layout.from_pieces(cuts, np.arange(cp_size), cp_size, granule)
    chosen = schedule(tree, layout, costs, waves)
    return chosen, (Candidate("contiguous", chosen.total_ms),)


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
