"""Two-level exchanges: a row crosses the network once a node, then fans out inside the node.

Rank r sits on node ``r // ranks_per_node``. Hop 1 is one all-to-all that brings every row of
another node to its *relay*, one rank of the reading node, and rows of the own node straight to
their readers. Hop 2 is a second all-to-all, inside the nodes only, from the relays to the other
readers. The rows that a node imports are dealt out to its ranks in equal shares.

The transpose runs the hops backwards: readers return to the relay, the relay adds up its node's
rows and sends one of each home.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .exchange import ExchangePlan, RankExchange
from .remote import RemoteKeys
from .runs import RunTable
from .values import Array, ArrayValue, expand_ranges, freeze_arrays, frozen_array, merge_sorted


@dataclass(frozen=True, eq=False)
class RankTwoLevel(ArrayValue):
    """One rank's side of a two-level exchange.

    ``second`` sends from the buffer that ``first`` received. The receive buffer of the exchange
    holds, in order, the ranges ``[arrival_starts, arrival_starts + arrival_lengths)`` int64[n] of
    [rows of ``first``; rows of ``second``].
    """

    first: RankExchange
    second: RankExchange
    arrival_starts: Array
    arrival_lengths: Array

    def __post_init__(self) -> None:
        freeze_arrays(self)

    @property
    def num_recv(self) -> int:
        """Rows of the receive buffer."""
        return int(self.arrival_lengths.sum())


@dataclass(frozen=True, eq=False)
class TwoLevelExchange(ArrayValue):
    """Two all-to-alls of all ranks that bring what one `ExchangePlan` of the same keys brings.

    Receive buffers come out in the same order too: source ascending, row index ascending.
    ``destination`` int32[m], ``arrival_start`` int64[m] and ``arrival_length`` int64[m] are the
    ranges of `RankTwoLevel`, of all ranks, destination ascending.
    """

    first: ExchangePlan
    second: ExchangePlan
    destination: Array
    arrival_start: Array
    arrival_length: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "destination", frozen_array(self.destination, np.int32))
        for name in ("arrival_start", "arrival_length"):
            object.__setattr__(self, name, frozen_array(getattr(self, name)))

    @property
    def cp_size(self) -> int:
        """Ranks of the exchange."""
        return self.first.cp_size

    @property
    def hops(self) -> tuple[ExchangePlan, ...]:
        """The all-to-alls in order."""
        return self.first, self.second

    @cached_property
    def counts(self) -> Array:
        """int64[cp, cp]: rows that travel from rank (first axis) to rank, in both hops."""
        return frozen_array(self.first.counts + self.second.counts)

    def rank(self, rank: int) -> RankTwoLevel:
        """The side of ``rank``."""
        mine = self.destination == rank
        return RankTwoLevel(
            self.first.rank(rank),
            self.second.rank(rank),
            self.arrival_start[mine],
            self.arrival_length[mine],
        )


def two_level_exchange(keys: RemoteKeys, runs: RunTable, ranks_per_node: int) -> TwoLevelExchange:
    """The two hops that bring ``keys``, sorted as in a plan, to their destinations."""
    size = runs.cp_size
    source = runs.owner[keys.run].astype(np.int64)
    near = source // ranks_per_node == keys.destination // ranks_per_node
    local = runs.local_start[keys.run] - runs.start[keys.run]
    imports = _relayed(keys.take(~near), source[~near], size, ranks_per_node, runs.tree.num_tokens)

    # Hop 1, sorted by (destination, source, row): a pair of ranks is either near or relayed.
    part = imports.piece_key
    sent_to = np.concatenate([keys.destination[near], imports.relay])
    sent_by = np.concatenate([source[near], imports.source])
    row = np.concatenate([keys.start[near], imports.start])
    length = np.concatenate([keys.length[near], imports.length])
    shift = np.concatenate([local[near], local[~near][part]])
    order = np.lexsort((row, sent_by, sent_to))
    place = np.empty_like(length)  # in the destination's buffer of hop 1
    place[order] = _offsets_within(sent_to[order], length[order])
    first = ExchangePlan.from_pieces(
        size, sent_by[order], sent_to[order], (row + shift)[order], length[order]
    )

    # Hop 2, sorted by (destination, relay, place in the relay's buffer).
    relayed_place = place[near.sum() :]
    piece, reader = imports.reader_piece, imports.reader
    passed = imports.relay[piece] != reader
    to, by = reader[passed], imports.relay[piece[passed]]
    at, count = relayed_place[piece[passed]], imports.length[piece[passed]]
    order = np.lexsort((at, by, to))
    arrived = np.empty_like(count)
    arrived[order] = _offsets_within(to[order], count[order])
    second = ExchangePlan.from_pieces(size, by[order], to[order], at[order], count[order])

    # Receive buffers: rows of hop 1 that stay, rows of hop 2 behind all of hop 1.
    behind = np.bincount(sent_to, weights=length, minlength=size).astype(np.int64)
    start = relayed_place[piece]
    start[passed] = behind[to] + arrived
    destination = np.concatenate([keys.destination[near], reader])
    origin = np.concatenate([source[near], imports.source[piece]])
    row = np.concatenate([keys.start[near], imports.start[piece]])
    start = np.concatenate([place[: near.sum()], start])
    length = np.concatenate([keys.length[near], imports.length[piece]])
    order = np.lexsort((row, origin, destination))
    # Neighbours that are one range are joined as those of an exchange are.
    arrival = ExchangePlan.from_pieces(
        size,
        np.zeros(len(order), np.int64),
        destination[order],
        start[order],
        length[order],
    )
    return TwoLevelExchange(
        first, second, arrival.destination, arrival.source_start, arrival.length
    )


@dataclass(frozen=True)
class _Imports:
    """Rows that nodes import, in pieces with one relay and one set of readers each, int64.

    ``source``, ``relay``, ``start`` (row index), ``length`` and ``piece_key`` (an entry of the keys
    that holds the piece) per piece; ``reader_piece`` and ``reader``: the ranks that need a piece.
    """

    source: Array
    relay: Array
    start: Array
    length: Array
    piece_key: Array
    reader_piece: Array
    reader: Array


def _relayed(
    keys: RemoteKeys, source: Array, cp_size: int, ranks_per_node: int, num_tokens: int
) -> _Imports:
    """Pieces of ``keys``, all of other nodes, and their relays."""
    # One coordinate for (node, row): pieces lie between neighbouring ends of any rank's ranges.
    base = keys.destination // ranks_per_node * num_tokens
    begin, end = base + keys.start, base + keys.start + keys.length
    bounds = merge_sorted(np.sort(begin), np.sort(end))
    low = np.searchsorted(bounds, begin)
    count = np.searchsorted(bounds, end) - low
    key = np.repeat(np.arange(len(keys)), count)
    used, first, piece = np.unique(
        expand_ranges(low, count), return_index=True, return_inverse=True
    )
    node, start = bounds[used] // num_tokens, bounds[used] % num_tokens
    length = bounds[used + 1] - bounds[used] if len(used) else np.zeros(0, np.int64)

    # Shares are cut from pieces ordered by the middle of their readers: a relay mostly reads what
    # it passes on.
    readers = np.bincount(piece, minlength=len(used))
    middle = np.bincount(piece, weights=keys.destination[key], minlength=len(used)) / readers
    order = np.lexsort((start, source[key[first]], middle, node))
    behind = np.cumsum(length[order])
    before = behind - length[order]
    cuts = _share_cuts(node, length, cp_size, ranks_per_node)
    total = int(behind[-1]) if len(behind) else 0
    parts = merge_sorted(before, cuts[cuts < total])
    relay = np.searchsorted(cuts, parts, side="right") - 1
    of = np.searchsorted(before, parts, side="right") - 1
    cut = order[of]

    # Every reader of a piece reads all of its parts.
    parts_of = np.bincount(cut, minlength=len(used))
    first_part = np.empty(len(used), np.int64)
    first_part[order] = np.searchsorted(parts, before)
    reader_piece = expand_ranges(first_part[piece], parts_of[piece])
    return _Imports(
        source=source[key[first]][cut],
        relay=relay,
        start=start[cut] + parts - before[of],
        length=np.diff(np.append(parts, total)),
        piece_key=key[first][cut],
        reader_piece=reader_piece,
        reader=np.repeat(keys.destination[key], parts_of[piece]),
    )


def _share_cuts(node: Array, length: Array, cp_size: int, ranks_per_node: int) -> Array:
    """int64[cp]: where each relay's share begins among the imported rows of all nodes in order."""
    rank = np.arange(cp_size)
    of = rank // ranks_per_node
    ranks = np.bincount(of)
    total = np.bincount(node, weights=length, minlength=len(ranks)).astype(np.int64)
    first = np.cumsum(total) - total
    cuts: Array = first[of] + total[of] * (rank % ranks_per_node) // ranks[of]
    return cuts


def _offsets_within(group: Array, length: Array) -> Array:
    """int64[n]: the lengths before each entry in its group; groups are contiguous."""
    offset = np.cumsum(length) - length
    if not len(group):
        return offset
    first = np.concatenate([[True], group[1:] != group[:-1]])
    return np.asarray(offset - np.maximum.accumulate(np.where(first, offset, 0)))
