"""`tree-cp`: output for good input, one line and exit code 2 for bad input."""

import json
from pathlib import Path

import pytest

from megatron_tree_cp import __version__
from megatron_tree_cp.cli import main


@pytest.fixture
def rollouts(tmp_path: Path) -> str:
    shared = [1, 2, 3, 4]
    records = [{"tokens": shared + [tail] * 6, "loss_mask": [0] * 4 + [1] * 6} for tail in (5, 6)]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def test_pack_prints_the_summary(rollouts, capsys):
    assert main(["pack", rollouts, "--max-tokens", "64"]) == 0
    assert "2" in capsys.readouterr().out


def test_plan_prints_every_rank(rollouts, capsys):
    arguments = ["--max-tokens", "64", "--cp-size", "2", "--windows", "3", "--waves", "1"]
    assert main(["plan", rollouts, *arguments]) == 0
    out = capsys.readouterr().out
    assert "row 0: 15 tokens" in out  # 3 shared, then 6 twice: the trie forks one token early
    assert "digest" in out


def test_plan_of_a_preset_as_json(capsys, tmp_path):
    profile = tmp_path / "slow.json"
    profile.write_text(json.dumps({"name": "slow", "exchange_bytes_per_ms": 1e6}))
    arguments = ["plan", "--preset", "dominant", "--tokens", "60000", "--cp", "4", "--json"]
    assert main(arguments) == 0
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["row"] == "dominant row 16" and record["planning_ms"] > 0
    assert record["num_tokens"] == sum(rank["tokens"] for rank in record["ranks"]) == 60_000
    ranges = sorted(r for part in record["plan"]["layout"]["ranges"] for r in part)
    assert ranges[0][0] == 0 and ranges[-1][1] == 60_000
    attention = record["plan"]["attention"]["global"]
    received = [sum(col) for counts in attention["exchanges"] for col in zip(*counts)]
    assert sum(received) == sum(rank["remote_tokens"]["global"] for rank in record["ranks"])
    assert record["predicted"]["total_ms"] <= record["tried"][0]["total_ms"]
    assert main([*arguments, "--profile", str(profile)]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["profile"] == "slow"
    assert slow["predicted"]["total_ms"] > record["predicted"]["total_ms"]
    assert main([*arguments[:-1], "--row", "17"]) == 0
    assert "dominant row 17: 60,000 tokens" in capsys.readouterr().out


def test_plan_of_a_hybrid_model(capsys):
    arguments = ["plan", "--preset", "medium_long", "--tokens", "60000", "--cp", "4"]
    arguments += ["--gdn-layers", "3"]
    assert main([*arguments, "--islands", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    ranges = sorted(r for part in record["plan"]["recurrent_layout"] for r in part)
    assert ranges[0][0] == 0 and ranges[-1][1] == record["num_tokens"] == 60_000
    assert [c["name"] for c in record["tried"][-2:]] == ["one layout", "islands"]
    assert record["predicted"]["chained_runs"] >= 0
    assert main(arguments) == 0
    assert "runs chained" in capsys.readouterr().out


def test_plan_of_packed_rows(rollouts, capsys, tmp_path):
    rows = str(tmp_path / "rows.npz")
    assert main(["pack", rollouts, "--max-tokens", "64", "--output", rows]) == 0
    assert main(["plan", rows, "--cp", "2"]) == 0
    assert "row 0: 15 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pack", "missing.jsonl", "--max-tokens", "64"], "missing.jsonl: cannot read"),
        (["pack", "{}", "--max-tokens", "4"], "trajectory 0"),
        (["pack", "{}", "--max-tokens", "0"], "max_tokens"),
        (["pack", "{}", "--max-tokens", "64", "--tokenizer", "words"], "tokenizer 'words'"),
        (["plan", "{}", "--max-tokens", "64", "--cp-size", "0"], "cp_size"),
        (["plan", "{}", "--max-tokens", "64", "--cp-size", "2", "--row", "7"], "--row 7"),
        (["plan", "--cp", "2"], "either rollouts (PATH ...) or --preset"),
        (["plan", "{}", "--preset", "deep", "--cp", "2"], "either rollouts"),
        (["plan", "{}", "--cp", "2"], "rollouts need --max-tokens"),
        (["plan", "{}", "rows.npz", "--cp", "2"], "rows.npz: packed rows and rollouts"),
        (["plan", "--preset", "depe", "--cp", "2"], "--preset depe: known are fixed_5k"),
        (["plan", "--preset", "deep", "--cp", "2", "--tokens", "0"], "--tokens must be"),
        (["plan", "--preset", "deep", "--cp", "2", "--heads", "8"], "--heads 8: write it as"),
        (["plan", "--preset", "deep", "--cp", "2", "--profile", "no.json"], "no.json: cannot"),
        (
            ["plan", "--preset", "deep", "--cp", "2", "--gdn-layers", "1", "--gdn-heads", "8"],
            "K/V/",
        ),
        (["plan", "--preset", "deep", "--cp", "2", "--islands", "1"], "--islands 1: islands need"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, rollouts, capsys):
    assert main([rollouts if word == "{}" else word for word in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and message in captured.err
    assert not captured.out


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out
