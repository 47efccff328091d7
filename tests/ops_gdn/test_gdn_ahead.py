"""Rows prepared ahead: the same results to the last bit, and nothing left for layers to build."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.comm.upload import upload_together
from megatron_tree_cp.ops.gdn.ahead import upload_recurrent_row
from megatron_tree_cp.plan import plan_row
from megatron_tree_cp.plan.recurrence_tables import BlockArrays, recurrent_row
from tests.distributed import run_ranks
from tests.ops_gdn.cases import Case, build_plan, make_row, run_rank

CASE = Case((9, 5, 1, 7, 3, 6, 2), (-1, 0, 1, 0, 3, -1, 5), pieces=9, seed=3)


def _plan(cp_size):
    layout = build_plan(CASE, cp_size).layouts["main"]
    return plan_row(CASE.tree, cp_size, CASE.model(), layout=layout)


def _ahead(rank, world_size):
    group, plan = dist.group.WORLD, _plan(world_size)
    row = make_row(CASE, oracle=False)
    lazy = run_rank(CASE, row, TreeContext(plan, group, "cpu"))
    context = TreeContext(plan, group, "cpu")
    upload_recurrent_row(context, pickle.loads(pickle.dumps(recurrent_row(plan, rank))))
    built = set(context._memo)
    ahead = run_rank(CASE, row, context)
    late = set(context._memo) - built
    try:
        upload_recurrent_row(context, recurrent_row(plan, 1 - rank))
    except ValueError as error:
        refused = str(error)
    return (
        all(torch.equal(lazy[name], ahead[name]) for name in lazy),
        sorted(map(str, late)),
        refused,
    )


def test_layers_find_everything_built_and_give_the_same_bits():
    for rank, (equal, late, refused) in enumerate(run_ranks(2, _ahead, timeout=60)):
        assert equal and not late
        assert f"of rank {1 - rank} but the context is rank {rank}'s" in refused


def test_one_buffer_keeps_every_tensor_aligned():
    arrays = BlockArrays.of(_recurrence(), 0, chunk=4)
    host = [arrays.starts, arrays.part.start, arrays.block_runs, arrays.starts[:0], arrays.starts]
    tensors = upload_together(host, torch.device("cpu"))
    for array, tensor in zip(host, tensors, strict=True):
        assert tensor.numpy().dtype == array.dtype and tensor.tolist() == array.tolist()
        assert tensor.data_ptr() % 16 == 0


def _recurrence():
    from megatron_tree_cp.plan.recurrence import RecurrencePlan

    return RecurrencePlan(CASE.tree, build_plan(CASE, 2).layouts["main"])


@pytest.mark.parametrize("name", ["starts", "block_runs"])
def test_layers_cannot_write_to_shared_arrays(name):
    arrays = BlockArrays.of(_recurrence(), 0)
    with pytest.raises(ValueError, match="read-only"):
        getattr(arrays, name)[0] = 1
