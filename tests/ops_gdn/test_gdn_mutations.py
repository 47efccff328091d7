"""Mistakes that the oracle must catch: each is patched in here, the package has no switch."""

from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.gdn import conv_tables, distributed, tables, tiled
from megatron_tree_cp.plan import recurrence_tables
from tests.distributed import run_ranks
from tests.ops.test_attention_mutations import Patches
from tests.ops_gdn.cases import Case, build_plan, errors, make_row, run_rank

ROW = Case((9, 5, 7, 6), (-1, 0, 0, -1), pieces=20, seed=3)


def halo_dropped(patches):
    stock = conv_tables.build_conv_tables

    def build(arrays, ctx):
        built = stock(arrays, ctx)
        return replace(built, taps=built.taps.masked_fill(built.taps >= built.num_tokens, -1))

    patches.set(conv_tables, "build_conv_tables", build)


def halo_gradient_dropped(patches):
    from megatron_tree_cp.comm.exchange import RangeExchange

    patches.set(RangeExchange, "accumulate", lambda self, total, returned: total)


def decay_skipped_across_border(patches):
    stock = tiled.summarise

    def summarise(prep, levels, slots):
        return stock(replace(prep, decay=torch.ones_like(prep.decay)), levels, slots)

    patches.set(tiled, "summarise", summarise)


def sibling_state_as_parent(patches):
    stock = recurrence_tables._state_slots

    def slots(part, initial, final):
        built = stock(part, initial, final)
        read = built.read.copy()
        # Every run below another run continues the run stored before it.
        for run, parent in enumerate(part.parent.tolist()):
            if parent >= 0 and built.write[run - 1] >= 0:
                read[run] = built.write[run - 1]
        return replace(built, read=read)

    patches.set(recurrence_tables, "_state_slots", slots)


def first_child_gradient_only(patches):
    stock = tables._gradient_slots

    def slots(*args):
        built = stock(*args)
        lists = tuple(entries[:1] for entries in built.lists)
        built.__dict__["lists"] = lists
        return built

    patches.set(tables, "_gradient_slots", slots)


def transfer_forgotten(patches):
    stock = distributed.compose_states

    def compose(nodes, states, transfers):
        return stock(nodes, states, [torch.zeros_like(transfer) for transfer in transfers])

    patches.set(distributed, "compose_states", compose)


def transfer_not_transposed(patches):
    stock = distributed.compose_gradients

    def compose(nodes, states, transfers, zero):
        return stock(nodes, states, [transfer.mT for transfer in transfers], zero)

    patches.set(distributed, "compose_gradients", compose)


MUTATIONS = {
    halo_dropped: {"y", "dweight"},
    halo_gradient_dropped: {"dx"},
    decay_skipped_across_border: {"out", "dv"},
    sibling_state_as_parent: {"out"},
    first_child_gradient_only: {"dv", "dg"},
    transfer_forgotten: {"out", "dk"},
    transfer_not_transposed: {"dv"},
}
LEAVES = Case((9, 5, 7, 6), (-1, 0, 0, -1), pieces=2, seed=3)


def _worst_errors(rank, world_size, cases):
    found = {}
    for case, row in cases:
        for mutate in (None, *MUTATIONS):
            patches = Patches()
            if mutate is not None:
                mutate(patches)
            try:
                ctx = TreeContext(build_plan(case, world_size), dist.group.WORLD, "cpu")
                got = run_rank(case, row, ctx)
            finally:
                patches.undo()
            name = mutate.__name__ if mutate else "none"
            for tensor, error in errors(got, row, ctx, dist.group.WORLD).items():
                found[name, tensor] = max(error, found.get((name, tensor), 0.0))
    return found


def test_mutations_are_caught():
    # The second row has a final state read after its leaf's sibling, on one rank.
    cases = [(case, make_row(case)) for case in (ROW, LEAVES)]
    by_rank = run_ranks(2, _worst_errors, cases, timeout=60)
    worst = {key: max(found[key] for found in by_rank) for key in by_rank[0]}
    assert all(error < 1e-12 for (name, _), error in worst.items() if name == "none"), worst
    for mutate, tensors in MUTATIONS.items():
        for tensor in tensors:
            assert worst[mutate.__name__, tensor] > 1e-3, (mutate.__name__, tensor)
