"""Recurrent arrays of a row come from its data worker, are agreed on, and go up with the batch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from megatron_tree_cp.megatron.batch import build_batch
from megatron_tree_cp.megatron.rows import PlannedRows, PlanRecipe, RowRecipe
from megatron_tree_cp.megatron.stream import RowStream, SampleOrder, planned_row_loader
from megatron_tree_cp.plan.model import LayerClass, ModelShape
from megatron_tree_cp.plan.profile import CostProfile
from megatron_tree_cp.plan.recurrence_tables import BlockArrays

ATTENTION = LayerClass("global", query_heads=2, kv_heads=1, head_dim=8)
RECURRENT = LayerClass("gdn", kind="gdn", query_heads=1, kv_heads=2, head_dim=8, conv_width=3)
HYBRID = PlanRecipe(cp_size=2, tp_size=1, granule=1, model=ModelShape((ATTENTION, RECURRENT)))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> RowRecipe:
    path = tmp_path_factory.mktemp("rows") / "rollouts.jsonl"
    paths = [[7, *range(9), 1, 2, 3], [7, *range(9), 5, 5], [4, 4, *range(8)]]
    path.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in paths))
    return RowRecipe((str(path),), "bytes", 64, 64, 64, shuffle=False)


def test_a_worker_makes_the_arrays_of_its_rank(recipe):
    rows = PlannedRows(recipe, replace(HYBRID, cp_rank=1))
    planned = next(planned_row_loader(rows, SampleOrder(0, 0, 1), workers=1, lookahead=1))
    here = rows[0]
    assert planned.recurrence.rank == 1 and planned.recurrence.digest == here.recurrence.digest
    assert planned.recurrence.blocks.starts.tolist() == here.recurrence.blocks.starts.tolist()
    assert not planned.recurrence.blocks.starts.flags.writeable
    assert [arrays.width for arrays in planned.recurrence.convolutions] == [3]


class Recorded:
    """An agreement that keeps what this rank would have told the others."""

    def __init__(self):
        self.digests = []

    def begin(self, digest, error=None):
        assert error is None
        self.digests.append(digest)
        return self

    def finish(self):
        pass


def test_ranks_agree_on_states_too(recipe):
    dense = replace(HYBRID, model=ModelShape((ATTENTION,)))
    digests = {}
    plans = {"hybrid": HYBRID, "other rank": replace(HYBRID, cp_rank=1), "dense": dense}
    for name, plan in plans.items():
        rows, agreement = PlannedRows(recipe, plan), Recorded()
        stream = RowStream(iter([rows[0], rows[0]]), agreement, lambda row: row)
        stream.consumer()
        planned = stream.peek(0)
        digests[name] = agreement.digests[0]
        known = planned.recurrence
        assert (known is None) == (name == "dense")
        assert known is None or agreement.digests[0].endswith(known.digest[:32])
        assert len(digests[name].encode()) <= 128
    assert digests["hybrid"] == digests["other rank"] != digests["dense"]


def test_rows_with_islands_bring_their_arrays(recipe):
    """The island's layout is in the digest, its arrays come ahead, its router weights beside."""
    forced = replace(HYBRID, islands=1, force_islands=True, granule=2)
    rows = PlannedRows(recipe, forced)
    planned = next(planned_row_loader(rows, SampleOrder(0, 0, 1), workers=1, lookahead=1))
    assert planned.recurrence.layout == "gdn" and set(planned.plan.layouts) == {"main", "gdn"}
    digests = []
    for plan in (forced, replace(forced, cp_rank=1), replace(HYBRID, granule=2)):
        agreement = Recorded()
        stream = RowStream(iter([PlannedRows(recipe, plan)[0]] * 2), agreement, lambda row: row)
        stream.consumer()
        stream.peek(0)
        digests.append(agreement.digests[0])
    assert digests[0] == digests[1] != digests[2]
    # One rank has one layout, whatever is asked.
    alone = PlannedRows(recipe, replace(forced, cp_size=1))[0]
    assert set(alone.plan.layouts) == {"main"} and alone.recurrence.layout == "main"
    batch = build_batch(alone, None, torch.device("cpu"), router_statistics="logical")
    assert batch.routing is not None and batch.island_routing is None


def test_islands_that_do_not_win_cost_nothing(recipe):
    dear = CostProfile(exchange_latency_ms=1e3)
    auto = PlannedRows(recipe, replace(HYBRID, islands=1, profile=dear))[0]
    off = PlannedRows(recipe, replace(HYBRID, profile=dear))[0]
    assert auto.plan.digest == off.plan.digest and auto.recurrence.digest == off.recurrence.digest


def test_a_batch_brings_everything_up(recipe, monkeypatch):
    planned = PlannedRows(recipe, replace(HYBRID, cp_size=1))[0]
    monkeypatch.setattr(BlockArrays, "of", None)  # nothing is left to make
    batch = build_batch(planned, None, torch.device("cpu"))
    from megatron_tree_cp.ops.gdn.conv_tables import conv_tables
    from megatron_tree_cp.ops.gdn.tables import recurrence_tables

    tables = recurrence_tables(batch.context)
    assert tables.num_tokens == planned.row.num_tokens == conv_tables(batch.context, 3).num_tokens
    # A plan of another process or caller may come without: layers then make it themselves.
    monkeypatch.undo()
    later = build_batch(replace(planned, recurrence=None), None, torch.device("cpu"))
    assert recurrence_tables(later.context).starts.tolist() == tables.starts.tolist()
