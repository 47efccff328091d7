"""PackedTree: validation, the two numberings, visibility."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tree_cp.tree import InputError, PackedTree

#      0 (2 tokens: 0 1)          4 (1 token: 8)
#     /                \
#   1 (1: 2)           3 (2: 6 7)
#    |
#   2 (3: 3 4 5)       single-child segments are legal
TREE = PackedTree([2, 1, 3, 2, 1], [-1, 0, 1, 0, -1])


def test_derived_arrays():
    assert TREE.num_segments == 5 and TREE.num_tokens == 9
    assert TREE.segment_starts.tolist() == [0, 2, 3, 6, 8]
    assert TREE.segment_ends.tolist() == [2, 3, 6, 8, 9]
    assert TREE.subtree_ends.tolist() == [8, 6, 6, 8, 9]
    assert TREE.segment_positions.tolist() == [0, 2, 3, 2, 0]
    assert TREE.depths.tolist() == [0, 1, 2, 1, 0]
    assert TREE.positions.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 0]
    assert TREE.subtree_end.tolist() == [8, 8, 6, 6, 6, 6, 8, 8, 9]
    assert TREE.segment_of.tolist() == [0, 0, 1, 2, 2, 2, 3, 3, 4]
    assert TREE.path(2) == (0, 1, 2) and TREE.path(4) == (4,)


def test_visibility_broadcasts():
    assert TREE.is_visible(7, 1) and not TREE.is_visible(7, 5) and not TREE.is_visible(1, 7)
    assert TREE.is_visible(7, 1, window=3) and not TREE.is_visible(7, 0, window=3)
    assert TREE.is_visible([[5], [7]], [0, 2, 6]).tolist() == [
        [True, True, False],
        [True, False, True],
    ]


@st.composite
def trees(draw):
    parents, path = [], []
    for segment in range(draw(st.integers(1, 12))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return PackedTree([draw(st.integers(1, 4)) for _ in parents], parents)


@given(trees(), st.one_of(st.none(), st.integers(1, 9)))
def test_mask_is_ancestry_by_parent_pointers(tree, window):
    parent = []
    for segment, length in enumerate(tree.lengths.tolist()):
        above = tree.parents[segment]
        parent.append(-1 if above < 0 else int(tree.segment_ends[above]) - 1)
        parent.extend(range(len(parent) - 1, len(parent) + length - 2))
    expected = np.zeros((tree.num_tokens,) * 2, bool)
    for query in range(tree.num_tokens):
        key, distance = query, 0
        while key >= 0 and (window is None or distance < window):
            expected[query, key] = True
            key, distance = parent[key], distance + 1
    np.testing.assert_array_equal(tree.dense_mask(window), expected)
    assert tree.visible_pairs(window) == expected.sum()


def test_equality_hash_pickle():
    same = pickle.loads(pickle.dumps(TREE))
    assert same == TREE and hash(same) == hash(TREE) and same != PackedTree([2], [-1])
    with pytest.raises(ValueError, match="read-only"):
        same.lengths[0] = 3


def test_the_caller_keeps_his_arrays():
    lengths = np.array([1, 2])
    PackedTree(lengths, [-1, 0])
    lengths[0] = 7


@pytest.mark.parametrize(
    ("lengths", "parents", "match"),
    [
        ([], [], "at least one segment"),
        ([1, 2], [-1], "differ in size: 2 and 1"),
        ([1, 0], [-1, 0], r"lengths\[1\]: a segment needs at least one token, got 0"),
        ([1, -3], [-1, 0], r"lengths\[1\].* got -3"),
        ([1.0, 2.0], [-1, 0], "lengths: expected integers, got float64"),
        ([True, True], [-1, 0], "lengths: expected integers, got bool"),
        ([[1, 2]], [-1, 0], "lengths: expected one dimension"),
        ([[1], [1, 2]], [-1, 0], "lengths: not a vector of integers"),
        ([1, 1], [1, 0], r"parents\[0\]: 1 does not come before its child; a cycle"),
        ([1, 1], [-1, 1], r"parents\[1\]: 1 does not come before its child; a cycle"),
        ([1, 1], [-1, -2], r"parents\[1\]: -2 is neither"),
        ([1, 1, 1, 1], [-1, 0, 0, 1], r"parents\[3\]: the subtree of segment 1 is already closed"),
    ],
)
def test_bad_input(lengths, parents, match):
    with pytest.raises(InputError, match=match) as caught:
        PackedTree(lengths, parents)
    assert "\n" not in str(caught.value)


def test_bad_queries():
    for call in (
        lambda: TREE.is_visible(9, 0),
        lambda: TREE.is_visible(0, -1),
        lambda: TREE.is_visible(0.5, 0),
        lambda: TREE.visible_pairs(0),
        lambda: TREE.path(5),
    ):
        with pytest.raises(InputError):
            call()
