"""Start training runs as a user does (torchrun), with a hard timeout, and read what they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]

TINY_MODEL = """
--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
--transformer-impl local --use-cpu-initialization --distributed-backend gloo
--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1
""".split()
"""Flags of the test model: grouped queries, gated MLP, rotary positions."""

SGD = "--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0".split()


@dataclass(frozen=True)
class Finished:
    """A run that ended: its output, and what its probe wrote."""

    folder: Path
    returncode: int
    output: str

    def records(self) -> list[dict]:
        """The metrics file, one dict an iteration."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def tensors(self, what: str, iteration: int) -> list[dict[str, torch.Tensor]]:
        """{name: tensor} of every rank; ``what`` is ``gradients`` or ``weights``."""
        paths = sorted(self.folder.glob(f"{what}_{iteration}_rank*.pt"))
        assert paths, f"no {what} of iteration {iteration} in {self.folder}:\n{self.output[-3000:]}"
        return [torch.load(path) for path in paths]


def training_flags(iterations: int, batch: int, lr: float, **extra: object) -> list[str]:
    """Schedule flags; a constant learning rate, one log line an iteration."""
    values = {
        "train-iters": iterations,
        "global-batch-size": batch,
        "micro-batch-size": 1,
        "lr": lr,
        "lr-decay-style": "constant",
        "log-interval": 1,
        **{name.replace("_", "-"): value for name, value in extra.items()},
    }
    flags = []
    for name, value in values.items():
        flags.append(f"--{name}")
        if value is not True:
            flags.append(str(value))
    return flags


def command(side: str, ranks: int, folder: Path, argv: list[str], gradients="-", weights="-"):
    """The torchrun command of one run; ``argv`` are pretrain arguments."""
    return [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run",
        "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
        "-m", "tests.oracle.entry", side, str(folder), gradients, weights, "--",
        "--tree-cpu", "--context-parallel-backend", "tree",
        "--tree-metrics-file", str(folder / "metrics.jsonl"), *argv,
    ]  # fmt: skip


def script_command(side: str, ranks: int, folder: Path, script: Path, argv: list[str], weights="-"):
    """The torchrun command of a stock script, as it is (``script``) or launched (``launch``)."""
    return [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run",
        "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
        "-m", "tests.oracle.entry", side, str(folder), "-", weights, "--", str(script), *argv,
    ]  # fmt: skip


def start(cmd: list[str], folder: Path) -> subprocess.Popen:
    """Start a run in the background.

    The output goes to ``run.log``: nobody reads a pipe while a test waits for something else.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    env.pop("PYTEST_CURRENT_TEST", None)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "run.log").open("w") as log:
        return subprocess.Popen(cmd, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL the launcher and every rank and worker: ranks are in sessions of their own."""
    everything = [psutil.Process(process.pid)]
    everything += everything[0].children(recursive=True)
    for one in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def finish(process: subprocess.Popen, folder: Path, timeout: float) -> Finished:
    """Wait for a started run; kills all of it when the time is over."""
    try:
        process.wait(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        output = (folder / "run.log").read_text()
        raise AssertionError(f"run in {folder} took over {timeout} s:\n{output[-4000:]}") from None
    return Finished(folder, process.returncode, (folder / "run.log").read_text())


def train(
    side: str,
    ranks: int,
    folder: Path,
    argv: list[str],
    gradients: str = "-",
    weights: str = "-",
    timeout: float = 300,
) -> Finished:
    """Run to the end and require success."""
    done = finish(
        start(command(side, ranks, folder, argv, gradients, weights), folder), folder, timeout
    )
    assert done.returncode == 0, f"{side} on {ranks} ranks failed:\n{done.output[-6000:]}"
    return done
