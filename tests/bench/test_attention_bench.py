"""The attention benchmark on CPU ranks: it checks before it times, and writes evidence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_tree_cp import ops
from megatron_tree_cp.bench.attention import Shape
from megatron_tree_cp.bench.evidence import Evidence, read_evidence, spread
from megatron_tree_cp.bench.one_call import one_call
from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.attention.stages import attention_stages
from megatron_tree_cp.plan import plan_row
from megatron_tree_cp.tree.errors import InputError
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.distributed import run_ranks

ROOT = Path(__file__).parents[2]


def bench(path: Path, *flags: str, ranks: int = 2) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", f"{ranks}", "-m", "megatron_tree_cp.cli", "bench", "attention"]
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
        assert record.rows[0]["predicted_ms"] > 0
    assert "exposed_exchange_ms" in records[1].metrics
    assert "over_one_call_ms" in records[1].metrics
    assert "short" in done.stdout


@pytest.mark.timeout(240)
def test_filled_ranks_all_measure_with_the_profile_given(tmp_path):
    """Three ranks are no groups of two; of four, two groups work at once."""
    path, profile = tmp_path / "evidence.json", tmp_path / "slow.json"
    profile.write_text(
        '{"name": "slow", "forward_flops_per_ms": 1.0, "backward_flops_per_ms": 1.0}'
    )
    flags = ("--preset", "short", "--cp", "2", "--fill", "--profile", str(profile))
    refused = bench(path, *flags, ranks=3)
    assert refused.returncode and "--fill: 3 ranks do not make groups of 2" in refused.stderr
    assert not path.exists()
    done = bench(path, *flags, ranks=4)
    assert done.returncode == 0, done.stderr[-3000:]
    (record,) = read_evidence(path)
    assert record.variant.endswith(" filled")
    assert "--fill --tokens 512 --profile slow.json" in record.command
    pairs = preset_tree("short", 2, 1, 512).visible_pairs(None)
    assert record.rows[0]["predicted_ms"] > 14 * pairs / 2 * 4 * 16 * 0.9


def _one_call(rank, world_size):
    import torch.distributed as dist

    tree = PackedTree((200, 100, 150, 1, 149), (-1, 0, 0, 2, 2))
    shape = Shape(4, 2, 16, torch.float32)
    plan = plan_row(tree, world_size, shape.model(), waves=2)
    context = TreeContext(plan, dist.group.WORLD, torch.device("cpu"))
    torch.manual_seed(rank)
    dout, q, k, v = (torch.randn(context.num_tokens, heads, 16) for heads in (4, 4, 2, 2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ops.tree_attention(*leaves, context)
    (dq,) = torch.autograd.grad(out, leaves[:1], dout)
    received = [e.start(k, v).wait() for e in attention_stages(context, None).exchanges]
    implementation = shape.implementation(context.device)
    forward, (_, keys, values), grad = one_call(context, None, implementation, (dout, q, k, v))
    rows = torch.cat(received)
    keys = torch.cat([rows[:, :32].unflatten(1, (2, 16)), keys[len(rows) :]])
    values = torch.cat([rows[:, 32:].unflatten(1, (2, 16)), values[len(rows) :]])
    (again,) = torch.autograd.grad(forward(leaves[0], keys, values), leaves[:1], grad)
    return len(rows), torch.dist(forward(q, keys, values), out).item(), torch.dist(again, dq).item()


def test_one_call_makes_the_same_attention():
    results = run_ranks(2, _one_call, timeout=100)
    assert any(received for received, _, _ in results)
    for _, out, dq in results:
        assert out < 1e-4 and dq < 1e-4


def test_a_gradient_that_is_nan_times_nothing(monkeypatch, capsys):
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
