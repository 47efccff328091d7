"""The predicted timeline of one layer: the steps of the simulation, rank by rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .cost import CostModel, local_loads, stage_loads, two_level_loads
from .cost_gdn import GdnRates
from .model import LayerClass
from .profile import CostProfile
from .recurrence import CHUNK, RecurrencePlan
from .recurrence_loads import RecurrenceLoads, recurrence_loads
from .row_plan import RowPlan
from .simulate import Recorder, layer_ms
from .values import Array


@dataclass(frozen=True)
class Step:
    """One step of one rank in a layer, ms from the start of its pass.

    ``direction`` is ``forward`` or ``backward``. ``kind`` of every layer is ``tokens``
    (projections, MLP) or ``exchange``, which runs beside the others; of attention ``pack``,
    ``assemble``, ``local``, ``remote``, ``fused``, ``merge``, ``delta`` or ``accumulate``; of
    Gated DeltaNet ``launch``, ``conv``, ``chunks``, ``states``, ``summary`` or ``compose``.
    ``wave`` is -1 where a step belongs to none.
    """

    rank: int
    direction: str
    kind: str
    wave: int
    begin: float
    end: float


@dataclass(frozen=True)
class LayerTimeline:
    """One layer of a class: its steps, and when the slowest rank ends each pass."""

    name: str
    layers: int
    steps: tuple[Step, ...]
    forward_ms: float
    backward_ms: float


def layer_timelines(plan: RowPlan, profile: CostProfile) -> tuple[LayerTimeline, ...]:
    """The timeline of one layer of every attention and recurrent class, as the planner prices it.

    ``profile`` is the one that ``plan`` was made with. Token-local work is priced beside the mixer,
    as one step after it in both passes.
    """
    costs = CostModel(plan.model, profile, plan.tp_size)
    attention = [_attention(plan, layer, costs) for layer in plan.model.attention_classes]
    if not plan.model.recurrent_classes:
        return tuple(attention)
    loads = recurrent_loads(plan)
    recurrent = (
        _timeline(plan.cp_size, layer, loads.tokens, costs, _recurrent(loads, rates))
        for layer, (_, rates) in zip(
            plan.model.recurrent_classes, costs.recurrent_rates, strict=True
        )
    )
    return (*attention, *recurrent)


def recurrent_loads(plan: RowPlan) -> RecurrenceLoads:
    """Work of a recurrent layer of the plan, in the layout that it runs in."""
    layout = plan.layouts[plan.recurrent_layout]
    return recurrence_loads(RecurrencePlan(plan.tree, layout), CHUNK)


Price = Callable[[Recorder], tuple[Array, Array]]
"""Reports the steps of one layer and gives the (forward, backward) ms of every rank."""


def _attention(plan: RowPlan, layer: LayerClass, costs: CostModel) -> LayerTimeline:
    part = plan.attention[layer.name]
    local = local_loads(part.runs, part.window, costs.profile)
    loads = stage_loads(part.runs, part.waves, part.window, local, costs.profile)
    loads = two_level_loads(loads, part.runs, part.waves, costs.profile, part.two_level)

    def price(record: Recorder) -> tuple[Array, Array]:
        fused = (part.forward_fused, part.backward_fused)
        return layer_ms(loads, costs.rates(layer), *fused, record)

    return _timeline(plan.cp_size, layer, loads.queries, costs, price)


def _recurrent(loads: RecurrenceLoads, rates: GdnRates) -> Price:
    return lambda record: rates.layer_ms(loads, record)


def _timeline(
    cp_size: int, layer: LayerClass, tokens: Array, costs: CostModel, price: Price
) -> LayerTimeline:
    steps: list[Step] = []

    def record(direction: str, kind: str, wave: int, begin: Array, end: Array) -> None:
        begin, end = (np.broadcast_to(time, cp_size) for time in (begin, end))
        steps.extend(
            Step(rank, direction, kind, wave, float(begin[rank]), float(end[rank]))
            for rank in range(cp_size)
            if end[rank] > begin[rank]
        )

    forward, backward = price(record)
    ahead, back = costs.token_ms(tokens)
    record("forward", "tokens", -1, forward, forward + ahead)
    record("backward", "tokens", -1, backward, backward + back)
    steps.sort(key=lambda step: (step.rank, step.direction != "forward", step.begin))
    return LayerTimeline(
        layer.name,
        layer.layers,
        tuple(steps),
        float((forward + ahead).max()),
        float((backward + back).max()),
    )
