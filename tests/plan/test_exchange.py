"""Layout exchanges: content, placement and transposes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree_cp.plan import Layout, layout_exchange
from megatron_tree_cp.plan.values import expand_ranges
from tests.plan.oracle import layouts, sent_rows


def redistribute(exchange, src, dst):
    """What every rank holds after the exchange; a shard's content is its row indices."""
    shards = []
    for rank in range(dst.cp_size):
        mine = exchange.rank(rank)
        wire = np.concatenate([sent_rows(exchange, src, s, rank) for s in range(src.cp_size)])
        assert mine.recv_counts == tuple(exchange.counts[:, rank])
        shard = np.full(dst.shard_size(rank), -1)
        shard[expand_ranges(mine.recv_starts, mine.recv_lengths)] = wire
        shards.append(shard)
    return shards


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(1, 60), st.integers(1, 6), st.data())
def test_layout_exchange_moves_every_token_and_back(num_tokens, cp_size, data):
    src = data.draw(layouts(num_tokens, cp_size))
    dst = data.draw(layouts(num_tokens, cp_size))
    forth, back = layout_exchange(src, dst), layout_exchange(dst, src)
    for rank, shard in enumerate(redistribute(forth, src, dst)):
        assert np.array_equal(shard, dst.row_indices(rank))
    for rank, shard in enumerate(redistribute(back, dst, src)):
        assert np.array_equal(shard, src.row_indices(rank))
    assert np.array_equal(forth.counts, back.counts.T)
    for rank in range(cp_size):
        there, here = forth.rank(rank), back.rank(rank)
        # The transpose sends what was received, from where it was placed, in the same order.
        assert there.recv_counts == here.send_counts
        assert np.array_equal(
            expand_ranges(there.recv_starts, there.recv_lengths),
            expand_ranges(here.send_starts, here.send_lengths),
        )


def test_layout_exchange_wants_one_row():
    one, two = Layout.from_pieces([0, 4], [0], 2), Layout.from_pieces([0, 5], [0], 2)
    with pytest.raises(ValueError, match="4 tokens on 2 ranks and 5 tokens on 2 ranks"):
        layout_exchange(one, two)


def test_adjacent_ranges_are_joined():
    layout = Layout(9, (np.array([[4, 6], [0, 2], [2, 4]]), np.array([[6, 9], [6, 6]])))
    assert layout.ranges[0].tolist() == [[0, 6]] and layout.ranges[1].tolist() == [[6, 9]]
