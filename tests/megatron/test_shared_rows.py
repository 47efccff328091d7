"""One rank plans for all: every rank gets its rows, their end, and what went wrong."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from megatron_tree_cp.comm.agreement import Agreement, AgreementError
from megatron_tree_cp.megatron.rows import PlannedRow, RowFailure
from megatron_tree_cp.megatron.shared_rows import SharedRows
from megatron_tree_cp.megatron.stream import RowStream
from tests.distributed import run_ranks


def row(sample: int) -> PlannedRow:
    plan = SimpleNamespace(digest="a" * 64)
    return PlannedRow(sample, None, np.arange(sample), plan, "f" * 64, "", 3, 10.0)


def source():
    yield row(0)
    yield RowFailure(1, "bad", bad_input=True)
    yield row(3)


def broken():
    yield row(0)
    raise OSError("the planner is gone")


def _take(rank, world_size, make):
    rows = SharedRows(make() if rank == 0 else None, dist.group.WORLD)
    found = []
    while True:
        try:
            item = next(rows)
        except StopIteration:
            return [*found, "end"]
        except Exception as error:
            return [*found, f"{type(error).__name__}: {error}"]
        if isinstance(item, RowFailure):
            found.append(item.message)
        else:
            found.append((item.sample, item.counts.tolist(), item.planning_cpu_ms))


def test_every_rank_gets_the_rows_and_their_end():
    first, *others = run_ranks(3, _take, source, timeout=60)
    assert first == [(0, [], 10.0), "bad", (3, [0, 1, 2], 10.0), "end"]
    for found in others:  # planning is counted once
        assert found == [(0, [], 0.0), "bad", (3, [0, 1, 2], 0.0), "end"]


def test_what_stops_the_planner_is_heard_by_all():
    first, *others = run_ranks(3, _take, broken, timeout=60)
    assert first[-1] == "OSError: the planner is gone"
    for found in others:
        assert found[-1].startswith("RuntimeError: rank 0, which plans for this node: OSError: the")


def _stream(rank, world_size):
    group = dist.new_group(backend="gloo")
    rows = SharedRows(broken() if rank == 0 else None, group)
    stream = RowStream(rows, Agreement(dist.group.WORLD), lambda planned: planned.sample)
    stream.consumer()
    first = stream.get(0)
    with pytest.raises(AgreementError, match="the planner is gone"):
        stream.get(0)
    return first


def test_a_stream_of_shared_rows_raises_on_every_rank():
    assert run_ranks(2, _stream, timeout=60) == [0, 0]


def _misplaced(rank, world_size):
    with pytest.raises(ValueError, match="the first rank of the group, and no other"):
        SharedRows(source() if rank == 1 else None, dist.group.WORLD)


def test_the_source_belongs_to_the_first_rank():
    run_ranks(2, _misplaced, timeout=60)
