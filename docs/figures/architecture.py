"""Draw architecture.svg: the rooms, and what happens to one row on its way through them.

python docs/figures/architecture.py
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from style import INK, MUTED, ROOMS, arrow, box, canvas, save


def band(axes: Axes, x, y, width, height, title, text):
    """A pale background that says where (which process, which device) things run."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor="#fafbfc",
            edgecolor="#d5dbe1",
            linewidth=1,
        )
    )
    axes.text(x + 0.15, y + height - 0.13, title, size=10, weight="bold", va="top")
    axes.text(x + width - 0.15, y + height - 0.15, text, size=8, color=MUTED, va="top", ha="right")


def draw_rooms(axes: Axes, x: float, top: float) -> None:
    """The stack of rooms; imports go downwards."""
    rooms = (
        ("megatron", "megatron/", "arguments, specs, layers, loss,\ndata iterator, entry"),
        ("ops", "ops/", "attention: reference, tiled, flex,\nmerge, sink, distributed executor"),
        ("comm", "comm/", "range exchange and its transpose,\nagreement, TreeContext"),
        ("plan", "plan/", "layouts, exchanges, stages,\ncost model, search"),
        ("tree", "tree/", "trajectories, packing, positions,\nvisibility, readers"),
    )
    needs = ("Megatron-Core", "torch", "torch.distributed", "numpy", "numpy")
    width, height, gap = 2.75, 0.86, 0.3
    axes.text(x, top, "Rooms", size=10, weight="bold", va="top")
    axes.text(
        x, top - 0.23, "imports go downwards only; a test holds that", size=8, color=MUTED, va="top"
    )
    y = top - 0.56 - height
    for number, ((room, title, text), need) in enumerate(zip(rooms, needs, strict=True)):
        box(axes, x, y, width, height, room, title, text, size=10)
        axes.text(
            x + width - 0.07,
            y + height - 0.06,
            need,
            size=6.8,
            color=ROOMS[room][1],
            ha="right",
            va="top",
            style="italic",
        )
        if number < len(rooms) - 1:
            arrow(axes, (x + width / 2, y), (x + width / 2, y - gap))
        y -= height + gap


def draw_ahead_of_time(axes: Axes, x: float, y: float, width: float) -> None:
    band(
        axes,
        x,
        y,
        width,
        1.68,
        "Ahead of time, on CPU",
        "DataLoader workers, several rows ahead of the training loop",
    )
    boxes = (
        ("outside", "rollouts", "JSON, JSONL: chat\nmessages or token ids"),
        ("tree", "Trajectory", "tokens, loss mask,\nweights, advantages"),
        ("tree", "PackedRow", "tree, labels, weights,\nentries, paths"),
        ("plan", "RowPlan", "who owns what, what\nmoves when; digest"),
    )
    inner, gap = 1.62, 0.44
    left = x + (width - 4 * inner - 3 * gap) / 2
    for number, (room, title, text) in enumerate(boxes):
        at = left + number * (inner + gap)
        box(axes, at, y + 0.25, inner, 0.82, room, title, text, size=9.2)
        if number < len(boxes) - 1:
            arrow(axes, (at + inner + 0.03, y + 0.66), (at + inner + gap - 0.03, y + 0.66))


def draw_timeline(axes: Axes, x: float, y: float, width: float) -> None:
    """One attention layer on one rank: computing and moving at the same time."""
    label = 1.0
    start, span = x + label, width - label - 0.12
    lanes = {"compute": y + 0.52, "exchange": y + 0.08}
    pieces = (
        ("compute", 0.0, 0.40, "ops", "local stage"),
        ("compute", 0.41, 0.24, "ops", "remote stage 1"),
        ("compute", 0.66, 0.24, "ops", "remote stage 2"),
        ("compute", 0.91, 0.09, "ops", "merge"),
        ("exchange", 0.0, 0.33, "comm", "wave 1: KV rows come"),
        ("exchange", 0.345, 0.27, "comm", "wave 2"),
    )
    for lane, begin, length, room, text in pieces:
        fill, edge = ROOMS[room]
        axes.add_patch(
            Rectangle(
                (start + begin * span, lanes[lane]),
                length * span,
                0.34,
                facecolor=fill,
                edgecolor=edge,
                linewidth=1,
            )
        )
        axes.text(
            start + (begin + length / 2) * span,
            lanes[lane] + 0.17,
            text,
            size=7.6,
            ha="center",
            va="center",
        )
    for lane, level in lanes.items():
        axes.text(x + label - 0.1, level + 0.17, lane, size=8, ha="right", va="center", color=MUTED)
    for begin, end in ((0.33, 0.41), (0.615, 0.66)):
        arrow(
            axes,
            (start + begin * span + 0.01, lanes["exchange"] + 0.34),
            (start + end * span + 0.04, lanes["compute"]),
            color=ROOMS["comm"][1],
            width=1.1,
        )


def draw_training(axes: Axes, x: float, y: float, width: float) -> None:
    height = 3.62
    band(
        axes,
        x,
        y,
        width,
        height,
        "In the training loop, on every rank",
        "Megatron's own pretrain(): schedules, DDP, optimizer, checkpoints",
    )
    top = y + height - 1.32
    boxes = (
        ("megatron", "shard of the row", "tokens, labels, weights,\npositions, TreeContext"),
        ("outside", "Megatron's layers", "norms, projections, MLP,\nMoE: token by token"),
        ("ops", "tree attention", "Q and O stay at home,\nKV rows visit"),
        ("megatron", "loss", "sums and an integer\ncount over all ranks"),
    )
    inner, gap = 1.62, 0.44
    left = x + (width - 4 * inner - 3 * gap) / 2
    edges = []
    for number, (room, title, text) in enumerate(boxes):
        at = left + number * (inner + gap)
        edges.append((at, at + inner))
        box(axes, at, top, inner, 0.82, room, title, text, size=9.2)
    middle = top + 0.41
    pad = 0.14
    axes.add_patch(
        FancyBboxPatch(
            (edges[1][0] - pad, top - pad),
            edges[2][1] - edges[1][0] + 2 * pad,
            0.82 + 2 * pad,
            boxstyle="round,pad=0,rounding_size=0.1",
            facecolor="none",
            edgecolor="#b6c0ca",
            linewidth=1.1,
        )
    )
    axes.text(
        (edges[1][1] + edges[2][0]) / 2,
        top - pad + 0.05,
        "× layers",
        size=7.5,
        color=MUTED,
        ha="center",
        va="bottom",
    )
    arrow(axes, (edges[0][1] + 0.03, middle), (edges[1][0] - pad - 0.02, middle))
    arrow(axes, (edges[1][1] + 0.03, middle + 0.12), (edges[2][0] - 0.03, middle + 0.12))
    arrow(axes, (edges[2][0] - 0.03, middle - 0.08), (edges[1][1] + 0.03, middle - 0.08))
    arrow(axes, (edges[2][1] + pad + 0.02, middle), (edges[3][0] - 0.03, middle))
    zoom_y, zoom_height = y + 0.62, 1.28
    axes.add_patch(
        FancyBboxPatch(
            (x + 0.18, zoom_y),
            width - 0.36,
            zoom_height,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor="#ffffff",
            edgecolor=ROOMS["ops"][1],
            linewidth=1,
            linestyle=(0, (3, 2)),
        )
    )
    attention = (edges[2][0] + edges[2][1]) / 2
    arrow(
        axes,
        (attention, top),
        (attention, zoom_y + zoom_height),
        color=ROOMS["ops"][1],
        style="-",
        dashed=True,
    )
    axes.text(
        x + 0.3,
        zoom_y + zoom_height - 0.1,
        "tree attention of one layer, forward, on one rank",
        size=8,
        color=ROOMS["ops"][1],
        va="top",
    )
    draw_timeline(axes, x + 0.22, zoom_y + 0.07, width - 0.44)
    axes.text(
        x + width / 2,
        y + 0.33,
        "Backward runs every stage with the global output and log-sum-exp; the gradients of "
        "visiting KV rows\nreturn by the transposed exchange and are summed by their owner in "
        "fp32, in a fixed order.",
        size=8.2,
        ha="center",
        va="center",
        color=INK,
        linespacing=1.35,
    )


def main() -> None:
    figure, axes = canvas(12.2, 6.45)
    draw_rooms(axes, 0.25, 6.2)
    x, width = 3.45, 8.5
    draw_ahead_of_time(axes, x, 4.52, width)
    draw_training(axes, x, 0.22, width)
    arrow(axes, (x + 1.2, 4.5), (x + 1.2, 3.88), color=ROOMS["plan"][1], width=1.6)
    axes.text(
        x + 1.38,
        4.19,
        "row and plan; digests and error flags are compared over a CPU group first, one microbatch "
        "ahead",
        size=8.2,
        va="center",
        color=INK,
    )
    save(figure, "architecture")


if __name__ == "__main__":
    main()
