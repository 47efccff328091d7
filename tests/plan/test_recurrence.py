"""The recurrence plan executed with small matrices on up to 8 ranks, against the tree itself."""

import pickle

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree_cp.plan.halo import HaloPlan
from megatron_tree_cp.plan.layout import Layout
from megatron_tree_cp.plan.recurrence import RecurrencePlan
from megatron_tree_cp.tree.packed_tree import PackedTree


@st.composite
def plans(draw, cp_sizes=(1, 2, 3, 8)):
    """Random forest, interleaved pieces with random owners, often with ranks that own nothing."""
    count = draw(st.integers(1, 10))
    lengths = [draw(st.integers(1, 7)) for _ in range(count)]
    chain, parents = [], []
    for segment in range(count):
        depth = draw(st.integers(0, len(chain)))
        parents.append(chain[depth - 1] if depth else -1)
        chain = [*chain[:depth], segment]
    tree = PackedTree(lengths, parents)
    cp_size = draw(st.sampled_from(cp_sizes))
    inner = draw(st.lists(st.integers(0, tree.num_tokens), max_size=20))
    cuts = np.unique([0, *inner, tree.num_tokens])
    owners = draw(st.integers(1, cp_size))
    owner = [draw(st.integers(0, owners - 1)) for _ in cuts[1:]]
    return RecurrencePlan(tree, Layout.from_pieces(cuts, np.array(owner), cp_size))


def token_parents(tree):
    parents = np.arange(tree.num_tokens) - 1
    for segment, start in enumerate(tree.segment_starts):
        above = tree.parents[segment]
        parents[start] = -1 if above < 0 else tree.segment_ends[above] - 1
    return parents


def exchange(parts, banks, side):
    """All ranks' states and transfers after the exchange, the rank's own first."""
    pools = []
    for reader, part in enumerate(parts):
        plan, pool = getattr(part, side), []
        for form, own in zip(("states", "transfers"), banks[reader], strict=True):
            entries = list(own)
            for source, other in enumerate(parts):
                sent = getattr(getattr(other, side), f"send_{form}")[reader]
                bank = banks[source][form == "transfers"]
                assert len(sent) == getattr(plan, f"recv_{form}")[source]
                assert source != reader or not len(sent)
                entries += [bank[i] for i in sent]
            pool.append(entries)
        pools.append(pool)
    return pools


@settings(max_examples=60)
@given(plans(), st.integers(0, 1000))
def test_states_and_gradients_equal_the_tree_s(plan, seed):
    runs, parent = plan.runs, plan.parent
    rng = np.random.default_rng(seed)
    matrix, write, dlocal = rng.normal(size=(3, len(runs), 2, 2))
    state_in, state_out = np.zeros((2, len(runs), 2, 2))
    for run in range(len(runs)):
        state_in[run] = state_out[parent[run]] if parent[run] >= 0 else 0
        state_out[run] = matrix[run] @ state_in[run] + write[run]
    dout, din = np.zeros((2, len(runs), 2, 2))
    for run in reversed(range(len(runs))):
        din[run] = matrix[run].T @ dout[run] + dlocal[run]
        if parent[run] >= 0:
            dout[parent[run]] += din[run]

    ranks = range(plan.layout.cp_size)
    parts = [plan.rank(rank) for rank in ranks]
    ids = [np.flatnonzero(runs.owner == rank) for rank in ranks]
    assert sum(len(part.start) for part in parts) == len(runs)
    banks = []
    for part, mine in zip(parts, ids, strict=True):
        ends, maps = {}, {}
        final = set(np.concatenate([*part.early, *part.rest, [-1]]).tolist())
        for run, above in enumerate(part.parent.tolist()):
            m, e = matrix[mine[run]], write[mine[run]]
            ends[run] = m @ ends[above] + e if above >= 0 else e
            maps[run] = m @ maps[above] if above >= 0 else m
        assert [x for x in part.exports.tolist() if x not in final] == part.transfers.tolist()
        banks.append(([ends[x] for x in part.exports], [maps[x] for x in part.transfers]))
    for rank, (states, transfers) in enumerate(exchange(parts, banks, "forward")):
        nodes = []
        for node in parts[rank].state_nodes:
            end = states[node.state]
            nodes.append(
                end if node.transfer < 0 else transfers[node.transfer] @ nodes[node.parent] + end
            )
        for head, node in zip(parts[rank].heads, parts[rank].incoming, strict=True):
            np.testing.assert_allclose(nodes[node], state_in[ids[rank][head]], atol=1e-9)

    back = []
    for part, mine, bank in zip(parts, ids, banks, strict=True):
        local = np.zeros((len(mine), 2, 2))
        for run in reversed(range(len(mine))):
            end = sum((local[c] for c in np.flatnonzero(part.parent == run)), np.zeros((2, 2)))
            local[run] = matrix[mine[run]].T @ end + dlocal[mine[run]]
        assert sorted(h for heads in part.gradient_bank for h in heads) == part.heads.tolist()
        back.append(([sum(local[h] for h in heads) for heads in part.gradient_bank], bank[1]))
    for rank, (states, transfers) in enumerate(exchange(parts, back, "backward")):
        part, nodes = parts[rank], []
        for node in part.gradient_nodes:
            total = sum((states[s] for s in node.states), np.zeros((2, 2)))
            total = total + sum((transfers[m].T @ nodes[n] for m, n in node.products), 0.0)
            nodes.append(total)
        for run, node in zip(part.exports, part.outgoing, strict=True):
            local = sum((din[ids[rank][c]] for c in np.flatnonzero(part.parent == run)), 0.0)
            np.testing.assert_allclose(nodes[node], dout[ids[rank][run]] - local, atol=1e-9)


@settings(max_examples=40)
@given(plans(), st.sampled_from([1, 2, 4, 8]))
def test_halos_follow_the_path(plan, width):
    halo, parents = HaloPlan(plan, width), token_parents(plan.tree)
    for rank in range(plan.layout.cp_size):
        rows = plan.layout.row_indices(rank)
        rows = rows[rows >= 0]
        part, side = halo.rank(rank), halo.exchange.rank(rank)
        received = halo.received_rows(rank)
        assert part.num_received == len(received) == side.num_recv
        sent = []
        for source in range(plan.layout.cp_size):
            other = halo.exchange.rank(source)
            begin = sum(other.send_counts[:rank])
            local = np.concatenate(
                [np.arange(s, s + n) for s, n in zip(other.send_starts, other.send_lengths)]
                or [np.zeros(0, int)]
            )[begin : begin + other.send_counts[rank]]
            sent.append(plan.layout.row_indices(source)[local])
        np.testing.assert_array_equal(np.concatenate(sent), received)
        table = np.concatenate([rows, received, [-1]])
        want = rows[part.start]
        for column in part.before.T:
            want = np.where(want < 0, -1, parents[want])
            np.testing.assert_array_equal(table[column], want)


def test_levels_and_forms_of_a_small_tree():
    # Root on rank 0; its first child on rank 1 with a grandchild on rank 0; the second on rank 1.
    tree = PackedTree((4, 3, 2, 2), (-1, 0, 1, 0))
    layout = Layout.from_pieces(np.array([0, 4, 7, 9, 11]), np.array([0, 1, 0, 1]), 2)
    plan = RecurrencePlan(tree, layout)
    first, second = plan.rank(0), plan.rank(1)
    assert plan.parent.tolist() == [-1, 0, 1, 0] and plan.leaf.tolist() == [-1, -1, 0, 1]
    assert [x.tolist() for x in first.early] == [[0]] and [x.tolist() for x in first.late] == [[1]]
    assert first.exports.tolist() == [0] and not len(first.transfers)  # a root's state is final
    assert second.exports.tolist() == [0] and second.transfers.tolist() == [0]
    assert second.heads.tolist() == [0, 1]
    # Backward: the leaf of rank 1 is exact, its other run sends B and M, rank 0's leaf is exact.
    assert second.gradient_bank == ((1,), (0,)) and first.gradient_bank == ((1,),)
    assert len(second.backward.send_states[0]) == 2 and len(second.backward.send_transfers[0]) == 1
    assert [x.tolist() for x in second.exact] == [[1]]
    assert [x.tolist() for x in second.partial] == [[0]]


def test_siblings_under_one_parent_travel_as_one():
    tree = PackedTree((4, 2, 2, 2, 2), (-1, 0, 0, 0, 0))
    layout = Layout.from_pieces(np.array([0, 4, 8, 12]), np.array([0, 1, 2]), 3)
    plan = RecurrencePlan(tree, layout)
    assert plan.rank(1).gradient_bank == ((0, 1),)
    assert plan.rank(0).backward.recv_states == (0, 1, 1)
    assert plan.rank(1).forward.recv_states == (1, 0, 0)


def test_plans_pickle():
    tree = PackedTree((4, 3, 2), (-1, 0, 0))
    layout = Layout.from_pieces(np.array([0, 5, 9]), np.array([0, 1]), 2)
    part = RecurrencePlan(tree, layout).rank(1)
    again = pickle.loads(pickle.dumps(part))
    assert again.gradient_nodes == part.gradient_nodes
    assert again.heads.tolist() == part.heads.tolist()
