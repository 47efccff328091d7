"""Rows without a trained token: the run goes on, and every gradient is exactly 0."""

import pytest

from . import rollouts
from .launch import TINY_MODEL, train, training_flags


@pytest.mark.timeout(300)
def test_nothing_trained(tmp_path):
    # System and user turns only; one text sits on one rank, so that the other holds padding alone.
    records = [{"messages": [{"role": "user", "content": "hello"}]}]
    path = rollouts.write(tmp_path / "data.jsonl", records)
    flags = f"--tree-data {path} --tree-max-tokens 64 --context-parallel-size 2 --clip-grad 1"
    argv = [*TINY_MODEL, *flags.split(), *training_flags(2, 1, 1e-3)]
    run = train("tree", 2, tmp_path / "run", argv, gradients="1,2", timeout=200)
    for record in run.records():
        assert record["count"] == 0 and record["loss_sum"] == 0 and record["grad_norm"] == 0
        assert record["stored_tokens"] > 0 and record["skipped"] == 0
    for iteration in (1, 2):
        for rank in run.tensors("gradients", iteration):
            assert rank and all((g == 0).all() for g in rank.values())
