"""Distributed tree attention against every trajectory alone, on CP1, CP2 and CP4."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_tree_cp import ops
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.attention.distributed import backward_stages
from megatron_tree_cp.ops.attention.stages import AttentionStages, DirectionStages
from tests.distributed import run_ranks
from tests.ops.cases import Case, build_plan, cases, check_case, make_row, run_rank, shard

LENGTHS, PARENTS = (9, 5, 1, 7, 3, 6, 2), (-1, 0, 1, 0, 3, -1, 5)
CROSSING = Case(LENGTHS, PARENTS, pieces=7, window=4, sink="learnable", seed=3)
# Cut so that every rank receives keys, on CP2 and on CP4.
BOTH_WAYS = replace(CROSSING, pieces=12, waves=1, seed=25)

DIRECTIONS = [(forward, backward) for forward in (False, True) for backward in (False, True)]

EXPLICIT = [
    CROSSING,
    replace(CROSSING, window=None),
    replace(CROSSING, impl="reference"),
    Case((1,), (-1,), waves=1, granule=4, seed=1),  # one token: every other rank is empty
    Case((1, 1, 1, 1, 1), (-1, 0, 1, 0, -1), pieces=9, seed=2),
    Case((40,), (-1,), seed=4),
    Case((40,), (-1,), seed=4, window=5, pieces=9, granule=8),
    Case((6, 4, 4), (-1, 0, 0), pieces=3, owners=1, waves=1, seed=5),  # all on rank 0
    Case((30, 10, 10, 10), (-1, 0, 0, 0), sink="off-by-one", kv_heads=1, value_dim=3, seed=6),
    *(replace(CROSSING, dtype=torch.bfloat16, waves=w, window=None) for w in (0, 1, 2)),
    *(replace(CROSSING, dtype=torch.float32, waves=w, granule=8) for w in (0, 1, 2, None)),
]


@settings(max_examples=60)
@given(cases(cp_size=1))
def test_one_rank(case):
    check_case(case, None, 1)


def _check_all(rank, world_size, batch):
    return [check_case(case, dist.group.WORLD, world_size) for case in batch]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_explicit_cases(cp_size):
    run_ranks(cp_size, _check_all, EXPLICIT, timeout=60)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_directions_run_fused_and_staged_apart(cp_size):
    some = replace(BOTH_WAYS, granule=4)
    batch = [
        replace(case, fused=fused)
        for fused in DIRECTIONS
        for case in (
            some,
            replace(some, window=None, sink="off-by-one", value_dim=6),
            replace(some, owners=1, sink="vanilla"),  # nothing travels, other ranks are empty
            replace(some, window=None, dtype=torch.bfloat16),
        )
    ]
    run_ranks(cp_size, _check_all, batch, timeout=60)


def _calls_and_kept(rank, world_size, case):
    """For every choice of directions: keys per kernel call forward and backward, shapes kept."""
    from megatron_tree_cp.ops.attention import tiled

    calls, kept, results = [], [], []
    for name in ("forward", "backward"):
        stock, place = getattr(tiled, name), 1 if name == "forward" else 2

        def counted(*arguments, name=name, stock=stock, place=place):
            calls.append((name, len(arguments[place])))
            return stock(*arguments)

        setattr(tiled, name, counted)

    def keep(x):
        kept.append(tuple(x.shape))
        return x

    for fused in DIRECTIONS:
        ctx = TreeContext(
            build_plan(replace(case, fused=fused), world_size), dist.group.WORLD, "cpu"
        )
        calls.clear()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            run_rank(case, make_row(case), ctx)
        results.append((fused, list(calls), list(kept)))
    (exchange,) = ctx.plan.attention_class(None).exchanges
    return ctx.num_real, sum(exchange.rank(rank).recv_counts), results


def test_each_direction_makes_its_own_calls_and_keeps_the_same_buffers():
    case = replace(BOTH_WAYS, window=None, impl="tiled")
    for own, received, results in run_ranks(2, _calls_and_kept, case, timeout=60):
        assert own and received
        for (forward, backward), calls, kept in results:
            ahead = [received + own] if forward else [own, received]
            back = [received + own] if backward else [received, own]
            assert calls == [("forward", n) for n in ahead] + [("backward", n) for n in back]
            assert kept == results[0][2]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_random_cases(cp_size):
    # Many cases a spawn; no shrinking, since a failing rank names its case.
    @settings(max_examples=3, phases=[Phase.generate])
    @given(st.lists(cases(cp_size), min_size=16, max_size=16))
    def check(batch):
        run_ranks(cp_size, _check_all, batch, timeout=60)

    check()


def _repeat(rank, world_size, case):
    row = make_row(case)
    ctx = TreeContext(build_plan(case, world_size), dist.group.WORLD, "cpu")
    first = run_rank(case, row, ctx)
    again = TreeContext(build_plan(case, world_size), dist.group.WORLD, "cpu")
    second = run_rank(case, row, again)
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize(
    ("waves", "fused"), [(0, None), (1, (True, False)), (1, (False, True)), (2, None)]
)
def test_bitwise_repeatable(waves, fused):
    case = Case((300, 200, 250, 40), (-1, 0, 0, 2), waves, fused, pieces=9, dtype=torch.float32)
    assert run_ranks(3, _repeat, case, timeout=60) == [[], [], []]


def _record_collectives(rank, world_size, batch):
    calls = []
    stock = dist.all_to_all_single

    def recorded(received, sent, recv_counts, send_counts, group):
        calls.append((len(recv_counts), received.dtype, received.shape[1:]))
        return stock(received, sent, recv_counts, send_counts, group=group)

    dist.all_to_all_single = recorded
    try:
        for case in batch:
            check_case(case, dist.group.WORLD, world_size)
    finally:
        dist.all_to_all_single = stock
    return calls


def test_every_rank_calls_the_same_collectives():
    batch = [replace(CROSSING, waves=w, owners=2, granule=2) for w in (0, 1, 2)]
    batch += [replace(BOTH_WAYS, fused=f, owners=2, granule=2) for f in DIRECTIONS]
    batch.append(Case((1,), (-1,), waves=1))
    calls = run_ranks(4, _record_collectives, batch, timeout=60)
    assert calls[0]
    assert all(other == calls[0] for other in calls)


def _recompute(rank, world_size, case, reentrant):
    from torch.utils.checkpoint import checkpoint

    row = make_row(case)
    ctx = TreeContext(build_plan(case, world_size), dist.group.WORLD, "cpu")
    upstream = shard(row.dout, ctx.row_indices)

    def grads(call):
        inputs = [shard(x, ctx.row_indices).requires_grad_() for x in (row.q, row.k, row.v)]
        call(*inputs).backward(upstream)
        return [x.grad for x in inputs]

    def layer(q, k, v):
        return ops.tree_attention(q, k, v, ctx)

    plain = grads(layer)
    again = grads(lambda *x: checkpoint(layer, *x, use_reentrant=reentrant))
    with torch.autograd.graph.save_on_cpu():
        offloaded = grads(layer)
    return all(
        torch.equal(a, b) and torch.equal(a, c)
        for a, b, c in zip(plain, again, offloaded, strict=True)
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_and_offload(reentrant):
    case = replace(CROSSING, window=None, sink="vanilla", dtype=torch.float32, waves=2)
    assert run_ranks(2, _recompute, case, reentrant, timeout=60) == [True, True]


class _Logged:
    """An exchange, a stage and a layer's backward that write down the order of their calls."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def start_transposed(self, dkeys, dvalues):
        self.log.append(f"start {self.name}")
        return self

    def proceed(self):
        self.log.append(f"proceed {self.name}")

    def wait(self):
        self.log.append(f"wait {self.name}")
        return torch.zeros(0, 2)

    def accumulate(self, total, rows):
        pass

    def stage(self, rows, keys, values, mask):
        self.log.append(f"call {mask}")
        return torch.zeros_like(keys), torch.zeros_like(values)


def backward_order(made):
    """What a rank launches that makes the calls ``made`` of its waves, and always its own."""
    log = []
    exchanges = tuple(_Logged(log, str(wave)) for wave in range(len(made)))
    rows = slice(0, 1)
    stages = [SimpleNamespace(empty=not m, rows=rows, mask=w) for w, m in enumerate(made)]
    own = SimpleNamespace(empty=False, rows=rows, mask="own")
    calls = DirectionStages(own, tuple(stages), fused=False)
    k = v = torch.zeros(1, 1, 1)
    buffers = tuple(torch.zeros(1, 2) for _ in made)
    backward_stages(_Logged(log, "layer"), k, v, buffers, AttentionStages(exchanges, calls, calls))
    return [entry for entry in log if not entry.startswith("wait")]


def test_returns_never_stand_two_in_a_row_before_a_call():
    """The second would wait for the first, and the call behind both with it."""
    assert backward_order((True, True)) == [
        "call 0", "start 0", "call 1", "proceed 0", "start 1", "call own",
    ]  # fmt: skip
    assert backward_order((False, False, False)) == [
        "start 0", "call own", "proceed 0", "start 1", "proceed 1", "start 2",
    ]  # fmt: skip
    for made in itertools.product((False, True), repeat=4):
        order = backward_order(made)
        starts = [entry for entry in order if entry.startswith("start")]
        assert starts == [f"start {wave}" for wave in range(4)]
        before_own = [e[:4] for e in order[: order.index("call own")] if e[:4] in ("star", "call")]
        assert all(a != b or a == "call" for a, b in itertools.pairwise(before_own))
