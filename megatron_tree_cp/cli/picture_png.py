"""A `Picture` as PNG, drawn with matplotlib."""

from __future__ import annotations

import io
from textwrap import wrap

import numpy as np

from .picture import KINDS, Picture, kind_of, kinds_of, mixer_ends
from .picture_ticks import ticks

INK, MUTED, WAIT = "#1f2933", "#5f6c7b", "#eceff3"
FACTS_WIDTH = 160
"""Characters of a line of facts under the title."""


def png_image(picture: Picture) -> bytes:
    """The bytes of the image: tree, row, timelines, costs, bytes and candidates."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = max(0.16 * picture.cp_size, 0.7) if picture.cp_size <= 16 else 0.07 * picture.cp_size
    tree = min(max(0.13 * picture.num_leaves, 1.0), 4.5)
    last = max(2.6, 0.2 * sum(len(found) + 1 for _, found in picture.tried))
    heights = [tree, 0.25, *[lanes] * len(picture.timelines), lanes, last]
    facts = wrap("   ".join(f"{k} {v}" for k, v in picture.figures[3:8]), FACTS_WIDTH)
    head = 0.8 + 0.17 * len(facts)
    total = sum(heights) + 0.62 * len(heights) + head - 0.1
    figure = Figure(figsize=(11, total), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.04, 1 - 0.28 / total, picture.title, fontsize=13, weight="bold", color=INK)
    for number, text in enumerate(facts):
        figure.text(0.04, 1 - (0.55 + 0.17 * number) / total, text, fontsize=8, color=MUTED)

    top = total - head
    places = []
    for height in heights:
        places.append((top - height) / total)
        top -= height + 0.62

    def panel(index: int, title: str, left: float = 0.09, width: float = 0.88):
        axes = figure.add_axes((left, places[index], width, heights[index] / total))
        axes.set_title(title, loc="left", fontsize=9, weight="bold", color=INK)
        axes.tick_params(labelsize=7, colors=MUTED, length=2)
        for side in axes.spines.values():
            side.set_visible(False)
        return axes

    _tree(panel(0, "Tree and ownership: width is tokens, height is leaves"), picture)
    _strip(panel(1, "Row order"), picture)
    for n, line in enumerate(picture.timelines):
        title = f"Predicted timeline of one layer, {line.name}"
        _timeline(panel(2 + n, title), picture, line)
    at = 2 + len(picture.timelines)
    _split(panel(at, "Where the time goes, all layers above, ms"), picture)
    if picture.traffic:
        name, sent = picture.traffic[0]
        _matrix(panel(at + 1, f"MiB from (row) to (column), {name}", width=0.3), sent)
    _tried(panel(at + 1, "What the search tried, ms", left=0.62, width=0.35), picture)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _bars(axes, boxes, colours, edges=False) -> None:
    """Boxes (x0, x1, y0, y1), y downwards."""
    from matplotlib.collections import PolyCollection

    corners = [[(a, c), (b, c), (b, d), (a, d)] for a, b, c, d in boxes]
    axes.add_collection(
        PolyCollection(
            corners,
            facecolors=colours,
            edgecolors="white" if edges else "none",
            linewidths=0.5 if edges else 0,
        )
    )


def _axis(axes, end: float, ranks: int | None = None) -> None:
    marks = ticks(end)
    axes.set_xticks([value for value, _ in marks], [name for _, name in marks])
    axes.set_xlim(0, end)
    if ranks is None:
        axes.set_yticks([])
    else:
        shown = range(0, ranks, 1 if ranks <= 16 else 8)
        axes.set_yticks([r + 0.5 for r in shown], [f"rank {r}" for r in shown])
        axes.set_ylim(ranks, 0)


def _tree(axes, picture: Picture) -> None:
    colours = [picture.colours[p.owner] for p in picture.pieces]
    boxes = [(p.x0, p.x1, p.y0, p.y1) for p in picture.pieces]
    _bars(axes, boxes, colours, edges=picture.num_leaves <= 150)
    axes.set_ylim(picture.num_leaves, 0)
    _axis(axes, picture.num_positions)


def _strip(axes, picture: Picture) -> None:
    boxes = [(begin, end, 0, 1) for begin, end, _ in picture.strip]
    _bars(axes, boxes, [picture.colours[rank] for *_, rank in picture.strip])
    if picture.cp_size <= 16:
        for begin, end, rank in picture.strip:
            if end - begin > 0.02 * picture.num_tokens:
                middle = (begin + end) / 2
                axes.text(middle, 0.5, rank, ha="center", va="center", fontsize=7, color="white")
    axes.set_ylim(1, 0)
    _axis(axes, picture.num_tokens)


def _timeline(axes, picture: Picture, line) -> None:
    ends = mixer_ends(line)
    gap = 0.03 * sum(ends.values())
    start = {"forward": 0.0, "backward": ends["forward"] + gap}
    boxes: list[tuple[float, float, float, float]] = []
    colours: list[str | tuple[float, float, float]] = []
    for direction in ends:
        for rank in range(picture.cp_size):
            left = start[direction]
            boxes.append((left, left + ends[direction], rank + 0.1, rank + 0.7))
            colours.append(WAIT)
    for step in line.steps:
        wire = step.kind == "exchange"
        begin, end = step.begin, min(step.end, ends[step.direction])
        if begin < end:
            left, y = start[step.direction], step.rank
            low, high = (y + 0.74, y + 0.92) if wire else (y + 0.1, y + 0.7)
            boxes.append((left + begin, left + end, low, high))
            colours.append(_shade(KINDS[kind_of(step.kind)][1], step.wave))
    _bars(axes, boxes, colours)
    _axis(axes, start["backward"] + ends["backward"], picture.cp_size)
    marks, names = [], []
    for direction, end in ends.items():
        for value, name in ticks(end, 4):
            marks.append(start[direction] + value)
            names.append(name if value else f"{direction}, ms")
    axes.set_xticks(marks, names)
    for label in axes.get_xticklabels():
        if label.get_text().endswith("ms"):
            label.set_horizontalalignment("left")
    handles = [_patch(colour, name) for name, colour in (KINDS[k] for k in kinds_of(line))]
    axes.legend(
        handles=handles, ncols=8, fontsize=6.5, frameon=False, loc="lower right",
        bbox_to_anchor=(1.01, 0.98), handlelength=1, columnspacing=1,
    )  # fmt: skip


def _patch(colour: str, name: str):
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=name)


def _shade(colour: str, wave: int) -> tuple[float, float, float]:
    share = 0.16 * (max(wave, 0) % 4)
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part + (1 - part) * share for part in parts)
    return red, green, blue


def _split(axes, picture: Picture) -> None:
    boxes, colours = [], []
    for rank, split in enumerate(picture.split):
        x = 0.0
        for kind, ms in split.items():
            boxes.append((x, x + ms, rank + 0.1, rank + 0.85))
            colours.append(KINDS[kind][1])
            x += ms
    _bars(axes, boxes, colours)
    _axis(axes, max(sum(split.values()) for split in picture.split), picture.cp_size)


def _matrix(axes, sent: np.ndarray) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    mib = sent / 2**20
    warm = LinearSegmentedColormap.from_list("warm", [WAIT, "#fdeed5", "#d6693c"])
    axes.imshow(mib, cmap=warm, aspect="auto")
    size = len(mib)
    shown = range(0, size, 1 if size <= 16 else 8)
    axes.set_xticks(list(shown))
    axes.set_yticks(list(shown))
    if size <= 10:
        for (s, d), value in np.ndenumerate(mib):
            if value:
                axes.text(d, s, f"{value:.1f}", ha="center", va="center", fontsize=6, color=INK)


def _tried(axes, picture: Picture) -> None:
    y, marks, names = 0.0, [], []
    for group, found in picture.tried:
        least = min(ms for _, ms, _ in found)
        for name, ms, chosen in found:
            axes.barh(y, 100 * (ms / least - 1), color="#e08a2e", height=0.6)
            axes.annotate(
                f" {ms:.3f}", (100 * (ms / least - 1), y), va="center", fontsize=6.5,
                weight="bold" if chosen else "normal", color=INK,
            )  # fmt: skip
            marks.append(y)
            names.append(name)
            y += 1
        names[-len(found)] = f"{group}: {names[-len(found)]}"
        y += 0.5
    axes.set_yticks(marks, names)
    axes.set_ylim(y, -1)
    axes.margins(x=0.15)
    axes.set_xlabel("% above the cheapest", fontsize=7, color=MUTED)
