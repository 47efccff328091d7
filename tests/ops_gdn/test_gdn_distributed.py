"""The Gated DeltaNet operators under CP1, CP2 and CP4 against the token recurrence."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_tree_cp import ops
from megatron_tree_cp.comm import TreeContext
from tests.distributed import run_ranks
from tests.ops.cases import shard
from tests.ops_gdn.cases import Case, build_plan, cases, check_case, make_row, run_rank

LENGTHS, PARENTS = (9, 5, 1, 7, 3, 6, 2), (-1, 0, 1, 0, 3, -1, 5)
CROSSING = Case(LENGTHS, PARENTS, pieces=9, seed=3)

EXPLICIT = [
    CROSSING,
    replace(CROSSING, pieces=30, width=8, seed=5),  # one-token runs: halos from several ranks
    replace(CROSSING, granule=8, initial=False, final=False, dtype=torch.float32),
    replace(CROSSING, dtype=torch.bfloat16, norm=False),
    Case((1,), (-1,), granule=4, seed=1),  # one token: every other rank is empty
    Case((1, 1, 1, 1, 1), (-1, 0, 1, 0, -1), pieces=9, seed=2),
    Case((150, 70, 66), (-1, 0, 0), pieces=5, seed=4, dtype=torch.float32),  # runs of many chunks
    Case((300,), (-1,), pieces=7, seed=6, decay=0.002),  # one chain, interleaved, slow decay
    Case((6, 4, 4), (-1, 0, 0), pieces=3, owners=1, seed=5),  # all on rank 0: no exchange
    Case((30, 9, 9, 9, 8, 8), (-1, 0, 0, 0, 3, 3), pieces=30, seed=7, key_heads=2, value_heads=4),
]


@settings(max_examples=12)
@given(cases(cp_size=1))
def test_one_rank(case):
    check_case(case, None, 1)


def _check_all(rank, world_size, batch):
    for case, row in batch:
        check_case(case, dist.group.WORLD, world_size, row)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_many_cases_a_rank(cp_size):
    # One spawn for all; no shrinking, since a failing rank names its case.
    @settings(max_examples=1, phases=[Phase.generate])
    @given(st.lists(cases(cp_size), min_size=16, max_size=16))
    def check(batch):
        batch = EXPLICIT + batch
        run_ranks(cp_size, _check_all, [(case, make_row(case)) for case in batch], timeout=120)

    check()


def _record_collectives(rank, world_size, batch):
    calls = []
    stock = dist.all_to_all_single

    def recorded(received, sent, recv_counts, send_counts, group):
        calls.append((len(recv_counts), received.dtype, received.shape[1:]))
        return stock(received, sent, recv_counts, send_counts, group=group)

    dist.all_to_all_single = recorded
    try:
        for case, row in batch:
            check_case(case, dist.group.WORLD, world_size, row)
    finally:
        dist.all_to_all_single = stock
    return calls


def test_one_exchange_each_way_on_every_rank():
    case = replace(CROSSING, owners=3)
    calls = run_ranks(4, _record_collectives, [(case, make_row(case))], timeout=120)
    assert all(other == calls[0] for other in calls)
    assert len(calls[0]) == 4  # halo and states, forward and backward
    case = Case((6, 4), (-1, 0), pieces=1)
    assert run_ranks(2, _record_collectives, [(case, make_row(case))], timeout=120) == [[], []]


def _repeat(rank, world_size, case):
    row = make_row(case, oracle=False)
    runs = [
        run_rank(case, row, TreeContext(build_plan(case, world_size), dist.group.WORLD, "cpu"))
        for _ in range(2)
    ]
    repeated = all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    # Perturb the last leaf: no token of another branch may change by a bit.
    first = case.num_tokens - case.lengths[-1]
    for name in ("x", "q", "k", "v", "g", "beta"):
        row.inputs[name][first:] = row.inputs[name][first:] * 1.5
    ctx = TreeContext(build_plan(case, world_size), dist.group.WORLD, "cpu")
    after = run_rank(case, row, ctx)
    other = (ctx.row_indices >= 0) & (ctx.row_indices < first)
    same = all(torch.equal(runs[0][name][other], after[name][other]) for name in ("y", "out"))
    changed = not torch.equal(runs[0]["out"], after["out"])
    return repeated, same, changed


def test_repeatable_and_siblings_independent():
    case = Case((40, 70, 66, 90), (-1, 0, 0, 0), pieces=7, dtype=torch.float32, seed=2)
    results = run_ranks(2, _repeat, case, timeout=120)
    assert all(repeated and same for repeated, same, _ in results)
    assert any(changed for *_, changed in results)


def _recompute(rank, world_size, case):
    from torch.utils.checkpoint import checkpoint

    row = make_row(case, oracle=False)
    ctx = TreeContext(build_plan(case, world_size), dist.group.WORLD, "cpu")
    names = ("q", "k", "v", "g", "beta")

    def layer(x, *inputs):
        y = ops.tree_causal_conv1d(x, row.inputs["weight"], row.inputs["bias"], ctx)
        return y.sum(1)[:, None, None] * ops.tree_gated_delta_rule(*inputs, ctx)

    def grads(call):
        inputs = [
            shard(row.inputs[name], ctx.row_indices).requires_grad_() for name in ("x", *names)
        ]
        call(*inputs).backward(shard(row.upstream["out"], ctx.row_indices))
        return [x.grad for x in inputs]

    plain = grads(layer)
    again = [
        grads(lambda *x, r=reentrant: checkpoint(layer, *x, use_reentrant=r))
        for reentrant in (False, True)
    ]
    with torch.autograd.graph.save_on_cpu():
        offloaded = grads(layer)
    others = [*again, offloaded]
    return all(torch.equal(a, b) for other in others for a, b in zip(plain, other, strict=True))


def test_recompute_and_offload():
    case = replace(CROSSING, dtype=torch.float32)
    assert run_ranks(2, _recompute, case, timeout=120) == [True, True]
