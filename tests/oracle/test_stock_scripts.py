"""Unmodified pretrain_gpt.py and pretrain_hybrid.py under ``megatron_tree_cp.launch``."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from .launch import ROOT, TINY_MODEL, finish, script_command, start, train, training_flags
from .stock_scripts import SCRIPTS, stock_scripts

TREE = [
    *f"--tree-data {ROOT}/examples/rollouts.jsonl --tree-tokenizer bytes".split(),
    *"--tree-max-tokens 2048 --context-parallel-size 2".split(),
    *training_flags(3, 2, 1e-3),
]
HYBRID = ["--hybrid-layer-pattern", "*-*-"]
EXACT = ("loss_sum", "count", "grad_norm", "rows", "stored_tokens", "consumed_samples")


@pytest.mark.timeout(400)
def test_te_backend_leaves_megatron_bitwise_as_it_is(tmp_path):
    script = stock_scripts() / "pretrain_gpt.py"
    argv = [
        *TINY_MODEL,
        *"--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --seq-length 128".split(),
        *"--max-position-embeddings 128 --no-gradient-accumulation-fusion".split(),
        *"--eval-iters 0 --eval-interval 100".split(),
        *"--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion".split(),
        *training_flags(3, 2, 1e-3),
    ]
    plain, launched = tmp_path / "plain", tmp_path / "launched"
    choice = ["--tree-cpu", "--context-parallel-backend=te"]
    runs = [  # side by side: they have nothing to do with each other
        start(script_command("script", 1, plain, script, argv, weights="3"), plain),
        start(script_command("launch", 1, launched, script, argv + choice, weights="3"), launched),
    ]
    done = [finish(run, folder, 180) for run, folder in zip(runs, (plain, launched), strict=True)]
    for run in done:
        assert run.returncode == 0, run.output[-6000:]
    losses = [(run.folder / "losses.txt").read_text() for run in done]
    assert losses[0] == losses[1] and len(losses[0].splitlines()) == 3
    stock, ours = (run.tensors("weights", 3)[0] for run in done)
    assert stock.keys() == ours.keys()
    assert all(bool((stock[name] == ours[name]).all()) for name in stock)


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "pretrain_hybrid.py"])
def test_patches_apply(script, tmp_path):
    shutil.copy(stock_scripts() / script, tmp_path)
    apply = ["git", "apply", str(ROOT / "patches" / f"{script}.patch")]
    for command in ([*apply, "--check"], apply):
        subprocess.run(command, cwd=tmp_path, check=True, timeout=30)
    before = (stock_scripts() / script).read_text().splitlines()
    after = (tmp_path / script).read_text().splitlines()
    compile("\n".join(after), script, "exec")
    assert len(after) == len(before) + 2 and "    pretrain = install().pretrain" in after


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "script", "model"),
    [
        ("launch", "pretrain_gpt.py", []),
        pytest.param("patch", "pretrain_gpt.py", [], marks=pytest.mark.slow),
        pytest.param("launch", "pretrain_hybrid.py", HYBRID, marks=pytest.mark.slow),
    ],
)
def test_tree_backend_trains_as_the_own_entry_does(way, script, model, tmp_path):
    path, side = stock_scripts() / script, "launch"
    if way == "patch":
        for name in SCRIPTS:
            shutil.copy(stock_scripts() / name, tmp_path)
        path, side = tmp_path / script, "script"
        apply = ["git", "apply", str(ROOT / "patches" / f"{script}.patch")]
        subprocess.run(apply, cwd=tmp_path, check=True, timeout=30)
    argv = [*TINY_MODEL, *TREE, *model]
    folder = tmp_path / "stock"
    choice = ["--tree-cpu", "--context-parallel-backend=tree"]
    choice += ["--tree-metrics-file", str(folder / "metrics.jsonl")]
    process = start(script_command(side, 2, folder, path, argv + choice), folder)
    stock = finish(process, folder, 250)
    assert stock.returncode == 0, stock.output[-6000:]
    own = train("tree", 2, tmp_path / "own", argv)
    assert len(own.records()) == 3
    for ours, theirs in zip(stock.records(), own.records(), strict=True):
        assert {k: ours[k] for k in EXACT} == {k: theirs[k] for k in EXACT}
