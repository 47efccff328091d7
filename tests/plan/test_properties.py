"""Promises of every plan, over thousands of random trees on 1 to 8 ranks."""

import numpy as np
import pytest

from megatron_tree_cp.plan import CostProfile, LayerClass, Layout, ModelShape, layout_exchange
from megatron_tree_cp.plan.planner import plan_row
from megatron_tree_cp.plan.values import expand_ranges
from megatron_tree_cp.tree import PackedTree
from tests.plan.oracle import check_plan

TREES = 256  # a CP size


def random_tree(rng):
    """Forests with chains, wide forks, one-token segments and a long segment now and then."""
    count = int(rng.integers(1, 14))
    lengths = rng.integers(1, rng.choice([2, 6, 20]), count)
    lengths[rng.integers(count)] += rng.integers(0, 40)
    stay = rng.random()  # near 1: chains; near 0: many roots
    parents, path = [], []
    for segment in range(count):
        while path and rng.random() > stay:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return PackedTree(lengths, parents)


def random_layout(rng, num_tokens, cp_size, granule):
    cuts = np.unique(np.concatenate([[0, num_tokens], rng.integers(0, num_tokens, 12)]))
    return Layout.from_pieces(cuts, rng.integers(0, cp_size, len(cuts) - 1), cp_size, granule)


def check_transposes(exchange, source, destination):
    """Rows that travel back by the same counts arrive where they were sent from."""
    ranks = range(exchange.cp_size)
    sides = [exchange.rank(rank) for rank in ranks]
    sent, received = [], [[] for _ in ranks]
    for rank, side in enumerate(sides):
        local = expand_ranges(side.send_starts, side.send_lengths)
        sent.append(source.row_indices(rank)[local])
        for peer, rows in enumerate(np.split(sent[rank], np.cumsum(side.send_counts)[:-1])):
            received[peer].append(rows)
    received = [np.concatenate(parts) for parts in received]
    for rank, side in enumerate(sides):
        back = []
        for peer, other in enumerate(sides):
            assert other.recv_counts[rank] == side.send_counts[peer]
            ends = np.cumsum(other.recv_counts)
            back.append(received[peer][ends[rank] - other.recv_counts[rank] : ends[rank]])
        assert np.array_equal(np.concatenate(back), sent[rank])
    if destination is not None:
        for rank, side in enumerate(sides):
            place = expand_ranges(side.recv_starts, side.recv_lengths)
            assert np.array_equal(destination.row_indices(rank)[place], received[rank])


def check_tree(seed, cp_size):
    rng = np.random.default_rng((seed, cp_size))
    tree = random_tree(rng)
    model = ModelShape(
        classes=(LayerClass("full"), LayerClass("near", window=int(rng.integers(1, 24)), layers=2)),
        token_flops=rng.choice([None, 0.0]),
    )
    waves = rng.choice([None, None, 0, 1, 2, 3])
    granule = int(rng.choice([1, 2, 4]))
    forced = None if rng.random() < 0.5 else random_layout(rng, tree.num_tokens, cp_size, granule)
    # Coefficients for which rows this small are worth distributing in many ways.
    profile = CostProfile(
        forward_flops_per_ms=float(rng.choice([1e4, 1e6])),
        exchange_latency_ms=float(rng.choice([0.0, 0.1])),
        ranks_per_node=rng.choice([None, 2]),
    )
    plan = plan_row(tree, cp_size, model, profile, 1, waves, granule, forced)
    check_plan(plan)
    main = plan.layouts["main"]
    for attention in plan.attention.values():
        # One list of collectives for all ranks: a stage and a side of an exchange for every wave.
        for rank in range(cp_size):
            assert len(attention.rank(rank).remote) == len(attention.exchanges)
            sides = [hop.rank(rank) for e in attention.exchanges for hop in e.hops]
            assert len(sides) == attention.num_waves + sum(attention.two_level)
            assert all(len(s.send_counts) == len(s.recv_counts) == cp_size for s in sides)
        for exchange in attention.exchanges:
            check_transposes(exchange.hops[0], main, None)
    other = random_layout(rng, tree.num_tokens, cp_size, granule)
    forth, back = layout_exchange(main, other), layout_exchange(other, main)
    assert np.array_equal(forth.counts, back.counts.T)
    check_transposes(forth, main, other)
    if seed % 4 == 0:
        check_memory_cap(rng, plan, profile)


def check_memory_cap(rng, plan, profile):
    limit = float(plan.predicted.peak_bytes.max() * rng.choice([1.0, 0.95, 0.6]))
    capped = CostProfile(**{**vars(profile), "memory_limit_bytes": limit})
    try:
        again = plan_row(plan.tree, plan.cp_size, plan.model, capped)
    except ValueError as error:
        assert "shorter rows, a larger CP or TP size" in str(error)
    else:
        assert again.predicted.peak_bytes.max() <= limit


@pytest.mark.parametrize("cp_size", range(1, 9))
def test_a_few_random_trees(cp_size):
    for seed in range(4):
        check_tree(seed, cp_size)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cp_size", range(1, 9))
def test_thousands_of_random_trees(cp_size):
    """2,048 trees over all sizes."""
    for seed in range(TREES):
        check_tree(seed, cp_size)
