"""What a recurrent layer must move between ranks: states of runs, their summaries, their gradients.

A recurrent layer carries a state along every path; a run acts on it as ``S_out = M S_in + E``. Runs
of one rank that hang together along the tree form a *component*: its head's parent is on another
rank, or its head is a root. Inside a component states pass from run to run without any exchange. A
run with a child on another rank is an *export*. Relative to its component's head it is one summary

    S_out(x) = M(x) S_in(head) + E(x)

whatever number of runs lies between. The component of a root knows its incoming state, so that its
exports are *final*: they send the end state alone. Others send (M, E), and the receiver composes
along the chain of exports above each of its heads. Backward mirrors that: a component without
exports knows its exact ``dS_in``; those of one rank under one parent are summed before they travel.
Others send ``B``, their own part of ``dS_in``, and the M of their exports.

One exchange forward and one backward carry everything, for any layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..tree.packed_tree import PackedTree
from .layout import Layout
from .runs import RunTable, join_only_children
from .values import Array, ArrayValue, freeze_arrays, frozen_array

Levels = tuple[Array, ...]

CHUNK = 64
"""Tokens of a block: blocks are the steps of a state along a run."""


@dataclass(frozen=True, eq=False)
class SummaryExchange(ArrayValue):
    """One rank's side of an exchange of matrices.

    A rank has a bank of states [., Dk, Dv] and one of transfers M [., Dk, Dk]. ``send_states[t]``
    and ``send_transfers[t]`` are the entries that go to rank t, ascending; ``recv_states[s]`` and
    ``recv_transfers[s]`` count what comes from rank s. Received entries are numbered after the
    rank's own, source after source.
    """

    send_states: tuple[Array, ...]
    send_transfers: tuple[Array, ...]
    recv_states: tuple[int, ...]
    recv_transfers: tuple[int, ...]

    def __post_init__(self) -> None:
        freeze_arrays(self)


@dataclass(frozen=True)
class StateNode:
    """The end state of one export: ``states[state]``, plus ``transfers[transfer] @`` its parent."""

    state: int
    """Entry of the states, own and received."""

    transfer: int
    """Entry of the transfers; -1 when the state is final."""

    parent: int
    """Node of the export that the component hangs on; -1 when the state is final."""


@dataclass(frozen=True)
class GradientNode:
    """What reaches the end state of one export from other components.

    The sum of ``states[i]`` over ``states``, and of ``transfers[m].T @ node`` over ``products``.
    """

    states: tuple[int, ...]
    products: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class RankRecurrence(ArrayValue):
    """One rank's part of a recurrence; runs are numbered along its shard, which they tile.

    Levels are tuples of run ids, parents before children; gradient passes take them reversed.
    """

    start: Array
    """int64[R]: first row of each run in the shard."""

    length: Array
    """int64[R]"""

    parent: Array
    """int64[R]: the run on this rank whose end state enters; -1 at the head of a component."""

    root: Array
    """int64[R]: number of the root that starts with this run, else -1."""

    leaf: Array
    """int64[R]: number of the leaf segment that ends with this run, else -1."""

    heads: Array
    """int64[N]: heads whose incoming state comes from other ranks."""

    exports: Array
    """int64[X]: runs with a child on another rank; the states of the forward bank."""

    transfers: Array
    """int64[Y]: the exports that are not final; the transfers of both banks."""

    early: Levels
    """Runs of roots with exports: they go first."""

    summary: Levels
    """Runs between the heads and the exports that are not final: (M, E) before the exchange."""

    rest: Levels
    """Runs of roots without exports: they overlap the exchange."""

    late: Levels
    """Runs below ``heads``: they wait for the exchange."""

    exact: Levels
    """Runs below ``heads`` in components without exports: their gradients go first."""

    partial: Levels
    """Runs below ``heads`` in components with exports: B before the exchange, again after it."""

    open: Levels
    """Runs of components with exports: their gradients wait for the exchange."""

    forward: SummaryExchange
    state_nodes: tuple[StateNode, ...]
    """Parents before children."""

    incoming: tuple[int, ...]
    """Node whose state enters at ``heads[i]``."""

    backward: SummaryExchange
    gradient_bank: tuple[tuple[int, ...], ...]
    """Heads whose ``dS_in`` sum to each state of the backward bank."""

    gradient_nodes: tuple[GradientNode, ...]
    """Children before parents."""

    outgoing: tuple[int, ...]
    """Node whose gradient enters at the end of ``exports[i]``."""

    def __post_init__(self) -> None:
        freeze_arrays(self)


@dataclass(frozen=True, eq=False)
class RecurrencePlan(ArrayValue):
    """States that a recurrence over ``tree`` hands from run to run under ``layout``.

    Derived from tree and layout alone: equal plans give equal recurrences on all ranks.
    """

    tree: PackedTree
    layout: Layout

    @cached_property
    def runs(self) -> RunTable:
        """Pieces of one segment with one owner, in row order."""
        return RunTable(self.tree, self.layout)

    @cached_property
    def num_roots(self) -> int:
        """Roots of the row, in row order."""
        return int((self.tree.parents < 0).sum())

    @cached_property
    def num_leaves(self) -> int:
        """Segments without children, in row order."""
        return int(self.leaf.max()) + 1 if len(self.leaf) else 0

    @cached_property
    def parent(self) -> Array:
        """int64[runs]: the run before each run on its path, -1 at roots."""
        runs, tree = self.runs, self.tree
        segments = join_only_children(tree)
        parent = np.arange(len(runs)) - 1
        first = np.searchsorted(runs.start, segments.start)
        above = tree.parents[np.searchsorted(tree.segment_starts, segments.start)]
        last_row = tree.segment_ends[np.maximum(above, 0)] - 1
        parent[first] = np.where(above < 0, -1, self.run_of(last_row))
        return frozen_array(parent)

    def run_of(self, rows: Array) -> Array:
        """Run of each row index."""
        return np.searchsorted(self.runs.start, rows, side="right") - 1

    @cached_property
    def leaf(self) -> Array:
        """int64[runs]: number of the leaf segment that ends with the run, else -1."""
        childless = np.ones(len(self.runs), dtype=bool)
        childless[self.parent[self.parent >= 0]] = False
        return frozen_array(np.where(childless, np.cumsum(childless) - 1, -1))

    @cached_property
    def chains(self) -> tuple[Array, Array]:
        """Per run: the head of its component, and the runs between them."""
        owner = self.runs.owner
        own = (self.parent >= 0) & (owner[self.parent] == owner)
        return climb(np.where(own, self.parent, -1))

    @cached_property
    def heads(self) -> Array:
        """int64: heads of components whose parent is on another rank, in row order."""
        head, _ = self.chains
        return frozen_array(np.flatnonzero((head == np.arange(len(head))) & (self.parent >= 0)))

    @cached_property
    def exports(self) -> Array:
        """int64: runs with a child on another rank, in row order."""
        return frozen_array(np.unique(self.parent[self.heads]))

    @cached_property
    def above(self) -> tuple[Array, Array, Array]:
        """Export that each head hangs on; the export above each export (-1: final); its head."""
        head, _ = self.chains
        head_of_export = head[self.exports]
        hang = np.searchsorted(self.exports, self.parent[self.heads])
        above = self.parent[head_of_export]
        up = np.where(above < 0, -1, np.searchsorted(self.exports, above))
        return hang, up, head_of_export

    @cached_property
    def pairs(self) -> tuple[Array, Array]:
        """Every head with every export on its chain to the root: (head, export) entries."""
        hang, up, _ = self.above
        head, export = np.arange(len(hang)), hang
        heads, exports = [head], [export]
        while len(head):
            export = up[export]
            head, export = head[export >= 0], export[export >= 0]
            heads.append(head)
            exports.append(export)
        return np.concatenate(heads), np.concatenate(exports)

    def rank(self, rank: int) -> RankRecurrence:
        """The part of ``rank``."""
        runs, (head, depth) = self.runs, self.chains
        mine = np.flatnonzero(runs.owner == rank)
        local = np.full(len(runs), -1)
        local[mine] = np.arange(len(mine))
        exporting = np.zeros(len(runs), dtype=bool)
        exporting[head[self.exports]] = True
        rooted = self.parent[head[mine]] < 0
        open_ = exporting[head[mine]]
        exports = self.exports[runs.owner[self.exports] == rank]
        inner = np.zeros(len(runs), dtype=bool)  # on the way from a head to an export
        step = exports
        while len(step):
            inner[step] = True
            step = np.unique(step[step != head[step]])
            step = self.parent[step]

        def levels(chosen: Array) -> Levels:
            ids = np.flatnonzero(chosen)
            level = depth[mine[ids]]
            return tuple(frozen_array(ids[level == i]) for i in np.unique(level))

        own_parent = np.where(head[mine] == mine, -1, local[self.parent[mine]])
        starts = self.parent[mine] < 0
        root_number = np.cumsum(self.parent < 0) - 1
        states, gradients = self._states(rank, local), self._gradients(rank, local)
        return RankRecurrence(
            start=frozen_array(runs.local_start[mine]),
            length=frozen_array(runs.length[mine]),
            parent=frozen_array(own_parent),
            root=frozen_array(np.where(starts, root_number[mine], -1)),
            leaf=frozen_array(self.leaf[mine]),
            heads=frozen_array(local[self.heads[runs.owner[self.heads] == rank]]),
            exports=frozen_array(local[exports]),
            transfers=frozen_array(local[exports[self.parent[head[exports]] >= 0]]),
            early=levels(rooted & open_),
            summary=levels(~rooted & inner[mine]),
            rest=levels(rooted & ~open_),
            late=levels(~rooted),
            exact=levels(~rooted & ~open_),
            partial=levels(~rooted & open_),
            open=levels(open_),
            forward=states[0],
            state_nodes=states[1],
            incoming=states[2],
            backward=gradients[0],
            gradient_bank=gradients[1],
            gradient_nodes=gradients[2],
            outgoing=gradients[3],
        )

    @cached_property
    def export_rank(self) -> Array:
        """int32[exports]: owners of the exports."""
        return self.runs.owner[self.exports]

    @cached_property
    def head_rank(self) -> Array:
        """int32[heads]: owners of the heads."""
        return self.runs.owner[self.heads]

    def _transfer_bank(self, rank: int) -> list[tuple[str, int]]:
        own = np.flatnonzero((self.export_rank == rank) & (self.above[1] >= 0))
        return [("M", int(e)) for e in own]

    def _state_bank(self, rank: int) -> list[tuple[str, int]]:
        return [("E", int(e)) for e in np.flatnonzero(self.export_rank == rank)]

    @cached_property
    def _state_needs(self) -> set[tuple[int, tuple[str, int]]]:
        """(rank, key): the states and transfers of others that each rank composes with."""
        head, export = self.pairs
        ranks = self.head_rank[head]
        away = ranks != self.export_rank[export]
        needs = set()
        for rank, e in {(int(r), int(e)) for r, e in zip(ranks[away], export[away], strict=True)}:
            needs.add((rank, ("E", e)))
            if self.above[1][e] >= 0:
                needs.add((rank, ("M", e)))
        return needs

    def _states(
        self, rank: int, local: Array
    ) -> tuple[SummaryExchange, tuple[StateNode, ...], tuple[int, ...]]:
        exchange, pool = self._exchange(rank, self._state_bank, self._state_needs)
        hang, up, _ = self.above
        head, export = self.pairs
        own = self.head_rank[head] == rank
        order = [int(e) for e in np.unique(export[own])]
        node = {e: i for i, e in enumerate(order)}
        nodes = tuple(
            StateNode(pool["E", e], pool.get(("M", e), -1), node.get(int(up[e]), -1)) for e in order
        )
        incoming = tuple(node[int(hang[c])] for c in np.flatnonzero(self.head_rank == rank))
        return exchange, nodes, incoming

    @cached_property
    def open_heads(self) -> Array:
        """bool[heads]: whether the component has exports, so that its B is not yet dS_in."""
        return np.isin(self.heads, self.above[2])

    def _gradient_key(self, c: int) -> tuple[str, int]:
        """State of the backward bank that holds a component: shared by exact ones of a parent."""
        return ("B", c) if self.open_heads[c] else ("G", int(self.above[0][c]))

    def _gradient_bank(self, rank: int) -> list[tuple[str, int]]:
        keys = {self._gradient_key(int(c)) for c in np.flatnonzero(self.head_rank == rank)}
        return sorted(keys, key=lambda key: (key[0] == "B", key[1]))

    @cached_property
    def _gradient_needs(self) -> set[tuple[int, tuple[str, int, int]]]:
        """(rank, (kind, id, source)): what owners of ancestors need of each component."""
        head, export = self.pairs
        needs = set()
        for c, e in zip(head.tolist(), export.tolist(), strict=True):
            source, rank = int(self.head_rank[c]), int(self.export_rank[e])
            if source == rank:
                continue
            needs.add((rank, (*self._gradient_key(c), source)))
            for x in self._exports_of(c):
                needs.add((rank, ("M", x, source)))
        return needs

    @cached_property
    def _exports_by_head(self) -> dict[int, list[int]]:
        table: dict[int, list[int]] = {}
        for export, head in enumerate(self.above[2].tolist()):
            table.setdefault(head, []).append(export)
        return table

    def _exports_of(self, c: int) -> list[int]:
        return self._exports_by_head.get(int(self.heads[c]), [])

    def _gradients(
        self, rank: int, local: Array
    ) -> tuple[
        SummaryExchange, tuple[tuple[int, ...], ...], tuple[GradientNode, ...], tuple[int, ...]
    ]:
        needs_of: dict[int, set[tuple[int, tuple[str, int]]]] = {}
        for reader, (kind, number, source) in self._gradient_needs:
            needs_of.setdefault(source, set()).add((reader, (kind, number)))
        exchange, pool = self._exchange(rank, self._gradient_bank, needs_of, by_source=True)
        hang, _, _ = self.above
        own_heads = np.flatnonzero(self.head_rank == rank)
        bank = tuple(
            tuple(int(local[self.heads[c]]) for c in own_heads if self._gradient_key(int(c)) == key)
            for key in self._gradient_bank(rank)
        )
        own_exports = np.flatnonzero(self.export_rank == rank).tolist()
        needed, stack = set(own_exports), list(own_exports)
        hanging: dict[int, list[int]] = {}
        for c, e in enumerate(hang.tolist()):
            hanging.setdefault(e, []).append(c)
        while stack:
            for c in hanging[stack.pop()]:
                fresh = set(self._exports_of(c)) - needed
                needed |= fresh
                stack.extend(sorted(fresh))
        order = sorted(needed, reverse=True)
        node = {e: i for i, e in enumerate(order)}
        nodes = []
        for e in order:
            states = sorted(
                {pool[(*self._gradient_key(c), int(self.head_rank[c]))] for c in hanging[e]}
            )
            products = [
                (pool["M", x, int(self.head_rank[c])], node[x])
                for c in hanging[e]
                for x in self._exports_of(c)
            ]
            nodes.append(GradientNode(tuple(states), tuple(products)))
        return exchange, bank, tuple(nodes), tuple(node[e] for e in own_exports)

    def _exchange(
        self,
        rank: int,
        states_of: Callable[[int], list[tuple[str, int]]],
        needs: set[tuple[int, tuple[str, int]]] | dict[int, set[tuple[int, tuple[str, int]]]],
        by_source: bool = False,
    ) -> tuple[SummaryExchange, dict[tuple, int]]:
        """The exchange of what is needed, and where each key lies among own and received ones.

        Keys carry their source rank when several ranks have states of one name.
        """
        ranks = range(self.layout.cp_size)

        def wanted(source: int, reader: int, bank: list[tuple[str, int]]) -> list[int]:
            of_source = needs.get(source, set()) if isinstance(needs, dict) else needs
            return [i for i, key in enumerate(bank) if (reader, key) in of_source]

        def name(key: tuple[str, int], source: int) -> tuple:
            return (*key, source) if by_source else key

        pool: dict[tuple, int] = {}
        sent: dict[str, tuple[Array, ...]] = {}
        received: dict[str, tuple[int, ...]] = {}
        for form, bank_of in (("states", states_of), ("transfers", self._transfer_bank)):
            own = bank_of(rank)
            pool.update({name(key, rank): i for i, key in enumerate(own)})
            sent[form] = tuple(frozen_array(wanted(rank, t, own)) for t in ranks)
            counts, total = [], len(own)
            for source in ranks:
                bank = bank_of(source)
                entries = [] if source == rank else wanted(source, rank, bank)
                pool.update({name(bank[i], source): total + j for j, i in enumerate(entries)})
                total += len(entries)
                counts.append(len(entries))
            received[form] = tuple(counts)
        exchange = SummaryExchange(
            sent["states"], sent["transfers"], received["states"], received["transfers"]
        )
        return exchange, pool


def climb(parent: Array) -> tuple[Array, Array]:
    """Topmost ancestor of each node and the steps to it, by pointer doubling; -1 is no parent."""
    link = np.where(parent < 0, np.arange(len(parent)), parent)
    steps = (parent >= 0).astype(np.int64)
    while True:
        steps = steps + steps[link]
        after = link[link]
        if np.array_equal(after, link):
            return link, steps
        link = after
