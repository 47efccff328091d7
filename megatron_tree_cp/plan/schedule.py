"""How the remote keys of a layout travel: fused or in waves, chosen by predicted time.

With one exchange forward and backward are fused or staged apart: neither depends on the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..tree.packed_tree import PackedTree
from .attention import AttentionPlan
from .cost import CostModel, WindowCost, local_loads, stage_loads
from .layout import Layout
from .recurrence import CHUNK, RecurrencePlan
from .recurrence_loads import RecurrenceLoads, recurrence_loads
from .remote import RemoteKeys, remote_keys, split_waves
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
    forward_fused: bool
    backward_fused: bool
    waves: tuple[RemoteKeys, ...]
    loads: StageLoads
    cost: WindowCost
    candidates: tuple[Candidate, ...]

    def plan(self, name: str, runs: RunTable) -> AttentionPlan:
        """The attention plan of this choice."""
        fused = (self.forward_fused, self.backward_fused)
        return AttentionPlan(name, self.window, *fused, runs, self.waves)


@dataclass(frozen=True, eq=False)
class RecurrentSchedule:
    """The work of recurrent layers under one layout, and its price over all of them."""

    loads: RecurrenceLoads
    cost: WindowCost


@dataclass(frozen=True, eq=False)
class Schedule:
    """The chosen waves of every window under one layout, with exact predicted cost."""

    layout: Layout
    runs: RunTable
    windows: tuple[WindowSchedule, ...]
    tokens: Array
    other: WindowCost
    recurrent: RecurrentSchedule | None = None
    """None for a model without recurrent layers."""

    @property
    def total_ms(self) -> float:
        """Predicted forward + backward ms over all layers."""
        return sum(float(cost.total) for cost in self.costs)

    @property
    def costs(self) -> tuple[WindowCost, ...]:
        """The prices that add up: of windows, recurrent layers and the others."""
        recurrent = () if self.recurrent is None else (self.recurrent.cost,)
        return (self.other, *(window.cost for window in self.windows), *recurrent)


def schedule(tree: PackedTree, layout: Layout, costs: CostModel, waves: int | None) -> Schedule:
    """Choose the waves of every window; ``waves`` None is free, 0 fused, N forces N staged."""
    runs = RunTable(tree, layout)
    windows = tuple(_schedule_window(runs, window, costs, waves) for window in costs.windows)
    tokens = windows[0].loads.queries if windows else local_loads(runs, None)[0]
    recurrent = None
    if costs.recurrent_rates:
        loads = recurrence_loads(RecurrencePlan(tree, layout), CHUNK)
        recurrent = RecurrentSchedule(loads, costs.recurrent_ms(loads))
    return Schedule(layout, runs, windows, tokens, costs.other_ms(tokens), recurrent)


def _schedule_window(
    runs: RunTable, window: int | None, costs: CostModel, waves: int | None
) -> WindowSchedule:
    keys = remote_keys(runs, window)
    local = local_loads(runs, window, costs.profile)
    tried: list[WindowSchedule] = []

    def add(name: str, found: WindowSchedule) -> WindowSchedule:
        note = Candidate(f"window {window}: {name}", float(found.cost.total))
        tried.append(replace(found, candidates=(note,)))
        return found

    def price(name: str, parts: tuple[RemoteKeys, ...], fused: bool = False) -> WindowSchedule:
        # Fused and one wave move the same keys: their loads are the same.
        same = [t for t in tried if len(t.waves) == len(parts) == 1]
        loads = same[0].loads if same else stage_loads(runs, parts, window, local, costs.profile)
        cost = costs.window_ms(window, loads, fused, fused)
        return add(name, WindowSchedule(window, fused, fused, parts, loads, cost, ()))

    if runs.cp_size == 1 or (waves is None and not len(keys)):
        price("local", ())
    elif waves == 0:
        price("fused", (keys,), fused=True)
    elif waves is None:
        fused = price("fused", (keys,), fused=True)
        one = price("1 wave", (keys,))
        add("fused forward, 1 wave backward", _mixed(fused, one))
        add("1 wave forward, fused backward", _mixed(one, fused))
        best, count = float(one.cost.total), 1
        while count < MAX_WAVES:
            # Launches grow and waits shrink with the count: the first rise is the end.
            parts = split_waves(keys, runs, count + 1, "tokens")
            total = float(price(f"{count + 1} waves by tokens", parts).cost.total)
            if total >= best:
                break
            best, count = total, count + 1
        _price_distance(price, keys, runs, max(count, 2))
    else:
        price(f"{waves} waves by tokens", split_waves(keys, runs, waves, "tokens"))
        _price_distance(price, keys, runs, waves)
    chosen = min(tried, key=lambda t: float(t.cost.total))
    notes = tuple(note for t in tried for note in t.candidates)
    return replace(chosen, candidates=notes)


def _mixed(ahead: WindowSchedule, back: WindowSchedule) -> WindowSchedule:
    """The forward of one schedule and the backward of another over the same exchange."""
    return replace(
        ahead, backward_fused=back.backward_fused, cost=ahead.cost.with_backward(back.cost)
    )


def _price_distance(
    price: Callable[[str, tuple[RemoteKeys, ...]], WindowSchedule],
    keys: RemoteKeys,
    runs: RunTable,
    count: int,
) -> None:
    # With one wave, or one source, both splits are the same or one is pointless.
    if count > 1 and runs.cp_size > 2:
        price(f"{count} waves by distance", split_waves(keys, runs, count, "distance"))
