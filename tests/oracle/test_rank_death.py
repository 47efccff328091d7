"""A rank that is killed in the middle of a step ends the job soon, by name, and nothing stays."""

from __future__ import annotations

import json
import signal
import time

import psutil
import pytest

from .launch import ROOT, TINY_MODEL, command, finish, start, train, training_flags

LIMIT = 120  # seconds
EXACT = ("loss_sum", "count", "grad_norm", "rows", "stored_tokens", "consumed_samples")


def flags(iterations: int) -> list[str]:
    data = f"--tree-data {ROOT}/examples/rollouts.jsonl --tree-tokenizer bytes"
    return [
        *TINY_MODEL,
        *data.split(),
        *"--tree-max-tokens 2048 --context-parallel-size 2 --optimizer adam".split(),
        *training_flags(iterations, 2, 1e-3, save_interval=2, ckpt_format="torch_dist"),
    ]


def rank_of(process: psutil.Process) -> str | None:
    """RANK of a training process (its data workers inherit it; their parent is that process)."""
    try:
        return process.environ().get("RANK")
    except psutil.Error:
        return None


def data_worker(rank: psutil.Process) -> psutil.Process:
    """A planner process of a rank: a child of the rank's fork server."""
    (worker,) = [w for server in rank.children() for w in server.children()]
    return worker


def kill_in_a_step(folder, argv: list[str], rank: int, after: int, choose=lambda found: found):
    """Start two ranks and SIGKILL one, or what `choose` finds of it, after some iterations.

    Returns the finished job, the seconds it took to end, and all its processes.
    """
    process = start(command("tree", 2, folder, argv), folder)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or len(metrics.read_text().splitlines()) < after:
        assert process.poll() is None and time.monotonic() < deadline, "no iterations"
        time.sleep(0.02)
    ranks = psutil.Process(process.pid).children()
    everything = psutil.Process(process.pid).children(recursive=True)
    (victim,) = [child for child in ranks if rank_of(child) == str(rank)]
    choose(victim).send_signal(signal.SIGKILL)
    killed = time.monotonic()
    done = finish(process, folder, LIMIT)
    return done, time.monotonic() - killed, everything


@pytest.mark.timeout(500)
def test_killed_rank_ends_the_job_by_name(tmp_path):
    done, seconds, everything = kill_in_a_step(tmp_path, flags(1000), rank=1, after=2)
    print(f"the job ended {seconds:.1f} s after rank 1 was killed")
    assert done.returncode != 0 and seconds < LIMIT
    # (After a save, one process of Megatron's own checkpoint writer would stay.)
    _, alive = psutil.wait_procs(everything, timeout=30)
    assert not alive, f"still running: {alive}"
    cause = done.output.split("Root Cause")[-1]
    assert "rank      : 1 (local_rank: 1)" in cause and "Signal 9 (SIGKILL)" in cause


@pytest.mark.parametrize(
    ("rank", "planners"), [(1, "rank"), (0, "node")], ids=["a rank's planner", "a node's planner"]
)
@pytest.mark.timeout(500)
def test_killed_data_worker_ends_every_rank_with_its_reason(rank, planners, tmp_path):
    argv = [*flags(1000), "--tree-planners", planners]
    done, seconds, _ = kill_in_a_step(tmp_path, argv, rank, after=2, choose=data_worker)
    print(f"the job ended {seconds:.1f} s after a data worker of rank {rank} was killed")
    assert done.returncode != 0 and seconds < LIMIT
    for hearer in (0, 1):
        told = [line for line in done.output.splitlines() if line.startswith(f"[rank{hearer}]")]
        assert any("data worker failed" in line for line in told), f"rank {hearer}:\n{done.output}"


@pytest.mark.timeout(500)
def test_one_planner_a_node_trains_as_one_a_rank(tmp_path):
    runs = {
        who: train("tree", 2, tmp_path / who, [*flags(3), "--tree-planners", who])
        for who in ("rank", "node")
    }
    assert len(runs["node"].records()) == 3
    for ours, theirs in zip(*(run.records() for run in runs.values()), strict=True):
        assert {k: ours[k] for k in EXACT} == {k: theirs[k] for k in EXACT}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_job_of_a_killed_rank_resumes_exactly(tmp_path):
    saving = [*flags(8), "--save", str(tmp_path / "ckpt")]
    unbroken = train("tree", 2, tmp_path / "unbroken", flags(8))
    kill_in_a_step(tmp_path / "killed", saving, rank=0, after=3)
    lines = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    assert 3 <= len([json.loads(line) for line in lines]) < 8, "not killed in the middle"
    tracker = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    saved = int(tracker.read_text())
    resumed = train("tree", 2, tmp_path / "resumed", [*saving, "--load", str(tmp_path / "ckpt")])
    assert [r["iteration"] for r in resumed.records()] == list(range(saved + 1, 9))
    for ours, theirs in zip(resumed.records(), unbroken.records()[saved:], strict=True):
        assert {k: ours[k] for k in EXACT} == {k: theirs[k] for k in EXACT}
