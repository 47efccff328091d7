"""A run killed between two saves, resumed, is exactly the unbroken run, its data included."""

from __future__ import annotations

import json
import time

import pytest

from .launch import ROOT, TINY_MODEL, command, kill, start, train, training_flags

EXACT = ("loss_sum", "count", "loss", "grad_norm", "rows", "stored_tokens", "consumed_samples")


@pytest.mark.timeout(600)
def test_killed_run_resumes_exactly(tmp_path):
    data = f"--tree-data {ROOT}/examples/rollouts.jsonl --tree-tokenizer bytes"
    argv = [
        *TINY_MODEL,
        *data.split(),
        *"--tree-max-tokens 2048 --context-parallel-size 2 --optimizer adam".split(),
        *training_flags(10, 2, 1e-3, save_interval=5, ckpt_format="torch_dist"),
    ]
    unbroken = train("tree", 2, tmp_path / "unbroken", argv)

    folder = tmp_path / "killed"
    saving = [*argv, "--save", str(folder / "checkpoint")]
    process = start(command("tree", 2, folder, saving), folder)
    metrics, tracker = folder / "metrics.jsonl", folder / "checkpoint"
    deadline = time.monotonic() + 200
    # Iteration 6 is under way once 5 is recorded and its checkpoint is complete.
    while not (tracker / "latest_checkpointed_iteration.txt").exists():
        assert process.poll() is None and time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.02)
    kill(process)
    before = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert 5 <= len(before) < 10, "the run was not killed in the middle"

    resumed = train("tree", 2, tmp_path / "resumed", [*saving, "--load", str(tracker)])
    assert [r["iteration"] for r in resumed.records()] == [6, 7, 8, 9, 10]
    for ours, theirs in zip(resumed.records(), unbroken.records()[5:], strict=True):
        assert {k: ours[k] for k in EXACT} == {k: theirs[k] for k in EXACT}
