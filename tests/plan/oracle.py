"""Checks a whole plan against the tree's dense mask, rank by rank and pair by pair."""

import numpy as np
from hypothesis import strategies as st

from megatron_tree_cp.plan import LayerClass, Layout, ModelShape
from megatron_tree_cp.plan.values import expand_ranges
from megatron_tree_cp.tree import PackedTree

MODEL = ModelShape(
    classes=(
        LayerClass("global"),
        LayerClass("w5", window=5, layers=2),
        LayerClass("gdn", kind="gdn"),
    )
)


@st.composite
def trees(draw, max_segments=12, max_length=9):
    """Forests with odd lengths, one-token segments, deep chains and wide forks."""
    count = draw(st.integers(1, max_segments))
    lengths = draw(
        st.lists(st.one_of(st.just(1), st.integers(1, max_length)), min_size=count, max_size=count)
    )
    shape = draw(st.sampled_from(["any", "chain", "fork"]))
    parents, path = [], []
    for segment in range(count):
        keep = len(path)  # how much of the open path stays: all (a child) to none (a new root)
        if shape == "fork":
            keep = min(keep, 1)
        elif shape == "any":
            keep = draw(st.integers(0, len(path)))
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return PackedTree(lengths, parents)


@st.composite
def layouts(draw, num_tokens, cp_size):
    """Random ownership: token-interleaved or in pieces, some ranks possibly without tokens."""
    granule = draw(st.sampled_from([1, 2, 4]))
    step = draw(st.sampled_from([1, 1, 3, 7]))
    cuts = np.append(np.arange(0, num_tokens, step), num_tokens)
    ranks = draw(st.lists(st.integers(0, cp_size - 1), min_size=1, max_size=cp_size))
    owner = np.random.default_rng(draw(st.integers(0, 10**6))).choice(ranks, len(cuts) - 1)
    return Layout.from_pieces(cuts, owner, cp_size, granule)


def sent_rows(exchange, layout, source, destination):
    """Row indices that ``source`` sends to ``destination``, in wire order."""
    mine = exchange.rank(source)
    rows = layout.row_indices(source)[expand_ranges(mine.send_starts, mine.send_lengths)]
    assert len(rows) == mine.num_send and (rows >= 0).all()
    skip = sum(mine.send_counts[:destination])
    return rows[skip : skip + mine.send_counts[destination]]


def hop_buffers(hop, send_rows):
    """Rows that each rank receives in one all-to-all; ``send_rows(rank, local)`` names them."""
    received = [[] for _ in range(hop.cp_size)]
    for rank in range(hop.cp_size):
        side = hop.rank(rank)
        rows = send_rows(rank, expand_ranges(side.send_starts, side.send_lengths))
        assert len(rows) == side.num_send and (rows >= 0).all()
        for peer, part in enumerate(np.split(rows, np.cumsum(side.send_counts)[:-1])):
            received[peer].append(part)
    return [np.concatenate(parts) for parts in received]


def delivered(exchange, layout):
    """Per rank the row indices of an exchange's receive buffer, hop by hop."""
    shards = [layout.row_indices(rank) for rank in range(layout.cp_size)]
    first = hop_buffers(exchange.hops[0], lambda rank, local: shards[rank][local])
    if len(exchange.hops) == 1:
        return first
    second = hop_buffers(exchange.hops[1], lambda rank, local: first[rank][local])
    buffers = []
    for rank, arrived in enumerate(map(np.concatenate, zip(first, second))):
        side = exchange.rank(rank)
        buffers.append(arrived[expand_ranges(side.arrival_starts, side.arrival_lengths)])
        assert len(buffers[-1]) == side.num_recv
    return buffers


def computed_pairs(stage, rows, tree, window):
    """int[T, T] (query row, key row): how often the stage computes a pair."""
    seen = np.zeros((tree.num_tokens, tree.num_tokens), int)
    lo, hi, positions, keys = stage.keys.expand()
    assert lo.dtype == hi.dtype == np.int32 and len(keys) == stage.keys.num_keys
    assert np.array_equal(positions, tree.positions[keys])
    index = np.arange(len(rows))[:, None]
    visible = (lo <= index) & (index < hi)
    assert (lo >= 0).all() and (hi <= len(rows)).all()
    if window is not None:
        visible &= tree.positions[rows][:, None] - positions < window
    query, key = np.nonzero(visible)
    np.add.at(seen, (rows[query], keys[key]), 1)
    reached = (query.min(), query.max() + 1) if len(query) else (0, 0)
    assert stage.query_range == reached
    assert stage.visible_pairs == len(query)
    return seen


def check_layout(layout, num_tokens):
    """The shards partition the row and pad their tails; returns the real rows per rank."""
    real = []
    for rank in range(layout.cp_size):
        rows = layout.row_indices(rank)
        mine = rows[: layout.num_real(rank)]
        assert len(rows) == layout.shard_size(rank)
        assert len(rows) % layout.granule == 0 and len(rows) >= layout.granule
        assert len(rows) - len(mine) < layout.granule or not len(mine)
        assert (rows[len(mine) :] == -1).all() and (np.diff(mine) > 0).all()
        assert (layout.owner()[mine] == rank).all()
        real.append(mine)
    assert np.array_equal(np.sort(np.concatenate(real)), np.arange(num_tokens))
    return real


def checked_buffer(exchange, layout, rank):
    """Rows that ``rank`` receives in an all-to-all, whose sides must agree about them."""
    mine = exchange.rank(rank)
    parts = [sent_rows(exchange, layout, source, rank) for source in range(exchange.cp_size)]
    assert mine.recv_counts == tuple(len(part) for part in parts)
    assert mine.recv_counts == tuple(exchange.counts[:, rank])
    assert mine.send_counts == tuple(exchange.counts[rank])
    assert all((np.diff(part) > 0).all() for part in parts)
    buffer = np.concatenate(parts)
    assert np.array_equal(
        expand_ranges(mine.recv_starts, mine.recv_lengths), np.arange(len(buffer))
    )
    return buffer


def check_plan(plan):
    """Layout, exchanges and stages: every visible pair once, no other pair ever."""
    tree, layout = plan.tree, plan.layouts["main"]
    real = check_layout(layout, tree.num_tokens)
    for attention in plan.attention.values():
        window = attention.window
        assert len(attention.exchanges) == attention.num_waves
        fused = attention.forward_fused or attention.backward_fused
        assert attention.num_waves == 1 or not fused
        covered = np.zeros((tree.num_tokens, tree.num_tokens), int)
        pairs = np.zeros(plan.cp_size, int)
        buffers = [delivered(exchange, layout) for exchange in attention.exchanges]
        for rank in range(plan.cp_size):
            stages = attention.rank(rank)
            assert len(stages.remote) == attention.num_waves
            received = []
            for wave, exchange in enumerate(attention.exchanges):
                buffer = buffers[wave][rank]
                if len(exchange.hops) == 1:
                    assert np.array_equal(buffer, checked_buffer(exchange, layout, rank))
                assert np.array_equal(buffer, stages.remote[wave].keys.expand()[3])
                assert not stages.remote[wave].keys.diagonal.any()
                received.append(buffer)
            everything = np.concatenate([*received, real[rank]])
            assert len(np.unique(everything)) == len(everything)
            assert np.array_equal(stages.local.keys.expand()[3], real[rank])
            assert np.array_equal(stages.fused.keys.expand()[3], everything)
            parts = [
                computed_pairs(stage, real[rank], tree, window)
                for stage in (*stages.remote, stages.local)
            ]
            assert np.array_equal(
                sum(parts), computed_pairs(stages.fused, real[rank], tree, window)
            )
            covered += sum(parts)
            pairs[rank] = stages.fused.visible_pairs
            # Nothing travels that no query sees.
            needed = sum(parts).any(0)
            assert needed[everything].all()
        assert np.array_equal(covered, tree.dense_mask(window).astype(int))
        assert pairs.sum() == tree.visible_pairs(window)
        assert np.array_equal(plan.predicted.pairs[attention.name], pairs)
