"""Attention over two-level exchanges, 4 gloo ranks as 2 nodes, against one level and the oracle."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.comm.two_level import TwoLevelRangeExchange
from megatron_tree_cp.ops.attention import tiled
from megatron_tree_cp.plan import LayerClass, ModelShape, plan_row
from megatron_tree_cp.plan.profile import CostProfile
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.distributed import run_ranks
from tests.ops.cases import Case, build_plan, cases, errors, make_row, run_rank, tolerance

# A long prefix cut over all ranks, read by leaves of every rank.
SHARED = Case((40, 6, 6, 6, 6, 6, 6), (-1, 0, 0, 0, 0, 0, 0), pieces=16, waves=1, seed=11)
EXPLICIT = [
    SHARED,
    *(replace(SHARED, waves=w, window=None, dtype=torch.float32) for w in (0, 1, 2, 3)),
    replace(SHARED, window=9, sink="learnable", granule=4),
    replace(SHARED, dtype=torch.bfloat16, waves=2),
    replace(SHARED, owners=1, granule=2),  # nothing travels
    replace(SHARED, owners=3, waves=2, value_dim=6),
    replace(SHARED, fused=(True, False)),
    replace(SHARED, fused=(False, True)),
]


def relayed(plan, ranks_per_node=2, every=1):
    """`plan` with two levels in every `every`-th wave."""
    attention = {
        name: replace(
            part,
            two_level=tuple(w % every == 0 for w in range(part.num_waves)),
            ranks_per_node=ranks_per_node,
        )
        for name, part in plan.attention.items()
    }
    return replace(plan, attention=attention)


def _compare(rank, world_size, batch, every=1):
    """Hop-2 rows of this rank in all cases; every case against one level and the oracle."""
    passed = 0
    for case in batch:
        row, plan = make_row(case), build_plan(case, world_size)
        group = dist.group.WORLD
        one = run_rank(case, row, TreeContext(plan, group, "cpu"))
        ctx = TreeContext(relayed(plan, every=every), group, "cpu")
        two = run_rank(case, row, ctx)
        for name in ("out", "lse", "dq"):
            assert torch.equal(one[name], two[name]), f"{name} differs: {case}"
        bound = 1e-6 if case.dtype != torch.bfloat16 else tolerance(case.dtype)
        for name in ("dk", "dv"):
            wide = one[name].double(), two[name].double()
            assert (wide[0] - wide[1]).norm() <= bound * wide[0].norm().clamp(min=1e-30), case
        for name, error in errors(two, row, ctx, group).items():
            assert error <= tolerance(case.dtype), f"{name} off by {error:.2e}: {case}"
        part = ctx.plan.attention_class(case.window)
        passed += sum(e.rank(rank).second.num_send for e in part.exchanges if len(e.hops) == 2)
    return passed


def test_explicit_cases():
    assert min(run_ranks(4, _compare, EXPLICIT, timeout=60)) > 0


def test_waves_of_one_and_of_two_hops_mix():
    batch = [replace(SHARED, waves=w, sink="learnable") for w in (2, 3)]
    assert sum(run_ranks(4, _compare, batch, 2, timeout=60)) > 0


def test_random_cases():
    @settings(max_examples=2, phases=[Phase.generate], deadline=None)
    @given(st.lists(cases(4), min_size=16, max_size=16))
    def check(batch):
        run_ranks(4, _compare, batch, timeout=60)

    check()


def _planned(rank, world_size):
    """A plan that chose two levels by itself."""
    tree = PackedTree(SHARED.lengths, SHARED.parents)
    slow = CostProfile(
        forward_flops_per_ms=1e7,
        ranks_per_node=2,
        exchange_latency_ms=1e-3,
        network_latency_ms=1e-3,
        network_bytes_per_ms=1e4,
    )
    model = ModelShape((LayerClass("global"),), token_flops=0.0)
    plan = plan_row(tree, world_size, model, slow, layout=build_plan(SHARED, 4).layouts["main"])
    row, ctx = make_row(SHARED), TreeContext(plan, dist.group.WORLD, "cpu")
    found = errors(run_rank(SHARED, row, ctx), row, ctx, dist.group.WORLD)
    return plan.attention_class(None).describe(), max(found.values())


def test_a_plan_for_a_slow_network_runs_two_levels():
    for text, error in run_ranks(4, _planned, timeout=60):
        assert "two-level" in text and error <= tolerance(SHARED.dtype)


def _record(rank, world_size, cases_of, every):
    """What a rank launches, in order: hops by name, kernel calls as 'stage'."""
    log = []
    stock = TwoLevelRangeExchange._hop, tiled.forward, tiled.backward, dist.all_to_all_single

    def hop(self, which, send, received, back=False):
        log.append(("back " if back else "") + ("relay" if which is self else "node"))
        return stock[0](self, which, send, received, back)

    def kernel(call):
        def logged(*arguments):
            log.append("stage")
            return call(*arguments)

        return logged

    def collective(received, sent, recv_counts, send_counts, group):
        calls.append((len(recv_counts), received.dtype, received.shape[1:]))
        return stock[3](received, sent, recv_counts, send_counts, group=group)

    calls = []
    TwoLevelRangeExchange._hop = hop
    tiled.forward, tiled.backward = kernel(stock[1]), kernel(stock[2])
    dist.all_to_all_single = collective
    try:
        for case in cases_of:
            plan = relayed(build_plan(case, world_size), every=every)
            run_rank(case, make_row(case), TreeContext(plan, dist.group.WORLD, "cpu"))
    finally:
        TwoLevelRangeExchange._hop, tiled.forward, tiled.backward = stock[:3]
        dist.all_to_all_single = stock[3]
    return log, calls


def test_second_hops_are_launched_behind_the_stage_that_hides_them():
    case = replace(SHARED, waves=2, impl="tiled")
    logs = [log for log, _ in run_ranks(4, _record, [case], 1, timeout=60)]
    forward = ["relay", "stage", "node", "relay", "stage", "node", "stage"]
    backward = ["stage", "back node", "stage", "back relay", "back node", "stage", "back relay"]
    assert logs == [forward + backward] * 4


@pytest.mark.parametrize("every", [1, 2])
def test_every_rank_calls_the_same_collectives(every):
    batch = [replace(SHARED, waves=w, owners=2, granule=2) for w in (0, 1, 2, 3)]
    calls = [c for _, c in run_ranks(4, _record, batch, every, timeout=60)]
    assert calls[0] and all(other == calls[0] for other in calls)


def forgotten_share(set_to):
    """A relay that returns what its node sent, without what it read itself."""
    stock = TwoLevelRangeExchange.__init__

    def init(self, *arguments, **options):
        stock(self, *arguments, **options)
        add = self.fan_out.accumulate
        self.fan_out.accumulate = lambda total, returned: add(total.zero_(), returned)

    set_to(TwoLevelRangeExchange, "__init__", init)


def dropped_row(set_to):
    """The last row of the second hop does not arrive."""

    def drop(self, which, received, back):
        if which is self.fan_out and not back:
            received[-1:] = 0

    _after_a_hop(set_to, drop)


def unsent_sum(set_to):
    """The sums of relays do not reach the owners."""

    def drop(self, which, received, back):
        if which is self and back:
            received.zero_()

    _after_a_hop(set_to, drop)


def _after_a_hop(set_to, change):
    stock = TwoLevelRangeExchange._hop

    def hop(self, which, send, received, back=False):
        stock(self, which, send, received, back)
        change(self, which, received, back)

    set_to(TwoLevelRangeExchange, "_hop", hop)


MUTATIONS = {forgotten_share: {"dk", "dv"}, dropped_row: {"out", "dq"}, unsent_sum: {"dk", "dv"}}


def _worst_errors(rank, world_size):
    found = {}
    case = replace(SHARED, sink="learnable")
    row = make_row(case)
    for mutate in (None, *MUTATIONS):
        saved = []

        def set_to(owner, name, value, saved=saved):
            saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

        if mutate is not None:
            mutate(set_to)
        try:
            ctx = TreeContext(relayed(build_plan(case, world_size)), dist.group.WORLD, "cpu")
            got = run_rank(case, row, ctx)
        finally:
            for owner, name, value in reversed(saved):
                setattr(owner, name, value)
        name = mutate.__name__ if mutate else "none"
        found[name] = errors(got, row, ctx, dist.group.WORLD)
    return found


def test_mutations_are_caught():
    by_rank = run_ranks(4, _worst_errors, timeout=60)

    def worst(mutation, tensor):
        return max(found[mutation][tensor] for found in by_rank)

    assert all(worst("none", tensor) < 1e-12 for tensor in by_rank[0]["none"])
    for mutate, tensors in MUTATIONS.items():
        for tensor in tensors:
            assert worst(mutate.__name__, tensor) > 1e-3, (mutate.__name__, tensor)


def _refused(rank, world_size):
    class Peer:
        name = "peer"

    plan = relayed(build_plan(SHARED, world_size))
    ctx = TreeContext(plan, dist.group.WORLD, "cpu", transport=Peer())
    with pytest.raises(ValueError, match="--tree-exchange group") as error:
        run_rank(SHARED, make_row(SHARED), ctx)
    return str(error.value)


def test_peers_refuse_two_levels():
    (message, *_) = run_ranks(4, _refused, timeout=60)
    assert "\n" not in message and "the peer exchange has no two-level waves" in message


def _on_a_group(rank, world_size):
    from megatron_tree_cp.comm.transport import CollectiveTransport

    group = dist.group.WORLD
    plan, row = relayed(build_plan(SHARED, world_size)), make_row(SHARED)
    plain = run_rank(SHARED, row, TreeContext(plan, group, "cpu"))
    own = run_rank(
        SHARED, row, TreeContext(plan, group, "cpu", transport=CollectiveTransport(group))
    )
    return all(torch.equal(plain[name], own[name]) for name in plain)


def test_the_groups_own_transport_runs_two_levels():
    assert run_ranks(4, _on_a_group, timeout=60) == [True] * 4
