"""pack_trajectories: what DESIGN 3 promises, on the smallest inputs that show it."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree_cp.tree import InputError, Trajectory, pack_trajectories

from .oracle import check_row, pairs, trie_size


def pack_one(token_lists, **options):
    rows = pack_trajectories([Trajectory(tokens) for tokens in token_lists], 1000, **options)
    assert len(rows) == 1
    return rows[0]


def test_fork_is_one_token_before_divergence():
    row = pack_one([[1, 2, 3, 4], [1, 2, 3, 5]])
    # (1,2) (2,3) shared; (3,4) and (3,5) apart: token 3 is stored twice, each with its one label.
    assert row.tree.lengths.tolist() == [2, 1, 1]
    assert row.tree.parents.tolist() == [-1, 0, 0]
    assert row.tokens.tolist() == [1, 2, 3, 3]
    assert row.labels.tolist() == [2, 3, 4, 5]
    assert row.multiplicity.tolist() == [2, 2, 1, 1]


def test_divergence_at_the_second_token_shares_nothing():
    row = pack_one([[1, 2, 3], [1, 4, 3]])
    assert row.tree.parents.tolist() == [-1, -1]
    assert row.num_tokens == 4


def test_end_inside_a_segment_does_not_cut_it():
    row = pack_one([[1, 2, 3, 4, 5], [1, 2, 3]])
    assert row.tree.lengths.tolist() == [4]
    assert row.paths[1].tolist() == [0, 1]
    assert row.multiplicity.tolist() == [2, 2, 1, 1]


def test_duplicates_share_all_rows_and_differ_in_entries():
    trajectories = [
        Trajectory([1, 2, 3], weights=[9, 1, 2], advantages=[0, 0.5, 0.5]),
        Trajectory([1, 2, 3], weights=[9, 4, 8], loss_mask=[1, 0, 1], old_logprobs=[0, -1, -2]),
    ]
    (row,) = pack_trajectories(trajectories, 10)
    assert row.num_tokens == 2 and row.num_entries == 3
    assert row.entries.offsets.tolist() == [0, 1, 3]
    assert row.entries.trajectory.tolist() == [0, 0, 1]
    assert row.entries.weight.tolist() == [1, 2, 8]
    assert row.weights.tolist() == [1, 10]
    np.testing.assert_array_equal(row.entries.advantage, np.float32([0.5, 0.5, np.nan]))
    np.testing.assert_array_equal(row.entries.old_logprob, np.float32([np.nan, np.nan, -2]))


def test_keep_last_stores_the_end_without_a_label():
    row = pack_one([[1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [1, 2]], keep_last=True)
    check_row(row, [Trajectory(t) for t in ([1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [1, 2])], True)
    # paths (1,2)(2,3)(3,-) twice, (1,2)(2,3)(3,4)(4,-), (1,2)(2,-)
    assert row.num_tokens == 6
    assert (row.labels == -100).sum() == 3
    assert pack_one([[7]], keep_last=True).labels.tolist() == [-100]


def test_trained_is_the_mask_whatever_the_weight():
    (row,) = pack_trajectories([Trajectory([1, 2, 3, 4], [1, 1, 0, 1], [1, 0, 5, -2])], 10)
    assert row.entries.offsets.tolist() == [0, 1, 1, 2]
    assert row.entries.weight.tolist() == [0, -2]
    assert row.weights.tolist() == [0, 0, -2]


def test_no_trained_token_at_all():
    (row,) = pack_trajectories([Trajectory([1, 2, 3], [0, 0, 0])], 10)
    assert row.num_entries == 0 and row.weights.tolist() == [0, 0]


def test_min_shared_bounds_divergence_but_not_prefixes():
    base, fork = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9]
    assert pack_one([base, fork], min_shared=3).num_tokens == 6  # 3 stored tokens are shared
    assert pack_one([base, fork], min_shared=4).num_tokens == 9
    assert pack_one([base, base[:3], base], min_shared=100).num_tokens == 5
    three = [Trajectory(t) for t in (base, fork, base[:3])]
    (row,) = pack_trajectories(three, 100, min_shared=4)
    check_row(row, three)
    assert row.num_tokens == 9 and row.paths[2].size == 2


def test_branches_come_in_the_order_of_the_list():
    row = pack_one([[1, 2, 9], [1, 2, 3], [5, 6], [1, 2, 7]])
    assert row.labels.tolist() == [2, 9, 3, 7, 6]


def test_families_stay_together():
    family = {root: [[root, *range(100, 140), leaf] for leaf in range(4)] for root in (1, 2, 3)}
    mixed = [Trajectory(family[root][leaf]) for leaf in range(4) for root in (3, 1, 2)]
    rows = pack_trajectories(mixed, 44)
    assert [row.num_tokens for row in rows] == [44, 44, 44]
    for row in rows:
        assert len({int(mixed[i].tokens[0]) for i in row.trajectories}) == 1


def test_overlong_is_an_error_or_cut(caplog):
    short, long = Trajectory([1, 2]), Trajectory(range(12), advantages=range(12))
    with pytest.raises(InputError, match=r"^trajectory 1: 11 stored tokens do not fit a row of 10"):
        pack_trajectories([short, long], 10)
    rows = pack_trajectories([short, long], 10, overlong="cut")
    (path,) = [p for row in rows for i, p in zip(row.trajectories, row.paths) if i == 1]
    assert path.size == 10
    assert "1 trajectories cut to 10 tokens: 1 tokens left out" in caplog.text
    (row,) = pack_trajectories([long], 5, keep_last=True, overlong="cut")
    assert row.tokens.tolist() == [0, 1, 2, 3, 4] and row.labels.tolist() == [1, 2, 3, 4, -100]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 8.0}, "max_tokens"),
        ({"min_shared": 0}, "min_shared"),
        ({"overlong": "drop"}, "overlong"),
        ({"trajectories": [Trajectory([1, 2]), Trajectory([1])]}, "trajectory 1: 1 token"),
        ({"trajectories": [[1, 2, 3]]}, "trajectory 0: expected a Trajectory"),
    ],
)
def test_bad_options(options, match):
    arguments = {"trajectories": [Trajectory([1, 2])], "max_tokens": 8} | options
    with pytest.raises(InputError, match=match):
        pack_trajectories(**arguments)


def test_nothing_gives_no_rows():
    assert pack_trajectories([], 8) == []


def test_rows_are_immutable_and_survive_pickling():
    (row,) = pack_trajectories([Trajectory([1, 2, 3]), Trajectory([1, 2, 4])], 8)
    for copy in (row, pickle.loads(pickle.dumps(row))):
        assert copy.tree == row.tree
        np.testing.assert_array_equal(copy.paths[1], row.paths[1])
        for array in (copy.tokens, copy.entries.weight, copy.paths[0], copy.tree.lengths):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 5


token_lists = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=14)


@settings(max_examples=300)
@given(
    token_lists,
    st.integers(8, 40),
    st.integers(1, 5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_random_forests(lists, max_tokens, min_shared, keep_last, random):
    trajectories = []
    for ids in lists:
        n = len(ids)
        trajectories.append(
            Trajectory(
                ids,
                [random.randint(0, 1) for _ in ids] if random.random() < 0.7 else None,
                [random.uniform(-1, 1) for _ in ids] if random.random() < 0.5 else None,
                [random.uniform(-1, 1)] * n if random.random() < 0.5 else None,
                [-random.random() for _ in ids] if random.random() < 0.5 else None,
            )
        )
    rows = pack_trajectories(trajectories, max_tokens + keep_last, min_shared, keep_last)
    assert sorted(i for row in rows for i in row.trajectories) == list(range(len(lists)))
    for row in rows:
        assert row.num_tokens <= max_tokens + keep_last
        check_row(row, trajectories, keep_last)
        mine = [trajectories[i] for i in row.trajectories]
        if min_shared == 1:
            assert row.num_tokens == trie_size(mine, keep_last)
        # A duplicate or a prefix adds nothing that min_shared could take away.
        for i, path in zip(row.trajectories, row.paths):
            if not keep_last and any(
                pairs(trajectories[i]) == pairs(trajectories[j])[: path.size]
                for j in row.trajectories
                if j != i
            ):
                assert row.multiplicity[path].min() >= 2
        # Forks deeper than min_shared only.
        forks = np.flatnonzero(np.bincount(row.tree.parents + 1)[1:] > 1)
        for segment in forks:
            depth = row.tree.segment_positions[segment] + row.tree.lengths[segment]
            # with keep_last an end forks off the trajectory that it is a prefix of
            assert depth >= min_shared or keep_last


@settings(max_examples=50)
@given(token_lists)
def test_equal_inputs_give_equal_rows(lists):
    trajectories = [Trajectory(ids) for ids in lists]
    first, second = (pack_trajectories(trajectories, 12) for _ in range(2))
    assert [row.trajectories for row in first] == [row.trajectories for row in second]
    assert [row.tree for row in first] == [row.tree for row in second]
