"""PrefixOrder: trajectories in a DFS order of their trie, with what neighbours share.

A trie over long sequences needs no node per token: sort the sequences, take the longest common
prefix (LCP) of neighbours, and the LCP of any two is the minimum over the neighbours between them.
That holds for every DFS order of the trie, so branches may be visited in whatever order suits.

The stored tokens of a trajectory of n tokens are its (input, label) pairs: n - 1 of them, and with
`keep_last` one more, (last token, no label). Two trajectories whose tokens agree on the first L
therefore share L - 1 stored tokens: the trie forks one token before they diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .packed_tree import IntArray
from .trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class PrefixOrder:
    """A DFS order of a trie of N trajectories; a prefix comes before what extends it.

    Args:
        index: caller's index of each trajectory in this order, [N].
        sizes: tokens of each, [N].
        lcp: leading tokens in common with the one before, [N]; 0 at the first.
        min_shared: least length of a shared stored prefix where paths diverge.
        keep_last: whether the final token is stored too.
    """

    index: IntArray
    sizes: IntArray
    lcp: IntArray
    min_shared: int
    keep_last: bool

    @property
    def stored(self) -> IntArray:
        """Stored tokens of each trajectory alone, [N]."""
        return self.sizes if self.keep_last else self.sizes - 1

    def shared(self, lcp: IntArray, before: IntArray, after: IntArray) -> IntArray:
        """Stored tokens that `after` shares with `before`, from their LCP and their sizes.

        `before` comes first in this order, so it is `after` itself, its prefix, or it diverges.
        """
        pairs = np.maximum(lcp - 1, 0)
        pairs = np.where((lcp < before) & (pairs < self.min_shared), 0, pairs)
        if self.keep_last:
            pairs = np.where((lcp == before) & (lcp == after), lcp, pairs)
        return pairs

    def shared_within(self, members: IntArray) -> IntArray:
        """Stored tokens that each member shares with the member before it; 0 for the first.

        `members` are places in this order, ascending. The sum of `stored - shared_within` over the
        members is the number of stored tokens of the row that holds them.
        """
        shared = np.zeros(members.size, np.int64)
        if members.size > 1:
            # minimum of lcp over (previous member, member]
            bounds = np.stack([members[:-1] + 1, members[1:] + 1], axis=1).ravel()
            padded = np.append(self.lcp, 0)
            lcp = np.minimum.reduceat(padded, bounds)[::2]
            shared[1:] = self.shared(lcp, self.sizes[members[:-1]], self.sizes[members[1:]])
        return shared


@dataclass(eq=False)
class _Node:
    """A fork of the trie at `depth` tokens, or the end of one trajectory (`place` >= 0)."""

    depth: int
    place: int = -1
    children: list[_Node] | None = None
    first: int = 0  # smallest caller's index below
    weight: int = 0  # tokens below, from the parent's depth on


class Trie:
    """The compressed trie of trajectories, from which DFS orders are drawn."""

    def __init__(
        self, trajectories: Sequence[Trajectory], min_shared: int = 1, keep_last: bool = False
    ) -> None:
        self.min_shared, self.keep_last = min_shared, keep_last
        # Big-endian bytes compare as the token ids do, and a prefix sorts first: one memcmp a pair.
        largest = max(int(trajectory.tokens.max()) for trajectory in trajectories)
        key_type = ">u4" if largest < 2**32 else ">u8"
        keys = [trajectory.tokens.astype(key_type).tobytes() for trajectory in trajectories]
        self._sorted = sorted(range(len(keys)), key=keys.__getitem__)  # duplicates as given
        self._sizes = [len(trajectories[i]) for i in self._sorted]
        self._lcp = [0] * len(self._sorted)
        for place in range(1, len(self._sorted)):
            before = trajectories[self._sorted[place - 1]].tokens
            after = trajectories[self._sorted[place]].tokens
            self._lcp[place] = common_prefix(before, after)
        self._root = self._build()

    def first_seen_order(self) -> PrefixOrder:
        """Branches in the order in which the caller's list first takes them."""
        return self._order(lambda node: node.first)

    def heaviest_first_order(self) -> PrefixOrder:
        """Branches with the most tokens first: the order in which bin packing wastes least."""
        return self._order(lambda node: (-node.weight, node.first))

    def _build(self) -> _Node:
        root = _Node(0, children=[])
        path = [root]  # nodes from the root to the trajectory added last
        for place, (size, lcp) in enumerate(zip(self._sizes, self._lcp)):
            below = None
            while path[-1].depth > lcp or path[-1].place >= 0:
                below = path.pop()
            fork = path[-1]
            if fork.depth < lcp:  # a new fork inside the edge from `fork` to `below`
                assert fork.children is not None and below is not None
                split = _Node(lcp, children=[below])
                fork.children[-1] = split
                path.append(split)
                fork = split
            leaf = _Node(size, place=place)
            assert fork.children is not None
            fork.children.append(leaf)
            path.append(leaf)
        self._measure(root)
        return root

    def _measure(self, root: _Node) -> None:
        preorder: list[tuple[_Node, int]] = []
        pending = [(root, 0)]
        while pending:
            node, parent_depth = pending.pop()
            preorder.append((node, parent_depth))
            pending.extend((child, node.depth) for child in node.children or ())
        for node, parent_depth in reversed(preorder):  # children before their parents
            children = node.children or ()
            node.weight = node.depth - parent_depth + sum(child.weight for child in children)
            node.first = (
                self._sorted[node.place]
                if node.place >= 0
                else min((child.first for child in children), default=0)
            )

    def _order(self, key: Callable[[_Node], int | tuple[int, int]]) -> PrefixOrder:
        index: list[int] = []
        sizes: list[int] = []
        lcps: list[int] = []
        pending = [(self._root, 0)]  # (node, LCP of its first trajectory with the one before)
        while pending:
            node, lcp = pending.pop()
            if node.place >= 0:
                index.append(self._sorted[node.place])
                sizes.append(self._sizes[node.place])
                lcps.append(lcp)
                continue
            # Trajectories that end here come before those that go on, duplicates as given.
            children = sorted(
                node.children or (),
                key=lambda child: (
                    (0, child.first) if child.depth == node.depth else (1, key(child))
                ),
            )
            entries = [(child, node.depth) for child in children]
            if entries:
                entries[0] = (children[0], lcp)
            pending.extend(reversed(entries))
        return PrefixOrder(
            np.array(index, np.int64),
            np.array(sizes, np.int64),
            np.array(lcps, np.int64),
            self.min_shared,
            self.keep_last,
        )


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Number of leading elements that `a` and `b` have in common."""
    size = min(a.size, b.size)
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size
