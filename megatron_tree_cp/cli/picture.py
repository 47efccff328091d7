"""What `tree-cp inspect` shows of a plan, as plain values that HTML and PNG both draw."""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..plan.cost import CostModel
from ..plan.profile import CostProfile
from ..plan.row_plan import RowPlan
from ..plan.runs import RunTable
from ..plan.timeline import LayerTimeline, layer_timelines, recurrent_loads

PALETTE = ("#4477c8", "#e08a2e", "#3f9b64", "#cf5161", "#8566b8", "#2fa5ae", "#c85fa3", "#8c7a2f")

KINDS = {
    # kind: (label, colour)
    "local": ("own keys", "#4477c8"),
    "remote": ("remote keys", "#e08a2e"),
    "fused": ("own + remote keys", "#7f6bb5"),
    "tokens": ("token-local", "#b9c3cf"),
    "merge": ("merge", "#3f9b64"),
    "copies": ("pack, delta, accumulate", "#d3b24a"),
    "conv": ("convolution", "#6c8f3c"),
    "chunks": ("chunks of all tokens", "#5aa7c7"),
    "states": ("passes over states", "#8c5a3c"),
    "summary": ("summaries for other ranks", "#d98f7a"),
    "exchange": ("exchange", "#cf5161"),
    "wait": ("waiting", "#eceff3"),
}

_COPIES = ("pack", "assemble", "delta", "accumulate", "launch")

MAX_CELLS = 1600
"""Pixels of a side within which pieces of the tree picture that fall together are drawn once."""


@dataclass(frozen=True)
class Piece:
    """One run in the tree picture: positions [x0, x1), leaves [y0, y1), its owner."""

    x0: float
    x1: float
    y0: float
    y1: float
    owner: int
    label: str


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn of one row's plan. Times in ms, sizes in bytes."""

    title: str
    figures: tuple[tuple[str, str], ...]
    cp_size: int
    colours: tuple[str, ...]
    pieces: tuple[Piece, ...]
    num_positions: int
    num_leaves: int
    segments_drawn: str
    strip: tuple[tuple[int, int, int], ...]
    """(begin, end, owner) in row order."""

    num_tokens: int
    traffic: tuple[tuple[str, np.ndarray], ...]
    """Per distinct class: bytes [source, destination] of one layer's forward, in all hops."""

    timelines: tuple[LayerTimeline, ...]
    split: tuple[dict[str, float], ...]
    """Per rank: ms of each of ``KINDS``, forward + backward over all layers."""

    tried: tuple[tuple[str, tuple[tuple[str, float, bool], ...]], ...]
    """Per group: (name, ms, whether chosen)."""


def kind_of(kind: str) -> str:
    """The key of ``KINDS`` under which a timeline's step is drawn."""
    if kind == "compose":
        return "states"
    return "copies" if kind in _COPIES else kind


def kinds_of(*timelines: LayerTimeline) -> tuple[str, ...]:
    """The keys of ``KINDS`` that timelines show, waiting included."""
    shown = {kind_of(step.kind) for line in timelines for step in line.steps}
    return tuple(kind for kind in KINDS if kind in shown or kind == "wait")


def mixer_ends(line: LayerTimeline) -> dict[str, float]:
    """How far to draw each pass: the mixer's last step, and a little of what follows."""
    result = {}
    for direction in ("forward", "backward"):
        steps = [s.end for s in line.steps if s.direction == direction and s.kind != "tokens"]
        result[direction] = 1.08 * max(steps, default=1.0)
    return result


def rank_colours(cp_size: int) -> tuple[str, ...]:
    """One colour a rank; beyond eight, hues in order with alternating lightness."""
    if cp_size <= len(PALETTE):
        return PALETTE[:cp_size]
    colours = []
    for rank in range(cp_size):
        light = (0.44, 0.62, 0.53)[rank % 3]
        rgb = colorsys.hls_to_rgb(rank / cp_size, light, 0.55)
        colours.append("#" + "".join(f"{round(255 * c):02x}" for c in rgb))
    return tuple(colours)


def picture(
    title: str,
    plan: RowPlan,
    profile: CostProfile,
    planning_ms: float,
    text_of: Callable[[int], str] | None = None,
) -> Picture:
    """What to draw of ``plan``; ``text_of`` gives the text of a segment, to be escaped."""
    tree, predicted, layout = plan.tree, plan.predicted, plan.layouts["main"]
    pieces, leaves, drawn = _pieces(plan, text_of)
    timelines = layer_timelines(plan, profile)
    starts, lengths, ranks, _ = layout.pieces
    moved = sum(
        float(plan.attention[layer.name].exchanges[w].counts.sum()) * _row_bytes(plan, layer)
        for layer in plan.model.attention_classes
        for w in range(plan.attention[layer.name].num_waves)
    )
    waves = "; ".join(f"{name} {part.describe()}" for name, part in plan.attention.items())
    share = predicted.total_ms / predicted.candidates[0].total_ms if predicted.candidates else 1
    figures = (
        ("tokens", f"{tree.num_tokens:,}"),
        ("segments", f"{tree.num_segments:,}"),
        ("ranks", f"{plan.cp_size} CP x {plan.tp_size} TP"),
        ("predicted fwd + bwd", f"{predicted.total_ms:.2f} ms"),
        ("against contiguous", f"{100 * (share - 1):+.2f} %"),
        ("slowest rank / mean", f"{predicted.imbalance:.3f}"),
        ("waves", waves or "none"),
        ("keys and values moved", f"{moved / 2**20:,.1f} MiB a layer"),
        ("peak of a rank", f"{predicted.peak_bytes.max() / 2**30:.2f} GiB"),
        *_recurrent_figures(plan),
        ("planned in", f"{planning_ms:.1f} ms"),
        ("cost profile", profile.name),
        ("digest", plan.digest[:16]),
    )
    traffic, known = [], set()
    for layer in plan.model.attention_classes:
        part = plan.attention[layer.name]
        if id(part) not in known and plan.cp_size > 1:
            known.add(id(part))
            counts = sum(
                (exchange.counts for exchange in part.exchanges),
                np.zeros((plan.cp_size, plan.cp_size), np.int64),
            )
            traffic.append((layer.name, counts * _row_bytes(plan, layer)))
    if plan.cp_size > 1 and plan.model.recurrent_classes:
        loads = recurrent_loads(plan)
        rates = CostModel(plan.model, profile, plan.tp_size).recurrent_rates
        for layer, (_, rate) in zip(plan.model.recurrent_classes, rates, strict=True):
            traffic.append((layer.name, rate.moved_bytes(loads).T))
    return Picture(
        title=title,
        figures=figures,
        cp_size=plan.cp_size,
        colours=rank_colours(plan.cp_size),
        pieces=pieces,
        num_positions=int((tree.segment_positions + tree.lengths).max()),
        num_leaves=leaves,
        segments_drawn=drawn,
        strip=tuple(zip(starts.tolist(), (starts + lengths).tolist(), ranks.tolist())),
        num_tokens=tree.num_tokens,
        traffic=tuple(traffic),
        timelines=timelines,
        split=_split(plan, timelines),
        tried=_tried(plan),
    )


def _recurrent_figures(plan: RowPlan) -> tuple[tuple[str, str], ...]:
    if not plan.model.recurrent_classes:
        return ()
    own = "of their own" if plan.recurrent_layout != "main" else "the row's"
    return (
        ("runs continued from other ranks", f"{plan.predicted.chained_runs:,}"),
        ("layout of recurrent layers", own),
    )


def _row_bytes(plan: RowPlan, layer) -> float:
    heads = max(layer.kv_heads / plan.tp_size, 1.0)
    return heads * (layer.head_dim + layer.value_width) * plan.model.dtype_bytes


def _pieces(
    plan: RowPlan, text_of: Callable[[int], str] | None
) -> tuple[tuple[Piece, ...], int, str]:
    tree = plan.tree
    leaf = np.ones(tree.num_segments, dtype=bool)
    leaf[tree.parents[tree.parents >= 0]] = False
    before = np.concatenate([[0], np.cumsum(leaf)])
    last = np.searchsorted(tree.segment_starts, tree.subtree_ends)
    top, bottom = before[:-1], before[last]
    leaves = int(before[-1])
    runs = RunTable(tree, plan.layouts["main"])
    # Runs join only children; the picture keeps the segments apart.
    edges = np.union1d(runs.start, tree.segment_starts)
    ends = np.append(edges[1:], tree.num_tokens)
    owner = runs.owner[np.searchsorted(runs.start, edges, side="right") - 1]
    segment = np.searchsorted(tree.segment_starts, edges, side="right") - 1
    x0 = tree.segment_positions[segment] + edges - tree.segment_starts[segment]
    x1 = x0 + ends - edges
    wide = max(int(x1.max()), 1) / MAX_CELLS
    tall = max(leaves / MAX_CELLS * 2, 1e-9)
    cell = np.stack(
        [x0 // wide, x1 // wide, top[segment] // tall, bottom[segment] // tall, owner], axis=1
    )
    chosen = np.sort(np.unique(cell.astype(np.int64), axis=0, return_index=True)[1])
    pieces = []
    for i in chosen.tolist():
        s = int(segment[i])
        label = (
            f"segment {s}: {tree.lengths[s]:,} tokens at positions "
            f"{tree.segment_positions[s]:,} to {tree.segment_positions[s] + tree.lengths[s] - 1:,}"
            f"\nrank {owner[i]}: rows {edges[i]:,} to {ends[i] - 1:,}"
        )
        if text_of is not None:
            label += f"\n{text_of(s)}"
        pieces.append(
            Piece(
                float(x0[i]),
                float(x1[i]),
                float(top[s]),
                float(max(bottom[s], top[s] + tall * (len(chosen) < len(edges)))),
                int(owner[i]),
                label,
            )
        )
    drawn = "" if len(pieces) == len(edges) else f"{len(pieces):,} of {len(edges):,} pieces drawn"
    return tuple(pieces), leaves, drawn


def _split(plan: RowPlan, timelines: tuple[LayerTimeline, ...]) -> tuple[dict[str, float], ...]:
    ranks: list[dict[str, float]] = [dict.fromkeys(KINDS, 0.0) for _ in range(plan.cp_size)]
    for line in timelines:
        busy = [0.0] * plan.cp_size
        for step in line.steps:
            if step.kind != "exchange":
                span = step.end - step.begin
                busy[step.rank] += span
                ranks[step.rank][kind_of(step.kind)] += line.layers * span
        for rank in range(plan.cp_size):
            wait = line.forward_ms + line.backward_ms - busy[rank]
            ranks[rank]["wait"] += line.layers * max(wait, 0.0)
    return tuple({k: v for k, v in rank.items() if k != "exchange"} for rank in ranks)


def _tried(plan: RowPlan) -> tuple[tuple[str, tuple[tuple[str, float, bool], ...]], ...]:
    groups: dict[str, list[tuple[str, float]]] = {}
    for candidate in plan.predicted.candidates:
        group, name = "layouts", candidate.name
        if name.startswith("window "):
            group, name = name.split(": ", 1)
            group = f"waves, {group}".replace("window None", "no window")
        groups.setdefault(group, []).append((name, candidate.total_ms))
    total = plan.predicted.total_ms
    result = []
    for group, found in groups.items():
        best = min(found, key=lambda c: abs(c[1] - total) if group == "layouts" else c[1])
        result.append((group, tuple((n, ms, (n, ms) == best) for n, ms in found)))
    return tuple(result)
