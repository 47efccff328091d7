"""Colours and small drawing pieces that the figures share."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK = "#1f2933"
MUTED = "#5f6c7b"
PAPER = "#ffffff"
# One colour a room, used in every figure (light fill, dark edge).
ROOMS = {
    "tree": ("#dcefe3", "#2f855a"),
    "plan": ("#fdf0cf", "#b7791f"),
    "comm": ("#fbe0dd", "#c0503f"),
    "ops": ("#dde9fb", "#2b62b3"),
    "megatron": ("#e9e2f6", "#6b46c1"),
    "outside": ("#f1f3f5", "#8593a3"),
}

plt.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": INK,
        "svg.fonttype": "path",  # the same letters on every machine
        "svg.hashsalt": "megatron-tree-cp",  # the same file from the same script
    }
)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of `width` x `height` inches whose data units are inches."""
    figure = plt.figure(figsize=(width, height), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x, y, width, height, room="outside", title="", text="", size=9) -> None:
    """A rounded box in the colour of `room`, a bold title and lines of text below it."""
    fill, edge = ROOMS[room]
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=fill,
            edgecolor=edge,
            linewidth=1.2,
        )
    )
    middle = x + width / 2
    if title and text:
        lines = text.count("\n") + 1
        step = 0.165 * (size - 1) / 8
        top = y + height / 2 + lines * step / 2
        axes.text(middle, top, title, ha="center", va="center", weight="bold", size=size)
        axes.text(
            middle,
            top - 0.12,
            text,
            ha="center",
            va="top",
            size=size - 1.2,
            color=INK,
            linespacing=1.25,
        )
    elif title or text:
        axes.text(
            middle,
            y + height / 2,
            title or text,
            ha="center",
            va="center",
            size=size,
            weight="bold" if title else "normal",
            linespacing=1.25,
        )


def arrow(axes: Axes, start, end, color=MUTED, style="-|>", dashed=False, bend=0.0, width=1.3):
    """An arrow between two points, both in inches."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle=style,
            mutation_scale=11,
            color=color,
            linewidth=width,
            linestyle=(0, (4, 2.5)) if dashed else "solid",
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=0,
            shrinkB=0,
        )
    )


def save(figure: Figure, name: str) -> None:
    """Write `name`.svg beside this file, without a date, so that it only changes when it should."""
    figure.savefig(Path(__file__).parent / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
