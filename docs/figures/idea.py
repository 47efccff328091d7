"""Draw idea.svg: trajectories that share turns, the packed row, and who sees what.

python docs/figures/idea.py
"""

from __future__ import annotations

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from style import INK, MUTED, PAPER, arrow, canvas, save

from megatron_tree_cp import PackedTree

NAMES = ("system + task", "try A", "retry A1", "retry A2", "try B")
LENGTHS = (6, 4, 3, 4, 5)
PARENTS = (-1, 0, 1, 1, 0)
COLOURS = ("#5b7fb5", "#4f9d7b", "#e0a63a", "#d9734f", "#8e6cb8")
TRAJECTORIES = ((0, 1, 2), (0, 1, 3), (0, 4))
RANKS = (((0, 6), (14, 17)), ((6, 14), (17, 22)))  # an example of ranges, not a measured plan


def bar(axes, x, y, segment, unit, height=0.3, label=None, alpha=1.0):
    """One segment as `length` token cells; returns the x where it ends."""
    width = LENGTHS[segment] * unit
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=COLOURS[segment], alpha=alpha, linewidth=0)
    )
    for cell in range(1, LENGTHS[segment]):
        axes.plot([x + cell * unit] * 2, [y, y + height], color=PAPER, linewidth=0.7)
    axes.plot([x + width] * 2, [y, y + height], color=PAPER, linewidth=1.6)
    if label:
        axes.text(
            x + width / 2,
            y - 0.05,
            label,
            ha="center",
            va="top",
            size=7.5,
            weight="bold",
            color=COLOURS[segment],
        )
    return x + width


def heading(axes, x, y, number, title, text):
    axes.text(x, y, f"{number}  {title}", size=11.5, weight="bold", va="top")
    axes.text(x, y - 0.27, text, size=8.5, color=MUTED, va="top", linespacing=1.3)


def draw_trajectories(axes, x, y):
    total = sum(LENGTHS[segment] for path in TRAJECTORIES for segment in path)
    heading(
        axes,
        x,
        y,
        "1",
        "Trajectories share turns",
        f"Three rollouts, {total} tokens. Run alone, each\none computes the shared turns again.",
    )
    unit = 0.2
    for number, path in enumerate(TRAJECTORIES):
        at, level = x, y - 1.25 - 0.68 * number
        for segment in path:
            at = bar(axes, at, level, segment, unit, label=NAMES[segment])


def draw_tree(axes, x, y):
    heading(
        axes,
        x,
        y,
        "2",
        "One tree, one row",
        f"{sum(LENGTHS)} stored tokens in depth-first order. Each token\n"
        "keeps its row index (address) and its position (depth).",
    )
    unit, left = 0.155, x
    starts = {}
    levels = {0: y - 1.45, 1: y - 1.2, 2: y - 1.0, 3: y - 1.42, 4: y - 1.86}
    for segment, parent in enumerate(PARENTS):
        depth_x = left if parent < 0 else starts[parent][1] + 0.26
        end = bar(axes, depth_x, levels[segment], segment, unit, height=0.26)
        starts[segment] = (depth_x, end)
        if parent >= 0:
            arrow(
                axes,
                (starts[parent][1] + 0.03, levels[parent] + 0.13),
                (depth_x - 0.02, levels[segment] + 0.13),
                style="-",
                width=1.2,
            )
    row_y, at = y - 2.62, left
    for segment in range(len(LENGTHS)):
        at = bar(axes, at, row_y, segment, 0.17, height=0.32)
    axes.text(left, row_y + 0.42, "packed row", size=8, color=MUTED)
    for rank, ranges in enumerate(RANKS):
        for start, end in ranges:
            level = row_y - 0.13
            axes.plot(
                [left + start * 0.17 + 0.03, left + end * 0.17 - 0.03],
                [level, level],
                color=INK if rank == 0 else "#c2410c",
                linewidth=3.2,
                solid_capstyle="butt",
            )
            axes.text(
                left + (start + end) / 2 * 0.17,
                level - 0.09,
                f"rank {rank}",
                size=7.5,
                ha="center",
                va="top",
                color=INK if rank == 0 else "#c2410c",
            )


def draw_mask(figure, axes, x, y):
    heading(
        axes,
        x,
        y,
        "3",
        "Each key is seen by one interval",
        "Key k is visible to query q iff k ≤ q < subtree_end[k]:\n"
        "one integer per key is the whole mask.",
    )
    tree = PackedTree(LENGTHS, PARENTS)
    segment_of = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    visible = tree.dense_mask()
    picture = np.ones((*visible.shape, 3))
    for key, segment in enumerate(segment_of):
        picture[visible[:, key], key] = to_rgb(COLOURS[segment])
    side = 2.05
    width, height = figure.get_size_inches()
    inset = figure.add_axes(
        ((x + 0.42) / width, (y - 0.85 - side) / height, side / width, side / height)
    )
    inset.imshow(picture, interpolation="nearest", aspect="equal")
    inset.set_xticks(np.arange(-0.5, tree.num_tokens), minor=True)
    inset.set_yticks(np.arange(-0.5, tree.num_tokens), minor=True)
    inset.grid(which="minor", color=PAPER, linewidth=0.6)
    inset.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    for spine in inset.spines.values():
        spine.set(color="#c5ccd3", linewidth=0.8)
    inset.set_xlabel("keys (row index)", size=8, color=MUTED, labelpad=3)
    inset.set_ylabel("queries (row index)", size=8, color=MUTED, labelpad=3)


def main() -> None:
    figure, axes = canvas(12.2, 3.35)
    draw_trajectories(axes, 0.3, 3.15)
    draw_tree(axes, 4.15, 3.15)
    draw_mask(figure, axes, 8.65, 3.15)
    save(figure, "idea")


if __name__ == "__main__":
    main()
