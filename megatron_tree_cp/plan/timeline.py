"""The predicted timeline of one layer: the steps of the simulation, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cost import CostModel, local_loads, stage_loads, two_level_loads
from .profile import CostProfile
from .row_plan import RowPlan
from .simulate import layer_ms
from .values import Array


@dataclass(frozen=True)
class Step:
    """One step of one rank in a layer, ms from the start of its pass.

    ``direction`` is ``forward`` or ``backward``; ``kind`` one of ``tokens`` (projections, MLP),
    ``pack``, ``assemble``, ``local``, ``remote``, ``fused``, ``merge``, ``delta``, ``accumulate``
    or ``exchange``; ``wave`` is -1 where a step belongs to none. Exchanges run beside the others.
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
    """The timeline of one layer of every attention class, as `simulate.layer_ms` orders it.

    ``profile`` is the one that ``plan`` was made with. Token-local work is priced beside attention,
    as one step after it in both passes.
    """
    costs = CostModel(plan.model, profile, plan.tp_size)
    result = []
    for layer in plan.model.attention_classes:
        part = plan.attention[layer.name]
        local = local_loads(part.runs, part.window, profile)
        loads = stage_loads(part.runs, part.waves, part.window, local, profile)
        loads = two_level_loads(loads, part.runs, part.waves, profile, part.two_level)
        steps: list[Step] = []

        def record(
            direction: str,
            kind: str,
            wave: int,
            begin: Array,
            end: Array,
            steps: list[Step] = steps,
        ) -> None:
            begin, end = (np.broadcast_to(time, plan.cp_size) for time in (begin, end))
            steps.extend(
                Step(rank, direction, kind, wave, float(begin[rank]), float(end[rank]))
                for rank in range(plan.cp_size)
                if end[rank] > begin[rank]
            )

        forward, backward = layer_ms(
            loads, costs.rates(layer), part.forward_fused, part.backward_fused, record
        )
        ahead, back = costs.token_ms(loads.queries)
        record("forward", "tokens", -1, forward, forward + ahead)
        record("backward", "tokens", -1, backward, backward + back)
        steps.sort(key=lambda step: (step.rank, step.direction != "forward", step.begin))
        result.append(
            LayerTimeline(
                layer.name,
                layer.layers,
                tuple(steps),
                float((forward + ahead).max()),
                float((backward + back).max()),
            )
        )
    return tuple(result)
