"""Rollout files for the oracle: the shipped examples, and real ones where they are at hand."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from .launch import ROOT

EXAMPLES = ROOT / "examples" / "rollouts.jsonl"


def airline_rollouts() -> list[dict]:
    """200 recorded agent trajectories; skips where the file is not at hand.

    They lie in ``../shared/data`` beside a checkout, or where TREE_CP_ROLLOUTS points.
    """
    beside = ROOT.parent / "shared" / "data" / "airline_rollouts" / "rollouts.json"
    path = Path(os.environ.get("TREE_CP_ROLLOUTS", beside))
    if not path.exists():
        pytest.skip("set TREE_CP_ROLLOUTS to a rollouts.json with `traj` message lists")
    return json.loads(path.read_text())


def as_messages(record: dict) -> dict:
    """An airline record in the shape of our example file."""
    return {"messages": record["traj"]}


def airline_sample(count: int, seed: int = 0) -> list[dict]:
    """The sample that the acceptance test names: ``random.Random(seed).sample``."""
    return [as_messages(r) for r in random.Random(seed).sample(airline_rollouts(), count)]


def example_records() -> list[dict]:
    """All shipped example rollouts."""
    return [json.loads(line) for line in EXAMPLES.read_text().splitlines()]


def write(path: Path, records: list[dict]) -> Path:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def eight_examples() -> list[dict]:
    """Eight example rollouts with shared trained turns, a duplicate, and an end inside another."""
    records = example_records()
    texts = [[json.dumps(m, sort_keys=True) for m in r["messages"]] for r in records]
    pairs = [(a, b) for a in range(len(texts)) for b in range(len(texts)) if a != b]
    duplicate = next((a, b) for a, b in pairs if a < b and texts[a] == texts[b])
    prefix = next(
        (a, b)
        for a, b in pairs
        if len(texts[a]) < len(texts[b]) and texts[b][: len(texts[a])] == texts[a]
    )
    chosen = dict.fromkeys([*duplicate, *prefix])
    tasks = {records[index]["task_id"] for index in chosen}
    chosen |= dict.fromkeys(i for i, r in enumerate(records) if r["task_id"] in tasks)
    return [records[index] for index in list(chosen)[:8]]


def bpe(folder: Path, words: int = 4096) -> Path:
    """A byte-level BPE of the airline rollouts' rendered bodies, as the acceptance test names."""
    from megatron_tree_cp.tree.bpe import train_bpe
    from megatron_tree_cp.tree.readers import iterate_bodies

    source = write(folder / "airline.jsonl", [as_messages(r) for r in airline_rollouts()])
    path = folder / "bpe.json"
    path.write_text(train_bpe(iterate_bodies([source], "messages"), words))
    return path
