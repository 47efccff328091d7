"""plan_row against the dense mask: every visible pair once, no other pair ever."""

import numpy as np
import pytest

from megatron_tree_cp.plan import LayerClass, Layout, ModelShape, plan_row
from megatron_tree_cp.tree import PackedTree

MODEL = ModelShape(
    classes=(
        LayerClass("global"),
        LayerClass("w5", window=5, layers=2),
        LayerClass("gdn", kind="gdn"),
    )
)


def stage_matrix(stage, num_rows, rows, tree, window):
    """int[T, T] (query row, key row): how often the stage computes a pair."""
    seen = np.zeros((num_rows, num_rows), int)
    lo, hi, positions, keys = stage.keys.expand()
    reached = np.zeros(len(rows), bool)
    for j, key in enumerate(keys):
        queries = rows[lo[j] : hi[j]]
        if window is not None:
            queries = queries[tree.positions[queries] - positions[j] < window]
        seen[queries, key] += 1
        reached[np.searchsorted(rows, queries)] = True
    assert np.array_equal(positions, tree.positions[keys])
    ends = np.flatnonzero(reached)
    assert stage.query_range == ((ends[0], ends[-1] + 1) if len(ends) else (0, 0))
    assert stage.visible_pairs == seen.sum()
    return seen


def check_plan(plan):
    """Cover, exchanges and stages of a whole plan against the tree's dense mask."""
    tree, layout = plan.tree, plan.layouts["main"]
    shards = [layout.row_indices(rank) for rank in range(plan.cp_size)]
    real = [rows[rows >= 0] for rows in shards]
    assert np.array_equal(np.sort(np.concatenate(real)), np.arange(tree.num_tokens))
    for rank, rows in enumerate(shards):
        assert len(rows) % layout.granule == 0 and len(rows) >= layout.granule
        assert (rows[len(real[rank]) :] == -1).all() and (np.diff(real[rank]) > 0).all()
        assert (layout.owner()[real[rank]] == rank).all()
    for attention in plan.attention.values():
        assert len(attention.exchanges) == attention.num_waves
        assert not attention.fused or attention.num_waves == 1
        covered = np.zeros((tree.num_tokens,) * 2, int)
        for rank in range(plan.cp_size):
            stages = attention.rank(rank)
            for wave, exchange in enumerate(attention.exchanges):
                mine = exchange.rank(rank)
                buffer = []
                for source in range(plan.cp_size):
                    sent = exchange.rank(source)
                    assert sent.send_counts[rank] == mine.recv_counts[source]
                    assert sent.send_counts == tuple(exchange.counts[source])
                    rows = np.concatenate(
                        [np.arange(a, a + n) for a, n in zip(sent.send_starts, sent.send_lengths)]
                        or [np.zeros(0, int)]
                    )
                    skip = sum(sent.send_counts[:rank])
                    buffer.append(shards[source][rows][skip : skip + sent.send_counts[rank]])
                buffer = np.concatenate(buffer)
                assert len(buffer) == mine.num_recv and sum(mine.recv_lengths) == mine.num_recv
                assert np.array_equal(buffer, stages.remote[wave].keys.expand()[3])
                assert not np.isin(buffer, real[rank]).any()
            assert np.array_equal(stages.local.keys.expand()[3], real[rank])
            parts = [
                stage_matrix(s, tree.num_tokens, real[rank], tree, attention.window)
                for s in (*stages.remote, stages.local)
            ]
            fused = stage_matrix(stages.fused, tree.num_tokens, real[rank], tree, attention.window)
            assert np.array_equal(sum(parts), fused)
            covered += fused
        assert np.array_equal(covered, tree.dense_mask(attention.window).astype(int))


@pytest.mark.parametrize("waves", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_plan_covers_the_mask(cp_size, waves):
    tree = PackedTree([7, 3, 1, 5, 4, 1, 9], [-1, 0, 1, 1, 0, -1, 5])
    check_plan(plan_row(tree, cp_size, MODEL, waves=waves, granule=2))


def test_random_layouts_cover_the_mask():
    tree = PackedTree([6, 3, 2, 5, 4, 1, 9], [-1, 0, 1, 1, 0, -1, 5])
    rng = np.random.default_rng(0)
    for trial in range(40):
        cp_size = int(rng.integers(1, 6))
        owner = rng.integers(0, cp_size, tree.num_tokens)
        layout = Layout.from_pieces(np.arange(tree.num_tokens + 1), owner, cp_size, 4)
        check_plan(plan_row(tree, cp_size, MODEL, waves=trial % 4, layout=layout))
