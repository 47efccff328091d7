"""Arrays of recurrent layers: what slots hold, read-only through a pickle, one digest a row."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_tree_cp.plan import LayerClass, Layout, ModelShape, plan_row
from megatron_tree_cp.plan.recurrence_tables import BlockArrays, recurrent_row
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.plan.test_recurrence import plans

TREE = PackedTree([40, 30, 1, 90, 6], [-1, 0, 1, 0, -1])
MODEL = ModelShape(
    classes=(
        LayerClass("global"),
        LayerClass("gdn", kind="gdn", conv_width=4),
        LayerClass("wide", kind="gdn", conv_width=2),
    )
)


def plan_of(cuts, owner, cp_size=2):
    layout = Layout.from_pieces(np.array([0, *cuts, TREE.num_tokens]), np.array(owner), cp_size)
    return plan_row(TREE, cp_size, MODEL, layout=layout)


def arrays_in(value):
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from arrays_in(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from arrays_in(getattr(value, field.name))


def test_arrays_survive_a_pickle_read_only():
    row = recurrent_row(plan_of([20, 75], [0, 1, 0]), 1)
    copy = pickle.loads(pickle.dumps(row))
    assert copy.digest == row.digest and copy.rank == 1
    before, after = list(arrays_in(row)), list(arrays_in(copy))
    assert len(before) == len(after) > 30
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(array.flags.writeable for array in (*before, *after))


def test_one_digest_on_all_ranks_that_tells_layouts_apart():
    cut = [([20, 75], [0, 1, 0]), ([20, 76], [0, 1, 0]), ([20, 75], [0, 1, 1])]
    digests = [{recurrent_row(plan_of(*c), rank).digest for rank in (0, 1)} for c in cut]
    assert all(len(of_ranks) == 1 for of_ranks in digests)
    assert len(set.union(*digests)) == len(cut)
    blocks = recurrent_row(plan_of(*cut[0]), 0, chunk=32)
    assert blocks.digest not in digests[0] and blocks.blocks.chunk == 32


def test_one_convolution_a_width_and_none_without_recurrent_layers():
    row = recurrent_row(plan_of([20, 75], [0, 1, 0]), 0)
    assert [arrays.width for arrays in row.convolutions] == [2, 4]
    assert recurrent_row(plan_row(TREE, 2), 0) is None


@settings(max_examples=80)
@given(plans(cp_sizes=(1, 3)))
def test_slots_hand_states_and_gradients_to_the_right_runs(plan):
    for rank in range(plan.layout.cp_size):
        arrays = BlockArrays.of(plan, rank, chunk=2)
        part, runs = arrays.part, len(arrays.part.start)
        assert np.array_equal(np.diff(arrays.block_offsets), -(-part.length // 2))
        depth = {}
        for level, of_level in enumerate(arrays.every):
            depth.update(dict.fromkeys(of_level.runs.tolist(), level))
            chunks = -(-part.length[of_level.runs] // 2)
            assert (np.diff(chunks) <= 0).all()
            assert of_level.active == tuple((chunks > c).sum() for c in range(chunks[0]))
        assert sorted(depth) == list(range(runs))
        for final in (False, True):
            for initial in (False, True):
                slots = arrays.state_slots[initial + 2 * final]
                written = slots.write[slots.write >= 0]
                assert len(set(written.tolist())) == len(written)
                for run, above in enumerate(part.parent.tolist()):
                    if above >= 0:
                        assert depth[above] + 1 == depth[run]
                        assert slots.read[run] == slots.write[above] >= len(part.heads)
                assert (slots.write[part.exports] >= 0).all()
                assert not final or (slots.write[part.leaf >= 0] >= 0).all()
                reads = slots.read[part.root >= 0] >= 0
                assert reads.all() if initial else not reads.any()
                assert slots.read[part.heads].tolist() == list(range(len(part.heads)))
                assert max([-1, *slots.read, *slots.write]) < slots.count
            gradients = arrays.gradient_slots[final]
            leaves = np.flatnonzero(part.leaf >= 0).tolist() if final else []
            for run in range(runs):
                sources = gradients.sources[gradients.offsets[run] : gradients.offsets[run + 1]]
                expected = np.flatnonzero(part.parent == run).tolist()
                expected += [runs + i for i in np.flatnonzero(part.exports == run)]
                expected += [
                    runs + len(part.exports) + i for i, leaf in enumerate(leaves) if leaf == run
                ]
                assert sources.tolist() == expected
            assert gradients.count == runs + len(part.exports) + len(leaves)


def test_a_convolution_has_a_tap():
    with pytest.raises(ValueError, match="conv_width must be at least 1"):
        LayerClass("gdn", kind="gdn", conv_width=0)
