"""The passes over states by themselves: which of a layer's time they are.

In samples of whole layers a chunk's pass and its tokens' other work are both a rate of tokens, and
only where few runs walk alone do they part. What waits for another rank is a pass, though.
"""

from __future__ import annotations

from typing import Any

import torch

from ...comm.context import TreeContext
from ...ops.gdn.registry import RULES, GdnCase, select
from ...ops.gdn.tables import StateSlots, recurrence_tables
from ...plan.cost_gdn import GdnRates
from ...plan.profile import CostProfile
from ...plan.recurrence_loads import RecurrenceLoads
from ..gdn_layer import GdnShape
from .component import Call

KINDS = ("states", "gradients", "summaries")


def pass_price(shape: GdnShape, loads: RecurrenceLoads, kind: str, profile: CostProfile) -> float:
    """ms of a pass over all runs of one rank, as the planner counts it."""
    rates = GdnRates.of(shape.model().classes[0], profile, shape.dtype.itemsize, 1)
    every, one = loads.passes["every"], getattr(rates, kind)
    return float(one.ms(every.longest, every.chunks, every.runs).sum())


def pass_call(context: TreeContext, shape: GdnShape, kind: str) -> Call:
    """A call of one pass over all runs of the context's rank."""
    tables, dtype, device = recurrence_tables(context), shape.dtype, context.device

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(context.num_tokens, *size, device=device).to(dtype)

    key, value = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)
    gates = -0.1 * torch.rand(context.num_tokens, shape.value_heads, device=device)
    kernel: Any = select(
        GdnCase(device.type, dtype, shape.key_dim, shape.value_dim), shape.impl, RULES
    ).load()
    strength = normal(shape.value_heads).sigmoid()
    inputs = (normal(*key), normal(*key), normal(*value), gates, strength)
    prep = kernel.prepare(inputs, tables, shape.key_dim**-0.5, True)
    state = (shape.value_heads, shape.key_dim, shape.value_dim)
    slots = tables.state_slots[0]
    states = torch.zeros(slots.count, *state, device=device)
    kernel.pass_states(prep, tables.every, slots, states)
    if kind == "states":
        return lambda: kernel.pass_states(prep, tables.every, slots, states)
    if kind == "gradients":
        kernel.begin_backward(prep, normal(*value))
        into = tables.gradient_slots[0]
        gradients = torch.zeros(into.count, *state, device=device)
        return lambda: kernel.pass_gradients(prep, tables.every, into, gradients)
    runs = len(tables.part.start)
    number = torch.arange(runs, dtype=torch.int32, device=device)
    apart = StateSlots(runs, torch.full_like(number, -1), number)
    return lambda: kernel.summarise(prep, tables.every, apart)
