"""YAML run configs become the argument list a user would have typed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_tree_cp.megatron.arguments import add_tree_arguments
from megatron_tree_cp.megatron.run_config import expand_tree_config, requests_cpu
from megatron_tree_cp.tree.errors import InputError


def parser() -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(allow_abbrev=False)
    known.add_argument("--lr", type=float)
    known.add_argument("--seq-length", type=int)
    known.add_argument("--hybrid-layer-pattern")
    known.add_argument("--bf16", action="store_true")
    known.add_argument("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    known.add_argument("--persist-cache", action=argparse.BooleanOptionalAction)
    known.add_argument("--under_score", type=int)
    return add_tree_arguments(known, argv=())


def expand(tmp_path: Path, text: str, *argv: str) -> list[str]:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return expand_tree_config(["--tree-config", str(path), *argv], parser())


def test_values_flags_lists_and_spellings(tmp_path):
    text = """
# a comment
lr: 3.0e-3
tree_data: [a.jsonl, b c.jsonl]
tree-valid-data: one.jsonl
hybrid-layer-pattern: "*-*E"
bf16: true
rope-fusion: false
persist-cache: false
under-score: -4
"""
    assert expand(tmp_path, text) == [
        "--lr=3.0e-3",
        *("--tree-data", "a.jsonl", "b c.jsonl"),
        *("--tree-valid-data", "one.jsonl"),
        "--hybrid-layer-pattern=*-*E",
        "--bf16",
        "--no-rope-fusion",
        "--no-persist-cache",
        "--under_score=-4",
    ]


def test_what_is_off_already_is_left_out(tmp_path):
    assert expand(tmp_path, "bf16: false\nrope-fusion: true\nno-rope-fusion: false\n") == []
    assert expand(tmp_path, "persist-cache: true\nno-rope-fusion: true\n") == [
        "--persist-cache",
        "--no-rope-fusion",
    ]


def test_the_command_line_wins(tmp_path):
    text = "lr: 1\nseq-length: 64\nrope-fusion: true\ntree-overlong: cut\n"
    argv = expand(tmp_path, text, "--tree-max-tokens", "128", "--lr=2")
    assert argv == ["--tree-overlong=cut", "--tree-max-tokens", "128", "--lr=2"]
    args = parser().parse_args(argv)
    assert (args.lr, args.seq_length, args.tree_max_tokens) == (2.0, 128, 128)


def test_without_a_config_nothing_changes():
    assert expand_tree_config(["--lr", "1"], parser()) == ["--lr", "1"]


def test_an_empty_config_is_legal(tmp_path):
    assert expand(tmp_path, "# nothing yet\n", "--bf16") == ["--bf16"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("lr: 1\ntree-dat: x\n", ":2: unknown option tree-dat: did you mean tree-data?"),
        ("colour: 3\n", ":1: unknown option colour: see --help"),
        ("model:\n  lr: 1\n", ":1: model holds a mapping: options are not nested"),
        ("lr: [1, 2]\n", ":1: lr takes one value: drop the brackets"),
        ("tree-data: [[a], b]\n", ":1: tree-data takes a flat list"),
        ("tree-data: [a, ~]\n", ":1: tree-data takes a flat list"),
        ("lr: 1\nlr: 2\n", ":2: lr stands at "),
        ("lr:\n", ":1: lr has no value"),
        ("lr: true\n", ":1: lr takes a value, not true"),
        ("bf16: 1\n", ":1: bf16 is a flag: write true or false"),
        ("- lr\n", ":1: a run config is a mapping"),
        ("lr: 1\nhybrid-layer-pattern: *-*E\n", ":2: not YAML"),
        ("lr: [1\n", "not YAML"),
        ("lr: !!python/object/apply:os.getcwd []\n", ":1: lr takes one value"),
    ],
)
def test_errors_name_file_and_line(tmp_path, text, message):
    with pytest.raises(InputError) as error:
        expand(tmp_path, text)
    assert message in str(error.value) and "run.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_missing_name():
    with pytest.raises(InputError, match="nowhere.yaml: cannot read the run config"):
        expand_tree_config(["--tree-config=nowhere.yaml"], parser())
    with pytest.raises(InputError, match="--tree-config needs a file"):
        expand_tree_config(["--tree-config"], parser())
    with pytest.raises(InputError, match="given 2 times"):
        expand_tree_config(["--tree-config=a", "--tree-config", "b"], parser())


def test_the_cpu_shim_is_asked_for_in_either_place(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("tree_cpu: true\n")
    assert requests_cpu(["--tree-config", str(path)]) and requests_cpu(["--tree-cpu"])
    path.write_text("tree-cpu: false\n")
    assert not requests_cpu([f"--tree-config={path}"]) and not requests_cpu([])


CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_hold_options_that_exist(path):
    argv = expand_tree_config(["--tree-config", str(path)])  # with Megatron's own parser
    assert argv and all(isinstance(word, str) for word in argv)
