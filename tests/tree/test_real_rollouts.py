"""The example rollouts of the repository, and the airline rollouts where they are at hand.

The airline set (sierra-research/tau-bench, MIT) is not part of the repository: TREE_CP_ROLLOUTS
names its `rollouts.json`, or it lies in `../shared/data/airline_rollouts/`.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_tree_cp.tree import (
    Trajectory,
    load_tokenizer,
    pack_trajectories,
    read_rollouts,
    summarise,
)
from megatron_tree_cp.tree.bpe import train_bpe
from megatron_tree_cp.tree.readers import iterate_bodies

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "make_example_rollouts.py"


@pytest.fixture(scope="module")
def example_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "rollouts.jsonl"
    subprocess.run([sys.executable, SCRIPT, "--out", path], check=True, timeout=60)
    return path


def test_the_committed_examples_are_what_the_script_writes(example_file):
    committed = ROOT / "examples" / "rollouts.jsonl"
    if not committed.exists():
        pytest.skip("not in this checkout")
    assert committed.read_text() == example_file.read_text()


def test_examples_have_what_examples_should_show(example_file):
    trajectories = read_rollouts(example_file, load_tokenizer("bytes"))
    assert 48 <= len(trajectories) <= 96
    rows = pack_trajectories(trajectories, 2048)  # the row of configs/quickstart.yaml
    summary = summarise(trajectories, rows, 2048)
    assert summary.saving > 1.8 and summary.fill > 0.8
    assert summary.trained_stored < summary.trained_tokens  # shared trained turns
    assert max(int(row.tree.depths.max()) for row in rows) >= 3  # system, task, turns, retries
    texts = [t.tokens.tobytes() for t in trajectories]
    assert sorted(Counter(texts).values())[-2:] == [1, 2]  # exactly one duplicate
    inside = [a for a in texts if any(b.startswith(a) and b != a for b in texts)]
    assert len(inside) == 1
    roles = Counter(
        message["role"] for line in example_file.open() for message in json.loads(line)["messages"]
    )
    assert roles["tool"] > 100


def airline_rollouts() -> Path | None:
    given = os.environ.get("TREE_CP_ROLLOUTS")
    path = Path(given) if given else ROOT.parent / "shared/data/airline_rollouts/rollouts.json"
    return path if path.is_file() else None


@pytest.mark.skipif(airline_rollouts() is None, reason="no airline rollouts here")
def test_airline_rollouts(tmp_path):
    pytest.importorskip("tokenizers")
    path = airline_rollouts()
    (tmp_path / "bpe.json").write_text(train_bpe(iterate_bodies([path], "traj"), 4096))
    tokenizer = load_tokenizer(str(tmp_path / "bpe.json"))
    trajectories = read_rollouts(path, tokenizer, messages_key="traj")
    start = time.perf_counter()
    rows = pack_trajectories(trajectories, 16_384)
    assert time.perf_counter() - start < 10  # 0.1 s on an idle core
    summary = summarise(trajectories, rows, 16_384)
    sizes = [len(t) for t in trajectories]
    # The data's README, whose tool calls are rendered a little differently: within 3 %.
    near = pytest.approx
    assert (min(sizes), np.median(sizes), max(sizes)) == near((1513, 3395, 9968), rel=0.03)
    assert summary.logical_tokens == near(719_105, rel=0.03)
    assert summary.trained_tokens == near(159_126, rel=0.03)
    assert summary.stored_one_trie == near(460_753, rel=0.03)
    assert summary.stored_tokens == near(501_266, rel=0.03)
    assert summary.rows <= 32 and summary.rows_flat == 45
    assert summary.pairs_flat == near(1_561e6, rel=0.03)
    assert summary.pairs_tree == near(1_420e6, rel=0.03)


def test_thousands_of_trajectories_pack_in_seconds():
    rng = np.random.default_rng(0)
    system = rng.integers(0, 1000, 200)
    trajectories = []
    for _ in range(300):
        prompt = rng.integers(0, 1000, rng.integers(50, 150))
        turns = [rng.integers(0, 1000, 60) for _ in range(3)]
        for _ in range(8):
            tail = rng.integers(0, 1000, rng.integers(20, 100))
            trajectories.append(
                Trajectory(np.concatenate([system, prompt, *turns[: rng.integers(4)], tail]))
            )
    start = time.perf_counter()
    rows = pack_trajectories(trajectories, 8192)
    assert time.perf_counter() - start < 20  # 0.5 s on an idle core
    summary = summarise(trajectories, rows, 8192)
    # Hardly a family is split, though no row but the last has room for another.
    assert summary.fill > 0.95
    assert summary.stored_tokens - 200 * len(rows) < 1.02 * summary.stored_one_trie
