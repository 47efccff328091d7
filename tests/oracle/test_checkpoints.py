"""Checkpoints cross between stock and tree layers and between CP sizes, with optimizer states."""

from __future__ import annotations

import pytest

from . import rollouts
from .compare import worst
from .launch import TINY_MODEL, command, finish, start, train, training_flags


def flags(tmp_path) -> list[str]:
    data = rollouts.write(tmp_path / "data.jsonl", rollouts.eight_examples())
    return [
        *TINY_MODEL,
        *f"--tree-data {data} --tree-tokenizer bytes --tree-max-tokens 2048".split(),
        *"--optimizer adam --ckpt-format torch_dist --override-opt-param-scheduler".split(),
    ]


@pytest.mark.timeout(600)
def test_stock_checkpoint_continues_in_a_tree_run_and_back(tmp_path):
    """Stock layers, CP1 -> tree, CP2 -> stock layers, against stock layers all the way."""
    model = flags(tmp_path)
    stock, tree = tmp_path / "stock", tmp_path / "tree"
    saving = ["--save", str(stock / "ckpt"), "--save-interval", "1"]
    argv = [*model, *training_flags(3, 1, 1e-3)]
    unbroken = train("alone", 1, stock, [*argv, *saving], weights="1,2,3")

    loading = ["--load", str(stock / "ckpt"), "--ckpt-step", "1", "--save", str(tree / "ckpt")]
    loading += ["--save-interval", "1"]
    argv = [*model, *training_flags(2, 1, 1e-3), "--context-parallel-size", "2"]
    middle = train("tree", 2, tree, [*argv, *loading], weights="0,1")
    # The probe counts the steps of its process: 0 is what was loaded, 1 the run's iteration 2.
    assert worst(unbroken.tensors("weights", 1)[0], middle.tensors("weights", 0))[1] == 0
    assert worst(unbroken.tensors("weights", 2)[0], middle.tensors("weights", 1))[1] < 1e-6

    loading = ["--load", str(tree / "ckpt")]
    argv = [*model, *training_flags(3, 1, 1e-3)]
    last = train("alone", 1, tmp_path / "back", [*argv, *loading], weights="0,1")
    assert worst(middle.tensors("weights", 1)[0], last.tensors("weights", 0))[1] == 0
    assert worst(unbroken.tensors("weights", 3)[0], last.tensors("weights", 1))[1] < 1e-6
    records = [*middle.records(), *last.records()]
    assert [r["iteration"] for r in records] == [2, 3]
    for ours, theirs in zip(records, unbroken.records()[1:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stock_experts_load_although_the_local_spec_names_a_norm_otherwise(tmp_path):
    experts = "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-load-balancing-type none"
    model = [*flags(tmp_path), *experts.split()]
    saving = ["--save", str(tmp_path / "ckpt"), "--save-interval", "1"]
    stock = train(
        "alone", 1, tmp_path / "stock", [*model, *training_flags(1, 1, 1e-3), *saving], weights="1"
    )
    argv = [*model, *training_flags(2, 1, 1e-3), "--load", str(tmp_path / "ckpt")]
    tree = train("tree", 1, tmp_path / "tree", argv, weights="0")
    assert worst(stock.tensors("weights", 1)[0], tree.tensors("weights", 0))[1] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_rows_than_the_checkpoints_are_refused_in_one_line(tmp_path):
    model = flags(tmp_path)
    schedule = training_flags(1, 1, 1e-3, save_interval=1)
    first = [*model, *schedule, "--save", str(tmp_path / "ckpt")]
    train("tree", 1, tmp_path / "first", first)
    other = rollouts.write(tmp_path / "other.jsonl", rollouts.eight_examples()[:5])
    loading = [
        *model,
        *training_flags(2, 1, 1e-3),
        "--load",
        str(tmp_path / "ckpt"),
    ]
    for name, change, message in (
        (
            "seed",
            ["--tree-shuffle-seed", "5"],
            "this run has --tree-shuffle-seed 5, its checkpoint",
        ),
        ("rows", ["--tree-data", str(other)], "the rows are not the checkpoint's (packing finge"),
    ):
        folder = tmp_path / name
        refused = finish(
            start(command("tree", 1, folder, [*loading, *change]), folder), folder, 200
        )
        assert refused.returncode != 0 and f"error: {message}" in refused.output
        assert "exitcode  : 2" in refused.output
    allowed = train(
        "tree", 1, tmp_path / "new", [*loading, "--tree-data", str(other), "--tree-allow-new-data"]
    )
    assert [r["iteration"] for r in allowed.records()] == [2]
