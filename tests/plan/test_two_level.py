"""Two-level exchanges: who gets which row, how often it crosses, what comes home, what it costs."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree_cp.plan import CostProfile, LayerClass, Layout, ModelShape, plan_row
from megatron_tree_cp.plan.cost import CostModel, local_loads, stage_loads, two_level_loads
from megatron_tree_cp.plan.remote import remote_keys, split_waves, split_waves_by_node
from megatron_tree_cp.plan.runs import RunTable
from megatron_tree_cp.plan.simulate import HopLoads, LayerRates, StageLoads, layer_ms, wave_ms
from megatron_tree_cp.plan.two_level import TwoLevelExchange, two_level_exchange
from megatron_tree_cp.plan.values import expand_ranges
from megatron_tree_cp.tree import PackedTree
from tests.plan.oracle import check_plan, delivered, layouts, trees
from tests.plan.test_simulate import LAYER, PROFILE


def returned_sums(exchange, values):
    """Per rank {source row of the shard: sum} when ``values[rank]`` per received row goes back."""
    sides = [exchange.rank(rank) for rank in range(exchange.cp_size)]

    def back(hop_sides, grads):
        returned = [[] for _ in sides]
        for rank, side in enumerate(hop_sides):
            for peer, part in enumerate(np.split(grads[rank], np.cumsum(side.recv_counts)[:-1])):
                returned[peer].append(part)
        return [np.concatenate(parts) for parts in returned]

    own, passed = [], []
    for side, grad in zip(sides, values):
        arrived = np.zeros(side.first.num_recv + side.second.num_recv, grad.dtype)
        arrived[expand_ranges(side.arrival_starts, side.arrival_lengths)] = grad
        own.append(arrived[: side.first.num_recv])
        passed.append(arrived[side.first.num_recv :])
    for rank, returned in enumerate(back([s.second for s in sides], passed)):
        second = sides[rank].second
        np.add.at(own[rank], expand_ranges(second.send_starts, second.send_lengths), returned)
    sums = []
    for rank, returned in enumerate(back([s.first for s in sides], own)):
        first = sides[rank].first
        rows = expand_ranges(first.send_starts, first.send_lengths)
        total = {}
        for row, value in zip(rows.tolist(), returned.tolist()):
            total[row] = total.get(row, 0) + value
        sums.append(total)
    return sums


def check_two_level(exchange, one_level, layout, ranks_per_node):
    """Same buffers as one level, each row once a node, balanced relays, an exact transpose."""
    size = exchange.cp_size
    buffers, wanted = delivered(exchange, layout), delivered(one_level, layout)
    node = np.arange(size) // ranks_per_node
    for buffer, want in zip(buffers, wanted):
        assert np.array_equal(buffer, want)
    # One list of collectives: both hops name every peer on every rank, and both ends agree.
    for hop in exchange.hops:
        assert hop.counts.shape == (size, size)
        for rank in range(size):
            side = hop.rank(rank)
            assert side.send_counts == tuple(hop.counts[rank])
            assert side.recv_counts == tuple(hop.counts[:, rank])
    far = node[:, None] != node
    assert not exchange.second.counts[far].any()
    imported = exchange.first.counts * far
    crossings = 0
    for home in range(node[-1] + 1):
        needed = [w for w, at in zip(wanted, node) if at == home]
        foreign = np.unique(np.concatenate(needed))
        foreign = foreign[node[layout.owner()[foreign]] != home]
        shares = imported.sum(0)[node == home]
        assert shares.sum() == len(foreign)
        assert shares.max() - shares.min() <= 1
        crossings += len(foreign)
    assert imported.sum() == crossings
    # Every reader returns a power of its own: the sums name who returned what.
    sums = returned_sums(exchange, [np.full(len(b), 3**r) for r, b in enumerate(buffers)])
    for rank in range(size):
        rows = layout.row_indices(rank)
        want = {}
        for reader, buffer in enumerate(wanted):
            for local in np.flatnonzero(np.isin(rows, buffer)).tolist():
                want[local] = want.get(local, 0) + 3**reader
        assert sums[rank] == want


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_random_trees(data):
    tree = data.draw(trees())
    cp_size = data.draw(st.integers(2, 9))
    ranks_per_node = data.draw(st.integers(1, cp_size))
    window = data.draw(st.sampled_from([None, 1, 3, 8]))
    layout = data.draw(layouts(tree.num_tokens, cp_size))
    runs = RunTable(tree, layout)
    keys = remote_keys(runs, window)
    for wave in (keys, *split_waves(keys, runs, 2, "tokens")):
        exchange = two_level_exchange(wave, runs, ranks_per_node)
        check_two_level(exchange, wave.exchange(runs), layout, ranks_per_node)
    # Waves by nodes: every key once, and a row crosses to a node in one of them only.
    waves = split_waves_by_node(keys, runs, 3, ranks_per_node)
    node, crossed = np.arange(cp_size) // ranks_per_node, []
    got = [[] for _ in range(cp_size)]
    for wave in waves:
        exchange = two_level_exchange(wave, runs, ranks_per_node)
        check_two_level(exchange, wave.exchange(runs), layout, ranks_per_node)
        rows = np.unique(
            np.concatenate(
                [
                    node[rank] * tree.num_tokens + buffer
                    for rank, buffer in enumerate(delivered(exchange, layout))
                ]
            )
        )
        crossed.append(rows)
        for rank, buffer in enumerate(delivered(exchange, layout)):
            got[rank].append(buffer)
    assert len(np.unique(np.concatenate(crossed))) == sum(map(len, crossed))
    for rank, buffer in enumerate(delivered(keys.exchange(runs), layout)):
        assert np.array_equal(np.sort(np.concatenate(got[rank])), np.sort(buffer))


def _chain_on_two_nodes():
    """A prefix of 8 on rank 0 of node 0, seen by both ranks of node 1; plan arguments of it."""
    tree = PackedTree([8, 4, 4, 4], [-1, 0, 0, 0])
    return tree, Layout.from_pieces(np.array([0, 8, 12, 16, 20]), np.array([0, 1, 2, 3]), 4)


def test_a_dropped_second_hop_and_a_forgotten_share_are_noticed():
    tree, layout = _chain_on_two_nodes()
    runs = RunTable(tree, layout)
    keys = remote_keys(runs, None)
    exchange, one_level = two_level_exchange(keys, runs, 2), keys.exchange(runs)
    check_two_level(exchange, one_level, layout, 2)
    second = exchange.second
    assert len(second.length) == 2  # relays 2 and 3 hold four rows each and pass them on
    fewer = replace(second, length=second.length - np.array([1, 0]))
    with pytest.raises((AssertionError, IndexError)):
        check_two_level(replace(exchange, second=fewer), one_level, layout, 2)
    swapped = replace(exchange, arrival_start=exchange.arrival_start[::-1])
    with pytest.raises((AssertionError, IndexError)):
        check_two_level(swapped, one_level, layout, 2)


NODES = replace(
    PROFILE,
    exchange_latency_ms=0.5,
    exchange_bytes_per_ms=8.0,
    ranks_per_node=2,
    network_latency_ms=1.0,
    network_bytes_per_ms=1.0,
)
BYTES = ModelShape((LAYER,), token_flops=0.0, dtype_bytes=1, activation_bytes=0.0)


def test_slow_link_between_two_nodes_of_two_ranks_by_hand():
    """The prefix of 8 rows (2 bytes each, K and V) crosses once instead of twice."""
    tree, layout = _chain_on_two_nodes()
    costs = CostModel(BYTES, NODES, 1)
    runs = RunTable(tree, layout)
    keys = remote_keys(runs, None)
    local = local_loads(runs, None, NODES)
    rates = costs.rates(LAYER)
    assert rates.kv_bytes == 2
    one = stage_loads(runs, (keys,), None, local, NODES)
    two = two_level_loads(one, runs, (keys,), NODES, (True,))
    # One hop: rank 0 sends 8 rows to rank 1 (16 bytes at 8) and 8 to each of 2 and 3 (32 at 1).
    first, second = wave_ms(one, rates)
    assert first == pytest.approx([0.5 + 1 + 32]) and second is None
    # Two: 4 rows to each relay, 16 bytes in all; then relays swap 4 rows, 8 bytes at 8.
    first, second = wave_ms(two, rates)
    assert first == pytest.approx([0.5 + 1 + 16]) and second == pytest.approx([0.5 + 1])
    assert two.hops.sent.tolist() == [16, 0, 0, 0]  # 8 to rank 1 and 4 to each relay
    assert two.hops.held.tolist() == [0, 8, 4 + 4 + 4, 4 + 4 + 4]
    # What the stages read is the same.
    assert np.array_equal(one.received.sum((0, 1)), two.received.sum((0, 1)))
    # Fused, the forward waits for the exchange, packs and computes: 14.5 ms sooner in two hops.
    ms = {}
    for two_level, loads in ((False, one), (True, two)):
        ms[two_level] = layer_ms(loads, rates, True, True)[0].max()
    assert ms[False] - ms[True] == pytest.approx(33.5 - 19)

    def chosen(profile, where):
        return plan_row(tree, 4, BYTES, profile, waves=0, layout=where).attention_class(None)

    plan = chosen(NODES, layout)
    assert plan.two_level == (True,) and plan.ranks_per_node == 2
    assert plan.describe() == "fused, two-level"
    # A network as fast as the node's links is not worth the second latency.
    fast = replace(NODES, network_bytes_per_ms=64.0, network_latency_ms=0.0)
    assert not chosen(fast, layout).two_level
    # Rows that one rank of the node reads cross once anyway.
    alone = Layout.from_pieces(np.array([0, 8, 16, 20]), np.array([0, 2, 1]), 4)
    assert not chosen(NODES, alone).two_level


def test_second_hops_follow_the_executors_order():
    """Two waves, both of two hops: a second hop behind the call before its stage, the next wave's
    first hop behind it."""
    moved = np.zeros((2, 2, 2, 2, 4))
    moved[:, 0, :, 1, 0] = 3  # 2 bytes a row at 1 a ms: 1.5 + 6 ms
    moved[:, 1, :, 0, 0] = 4  # at 8 a ms: 0.5 + 1 ms
    hops = HopLoads(np.array([True, True]), moved)
    pairs = np.array([[0, 0, 0, 10], [0, 0, 0, 5]])
    received = np.zeros((2, 2, 4))
    received[:, 0, 3] = 1
    work = StageLoads(
        np.ones(4), np.array([1, 1, 1, 20]), pairs, np.zeros((2, 4)), received, received, hops=hops
    )
    rates = LayerRates.of(LAYER, NODES, 1, 1)
    seen = []
    forward, backward = layer_ms(
        work, rates, False, False, lambda d, kind, w, b, e: seen.append((d, kind, w, b, e))
    )
    # Wave 0's hops end at 7.5 and 9, wave 1's first at 16.5; own keys till 20, wave 0 till 30.
    # The second hop of wave 1 starts with wave 0's stage, at 20, and is there long before 30.
    assert forward == pytest.approx([1, 1, 1, 35])
    exchanges = [(w, b, e) for d, kind, w, b, e in seen if (d, kind) == ("forward", "exchange")]
    assert [w for w, _, _ in exchanges] == [0, 0, 1, 1]
    spans = [(np.max(begin), np.max(end)) for _, begin, end in exchanges]
    assert np.array(spans) == pytest.approx(np.array([(0, 7.5), (7.5, 9), (9, 16.5), (20, 21.5)]))
    # Backward: stages till 25 and 37.5, then own keys till 87.5; returns of 9 ms end long before.
    assert backward[3] == pytest.approx(2.5 * 35)


def test_plans_choose_show_and_digest_two_levels():
    rng = np.random.default_rng(5)
    tree = PackedTree([256, *rng.integers(12, 56, 24).tolist()], [-1] + [0] * 24)
    slow = CostProfile(
        ranks_per_node=4,
        forward_flops_per_ms=1e7,
        exchange_latency_ms=0.01,
        network_latency_ms=0.01,
        network_bytes_per_ms=2e5,
    )
    model = ModelShape((LayerClass("global"), LayerClass("near", window=32)), token_flops=0.0)
    plan = plan_row(tree, 8, model, slow)
    check_plan(plan)
    chosen = plan.attention_class(None)
    assert any(chosen.two_level) and "two-level" in chosen.describe()
    assert any("two-level" in c.name for c in plan.predicted.candidates)
    for exchange, two_level in zip(chosen.exchanges, chosen.two_level):
        assert isinstance(exchange, TwoLevelExchange) == two_level
    assert plan.digest == plan_row(tree, 8, model, slow).digest
    again = pickle.loads(pickle.dumps(plan))
    assert again.digest == plan.digest and again.attention_class(None).two_level == chosen.two_level
    one_level = {
        name: replace(part, two_level=(), ranks_per_node=None)
        for name, part in plan.attention.items()
    }
    assert replace(plan, attention=one_level).digest != plan.digest
    # Forced waves, too, take what is sooner; one node never does.
    for waves in (0, 1, 2):
        forced = plan_row(tree, 8, model, slow, waves=waves)
        check_plan(forced)
        assert forced.attention_class(None).num_waves == max(waves, 1)
        assert any(forced.attention_class(None).two_level)
    for profile in (replace(slow, ranks_per_node=None), replace(slow, ranks_per_node=8)):
        assert not plan_row(tree, 8, model, profile).attention_class(None).two_level
    with pytest.raises(ValueError, match="1 two-level choices for 2 waves"):
        replace(forced.attention_class(None), two_level=(True,))
    with pytest.raises(ValueError, match="ranks_per_node is below the CP size"):
        runs = RunTable(tree, plan.layouts["main"])
        keys = (remote_keys(runs, None),)
        loads = stage_loads(runs, keys, None, local_loads(runs, None), CostProfile())
        two_level_loads(loads, runs, keys, CostProfile(), (True,))


def test_slow_network_is_crossed_less_than_by_one_level():
    """The best two-level plan of a row is predicted faster than any that crosses once a rank."""
    tree = PackedTree([16_384] + [1024] * 32, [-1] + [0] * 32)
    slow = CostProfile(ranks_per_node=4, network_bytes_per_ms=2e6)
    model = ModelShape(token_flops=0.0)
    plan = plan_row(tree, 8, model, slow)
    names = [c for c in plan.predicted.candidates if c.name.startswith("window")]
    one_level = min(c.total_ms for c in names if "two-level" not in c.name)
    assert plan.predicted.total_ms < 0.9 * one_level
    far = np.arange(8)[:, None] // 4 != np.arange(8) // 4
    crossing = sum(int(e.counts[far].sum()) for e in plan.attention_class(None).exchanges)
    kept = {n: replace(p, two_level=()) for n, p in plan.attention.items()}
    direct = replace(plan, attention=kept).attention_class(None)
    assert crossing < 0.5 * sum(int(e.counts[far].sum()) for e in direct.exchanges)


def test_slow_link_changes_placement_by_hand():
    """Two chains of 12 and 20 tokens on two nodes of two ranks: balanced, or whole on a node."""
    tree = PackedTree([12, 20], [-1, -1])
    slow = replace(NODES, network_bytes_per_ms=0.25)
    # 78, 74, 66 and 70 pairs; rank 1 reads 11 and 5 rows of ranks 2 and 3. In two levels rank 0
    # takes half of the 16, so that the 22 bytes of rank 2 are most, and passes on 16 bytes at 8.
    balanced = Layout.from_pieces(np.array([0, 12, 23, 28, 32]), np.array([0, 2, 3, 1]), 4)
    # 45, 33, 105 and 105 pairs; rank 3 reads 14 rows (28 bytes at 8 a ms) of its own node.
    whole = Layout.from_pieces(np.array([0, 9, 12, 26, 32]), np.arange(4), 4)

    def ms(profile, layout=None):
        return plan_row(tree, 4, BYTES, profile, waves=0, layout=layout).predicted.total_ms

    assert ms(NODES, balanced) == pytest.approx(3.5 * 78 + 2 * (0.5 + 1 + 22 + 0.5 + 2))
    assert ms(slow, balanced) == pytest.approx(3.5 * 78 + 2 * (0.5 + 1 + 22 * 4 + 0.5 + 2))
    assert ms(NODES, whole) == ms(slow, whole) == pytest.approx(3.5 * 105 + 2 * (0.5 + 3.5))
    assert ms(NODES, balanced) < ms(NODES, whole) and ms(slow, whole) < ms(slow, balanced)

    # The planner's own layouts follow: across the nodes, and whole on them.
    def crossing(profile):
        plan = plan_row(tree, 4, BYTES, profile, waves=0)
        (exchange,) = plan.attention_class(None).exchanges
        return int(exchange.counts[:2, 2:].sum() + exchange.counts[2:, :2].sum())

    assert ms(NODES) <= ms(NODES, balanced) and crossing(NODES) > 0
    assert ms(slow) <= ms(slow, whole) and crossing(slow) == 0
