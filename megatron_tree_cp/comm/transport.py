"""How rows travel between the ranks of a CP group: NCCL (or gloo), or copies between peers.

Both move the rows of a planned all-to-all and nothing else; which is faster is a property of the
machine, so `fastest_transport` measures.

Peer copies (symmetric memory, one NVLink domain): every rank writes the rows that it sends into its
own buffer, one barrier on the device tells that all have, and each rank copies its part out of the
others' buffers. Two buffers alternate: whoever passes the barrier of exchange i + 1 has read its
rows of exchange i, so the buffer of i is free again for i + 2, with one barrier an exchange.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

_GRANULE = 1 << 22
"""Bytes: peer buffers are multiples of it, doubled when they are too small."""


@dataclass(frozen=True)
class Route:
    """One direction of a planned all-to-all, seen from one rank; in rows.

    Attributes:
        send_counts, recv_counts: rows to and from every rank. Rows leave in order of destination
            and arrive in order of source.
        peer_offsets: where this rank's rows begin among those that each rank sends.
        most_rows: the most that any rank sends; equal on all ranks.
    """

    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    peer_offsets: tuple[int, ...]
    most_rows: int

    @classmethod
    def of(cls, counts: np.ndarray, rank: int) -> Route:
        """From `counts` int[cp, cp], the rows from each source (first axis) to each destination."""
        return cls(
            send_counts=tuple(int(n) for n in counts[rank]),
            recv_counts=tuple(int(n) for n in counts[:, rank]),
            peer_offsets=tuple(int(n) for n in counts[:, :rank].sum(1)),
            most_rows=int(counts.sum(1).max()),
        )


class Transport(Protocol):
    """Moves the rows of a route on the current stream; every rank calls in the same order."""

    @property
    def name(self) -> str:
        """For reports."""

    def all_to_all(self, send: torch.Tensor, route: Route) -> torch.Tensor:
        """[sum of send_counts, W] contiguous -> [sum of recv_counts, W]."""


def all_to_all(
    send: torch.Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    group: dist.ProcessGroup,
    received: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [sum of send_counts, ...] -> [sum of recv_counts, ...] by the group's backend.

    `received`: contiguous rows to write them to; new ones by default.
    """
    if received is None:
        received = send.new_empty((sum(recv_counts), *send.shape[1:]))
    dist.all_to_all_single(received, send, list(recv_counts), list(send_counts), group=group)
    return received


class CollectiveTransport:
    """`all_to_all_single` of the group's backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.name: str = dist.get_backend(group)

    def all_to_all(self, send: torch.Tensor, route: Route) -> torch.Tensor:
        return all_to_all(send, route.send_counts, route.recv_counts, self.group)


class PeerTransport:
    """Copies between the buffers of GPUs that can read each other's memory.

    Creation and growth are collective: the sizes that decide them are equal on all ranks. Raises
    ValueError on every rank where some ranks cannot read each other's memory.
    """

    name: str = "peer"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if not one_domain(group, device):
            raise ValueError(
                "peer exchange: some ranks of the group cannot read each other's memory (several "
                "hosts, or no link between GPUs): use the group's own exchange"
            )
        self.group, self.device = group, device
        self.rank = dist.get_rank(group)
        self._slots: list[_SymmetricBuffer] = []
        self._turn = 0

    def all_to_all(self, send: torch.Tensor, route: Route) -> torch.Tensor:
        width = math.prod(send.shape[1:])
        self._reserve(route.most_rows * width * send.element_size())
        slot = self._slots[self._turn]
        self._turn = 1 - self._turn
        slot.view(self.rank, send.shape, send.dtype).copy_(send)
        slot.barrier()
        received = send.new_empty((sum(route.recv_counts), *send.shape[1:]))
        begin = 0
        for peer, rows in enumerate(route.recv_counts):
            if rows:
                there = slot.view(
                    peer, (rows, *send.shape[1:]), send.dtype, route.peer_offsets[peer] * width
                )
                received[begin : begin + rows].copy_(there)
            begin += rows
        return received

    def _reserve(self, size: int) -> None:
        if self._slots and self._slots[0].size >= size:
            return
        # Peers may still read the buffers that go.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group)
        held = self._slots[0].size if self._slots else _GRANULE
        size = max(-(-size // _GRANULE) * _GRANULE, 2 * held)
        self._slots = [_SymmetricBuffer(size, self.group, self.device) for _ in range(2)]


class _SymmetricBuffer:
    """The same number of bytes on every rank of a group, all readable by all."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.size = size
        self._memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._memory, group)

    def view(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        """A tensor in the buffer of `rank`, `offset` elements from its beginning."""
        return self._handle.get_buffer(rank, shape, dtype, offset)

    def barrier(self) -> None:
        """On the current stream, after all ranks' work before it."""
        self._handle.barrier()


def fastest_transport(
    group: dist.ProcessGroup, device: torch.device, megabytes: tuple[int, ...] = (1, 32)
) -> Transport:
    """The transport that moves `megabytes` (of all sizes together) between the ranks sooner.

    A collective call, some milliseconds long. The group's own backend where peers cannot read each
    other's memory (several nodes, no NVLink) and on CPU.
    """
    collective = CollectiveTransport(group)
    if device.type != "cuda" or not one_domain(group, device):
        return collective
    peer = PeerTransport(group, device)
    cp_size = dist.get_world_size(group)
    times: list[float] = []
    candidates: tuple[Transport, ...] = (collective, peer)
    for transport in candidates:
        total = 0.0
        for size in megabytes:
            rows = size * 2**20 // 1024 // cp_size
            route = Route.of(np.full((cp_size, cp_size), rows), dist.get_rank(group))
            send = torch.empty(rows * cp_size, 512, dtype=torch.bfloat16, device=device)
            total += _milliseconds(transport, send, route)
        times.append(total)
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    of_collective, of_peer = slowest.tolist()
    return peer if of_peer < of_collective else collective


def _milliseconds(transport: Transport, send: torch.Tensor, route: Route, calls: int = 5) -> float:
    for _ in range(2):
        transport.all_to_all(send, route)
    torch.cuda.synchronize(send.device)
    started = time.perf_counter()
    for _ in range(calls):
        transport.all_to_all(send, route)
    torch.cuda.synchronize(send.device)
    return (time.perf_counter() - started) / calls * 1e3


def one_domain(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks sit on one host and their devices reach each other's memory; collective."""
    index = device.index or 0
    places: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(places, (socket.gethostname(), index), group=group)
    reach = all(
        host == socket.gethostname()
        and (device.type == "cpu" or other == index or _peers(index, other))
        for host, other in places
    )
    answers = [False] * len(places)
    dist.all_gather_object(answers, reach, group=group)
    return all(answers)


def _peers(one: int, other: int) -> bool:
    return torch.cuda.can_device_access_peer(one, other)
