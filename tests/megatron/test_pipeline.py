"""Shapes between pipeline stages follow from the schedule's order; nothing is sent to learn them.

That losses and gradients are the same is for `tests/topology`, which also counts shape exchanges.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

SIZES = [6, 10, 4, 8]


def communicator(monkeypatch, rank: int, chunks: int = 1, sequence_parallel: bool = False):
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron_tree_cp.megatron.pipeline import PlannedP2PCommunicator

    def init(self, group, config):
        self.config = config

    # Megatron's own needs process groups; two stages are enough here.
    monkeypatch.setattr(P2PCommunicator, "__init__", init)
    monkeypatch.setattr(P2PCommunicator, "is_pp_first_stage", rank == 0)
    monkeypatch.setattr(P2PCommunicator, "is_pp_last_stage", rank == 1)
    config = SimpleNamespace(
        microbatch_group_size_per_vp_stage=2,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=2,
        hidden_size=5,
    )
    return PlannedP2PCommunicator(None, config, SIZES.__getitem__, len(SIZES), chunks)


def receive(one, way: str, count: int) -> list[int]:
    """Token counts of the next ``count`` tensors from the stage before or after."""
    flags = (True, False) if way == "forward" else (False, True)
    shapes = [one._communicate_shapes(None, None, *flags) for _ in range(count)]
    return [pair[0 if way == "forward" else 1][0] for pair in shapes]


def test_one_chunk(monkeypatch):
    last = communicator(monkeypatch, rank=1)
    assert receive(last, "forward", 4) == SIZES
    first = communicator(monkeypatch, rank=0)
    for size in SIZES:
        first._communicate_shapes(torch.empty(size, 1, 5), None, False, False)
    assert receive(first, "backward", 4) == SIZES


def test_chunks_alternate_in_groups_and_ends_skip_one(monkeypatch):
    """Two chunks in groups of two: microbatches 0 1 0 1 2 3 2 3; the wrap carries one chunk."""
    every = [SIZES[m] for m in (0, 1, 0, 1, 2, 3, 2, 3)]
    last = communicator(monkeypatch, rank=1, chunks=2)
    assert receive(last, "forward", 8) == every
    assert receive(last, "backward", 4) == SIZES
    first = communicator(monkeypatch, rank=0, chunks=2)
    assert receive(first, "forward", 4) == SIZES
    assert receive(first, "backward", 8) == every


def test_sequence_parallel_parts(monkeypatch):
    one = communicator(monkeypatch, rank=1, sequence_parallel=True)
    assert one._communicate_shapes(None, None, True, False) == ((3, 1, 5), None)


def test_a_tensor_that_is_not_the_plans_does_not_leave(monkeypatch):
    one = communicator(monkeypatch, rank=1)
    receive(one, "forward", 1)
    with pytest.raises(ValueError, match=r"microbatch 0: tensor is \[7, 1, 5\].*\[6, 1, 5\]"):
        one._communicate_shapes(None, torch.empty(7, 1, 5), False, False)
