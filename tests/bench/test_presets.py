"""The workload presets: sizes, draws and clipping."""

import random

import pytest

from megatron_tree_cp.bench.attention import Shape
from megatron_tree_cp.bench.presets import PRESETS, preset_tree
from megatron_tree_cp.plan import plan_row
from megatron_tree_cp.plan.shipped_profiles import profile_for


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("cp_size", [1, 4])
def test_rows_are_full_and_repeat(name, cp_size):
    tree = preset_tree(name, cp_size)
    assert tree.num_tokens == PRESETS[name].base * (1 if name.startswith("one_") else cp_size)
    assert tree == preset_tree(name, cp_size)


def test_draws_follow_the_protocol():
    rng = random.Random(1234 + 97 * 17)
    want = [max(2, min(max(round(rng.gauss(100, 32)), 36), 164)) for _ in range(32)]
    lengths = preset_tree("varied_5k", 1, row=17).lengths.tolist()
    assert lengths[0] == 5000 and lengths[1:17] == want[:16]
    assert lengths[17] == 5000 and lengths[18:34] == want[16:]


def test_fixed_rows_repeat_and_clip():
    tree = preset_tree("fixed_5k", 1, row=3)
    assert tree == preset_tree("fixed_5k", 1, row=4)
    assert tree.lengths[-1] == 40_960 - 6 * 6600 - 0 and tree.parents[-1] == -1


def test_unknown_preset():
    with pytest.raises(ValueError, match="known: fixed_5k"):
        preset_tree("nope", 1)


def test_a_first_family_of_its_own():
    tree = preset_tree("lopsided", 2)
    assert tree.lengths[0] == 30_000 and tree.parents[:10].tolist() == [-1, *[0] * 8, -1]
    assert tree.lengths[9] == 256 and tree.parents[10:14].tolist() == [9] * 4
    assert (tree.parents < 0).sum() > 50 and tree.lengths[1:9].max() <= 1400


def test_the_search_beats_contiguous_shards_where_tokens_and_work_part():
    """Predicted by the costs of an H200, at CP4: attention alone, and a whole layer."""
    profile = profile_for("H200")[0]
    for model in (Shape().model(), None):
        predicted = plan_row(preset_tree("lopsided", 4), 4, model, profile).predicted
        contiguous = predicted.candidates[0]
        assert contiguous.name == "contiguous"
        assert predicted.total_ms < 0.9 * contiguous.total_ms and predicted.imbalance < 1.05
