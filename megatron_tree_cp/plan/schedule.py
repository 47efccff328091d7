"""How the remote keys of a layout travel: fused or in waves, chosen by predicted time."""

from __future__ import annotations

from dataclasses import dataclass

from ..tree.packed_tree import PackedTree
from .attention import AttentionPlan
from .cost import CostModel, WindowCost, stage_loads
from .layout import Layout
from .remote import SPLITS, RemoteKeys, remote_keys, split_waves
from .row_plan import Candidate
from .runs import RunTable
from .simulate import StageLoads
from .values import Array

MAX_WAVES = 4
"""Most waves that the automatic choice considers."""


@dataclass(frozen=True, eq=False)
class WindowSchedule:
    """The chosen waves of one window, what they carry and cost, and what else was priced."""

    window: int | None
    fused: bool
    waves: tuple[RemoteKeys, ...]
    loads: StageLoads
    cost: WindowCost
    candidates: tuple[Candidate, ...]

    def plan(self, name: str, runs: RunTable) -> AttentionPlan:
        """The attention plan of this choice."""
        return AttentionPlan(name, self.window, self.fused, runs, self.waves)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The chosen waves of every window under one layout, with exact predicted cost."""

    layout: Layout
    runs: RunTable
    windows: tuple[WindowSchedule, ...]
    tokens: Array
    other: WindowCost

    @property
    def total_ms(self) -> float:
        """Predicted forward + backward ms over all layers."""
        return float(self.other.total) + sum(float(w.cost.total) for w in self.windows)


def schedule(tree: PackedTree, layout: Layout, costs: CostModel, waves: int | None) -> Schedule:
    """Choose the waves of every window; ``waves`` None is free, 0 fused, N forces N."""
    runs = RunTable(tree, layout)
    windows = tuple(_schedule_window(runs, window, costs, waves) for window in costs.windows)
    rank_tokens = stage_loads(runs, (), None).queries
    return Schedule(layout, runs, windows, rank_tokens, costs.other_ms(rank_tokens))


def _schedule_window(
    runs: RunTable, window: int | None, costs: CostModel, waves: int | None
) -> WindowSchedule:
    keys = remote_keys(runs, window)
    options: list[tuple[str, bool, tuple[RemoteKeys, ...]]] = []
    if runs.cp_size == 1 or (waves is None and not len(keys)):
        options.append(("local", False, ()))
    else:
        if waves in (None, 0):
            options.append(("fused", True, (keys,)))
        counts = range(1, MAX_WAVES + 1) if waves is None else range(waves, waves + bool(waves))
        for count in counts:
            # With one wave, or waves of one source each, the two splits are the same or moot.
            for split in SPLITS if count > 1 and runs.cp_size > 2 else SPLITS[:1]:
                options.append(
                    (f"{count} waves by {split}", False, split_waves(keys, runs, count, split))
                )
    best: WindowSchedule | None = None
    tried = []
    for name, fused, parts in options:
        loads = stage_loads(runs, parts, window)
        cost = costs.window_ms(window, loads, fused)
        tried.append(Candidate(f"window {window}: {name}", float(cost.total)))
        if best is None or cost.total < best.cost.total:
            best = WindowSchedule(window, fused, parts, loads, cost, ())
    assert best is not None
    return WindowSchedule(window, best.fused, best.waves, best.loads, best.cost, tuple(tried))
