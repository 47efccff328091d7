"""How the remote keys of a layout travel: fused or in waves, chosen by predicted time.

With one exchange forward and backward are fused or staged apart: neither depends on the other.
Where ranks lie on several nodes, a single exchange is priced in one hop and in two; more waves also
divided by nodes, each wave in the hops that bring it sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..tree.packed_tree import PackedTree
from .attention import AttentionPlan
from .cost import CostModel, WindowCost, local_loads, stage_loads, two_level_loads
from .layout import Layout
from .memory import CrossingRows
from .recurrence import CHUNK, RecurrencePlan
from .recurrence_loads import RecurrenceLoads, recurrence_loads
from .remote import RemoteKeys, remote_keys, split_waves, split_waves_by_node
from .row_plan import Candidate
from .runs import RunTable
from .simulate import StageLoads, node_size
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
    two_level: tuple[bool, ...] = ()
    ranks_per_node: int | None = None

    @property
    def crossing(self) -> CrossingRows:
        """The rows that a layer exchanges, for its memory."""
        return CrossingRows.of_loads(self.loads, self.backward_fused)

    def plan(self, name: str, runs: RunTable) -> AttentionPlan:
        """The attention plan of this choice."""
        fused = (self.forward_fused, self.backward_fused)
        nodes = self.ranks_per_node if any(self.two_level) else None
        return AttentionPlan(name, self.window, *fused, runs, self.waves, self.two_level, nodes)


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

    def peak_bytes(self, costs: CostModel) -> Array:
        """Bytes per rank, as `CostModel.peak_bytes` counts them."""
        walk = None if self.recurrent is None else self.recurrent.loads.walk
        return costs.peak_bytes(self.tokens, [window.crossing for window in self.windows], walk)


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
    prices = _Prices(runs, window, costs, keys)
    if runs.cp_size == 1 or (waves is None and not len(keys)):
        prices.add("local", ())
    elif waves == 0:
        for two_level in prices.levels:
            prices.add("fused", (keys,), (two_level,), fused=True)
    elif waves is None:
        one = [prices.one_exchange(two_level) for two_level in prices.levels]
        count = prices.more_waves(prices.by_tokens, one[0])
        prices.by_distance(max(count, 2))
        if prices.nodes is not None:
            prices.more_waves(prices.by_nodes, min(one, key=_total))
    else:
        prices.by_tokens(waves)
        prices.by_distance(waves)
        if prices.nodes is not None:
            prices.by_nodes(waves)
    chosen = min(prices.tried, key=_total)
    notes = tuple(note for t in prices.tried for note in t.candidates)
    return replace(chosen, candidates=notes)


class _Prices:
    """The ways of one window's remote keys that were priced, in ``tried``.

    ``nodes`` is the number of ranks of a node where rows may travel in two hops, else None.
    """

    def __init__(
        self, runs: RunTable, window: int | None, costs: CostModel, keys: RemoteKeys
    ) -> None:
        self.runs, self.window, self.costs, self.keys = runs, window, costs, keys
        self.local = local_loads(runs, window, costs.profile)
        self.tried: list[WindowSchedule] = []
        size = node_size(runs.cp_size, costs.profile)
        if size is not None:
            far = runs.owner[keys.run] // size != keys.destination // size
            size = size if size > 1 and far.any() else None
        self.nodes = size

    @property
    def levels(self) -> tuple[bool, ...]:
        """The choices of two levels that there are."""
        return (False,) if self.nodes is None else (False, True)

    def loads(self, parts: tuple[RemoteKeys, ...], two_level: tuple[bool, ...]) -> StageLoads:
        """What the stages of ``parts`` do."""
        loads = stage_loads(self.runs, parts, self.window, self.local, self.costs.profile)
        return self._relayed(loads, parts, two_level)

    def add(
        self,
        name: str,
        parts: tuple[RemoteKeys, ...],
        two_level: tuple[bool, ...] = (),
        fused: bool = False,
        loads: StageLoads | None = None,
    ) -> WindowSchedule:
        """Price ``parts`` with both directions alike."""
        loads = self.loads(parts, two_level) if loads is None else loads
        cost = self.costs.window_ms(self.window, loads, fused, fused)
        made = WindowSchedule(
            self.window, fused, fused, parts, loads, cost, (), two_level, self.nodes
        )
        return self._note(name, made)

    def _note(self, name: str, found: WindowSchedule) -> WindowSchedule:
        name = f"window {self.window}: {name}{', two-level' * any(found.two_level)}"
        self.tried.append(replace(found, candidates=(Candidate(name, _total(found)),)))
        return found

    def one_exchange(self, two_level: bool) -> WindowSchedule:
        """Price one exchange, fused and staged in each direction; returns it staged in both."""
        # Fused and one wave move the same keys: their loads are the same.
        fused = self.add("fused", (self.keys,), (two_level,), fused=True)
        one = self.add("1 wave", (self.keys,), (two_level,), loads=fused.loads)
        self._note("fused forward, 1 wave backward", _mixed(fused, one))
        self._note("1 wave forward, fused backward", _mixed(one, fused))
        return one

    def more_waves(self, price: Callable[[int], WindowSchedule], one: WindowSchedule) -> int:
        """Price growing numbers of waves; returns the cheapest number."""
        best, count = _total(one), 1
        while count < MAX_WAVES:
            # Launches grow and waits shrink with the count: the first rise is the end.
            total = _total(price(count + 1))
            if total >= best:
                break
            best, count = total, count + 1
        return count

    def by_tokens(self, count: int) -> WindowSchedule:
        """Price waves of equal shares."""
        parts = split_waves(self.keys, self.runs, count, "tokens")
        return self.add(f"{count} waves by tokens", parts)

    def by_distance(self, count: int) -> None:
        """Price waves of near and far sources."""
        # With one wave, or one source, both splits are the same or one is pointless.
        if count > 1 and self.runs.cp_size > 2:
            parts = split_waves(self.keys, self.runs, count, "distance")
            self.add(f"{count} waves by distance", parts)

    def by_nodes(self, count: int) -> WindowSchedule:
        """Price waves that all ranks of a node share, each in the hops that bring it sooner."""
        if self.nodes is None:
            raise ValueError("waves by nodes need ranks on several nodes")
        parts = split_waves_by_node(self.keys, self.runs, count, self.nodes)
        one = self.loads(parts, ())
        two = self._relayed(one, parts, (True,) * count)
        ms = [self.costs.exchanges_ms(self.window, loads) for loads in (one, two)]
        two_level = tuple((ms[1] < ms[0]).tolist())
        loads = two if all(two_level) else self._relayed(one, parts, two_level)
        return self.add(f"{count} waves by nodes", parts, two_level, loads=loads)

    def _relayed(
        self, loads: StageLoads, parts: tuple[RemoteKeys, ...], two_level: tuple[bool, ...]
    ) -> StageLoads:
        return two_level_loads(loads, self.runs, parts, self.costs.profile, two_level)


def _total(found: WindowSchedule) -> float:
    return float(found.cost.total)


def _mixed(ahead: WindowSchedule, back: WindowSchedule) -> WindowSchedule:
    """The forward of one schedule and the backward of another over the same exchange."""
    return replace(
        ahead, backward_fused=back.backward_fused, cost=ahead.cost.with_backward(back.cost)
    )
