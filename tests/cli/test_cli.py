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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pack", "missing.jsonl", "--max-tokens", "64"], "missing.jsonl: cannot read"),
        (["pack", "{}", "--max-tokens", "4"], "trajectory 0"),
        (["pack", "{}", "--max-tokens", "0"], "max_tokens"),
        (["pack", "{}", "--max-tokens", "64", "--tokenizer", "words"], "tokenizer 'words'"),
        (["plan", "{}", "--max-tokens", "64", "--cp-size", "0"], "cp_size"),
        (["plan", "{}", "--max-tokens", "64", "--cp-size", "2", "--row", "7"], "--row 7"),
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
