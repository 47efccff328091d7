"""Numbers of an iteration, reduced over ranks and nodes."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from megatron_tree_cp.megatron.batch import RowStatistics
from megatron_tree_cp.megatron.metrics import IterationRecorder
from megatron_tree_cp.megatron.stream import Preparation
from tests.distributed import run_ranks


def _finish(recorder, rank, iteration):
    return recorder.finish(
        iteration=iteration,
        consumed_samples=iteration,
        grad_norm=1.0,
        learning_rate=1.0,
        skipped=0,
        preparation=Preparation(waited_ms=10.0 * rank, planning_cpu_ms=[1.0, 2.0, 4.0, 8.0][rank]),
        chunks=1,
        group=dist.group.WORLD,
        cp_size=1,
        device=torch.device("cpu"),
    )


def _rows_of_one_iteration(rank, world_size):
    recorder = IterationRecorder()
    for number in range(2):
        seen = RowStatistics(10, 20, 1, 5.0, predicted_ms=3.0 + rank, islands=number == 0)
        recorder.add_row(seen)
    record = _finish(recorder, rank, 1)
    return record.rows, record.island_rows, record.predicted_ms


def test_rows_add_up_and_the_longest_replica_counts():
    for found in run_ranks(2, _rows_of_one_iteration, timeout=60):
        assert found == (4, 2, 8.0)


def _two_iterations(rank, world_size, nodes, folder):
    path = folder / f"{rank}.jsonl"
    recorder = IterationRecorder(path, nodes=nodes)
    records = [_finish(recorder, rank, iteration) for iteration in (1, 2)]
    for record in records:
        recorder.write(record)
    written = [json.loads(line)["planning_cpu_ms"] for line in path.read_text().splitlines()]
    return written, records[0].exposed_preparation_ms, recorder.summary()


@pytest.mark.parametrize(("nodes", "planning"), [(1, 15.0), (2, 12.0), (4, 8.0)])
def test_planning_is_summed_over_the_ranks_of_the_node_with_most(nodes, planning, tmp_path):
    for written, waited, summary in run_ranks(4, _two_iterations, nodes, tmp_path, timeout=60):
        assert written == [planning, planning] and waited == 30.0
        assert f"planning of a node (CPU s): {2 * planning / 1e3:.2f}" in summary
        assert "2 iterations" in summary and summary.endswith("exposed preparation (s): 0.060")
