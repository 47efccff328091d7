"""`tree-cp calibrate` and `tree-cp predict` on CPU ranks, from measuring to evidence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tree_cp.bench.evidence import read_evidence
from megatron_tree_cp.cli import main
from megatron_tree_cp.plan.profile import load_profile

ROOT = Path(__file__).parents[2]
TINY = "--device cpu --dtype float32 --heads 4/2/16 --impl tiled --repeats 2".split()
WIDTH = "--quick --hidden-size 32 --ffn-size 64 --gdn".split()
GDN = {"gdn_conv_passes", "gdn_token_bytes_per_ms", "gdn_step_ms", "gdn_layer_ms"}


def torchrun(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "megatron_tree_cp.cli", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(400)
def test_calibrate_on_two_ranks(tmp_path):
    path, samples = tmp_path / "p.json", tmp_path / "s.json"
    out = torchrun(
        *("calibrate", "--cp", "1", "2", "--out", str(path), "--samples", str(samples)),
        *("--commit", "abc", *TINY, *WIDTH),
    )
    assert "exchange_cp2" in out and "not measured, defaults kept" in out
    document = json.loads(path.read_text())
    profile = load_profile(path)
    assert document["version"] == 1 and document["commit"] == "abc"
    assert document["device"] == "CPU" and "--quick" in document["command"]
    assert [size for size, _, _ in profile.exchange_sizes] == [2]
    assert not (GDN | {"gdn_compose_ms"}) & set(document["unmeasured"])
    unmeasured = document["unmeasured"]
    assert profile.exchange_latency_ms > 0 and "network_latency_ms" in unmeasured
    assert all(c["held_out_error"]["median"] >= 0 for c in document["components"])

    # A run that was cut short goes on with what is missing.
    written = json.loads(samples.read_text())
    held = written["samples"]
    cut = {name: held[name] for name in list(held)[:3]}
    samples.write_text(json.dumps({**written, "samples": cut}))
    options = ["--samples", str(samples), "--resume", "--out", str(path), *TINY, *WIDTH]
    torchrun("calibrate", "--cp", "1", "2", "--commit", "abc", *options)
    resumed = json.loads(samples.read_text())["samples"]
    assert list(resumed) == list(held) and {n: resumed[n] for n in cut} == cut
    assert resumed["exchange_cp2"] != held["exchange_cp2"], "measured again"
    profile = load_profile(path)

    # The same samples, fitted again without a device, give the same coefficients.
    again = tmp_path / "again.json"
    options = ["--from-samples", str(samples), "--out", str(again), *TINY, *WIDTH]
    assert main(["calibrate", *options]) == 0
    assert load_profile(again) == profile

    # What one process cannot measure comes from a former profile, which it names.
    alone = tmp_path / "alone.json"
    options = ["--out", str(alone), "--base", str(path), "--name", profile.name, *TINY, *WIDTH]
    assert main(["calibrate", *options]) == 0
    document = json.loads(alone.read_text())
    kept, fresh = load_profile(alone), {"memory_bytes_per_ms", "token_flops_per_ms"}
    assert kept.exchange_sizes == profile.exchange_sizes
    # So small on a CPU, some cost may vanish from one fit and not from the other.
    assert {"network_latency_ms"} <= set(document["unmeasured"]) <= set(unmeasured)
    assert all(getattr(kept, name) != getattr(profile, name) for name in fresh)
    carried = {c["name"]: c["from"]["commit"] for c in document["components"] if "from" in c}
    assert carried == dict.fromkeys(("exchange_cp2", "contention_cp2", "gdn_chained_cp2"), "abc")


@pytest.mark.timeout(240)
def test_predict_on_two_ranks(tmp_path):
    path, evidence = tmp_path / "p.json", tmp_path / "e.json"
    path.write_text(json.dumps({"name": "mine", "forward_hidden_factor": 1.0}))
    torchrun(
        *("predict", "--preset", "short", "--tokens", "256", "--cp", "1", "2", "--rows", "1"),
        *("--profile", str(path), "--evidence", str(evidence), *TINY),
    )
    one, two = read_evidence(evidence)
    assert (one.what, one.cp, two.cp) == ("planner", 1, 2)
    assert "profile mine" in two.variant
    assert len(one.rows[0]["plans"]) == 1 and len(two.rows[0]["plans"]) >= 8
    assert two.metrics["time_error_percent"]["median"] > 0
    assert two.metrics["regret_percent"]["worst"] >= 0 and "memory_error_percent" not in two.metrics


@pytest.mark.timeout(240)
def test_predict_a_recurrent_layer(tmp_path):
    evidence = tmp_path / "e.json"
    torchrun(
        *("predict", "--operator", "gdn", "--gdn-heads", "2/4/16/16", "--preset", "short"),
        *("--tokens", "256", "--cp", "2", "--rows", "1", "--evidence", str(evidence)),
        *"--device cpu --dtype float32 --repeats 2".split(),
    )
    (record,) = read_evidence(evidence)
    assert record.variant.startswith("gdn 2/4/16/16") and "--operator gdn" in record.command
    plans = record.rows[0]["plans"]
    names = [plan["name"] for plan in plans]
    assert names[0] == "contiguous" and {"folded", "random 0", "whole families"} <= set(names)
    assert all(
        plan["measured_ms"] > plan["measured_forward_ms"] for plan in record.rows[0]["plans"]
    )


@pytest.mark.timeout(120)
def test_calibrate_in_one_process(tmp_path, capsys):
    path = tmp_path / "p.json"
    assert main(["calibrate", "--out", str(path), "--name", "mine", *TINY, *WIDTH]) == 0
    out = capsys.readouterr().out
    assert "attention_backward" in out and "exchange_latency_ms" in out
    assert load_profile(path).name == "mine"
    unmeasured = json.loads(path.read_text())["unmeasured"]
    assert "gdn_compose_ms" in unmeasured and not GDN & set(unmeasured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "--out", "p.json", "--cp", "2", "--device", "cpu"], "needs as many"),
        (["calibrate", "--out", "p.json", "--repeats", "0"], "--repeats must be at least 1"),
        (["calibrate", "--out", "p.json", "--heads", "8"], "write it as Q/KV/D"),
        (["calibrate", "--out", "p.json", "--resume"], "--resume goes with --samples"),
        (["calibrate", "--out", "p.json", "--device", "cpu", "--from-samples", "no"], "not a file"),
        (["predict", "--preset", "deep", "--rows", "0"], "--rows and --repeats"),
        (["predict", "--preset", "deep", "--gdn-heads", "1/2"], "write it as K/V/DK/DV"),
        (
            ["predict", "--preset", "deep", "--operator", "gdn", "--window", "9"],
            "--window is of attention",
        ),
    ],
)
def test_refusals(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "p.json").exists()
