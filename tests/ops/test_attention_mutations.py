"""Mistakes that the oracle must catch: each is patched in here, the package has no switch."""

from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.attention import distributed, sink, stages, tiled
from tests.distributed import run_ranks
from tests.ops.cases import Case, build_plan, errors, make_row, run_rank

ROW = Case((9, 5, 7, 6), (-1, 0, 0, -1), waves=2, pieces=7, sink="learnable", seed=3)


class Patches:
    """A tiny monkeypatch for rank processes."""

    def __init__(self):
        self.saved = []

    def set(self, owner, name, value):
        self.saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self):
        for owner, name, value in reversed(self.saved):
            setattr(owner, name, value)


def sink_in_every_stage(patches, row):
    stock = tiled.forward

    def forward(q, k, v, mask, scale):
        out, lse = stock(q, k, v, mask, scale)
        sink.apply_sink(out, lse, row.sink)
        return out, lse

    patches.set(tiled, "forward", forward)
    patches.set(distributed, "apply_sink", lambda out, lse, logits: None)


def own_lse_in_backward(patches, row):
    stock = tiled.backward

    def backward(dout, q, k, v, out, lse, delta, mask, scale):
        own = tiled.forward(q, k, v, mask, scale)[1]
        return stock(dout, q, k, v, out, own, delta, mask, scale)

    patches.set(tiled, "backward", backward)


def row_index_as_position(patches, row):
    stock = stages._stage

    def stage(ctx, plan, window):
        built = stock(ctx, plan, window)
        if window is None:
            return built
        keys = torch.from_numpy(plan.keys.expand()[3]).int()
        queries = ctx.row_indices[built.rows].int()
        return replace(built, mask=replace(built.mask, q_positions=queries, k_positions=keys))

    patches.set(stages, "_stage", stage)


def sibling_visible(patches, row):
    stock = stages._stage

    def stage(ctx, plan, window):
        built = stock(ctx, plan, window)
        hi = torch.full_like(built.mask.hi, built.mask.num_queries)
        return replace(built, mask=replace(built.mask, hi=hi))

    patches.set(stages, "_stage", stage)


def last_wave_dropped(patches, row):
    stock = distributed.attention_stages

    def fewer(ctx, window):
        built = stock(ctx, window)
        forward, backward = (
            replace(d, remote=d.remote[:-1]) for d in (built.forward, built.backward)
        )
        return replace(built, exchanges=built.exchanges[:-1], forward=forward, backward=backward)

    patches.set(distributed, "attention_stages", fewer)


MUTATIONS = {
    sink_in_every_stage: (ROW, {"out", "lse", "dsink"}),
    own_lse_in_backward: (ROW, {"dq", "dk", "dv"}),
    row_index_as_position: (replace(ROW, window=4), {"out", "dk"}),
    sibling_visible: (ROW, {"out", "dk"}),
    last_wave_dropped: (ROW, {"out", "dv"}),
}


def _worst_errors(rank, world_size):
    found = {}
    for mutate in (None, *MUTATIONS):
        for case in {ROW, replace(ROW, window=4)} if mutate is None else {MUTATIONS[mutate][0]}:
            row = make_row(case)
            ctx = TreeContext(build_plan(case, world_size), dist.group.WORLD, "cpu")
            patches = Patches()
            if mutate is not None:
                mutate(patches, row)
            try:
                got = run_rank(case, row, ctx)
            finally:
                patches.undo()
            name = mutate.__name__ if mutate else "none"
            for tensor, error in errors(got, row, ctx, dist.group.WORLD).items():
                key = (name, tensor)
                found[key] = max(error, found.get(key, 0.0))
    return found


def test_mutations_are_caught():
    by_rank = run_ranks(2, _worst_errors, timeout=60)
    worst = {key: max(found[key] for found in by_rank) for key in by_rank[0]}
    assert all(error < 1e-12 for (name, _), error in worst.items() if name == "none"), worst
    for mutate, (_, tensors) in MUTATIONS.items():
        for tensor in tensors:
            assert worst[mutate.__name__, tensor] > 1e-3, (mutate.__name__, tensor, worst)
