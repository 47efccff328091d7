"""Exchanges of ranges between ranks: what every rank sends and receives in one all-to-all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .layout import Layout
from .values import Array, ArrayValue, freeze_arrays, frozen_array, merge_sorted


@dataclass(frozen=True, eq=False)
class RankExchange(ArrayValue):
    """One rank's side of an exchange; all arrays are int64 over ranges.

    Send buffer: the ranges ``[send_starts, send_starts + send_lengths)`` of the source shard,
    destination ascending, row index ascending within one. Receive buffer: source ascending, row
    index ascending within; its rows go, in order, to the ranges ``[recv_starts, recv_starts +
    recv_lengths)`` of the destination buffer (for waves the receive buffer itself).
    ``send_counts`` and ``recv_counts`` hold rows per peer.
    """

    send_starts: Array
    send_lengths: Array
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    recv_starts: Array
    recv_lengths: Array

    def __post_init__(self) -> None:
        freeze_arrays(self)

    @property
    def num_send(self) -> int:
        """Rows that this rank sends, to itself included."""
        return sum(self.send_counts)

    @property
    def num_recv(self) -> int:
        """Rows that this rank receives, from itself included."""
        return sum(self.recv_counts)


@dataclass(frozen=True, eq=False)
class ExchangePlan(ArrayValue):
    """One all-to-all of all ranks as pieces sorted by (destination, source, row index).

    ``source``, ``destination`` int32[n]; ``source_start`` int64[n] in the source shard; ``length``
    int64[n]; ``destination_start`` int64[n] in the destination buffer, or None when the receive
    buffer is the destination.
    """

    cp_size: int
    source: Array
    destination: Array
    source_start: Array
    length: Array
    destination_start: Array | None = None

    def __post_init__(self) -> None:
        for name, dtype in (
            ("source", np.int32),
            ("destination", np.int32),
            ("source_start", np.int64),
            ("length", np.int64),
        ):
            object.__setattr__(self, name, frozen_array(getattr(self, name), dtype))
        if self.destination_start is not None:
            object.__setattr__(self, "destination_start", frozen_array(self.destination_start))

    @classmethod
    def from_pieces(
        cls,
        cp_size: int,
        source: Array,
        destination: Array,
        source_start: Array,
        length: Array,
    ) -> ExchangePlan:
        """A wave: sorted pieces whose neighbours are joined where the source shard allows it."""
        if len(length):
            joins = (
                (source[1:] == source[:-1])
                & (destination[1:] == destination[:-1])
                & (source_start[1:] == source_start[:-1] + length[:-1])
            )
            first = np.flatnonzero(np.concatenate([[True], ~joins]))
            length = np.add.reduceat(length, first)
            source, destination = source[first], destination[first]
            source_start = source_start[first]
        return cls(cp_size, source, destination, source_start, length)

    @property
    def hops(self) -> tuple[ExchangePlan, ...]:
        """The all-to-alls in order: this one."""
        return (self,)

    @cached_property
    def counts(self) -> Array:
        """int64[cp, cp]: rows sent from source (first axis) to destination (second axis)."""
        flat = np.zeros(self.cp_size * self.cp_size, dtype=np.int64)
        np.add.at(flat, self.source.astype(np.int64) * self.cp_size + self.destination, self.length)
        return frozen_array(flat.reshape(self.cp_size, self.cp_size))

    def rank(self, rank: int) -> RankExchange:
        """The side of ``rank``; the same number of pieces and rows at both ends by construction."""
        sent = self.source == rank
        received = self.destination == rank
        lengths = self.length[received]
        if self.destination_start is not None:
            starts = self.destination_start[received]
        else:
            total = int(lengths.sum())
            lengths = np.full(1 if total else 0, total, dtype=np.int64)
            starts = np.zeros_like(lengths)
        return RankExchange(
            send_starts=frozen_array(self.source_start[sent]),
            send_lengths=frozen_array(self.length[sent]),
            send_counts=tuple(int(n) for n in self.counts[rank]),
            recv_counts=tuple(int(n) for n in self.counts[:, rank]),
            recv_starts=frozen_array(starts),
            recv_lengths=frozen_array(lengths),
        )


def layout_exchange(src: Layout, dst: Layout) -> ExchangePlan:
    """Move a token-wise tensor from layout ``src`` to layout ``dst`` (padding stays behind).

    Swapping the arguments gives the transpose. Raises ``ValueError`` when the layouts do not
    describe the same row and CP size.
    """
    if src.num_tokens != dst.num_tokens or src.cp_size != dst.cp_size:
        raise ValueError(
            "layout_exchange needs layouts of one row: got "
            f"{src.num_tokens} tokens on {src.cp_size} ranks and "
            f"{dst.num_tokens} tokens on {dst.cp_size} ranks"
        )
    src_start, _, src_rank, src_local = src.pieces
    dst_start, _, dst_rank, dst_local = dst.pieces
    start = merge_sorted(src_start, dst_start)
    length = np.diff(np.append(start, src.num_tokens))
    i = np.searchsorted(src_start, start, side="right") - 1
    j = np.searchsorted(dst_start, start, side="right") - 1
    order = np.lexsort((start, src_rank[i], dst_rank[j]))
    i, j, start, length = i[order], j[order], start[order], length[order]
    return ExchangePlan(
        src.cp_size,
        source=src_rank[i],
        destination=dst_rank[j],
        source_start=src_local[i] + start - src_start[i],
        length=length,
        destination_start=dst_local[j] + start - dst_start[j],
    )
