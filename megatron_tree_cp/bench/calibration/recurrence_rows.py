"""Rows that tell the terms of a recurrent layer's price apart; none is a preset's.

Lengths are for a device; ``scale`` divides tokens or counts for a quick run on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...tree.packed_tree import PackedTree

CHAINS = (5_000, 14_000, 40_000)
"""One run: every chunk waits for the one before it."""

EQUAL = ((3, 7_000), (24, 900), (40, 1_400), (100, 500), (220, 66), (500, 64), (900, 22))
"""(runs, tokens of each) that walk side by side, long ones and hardly a chunk."""

STARS = ((100, 300, 110), (2_000, 60, 640))
"""(prefix, branches, tokens of each)."""

COMBS = ((24, 140, 64), (48, 64, 180))
"""(levels, tokens of the spine's segments, of the leaf beside each)."""

CHAINED = ((16_000, 1), (16_000, 2), (16_000, 4), (16_000, 8), (16_000, 14), (40_000, 3))
"""(tokens of a chain, pieces of every rank)."""


@dataclass(frozen=True)
class GdnRow:
    """A row, and how many equal pieces of it every rank gets in turn."""

    name: str
    tree: PackedTree
    turns: int = 1


def local_rows(scale: int) -> Iterator[GdnRow]:
    """Rows of one rank."""
    for length in CHAINS:
        yield _chain(max(length // scale, 8), 1)
    for count, length in EQUAL:
        tokens = count * length // scale
        count = max(count // scale, 2)
        length = tokens // count
        yield GdnRow(f"{count} x {length}", PackedTree([length] * count, [-1] * count))
    yield _ragged(max(300 // scale, 4))
    for prefix, count, length in STARS:
        yield _star(max(prefix // scale, 8), max(count // scale, 2), length)
    for levels, spine, leaf in COMBS:
        levels = max(levels // scale, 2)
        # Preorder: a leaf, then the rest of the spine, both below the spine's segment before them.
        lengths = [spine, leaf] * levels
        parents = [parent for i in range(levels) for parent in (2 * i - 2, 2 * i)]
        parents[0] = -1
        yield GdnRow(f"comb of {levels} x {spine} + {leaf}", PackedTree(lengths, parents))


def chained_rows(scale: int) -> Iterator[GdnRow]:
    """Rows whose paths cross ranks."""
    for length, turns in CHAINED:
        yield _chain(max(length // scale, 64), turns)
    for turns in (1, 3):
        yield _star(max(4_000 // scale, 64), max(60 // scale, 4), max(320 // scale, 64), turns)


def _chain(length: int, turns: int) -> GdnRow:
    cut = f", {turns} pieces a rank" * (turns > 1)
    return GdnRow(f"chain {length}{cut}", PackedTree([length], [-1]), turns)


def _star(prefix: int, count: int, length: int, turns: int = 1) -> GdnRow:
    cut = f", {turns} pieces a rank" * (turns > 1)
    tree = PackedTree([prefix] + [length] * count, [-1] + [0] * count)
    return GdnRow(f"{prefix} + {count} x {length}{cut}", tree, turns)


def _ragged(count: int) -> GdnRow:
    lengths = np.random.default_rng(0).integers(8, 420, count)
    return GdnRow(f"{count} ragged runs", PackedTree(lengths.tolist(), [-1] * count))
