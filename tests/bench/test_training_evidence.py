"""Evidence of training runs: what is compared, and for how many steps runs agree."""

from __future__ import annotations

import json

import pytest

from megatron_tree_cp.bench import training


def run(factors, norm=2.0):
    return [
        {
            "loss": 3.0 * factor,
            "grad_norm": norm,
            "stored_tokens": 1000,
            "elapsed_ms": 500.0,
            "exposed_preparation_ms": 1.0,
            "peak_memory_gib": 7.0,
        }
        for factor in factors
    ]


@pytest.mark.parametrize(
    ("ours", "steps"),
    [
        (run([1.0, 1.004, 0.996]), 3),
        (run([1.0, 1.006, 1.0]), 1),  # a later step that agrees again does not count
        (run([1.0, 1.0, 1.0], norm=2.03), 0),
    ],
)
def test_steps_agree_until_the_first_that_does_not(ours, steps):
    assert training.agreeing_steps(ours, run([1.0, 1.0, 1.0])) == steps


def test_runs_from_other_weights_are_not_compared(tmp_path):
    for name, factors in (("a", [1.0, 1.0]), ("b", [1.0, 1.2]), ("c", [5.0, 5.0])):
        lines = "\n".join(json.dumps(record) for record in run(factors))
        (tmp_path / f"{name}.jsonl").write_text(lines)
    out = tmp_path / "train.json"
    runs = [("--run", f"{cp}:{v}:{tmp_path / v}.jsonl") for cp, v in ((1, "a"), (2, "b"), (1, "c"))]
    fixed = ["--hardware", "H", "--commit", "c", "--command", "x", "--skip", "1"]
    options = ["--out", str(out), *fixed, "--against-first", "--own-weights", "c"]
    assert training.main([*options, *(word for pair in runs for word in pair)]) == 0
    first, second, third = (record["metrics"] for record in json.loads(out.read_text()))
    assert first["agreeing_steps"]["median"] == 2 and second["agreeing_steps"]["median"] == 1
    assert second["loss_relative_difference"]["worst"] == pytest.approx(0.2)
    assert not any("difference" in name or "agree" in name for name in third)
    assert third["stored_tokens_per_s"]["median"] == 2000.0
