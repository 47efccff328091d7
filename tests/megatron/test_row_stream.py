"""Rows are built by a thread, agreed on by the training loop, and errors reach every rank."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_tree_cp.comm.agreement import Agreement, AgreementError
from megatron_tree_cp.megatron.rows import PlannedRow, RowFailure
from megatron_tree_cp.megatron.stream import RowStream
from megatron_tree_cp.tree.errors import InputError
from tests.distributed import run_ranks


def row(sample: int, digest: str = "a" * 64) -> PlannedRow:
    """A planned row whose parts nobody looks into."""
    plan = SimpleNamespace(digest=digest)
    return PlannedRow(sample, None, np.zeros(1), plan, "f" * 64, "", 3, 10.0)


def stream_of(source, build, agreement=None) -> RowStream:
    stream = RowStream(iter(source), agreement or Agreement(None), build)
    stream.consumer()
    return stream


def number(planned: PlannedRow) -> int:
    return planned.sample


def test_batches_come_in_order_and_end_after_the_last():
    stream = stream_of([row(0), row(1), row(2)], number)
    assert [stream.get(0) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            stream.get(0)


@pytest.mark.timeout(30)
def test_the_next_batch_is_built_while_the_loop_computes():
    built = threading.Semaphore(0)
    threads = set()

    def build(planned):
        time.sleep(0.2)
        threads.add(threading.current_thread())
        built.release()
        return planned.sample

    stream = stream_of((row(n) for n in range(9)), build)
    assert stream.get(0) == 0
    for _ in range(3):  # row 0, and the two that may be ready behind it
        assert built.acquire(timeout=5)
    assert not built.acquire(timeout=0.5), "more rows ahead than there is room for"
    stream.take_preparation()
    assert stream.get(0) == 1 and stream.get(0) == 2
    spent = stream.take_preparation()
    assert spent.waited_ms < 100, "the loop waited for what was ready"
    assert spent.planning_cpu_ms == 20.0
    assert threading.current_thread() not in threads


@pytest.mark.timeout(30)
def test_a_late_row_is_waited_for_when_it_is_needed_and_not_before():
    late = threading.Event()

    def source():
        yield row(0)
        late.wait()
        yield row(1)

    stream = stream_of(source(), number)
    assert stream.get(0) == 0  # would hang here if row 1 were wanted already
    threading.Timer(0.3, late.set).start()
    stream.take_preparation()
    assert stream.get(0) == 1
    assert stream.take_preparation().waited_ms > 100


def test_bad_input_is_told_as_such_at_its_row():
    stream = stream_of([row(0), RowFailure(1, "rollouts.jsonl line 7", bad_input=True)], number)
    assert stream.get(0) == 0
    for _ in range(2):
        with pytest.raises(InputError, match="line 7"):
            stream.get(0)


def test_an_error_of_the_build_names_its_row_and_keeps_its_cause():
    def build(planned):
        raise MemoryError("no room")

    with pytest.raises(AgreementError, match="row 4 on its device: MemoryError: no room") as caught:
        stream_of([row(4)], build).get(0)
    assert isinstance(caught.value.__cause__, MemoryError)


def _one_rank_is_late(rank, world_size):
    """Rank 1's rows come late or not at all; returns what each rank got."""

    def source():
        for sample in range(4):
            if rank == 1:
                time.sleep(0.1)
            if rank == 1 and sample == 3:
                raise RuntimeError("planner process 7 ended with exit code -9")
            yield row(sample)

    stream = stream_of(source(), number, Agreement(dist.group.WORLD))
    got = [stream.get(0) for _ in range(3)]
    with pytest.raises(AgreementError) as caught:
        stream.get(0)
    return got, str(caught.value)


def test_ranks_with_late_rows_agree_and_all_hear_of_a_dead_planner():
    told = "rank 1: data worker failed: planner process 7 ended with exit code -9"
    assert run_ranks(2, _one_rank_is_late, timeout=60) == [([0, 1, 2], told)] * 2


def _other_plan(rank, world_size):
    rows = [row(0), row(1, "b" * 64 if rank else "a" * 64)]
    stream = stream_of(rows, number, Agreement(dist.group.WORLD))
    assert stream.get(0) == 0
    with pytest.raises(AgreementError, match="ranks hold different plans"):
        stream.get(0)


def test_a_plan_of_its_own_is_refused_on_every_rank():
    run_ranks(2, _other_plan, timeout=60)


@pytest.mark.gpu
def test_the_thread_works_on_the_stream_of_the_loop_and_others_wait():
    device = torch.device("cuda", torch.cuda.current_device())
    loop, other = torch.cuda.Stream(device), torch.cuda.Stream(device)
    used = []

    def build(planned):
        used.append(torch.cuda.current_stream())
        torch.cuda._sleep(100_000_000)
        return torch.full((1 << 20,), planned.sample, device=device)

    with torch.cuda.stream(loop):
        stream = RowStream(iter([row(5), row(6)]), Agreement(None), build, device=device)
        stream.consumer()
        assert int(stream.get(0).sum()) == 5 << 20
    with torch.cuda.stream(other):
        assert int(stream.get(0).sum()) == 6 << 20
    assert used == [loop, loop]
