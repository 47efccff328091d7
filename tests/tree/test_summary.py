"""Summary, capacity, fingerprint and row files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tree_cp.tree import (
    InputError,
    Trajectory,
    capacity,
    load_rows,
    pack_trajectories,
    packing_fingerprint,
    save_rows,
    summarise,
)

TRAJECTORIES = [
    Trajectory([1, 2, 3, 4, 5], [0, 0, 0, 1, 1], group="a"),
    Trajectory([1, 2, 3, 4, 6], [0, 0, 0, 1, 1], group="a", advantages=0.5),
    Trajectory([1, 2, 3, 7], [0, 0, 0, 1], group="b"),
    Trajectory([9, 9]),
]


def test_figures_of_a_small_tree():
    rows = pack_trajectories(TRAJECTORIES, 8)
    summary = summarise(TRAJECTORIES, rows, 8)
    assert summary.trajectories == 4 and summary.groups == 2 and summary.longest == 4
    assert summary.logical_tokens == 4 + 4 + 3 + 1
    assert summary.trained_tokens == 2 + 2 + 1 + 1
    # 12 23 | 34 | 45, 46; 37 apart; 99
    assert summary.stored_one_trie == summary.stored_tokens == 2 + 1 + 2 + 1 + 1
    assert summary.trained_stored == 5  # (3, 4) is shared and trained twice
    assert summary.pairs_flat == 10 + 10 + 6 + 1 and summary.pairs_tree == 1 + 2 + 3 + 4 + 4 + 3 + 1
    assert summary.rows == 1 and summary.rows_flat == 2 and summary.fill == 7 / 8
    (depth,) = summary.by_depth
    assert (depth.begin, depth.end, depth.logical, depth.stored) == (0, 4, 12, 7)
    assert summary.cut_trajectories == 0
    assert "12, 6 trained" in summary.format() and "7 in rows" in summary.format()
    assert summary.to_json()["by_depth"][0]["stored"] == 7


@pytest.mark.parametrize("keep_last", [False, True])
def test_cuts_are_counted(keep_last):
    rows = pack_trajectories(TRAJECTORIES, 3, keep_last=keep_last, overlong="cut")
    summary = summarise(TRAJECTORIES, rows, 3)
    assert summary.cut_trajectories == (3 if keep_last else 2)
    assert summary.cut_tokens == (5 if keep_last else 2)
    assert "cut" in summary.format()


def test_rows_of_other_trajectories_are_refused():
    with pytest.raises(InputError, match="do not hold exactly these"):
        summarise(TRAJECTORIES, pack_trajectories(TRAJECTORIES[:2], 8))


def test_nothing_has_a_summary_too():
    assert "0" in summarise([], []).format()


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 40))
def test_capacity_is_what_packing_does(prompt, completion, max_tokens):
    counted = capacity(prompt, completion, max_tokens)

    def trajectories(count):
        return [
            Trajectory([0] * prompt + [100 + i] * completion)
            for i in range(count)
            if prompt + completion > 1
        ]

    def rows(count):
        return len(pack_trajectories(trajectories(count), max_tokens))

    if counted.tree == 0:
        with pytest.raises(InputError):
            rows(1)
    else:
        assert rows(counted.tree) == 1 and rows(counted.tree + 1) == 2
    assert counted.flat == max_tokens // (prompt + completion - 1)


def test_capacity_of_the_preset():
    counted = capacity(5000, 100, 40_960)
    assert (counted.flat, counted.tree) == (8, 359)
    assert "359 as a tree, 44.9x" in counted.format()
    with pytest.raises(InputError, match="completion: expected at least 1"):
        capacity(1, 0, 8)


def test_fingerprint_sees_every_change():
    def digest(trajectories, max_tokens=8, **options):
        return packing_fingerprint(pack_trajectories(trajectories, max_tokens), **options)

    base = digest(TRAJECTORIES)
    assert base == digest(list(TRAJECTORIES)) and len(base) == 64
    first, *rest = TRAJECTORIES
    others = [
        digest(TRAJECTORIES, 5),
        digest(TRAJECTORIES, objective="group"),
        digest(TRAJECTORIES[::-1]),
        digest([Trajectory([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]), *rest]),
        digest([Trajectory([1, 2, 3, 4, 5], first.loss_mask, weights=2), *rest]),
        digest([Trajectory([1, 2, 3, 4, 5], first.loss_mask, advantages=2), *rest]),
        digest([Trajectory([1, 2, 3, 4, 8], first.loss_mask), *rest]),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_rows_survive_a_file(tmp_path):
    rows = pack_trajectories(TRAJECTORIES, 5)
    save_rows(tmp_path / "rows.npz", rows)
    loaded = load_rows(tmp_path / "rows.npz")
    assert packing_fingerprint(loaded) == packing_fingerprint(rows)
    for row, copy in zip(rows, loaded):
        np.testing.assert_array_equal(row.weights, copy.weights)
        np.testing.assert_array_equal(row.multiplicity, copy.multiplicity)
        assert [p.tolist() for p in row.paths] == [p.tolist() for p in copy.paths]
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.npz"]


def test_bad_row_files(tmp_path):
    (tmp_path / "text").write_text("hello")
    np.savez(tmp_path / "other.npz", a=1)
    np.savez(tmp_path / "newer.npz", format=[99, 0])
    for name, match in (
        ("text", "not a file of packed rows"),
        ("other.npz", "not a file of packed rows"),
        ("newer.npz", "rows of format 99"),
        ("missing", "cannot read: No such file"),
    ):
        with pytest.raises(InputError, match=match):
            load_rows(tmp_path / name)
    with pytest.raises(InputError, match="cannot write"):
        save_rows(tmp_path / "no" / "rows.npz", pack_trajectories(TRAJECTORIES, 8))
