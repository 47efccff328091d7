"""Which trajectories share a row: best fit by marginal new tokens."""

from __future__ import annotations

import numpy as np

from .packed_tree import IntArray
from .trie import PrefixOrder


def fill_rows(order: PrefixOrder, max_tokens: int) -> list[IntArray]:
    """Caller's indices of the trajectories of each row.

    Trajectories are placed in `order`, each where it adds the fewest stored tokens and still fits,
    the fuller row where several tie. Two ways of cutting the order into units are tried: single
    trajectories, and the largest subtrees that fit a row whole, which keeps a family together when
    the row of its first member could not take the rest. The one with fewer rows wins, then the one
    with fewer stored tokens. In a DFS order a trajectory shares most with the last member of a
    row, so one LCP a row is all the state that is needed.
    """
    single = np.arange(order.index.size + 1)
    candidates = [_best_fit(order, bounds, max_tokens) for bounds in
                  (_subtree_bounds(order, max_tokens), single)]  # fmt: skip
    rows, _ = min(candidates, key=lambda candidate: (len(candidate[0]), candidate[1]))
    return [order.index[np.array(row, np.int64)] for row in rows]


def _best_fit(order: PrefixOrder, bounds: IntArray, max_tokens: int) -> tuple[list[list[int]], int]:
    """Place the units `order[bounds[u] : bounds[u + 1]]`; the rows and their stored tokens."""
    everyone = np.arange(order.index.size)
    added = np.cumsum(order.stored - order.shared_within(everyone))
    rows: list[list[int]] = []
    used = np.zeros(bounds.size, np.int64)
    last_size = np.zeros(bounds.size, np.int64)
    last_lcp = np.zeros(bounds.size, np.int64)  # of the last member and the unit to be placed
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        count = len(rows)
        np.minimum(last_lcp[:count], order.lcp[begin], out=last_lcp[:count])
        alone = int(order.stored[begin] + added[end - 1] - added[begin])
        size = order.sizes[begin]
        new = alone - order.shared(last_lcp[:count], last_size[:count], size)
        fits = np.flatnonzero(used[:count] + new <= max_tokens)
        if fits.size:
            best = int(fits[np.lexsort((fits, -used[fits], new[fits]))[0]])
            used[best] += new[best]
        else:
            best = count
            used[best] = alone
            rows.append([])
        rows[best].extend(range(begin, end))
        if end - begin > 1:
            np.minimum(last_lcp[:count], order.lcp[begin + 1 : end].min(), out=last_lcp[:count])
        last_lcp[best] = last_size[best] = order.sizes[end - 1]
    return rows, int(used.sum())


def _subtree_bounds(order: PrefixOrder, max_tokens: int) -> IntArray:
    """Cut the order into the largest subtrees that fit a row whole.

    A span is a subtree when its inner LCPs are all larger than those at both its ends.
    """
    everyone = np.arange(order.index.size)
    added = np.append(0, np.cumsum(order.stored - order.shared_within(everyone)))
    bounds = []
    pending = [(0, int(order.index.size))]
    while pending:
        begin, end = pending.pop()
        alone = int(order.stored[begin] + added[end] - added[begin + 1])
        if end - begin == 1 or alone <= max_tokens:
            bounds.append(begin)
            continue
        inner = order.lcp[begin + 1 : end]
        cuts = begin + 1 + np.flatnonzero(inner == inner.min())
        edges = [begin, *cuts.tolist(), end]
        pending.extend(reversed(list(zip(edges[:-1], edges[1:]))))
    return np.array([*bounds, order.index.size], np.int64)
