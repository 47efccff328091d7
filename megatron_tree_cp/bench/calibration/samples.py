"""Which rows of work are measured: trees and cuts that no preset has, large and small.

Lengths are for a device; ``scale`` divides them for a quick run on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...plan.cost import local_loads, stage_loads
from ...plan.layout import Layout
from ...plan.model import LayerClass, ModelShape
from ...plan.planner import plan_row
from ...plan.profile import CostProfile
from ...plan.simulate import StageLoads
from ...plan.stages import StagePlan
from ...tree.packed_tree import PackedTree

CHAINS = (700, 1_500, 3_000, 6_000, 12_000, 24_000, 44_000)
"""Lengths of single chains: large tiles, little waste."""

FAMILIES = (
    (300, 5, 40, 6_000),
    (90, 3, 28, 20_000),
    (700, 20, 45, 24_000),
    (1_800, 9, 330, 16_000),
    (3_300, 24, 75, 36_000),
    (3_300, 6, 900, 12_000),
    (6_500, 12, 210, 30_000),
    (6_500, 30, 130, 48_000),
    (11_000, 8, 1_500, 44_000),
    (11_000, 40, 64, 27_000),
    (19_000, 3, 7_000, 40_000),
    (19_000, 16, 420, 52_000),
)
"""(prefix, branches, branch length, tokens) of rows of equal families."""

WINDOWS = (128, 512, 2_048)
"""From windows of one tile, where all tiles are partial, to those of many full ones."""

CUTS = ((2, 2), (2, 4), (4, 4), (4, 8))
"""(ranks, slabs): a row is cut into equal slabs, dealt to the ranks forth and back."""

_TILES = CostProfile(forward_hidden_factor=1.0, backward_hidden_factor=1.0)


@dataclass(frozen=True)
class StageCase:
    """One rank's stage, and its features as the planner counts them."""

    label: str
    plan: StagePlan
    remote: bool
    window: int | None
    queries: int
    """Rows of the shard; the stage's own queries are ``plan.query_range``."""
    positions: np.ndarray
    """int64[queries] of the shard."""
    pairs: float
    hidden: float


def trees(scale: int) -> Iterator[tuple[str, PackedTree]]:
    """The rows, chains and families in turn, so that held-out samples are of both."""
    chains = [max(length // scale, 4) for length in CHAINS]
    families = [
        tuple(max(x // s, 2) for x, s in zip(f, (scale, 1, scale, scale))) for f in FAMILIES
    ]
    for i, family in enumerate(families):
        yield "family {}+{}x{}".format(*family), _families(*family)
        if i < len(chains):
            yield f"chain {chains[i]}", PackedTree([chains[i]], [-1])


def stage_cases(scale: int) -> Iterator[StageCase]:
    """Local stages of whole rows; local, remote and windowed stages of cut rows."""
    for i, (name, tree) in enumerate(trees(scale)):
        yield from _cases(name, tree, 1, 1, None, 0, 0)
        ranks, slabs = CUTS[i % len(CUTS)]
        waves = 1 + i % 2
        if tree.num_tokens >= 8 * slabs:
            yield from _cases(name, tree, ranks, slabs, None, waves, ranks - 1)
            yield from _cases(name, tree, ranks, slabs, None, 1, i % ranks)
            if i % 2 == 0:
                window = max(WINDOWS[i // 2 % len(WINDOWS)] // scale, 2)
                yield from _cases(name, tree, ranks, slabs, window, 1, ranks - 1)


def chain_case(length: int) -> StageCase:
    """One chain on one rank."""
    return next(_cases(f"chain {length}", PackedTree([length], [-1]), 1, 1, None, 0, 0))


def _families(prefix: int, branches: int, length: int, tokens: int) -> PackedTree:
    lengths: list[int] = []
    parents: list[int] = []
    left = tokens
    while left > 0:
        root = len(lengths)
        for branch in range(branches + 1):
            wanted = prefix if branch == 0 else length
            if left > 0:
                lengths.append(min(wanted, left))
                parents.append(-1 if branch == 0 else root)
                left -= lengths[-1]
    return PackedTree(lengths, parents)


def slab_layout(num_tokens: int, ranks: int, slabs: int) -> Layout:
    """Equal slabs, dealt to the ranks forth and back."""
    cuts = np.linspace(0, num_tokens, slabs + 1).astype(np.int64)
    turn = np.arange(slabs) % (2 * ranks)
    return Layout.from_pieces(cuts, np.minimum(turn, 2 * ranks - 1 - turn), ranks, 1)


def _cases(
    name: str,
    tree: PackedTree,
    ranks: int,
    slabs: int,
    window: int | None,
    waves: int,
    rank: int,
) -> Iterator[StageCase]:
    layer = LayerClass("x", window=window)
    model = ModelShape(classes=(layer,), token_flops=0.0)
    layout = slab_layout(tree.num_tokens, ranks, slabs)
    plan = plan_row(tree, ranks, model, waves=waves if ranks > 1 else None, layout=layout)
    part = plan.attention_class(window)
    local = local_loads(part.runs, window, _TILES)
    loads = stage_loads(part.runs, part.waves, window, local, _TILES)
    stages = part.rank(rank)
    rows = layout.row_indices(rank)[: layout.num_real(rank)]
    positions = tree.positions[rows]
    for wave, stage in enumerate((stages.local, *stages.remote), -1):
        if stage.visible_pairs:
            hidden = _hidden(loads, wave, rank)
            where = f"rank {rank} of {ranks}" + (f", wave {wave}" if wave >= 0 else "")
            where += "" if window is None else f", window {window}"
            yield StageCase(
                f"{name}, {where}",
                stage,
                wave >= 0,
                window,
                len(rows),
                positions,
                float(stage.visible_pairs),
                hidden,
            )


def _hidden(loads: StageLoads, wave: int, rank: int) -> float:
    assert loads.local_hidden is not None and loads.hidden is not None
    return float(loads.local_hidden[rank] if wave < 0 else loads.hidden[wave, rank])
