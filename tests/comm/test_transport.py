"""Transports: routes from counts, and peer copies against the group's own all-to-all.

Without GPUs the peers' buffers are shared files and the barrier is gloo's: the same order of
writes, barriers and reads.
"""

import os
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_tree_cp.comm import RangeExchange, transport
from megatron_tree_cp.plan import ExchangePlan
from tests.distributed import run_ranks

CP = 3


def _wave(seed: int, most: int) -> ExchangePlan:
    """Random pieces sorted by destination and source; some ranks exchange nothing."""
    generator = np.random.default_rng(seed)
    pieces = [
        (destination, source, generator.integers(0, 5), generator.integers(1, most))
        for destination in range(CP)
        for source in range(CP)
        if source != destination and generator.random() < 0.7
    ]
    destination, source, start, length = np.array(pieces).T.reshape(4, -1)
    return ExchangePlan.from_pieces(CP, source, destination, start, length)


class _SharedFile:
    """Stands in for a symmetric buffer: one file a rank, mapped by all."""

    made = 0

    def __init__(self, size, group, device):
        self.size, self.group = size, group
        name = [f"{os.getppid()}_{_SharedFile.made}"]
        _SharedFile.made += 1
        dist.broadcast_object_list(name, 0, group=group)
        folder = tempfile.gettempdir()
        self.maps = [
            torch.from_file(
                f"{folder}/tree_cp_peer_{name[0]}_{rank}", shared=True, size=size, dtype=torch.uint8
            )
            for rank in range(dist.get_world_size(group))
        ]
        self.path = f"{folder}/tree_cp_peer_{name[0]}_{dist.get_rank(group)}"

    def view(self, rank, shape, dtype, offset=0):
        width = torch.empty(0, dtype=dtype).element_size()
        count = int(np.prod(shape))
        part = self.maps[rank][offset * width : (offset + count) * width]
        return part.view(dtype).view(*shape)

    def barrier(self):
        dist.barrier(group=self.group)
        if os.path.exists(self.path):
            os.unlink(self.path)  # mapped by now


def _compare(rank, world_size):
    transport._SymmetricBuffer = _SharedFile
    transport._GRANULE = 64  # so that buffers have to grow
    group, device = dist.group.WORLD, torch.device("cpu")
    peer = transport.PeerTransport(group, device)
    moved = 0
    for seed in range(12):
        wave = _wave(seed, most=4 + 3 * seed)
        one = RangeExchange(wave.rank(rank), group, device)
        two = RangeExchange(wave.rank(rank), group, device, transport=peer, counts=wave.counts)
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        x = torch.randn(64, 2, 3, generator=torch.Generator().manual_seed(rank + 7 * seed))
        x = x.to(dtype)
        received, by_peer = one.start(x).wait(), two.start(x).wait()
        assert torch.equal(received, by_peer), seed
        returned = one.start_transposed(received).wait()
        assert torch.equal(returned, two.start_transposed(received).wait()), seed
        moved += received.shape[0]
    return moved, peer._slots[0].size


def test_peer_copies_are_the_all_to_all():
    results = run_ranks(CP, _compare, timeout=60)
    assert all(moved > 20 and size > 64 for moved, size in results)
    assert len({size for _, size in results}) == 1


def test_a_route_back_is_the_route_of_the_transposed_counts():
    counts = np.array([[0, 2, 5], [1, 0, 0], [4, 3, 0]])
    route = transport.Route.of(counts, 2)
    assert route == transport.Route((4, 3, 0), (5, 0, 0), (2, 1, 7), 7)
    back = transport.Route.of(counts.T, 2)
    assert back == transport.Route((5, 0, 0), (4, 3, 0), (1, 2, 5), 5)


def test_a_transport_needs_all_counts():
    with pytest.raises(ValueError, match="needs the process group and the counts of all ranks"):
        RangeExchange(_wave(0, 4).rank(0), "group", torch.device("cpu"), transport=object())
