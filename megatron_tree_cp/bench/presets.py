"""Workload presets: rows of packed families with the shapes that the benchmarks publish.

A row stacks families until it holds ``base x CP`` tokens; the last segment is clipped. Lengths are
drawn per row with ``random.Random(1234 + 97 * row)``, in DFS preorder, prefix first: ``gauss``,
rounded, clipped to mean +- clip, at least 2. Rows 0-15 warm up, rows 16-31 are measured.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from ..plan.layout import Layout
from ..tree.packed_tree import PackedTree

SEED = 1234
ROW_STRIDE = 97
WARMUP_ROWS = range(16)
MEASURED_ROWS = range(16, 32)
CHECK_TOKENS = 2048
"""Of a row that is checked before others are timed, per rank."""


@dataclass(frozen=True)
class Level:
    """``count`` children of every segment one level up, their lengths N(mean, std) within clip."""

    count: int
    mean: int
    std: int = 0
    clip: int = 0

    def draw(self, rng: random.Random) -> int:
        """One length; nothing is drawn from ``rng`` when the length is fixed."""
        if self.std == 0:
            return self.mean
        length = round(rng.gauss(self.mean, self.std))
        return max(2, min(max(length, self.mean - self.clip), self.mean + self.clip))


@dataclass(frozen=True)
class Preset:
    """One family, root level first, repeated until a row is full.

    ``base`` tokens per rank (weak scaling), or per row where ``strong`` is set (strong scaling).
    The first family has the levels ``first`` where these are given.
    """

    name: str
    levels: tuple[Level, ...]
    base: int
    strong: bool = False
    first: tuple[Level, ...] = ()

    def num_tokens(self, cp_size: int) -> int:
        """Tokens of a row on ``cp_size`` ranks."""
        return self.base if self.strong else self.base * cp_size

    def tree(self, cp_size: int, row: int = 16, num_tokens: int | None = None) -> PackedTree:
        """The packed tree of row ``row``; ``num_tokens`` overrides the row's size."""
        rng = random.Random(SEED + ROW_STRIDE * row)
        left = self.num_tokens(cp_size) if num_tokens is None else num_tokens
        lengths: list[int] = []
        parents: list[int] = []

        def grow(levels: tuple[Level, ...], parent: int) -> None:
            nonlocal left
            for _ in range(levels[0].count):
                if left == 0:
                    return
                length = min(levels[0].draw(rng), left)
                left -= length
                lengths.append(length)
                parents.append(parent)
                if levels[1:]:
                    grow(levels[1:], len(lengths) - 1)

        if self.first:
            grow(self.first, -1)
        while left:
            grow(self.levels, -1)
        return PackedTree(lengths, parents)


_ALL = (
    Preset("fixed_5k", (Level(1, 5000), Level(16, 100)), 40_960),
    Preset("varied_5k", (Level(1, 5000), Level(16, 100, 32, 64)), 40_960),
    Preset("dominant", (Level(1, 14_745, 1024, 2048), Level(16, 921, 256, 512)), 40_960),
    Preset("medium_long", (Level(1, 8192), Level(16, 512, 128, 256)), 40_960),
    Preset("glm_82k", (Level(1, 8192), Level(16, 512, 128, 256)), 81_920),
    Preset("long_chain", (Level(1, 24_576), Level(3, 24_576, 1024, 2048)), 98_304),
    Preset(
        "deep",
        (
            Level(1, 4096),
            Level(2, 10_240, 1024, 2048),
            Level(2, 3072, 512, 1024),
            Level(4, 512, 128, 256),
        ),
        65_536,
    ),
    Preset("short", (Level(1, 64, 7, 13), Level(4, 16, 5, 10)), 40_960),
    # A long rollout beside short chats: whoever gets equal work gets unequal tokens.
    Preset(
        "lopsided",
        (Level(1, 256), Level(4, 64, 16, 32)),
        40_960,
        first=(Level(1, 30_000), Level(8, 1000, 200, 400)),
    ),
    Preset("one_tree", (Level(1, 65_536), Level(12, 16_384)), 262_144, strong=True),
    Preset("one_chain", (Level(1, 262_144),), 262_144, strong=True),
)

PRESETS = {preset.name: preset for preset in _ALL}


def preset_tree(
    name: str, cp_size: int, row: int = 16, num_tokens: int | None = None
) -> PackedTree:
    """The packed tree of one row of the preset ``name``; ``ValueError`` names the known presets."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name].tree(cp_size, row, num_tokens)


def check_tree(preset: str, cp_size: int, row: int, tokens: int | None) -> PackedTree:
    """A small row with the branches of a preset's row: segments shrunk, a few families kept."""
    tree = preset_tree(preset, cp_size, row, tokens)
    limit = min(CHECK_TOKENS * cp_size, tree.num_tokens)
    family = int(np.append(np.flatnonzero(tree.parents < 0), tree.num_segments)[1])
    family_tokens = int(tree.segment_ends[family - 1])
    shrink = max(1, -(-2 * family_tokens // limit))  # two families fit in
    lengths = np.maximum(1, tree.lengths // shrink)
    count = max(1, int(np.searchsorted(np.cumsum(lengths), limit, side="right")))
    return PackedTree(lengths[:count], tree.parents[:count])


def crossing_layout(tree: PackedTree, cp_size: int) -> Layout | None:
    """Slabs dealt to the ranks in turn, twice round: paths cross all of them. None for one rank."""
    if cp_size == 1:
        return None
    cuts = np.unique(np.linspace(0, tree.num_tokens, 2 * cp_size + 2).astype(np.int64))
    return Layout.from_pieces(cuts, np.arange(len(cuts) - 1) % cp_size, cp_size)
