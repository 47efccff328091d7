"""A trie by the book: one dict node a token, keyed on (input, label) pairs."""

import numpy as np

from megatron_tree_cp.tree import PackedRow, Trajectory


def pairs(trajectory: Trajectory, keep_last: bool = False) -> list[tuple[int, int]]:
    """The stored tokens of a trajectory alone, as (input, label)."""
    ids = trajectory.tokens.tolist()
    stored = list(zip(ids[:-1], ids[1:]))
    return [*stored, (ids[-1], -100)] if keep_last else stored


def trie_size(trajectories: list[Trajectory], keep_last: bool = False) -> int:
    """Stored tokens of the one trie of all trajectories (min_shared 1)."""
    nodes: set[tuple[tuple[int, int], ...]] = set()
    for trajectory in trajectories:
        stored = tuple(pairs(trajectory, keep_last))
        nodes.update(stored[:depth] for depth in range(1, len(stored) + 1))
    return len(nodes)


def check_row(row: PackedRow, trajectories: list[Trajectory], keep_last: bool = False) -> None:
    """Everything a row promises about its trajectories, in plain loops."""
    tree = row.tree
    assert tree.num_tokens == row.num_tokens == row.labels.size == row.weights.size
    assert list(row.trajectories) == sorted(row.trajectories)
    passes = np.zeros(row.num_tokens, int)
    expected: dict[int, list[tuple]] = {t: [] for t in range(row.num_tokens)}
    for index, path in zip(row.trajectories, row.paths):
        trajectory = trajectories[index]
        stored = list(zip(row.tokens[path].tolist(), row.labels[path].tolist()))
        assert stored == pairs(trajectory, keep_last)
        assert tree.positions[path].tolist() == list(range(path.size))
        # The path is exactly what its end sees: nothing of a sibling, nothing missing.
        assert np.flatnonzero(tree.is_visible(path[-1], np.arange(row.num_tokens))).tolist() == (
            path.tolist()
        )
        passes[path] += 1
        mask = np.ones(len(trajectory)) if trajectory.loss_mask is None else trajectory.loss_mask
        for target in range(1, len(trajectory)):
            if mask[target]:
                values = [
                    default if field is None else float(np.float32(field[target]))
                    for field, default in (
                        (trajectory.weights, 1.0),
                        (trajectory.advantages, None),
                        (trajectory.old_logprobs, None),
                    )
                ]
                expected[path[target - 1]].append((index, *values))
    assert passes.tolist() == row.multiplicity.tolist() and passes.min() >= 1
    entries = row.entries
    for token in range(row.num_tokens):
        found = [
            (
                int(entries.trajectory[e]),
                *(
                    None if np.isnan(x) else float(x)
                    for x in (entries.weight[e], entries.advantage[e], entries.old_logprob[e])
                ),
            )
            for e in range(entries.offsets[token], entries.offsets[token + 1])
        ]
        assert found == sorted(expected[token], key=lambda entry: entry[0])
        total = np.float32(sum(float(entry[1]) for entry in found))
        assert np.isclose(row.weights[token], total, rtol=1e-6)
    assert entries.offsets[0] == 0 and entries.offsets[-1] == row.num_entries
    check_maximal_segments(row)


def check_maximal_segments(row: PackedRow) -> None:
    """A segment with one child that no trajectory's distinct path needs would be a needless cut."""
    parents = row.tree.parents
    children = np.bincount(parents[parents >= 0], minlength=parents.size)
    assert not np.any(children == 1)
