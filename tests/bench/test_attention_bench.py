"""The attention benchmark on CPU ranks: it checks before it times, and writes evidence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tree_cp.bench.evidence import Evidence, read_evidence, spread
from megatron_tree_cp.tree.errors import InputError

ROOT = Path(__file__).parents[2]


def bench(path: Path, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "megatron_tree_cp.cli", "bench", "attention"]
    command += "--device cpu --dtype float32 --heads 4/2/16 --warmup 1 --rows 2".split()
    command += ["--exposed-trials", "2", "--tokens", "512", "--evidence", str(path), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.timeout(240)
def test_measures_and_writes_evidence(tmp_path):
    path = tmp_path / "evidence.json"
    done = bench(path, "--preset", "short", "--cp", "1", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    records = read_evidence(path)
    assert [(r.preset, r.cp, len(r.rows)) for r in records] == [("short", 1, 2), ("short", 2, 2)]
    for record in records:
        assert record.metrics["fwd_bwd_ms"]["median"] > 0
        assert record.metrics["check_error"]["worst"] < 1e-6
    assert "exposed_exchange_ms" in records[1].metrics
    assert "short" in done.stdout


def test_a_gradient_that_is_nan_times_nothing(monkeypatch, capsys):
    import torch

    from megatron_tree_cp import ops
    from megatron_tree_cp.cli import main

    right = ops.tree_attention

    def broken(q, k, v, context, impl, **more):
        if impl == "auto":  # the kernel on trial; what it is held to stays
            v.register_hook(lambda grad: torch.full_like(grad, float("nan")))
        return right(q, k, v, context, impl=impl, **more)

    monkeypatch.setattr(ops, "tree_attention", broken, raising=False)
    words = "bench attention --device cpu --dtype float32 --heads 4/2/16 --preset short"
    assert main([*words.split(), *"--tokens 512 --warmup 0 --rows 1".split()]) == 2
    assert "error nan > " in capsys.readouterr().err


def test_spread_and_refusals(tmp_path):
    assert spread([1.0, 2.0, 9.0]) == {"median": 2.0, "p95": 9.0, "worst": 9.0}
    assert spread([1.0, 2.0, 9.0], higher_is_better=True)["worst"] == 1.0
    path = tmp_path / "bad.json"
    path.write_text(json.dumps([{"what": "speed"}]))
    with pytest.raises(InputError, match="not an evidence file"):
        read_evidence(path)
    with pytest.raises(InputError, match="known: attention"):
        Evidence("speed", "p", 1, {}, "h", {}, "c", "x", "d")
