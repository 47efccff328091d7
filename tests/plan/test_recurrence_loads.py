"""Loads of recurrent layers: what the executor's lists of all ranks add up to."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from megatron_tree_cp.plan.recurrence_loads import recurrence_loads
from tests.plan.test_recurrence import plans

CHUNK = 3
PHASES = ("early", "summary", "rest", "late", "exact", "partial", "open")


def levels_of(part, phase):
    """(longest chunks, all chunks, runs) of every level that the executor walks."""
    chunks = -(-part.length // CHUNK)
    groups = getattr(part, phase)
    return sorted((int(chunks[ids].max()), int(chunks[ids].sum()), len(ids)) for ids in groups)


@settings(max_examples=120)
@given(plans())
def test_loads_count_what_ranks_do(plan):
    size = plan.layout.cp_size
    parts = [plan.rank(rank) for rank in range(size)]
    loads = recurrence_loads(plan, CHUNK)
    assert loads.tokens.tolist() == [int(part.length.sum()) for part in parts]
    assert loads.exchanges == (len(plan.heads) > 0) and loads.chained == len(plan.heads)
    for phase in PHASES:
        found = loads.passes[phase]
        for rank, part in enumerate(parts):
            mine = found.rank == rank
            columns = (found.longest, found.chunks, found.runs)
            levels = sorted(zip(*(column[mine].tolist() for column in columns), strict=True))
            assert levels == levels_of(part, phase), phase
    assert loads.passes["every"].chunks.sum() == (-(-plan.runs.length // CHUNK)).sum()
    for rank, part in enumerate(parts):
        for found, exchange in ((loads.forward, part.forward), (loads.backward, part.backward)):
            # A received bank entry travels once to each rank that wants it.
            assert found.states[rank].tolist() == list(exchange.recv_states)
            assert found.transfers[rank].tolist() == list(exchange.recv_transfers)
            assert found.states[:, rank].tolist() == [len(s) for s in exchange.send_states]
            assert found.transfers[:, rank].tolist() == [len(s) for s in exchange.send_transfers]
        assert loads.forward.products[rank] == len(part.state_nodes)
        assert loads.heads[rank].sum() == len(part.heads)


def test_an_empty_rank_does_nothing():
    from megatron_tree_cp.plan.layout import Layout
    from megatron_tree_cp.plan.recurrence import RecurrencePlan
    from megatron_tree_cp.tree.packed_tree import PackedTree

    layout = Layout.from_pieces(np.array([0, 5]), np.array([0]), 2)
    loads = recurrence_loads(RecurrencePlan(PackedTree([5], [-1]), layout), CHUNK)
    assert loads.tokens.tolist() == [5, 0] and not loads.exchanges
    assert set(loads.passes["every"].rank.tolist()) == {0}
