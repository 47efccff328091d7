"""The main promise: gradients are those of every trajectory alone through stock Megatron.

The tree side is the package's entry under torchrun on CPU ranks; the other side feeds each
trajectory by itself to the stock local spec with Megatron's own attention. Both take the same ten
SGD steps from the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from . import rollouts
from .compare import Tensors, split_qkv, worst
from .launch import SGD, TINY_MODEL, Finished, train, training_flags

STEPS = 10
GRADIENT_TOLERANCE = 2e-6
UPDATE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Oracle:
    """The trajectories-alone run, and what a tree run needs to repeat it."""

    argv: list[str]
    alone: Finished
    folder: Path
    heads: tuple[int, int, int]
    """Query heads, query groups, head dimension of the model."""

    def check(self, cp: int, waves: int | str) -> None:
        """Train with the tree at one CP size and compare on every rank."""
        flags = ["--context-parallel-size", str(cp), "--tree-waves", str(waves)]
        tree = train(
            "tree",
            cp,
            self.folder / f"cp{cp}_waves{waves}",
            self.argv + flags,
            gradients="1",
            weights=f"0,{STEPS}",
            timeout=900,
        )
        name, deviation = worst(self.gradients(self.alone)[0], self.gradients(tree))
        print(f"CP{cp} waves {waves}: worst gradient {deviation:.2e} ({name})")
        assert deviation <= GRADIENT_TOLERANCE, f"gradient of {name}: {deviation:.2e}"
        name, deviation = worst(self.updates(self.alone)[0], self.updates(tree))
        print(f"CP{cp} waves {waves}: worst w{STEPS} - w0 {deviation:.2e} ({name})")
        assert deviation <= UPDATE_TOLERANCE, f"update of {name}: {deviation:.2e}"
        for ours, theirs in zip(tree.records(), self.alone.records(), strict=True):
            assert ours["count"] == theirs["count"]
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)

    def gradients(self, run: Finished) -> list[Tensors]:
        """First-step gradients of every rank, q, k and v apart."""
        return [split_qkv(t, *self.heads) for t in run.tensors("gradients", 1)]

    def updates(self, run: Finished) -> list[Tensors]:
        """w10 - w0 of every rank, in fp64."""
        first, last = run.tensors("weights", 0), run.tensors("weights", STEPS)
        return [
            split_qkv({n: after[n].double() - before[n].double() for n in after}, *self.heads)
            for before, after in zip(first, last, strict=True)
        ]


def oracle(folder: Path, data: list[str], heads: tuple[int, int, int]) -> Oracle:
    """Run the trajectories-alone side; one iteration visits the whole data."""
    queries, groups, _ = heads
    shape = f"--num-attention-heads {queries} --num-query-groups {groups}"
    # The data is one batch, made once: workers would only cost their start.
    data = [*data, "--tree-planner-workers", "0"]
    argv = [*TINY_MODEL, *shape.split(), *SGD, *training_flags(STEPS, 2, 0.6), *data]
    alone = train(
        "alone", 1, folder / "alone", argv, gradients="1", weights=f"0,{STEPS}", timeout=1200
    )
    return Oracle(argv, alone, folder, heads)


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Oracle:
    """Eight example rollouts as bytes: shared trained turns, a duplicate, an end inside another."""
    folder = tmp_path_factory.mktemp("examples")
    path = rollouts.write(folder / "data.jsonl", rollouts.eight_examples())
    data = f"--tree-data {path} --tree-tokenizer bytes --tree-max-tokens 2048"
    return oracle(folder, data.split(), (4, 2, 16))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Oracle:
    """Eight airline trajectories and eight example rollouts under a 4,096-word BPE.

    Two heads: stock attention holds all score matrices of a step at once.
    """
    folder = tmp_path_factory.mktemp("mixed")
    records = rollouts.airline_sample(8) + rollouts.eight_examples()
    messages = [{"messages": record["messages"]} for record in records]
    path = rollouts.write(folder / "data.jsonl", messages)
    data = f"--tree-data {path} --tree-tokenizer {rollouts.bpe(folder)} --tree-max-tokens 16384"
    return oracle(folder, data.split(), (2, 1, 32))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("cp", "waves"), [(1, "auto"), (2, 1), (4, 2)])
def test_gradients_equal_those_of_trajectories_alone(examples, cp, waves):
    examples.check(cp, waves)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("cp", "waves"), [(1, "auto"), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2)]
)
def test_real_and_example_rollouts_together(mixed, cp, waves):
    mixed.check(cp, waves)
