"""Trajectory: what it accepts and the one line it says otherwise."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from megatron_tree_cp.tree import InputError, Trajectory

NAN = float("nan")


def test_token_zero_is_never_a_target_and_ignored():
    trajectory = Trajectory([1, 2], [NAN, 1], [NAN, 1], [NAN, 1], [NAN, -1])
    assert trajectory.trained().tolist() == [False, True]
    assert Trajectory([4, 5, 6]).trained().tolist() == [False, True, True]


def test_rl_fields_need_values_only_where_trained():
    Trajectory([1, 2, 3], [0, 0, 1], None, [NAN, NAN, 1], [NAN, NAN, -1])


def test_one_number_stands_for_all_tokens():
    assert Trajectory([1, 2], weights=2, advantages=-0.5).advantages.tolist() == [-0.5, -0.5]


def test_copies():
    trajectory = Trajectory(np.array([1, 2, 3]), weights=[1, 2, 3], group="a")
    for copy in (pickle.loads(pickle.dumps(trajectory)), replace(trajectory, group=7)):
        assert copy.tokens.tolist() == [1, 2, 3] and copy.weights.tolist() == [1, 2, 3]
    assert trajectory.cut(2).weights.tolist() == [1, 2] and trajectory.cut(2).group == "a"
    with pytest.raises(ValueError, match="read-only"):
        trajectory.tokens[0] = 3


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tokens": []}, "tokens: a trajectory needs tokens"),
        ({"tokens": [1, -2]}, r"tokens\[1\]: token ids are not negative, got -2"),
        ({"tokens": [1.0, 2.0]}, "tokens: expected integers, got float64"),
        ({"tokens": [1, None]}, "tokens: expected integers, got object"),
        ({"tokens": "ab"}, "tokens: expected one dimension"),
        ({"tokens": np.array([1, 2**63], np.uint64)}, "tokens: 9223372036854775808 does not fit"),
        ({"tokens": [[1], [2, 3]]}, "tokens: not a vector of integers"),
        ({"loss_mask": [1]}, "loss_mask: 1 values for 3 tokens"),
        ({"loss_mask": [1, NAN, 0]}, r"loss_mask\[1\]: is NaN"),
        ({"weights": [1, 1, NAN]}, r"weights\[2\]: must be finite, got nan"),
        ({"weights": [1, float("inf"), 1]}, r"weights\[1\]: must be finite, got inf"),
        ({"weights": [[1], [2], [3]]}, "weights: expected one dimension"),
        ({"weights": ["a", "b", "c"]}, "weights: expected numbers"),
        ({"advantages": [0, 1, NAN]}, r"advantages\[2\]: must be finite"),
        ({"old_logprobs": [0, -1]}, "old_logprobs: 2 values for 3 tokens"),
        ({"old_logprobs": -1.0}, "old_logprobs: expected one dimension"),
        ({"group": 1.5}, "group: expected an integer or a string"),
    ],
)
def test_bad_input(fields, match):
    with pytest.raises(InputError, match=match) as caught:
        Trajectory(**({"tokens": [1, 2, 3]} | fields))
    assert "\n" not in str(caught.value)
