"""Real rollouts train the same at every CP size, every row visited."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import rollouts
from .launch import TINY_MODEL, train, training_flags

TOLERANCE = 1e-5


def losses_agree(folder: Path, argv: list[str], sizes: tuple[int, ...], timeout: float) -> None:
    """Train at each CP size; per-iteration loss and gradient norm agree with the first size."""
    runs = {}
    for cp in sizes:
        flags = ["--context-parallel-size", str(cp)]
        runs[cp] = train("tree", cp, folder / f"cp{cp}", argv + flags, timeout=timeout).records()
    reference = runs[sizes[0]]
    for cp in sizes[1:]:
        worst_loss = worst_norm = 0.0
        for ours, theirs in zip(runs[cp], reference, strict=True):
            assert ours["count"] == theirs["count"]
            assert ours["stored_tokens"] == theirs["stored_tokens"]
            worst_loss = max(worst_loss, abs(ours["loss"] / theirs["loss"] - 1))
            worst_norm = max(worst_norm, abs(ours["grad_norm"] / theirs["grad_norm"] - 1))
        print(f"CP{cp} vs CP{sizes[0]}: loss {worst_loss:.2e}, gradient norm {worst_norm:.2e}")
        assert worst_loss <= TOLERANCE
        assert worst_norm <= TOLERANCE


def rows_of(folder: Path, records: list[dict], max_tokens: int) -> tuple[list[str], int]:
    """Data flags for records under the BPE, and the number of rows that they pack into."""
    from megatron_tree_cp.tree.packing import pack_trajectories
    from megatron_tree_cp.tree.readers import read_rollouts
    from megatron_tree_cp.tree.tokenizers import load_tokenizer

    tokenizer = rollouts.bpe(folder)
    path = rollouts.write(folder / "data.jsonl", records)
    rows = pack_trajectories(read_rollouts([path], load_tokenizer(str(tokenizer))), max_tokens)
    flags = f"--tree-data {path} --tree-tokenizer {tokenizer} --tree-max-tokens {max_tokens}"
    # As many processes as ranks: on two cores a worker a rank would only add its start.
    return [*flags.split(), "--tree-planner-workers", "0"], len(rows)


@pytest.mark.timeout(600)
def test_forty_short_rollouts(tmp_path):
    """The 40 airline rollouts with the least text, in rows of 4,096."""
    records = sorted(rollouts.airline_rollouts(), key=lambda r: len(str(r["traj"])))[:40]
    data, rows = rows_of(tmp_path, [rollouts.as_messages(r) for r in records], 4096)
    argv = [*TINY_MODEL, *data, *training_flags(rows // 2, 2, 1e-3)]
    losses_agree(tmp_path, argv, (1, 2), timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_airline_rollouts(tmp_path):
    """All 200, rows of 16,384, one epoch at CP1, CP2 and CP4."""
    records = [rollouts.as_messages(r) for r in rollouts.airline_rollouts()]
    data, rows = rows_of(tmp_path, records, 16384)
    # One row an iteration, so that each is compared by itself; one layer keeps the epoch short.
    argv = [*TINY_MODEL, "--num-layers", "1", *data, *training_flags(rows, 1, 1e-3)]
    losses_agree(tmp_path, argv, (1, 2, 4), timeout=780)
