"""Predicted time of one attention layer on every rank, in the executor's real order.

Forward: pack, issue every wave's exchange at once, local stage, then each wave as it arrives.
Backward: remote stages first, each return overlapping the next stage, the local stage last.
All arrays may carry leading batch axes, so that a search prices many candidates in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .model import LayerClass
from .profile import CostProfile
from .values import Array

Recorder = Callable[[str, str, int, Array, Array], None]
"""Called with (direction, kind, wave or -1, begin, end) of every step, ms [.., cp] or [.., 1]."""


def link_masks(cp_size: int, profile: CostProfile) -> Array:
    """float64[L, cp, cp]: 1 where rows between two ranks use a link class, 0 at a rank and itself.

    One class on one node; else those inside the nodes and those between them.
    """
    apart = 1.0 - np.eye(cp_size)
    if profile.ranks_per_node is None or profile.ranks_per_node >= cp_size:
        return apart[None]
    node = np.arange(cp_size) // profile.ranks_per_node
    near = node[:, None] == node
    return np.stack([apart * near, apart * ~near])


@dataclass(frozen=True, eq=False)
class StageLoads:
    """Work of one layer: leading batch axes, then waves W, link classes L and ranks cp.

    ``queries`` [.., cp] real tokens; ``local_pairs`` [.., cp]; ``pairs`` and ``reached`` (queries
    of the stage) [.., W, cp]; ``sent`` and ``received`` [.., W, L, cp] rows, where one entry for W
    stands for equal waves. ``local_hidden`` [.., cp] and ``hidden`` [.., W, cp] are hidden pairs of
    touched tiles; None where the profile does not count them.
    """

    queries: Array
    local_pairs: Array
    pairs: Array
    reached: Array
    sent: Array
    received: Array
    local_hidden: Array | None = None
    hidden: Array | None = None


@dataclass(frozen=True)
class LayerRates:
    """Coefficients of one layer class on one rank: ms per pair, per row and per byte."""

    profile: CostProfile
    forward_pair_ms: float
    backward_pair_ms: float
    pair_flops: float
    kv_bytes: float
    output_bytes: float

    @classmethod
    def of(
        cls, layer: LayerClass, profile: CostProfile, dtype_bytes: int, tp_size: int
    ) -> LayerRates:
        """Rates of ``layer`` with its heads divided over ``tp_size`` ranks."""
        flops = layer.pair_flops / tp_size
        kv_heads = max(layer.kv_heads / tp_size, 1.0)  # fewer heads than ranks are replicated
        window = (1.0, 1.0)
        if layer.window is not None:
            window = (profile.forward_window_factor, profile.backward_window_factor)
        return cls(
            profile,
            forward_pair_ms=flops / profile.forward_flops_per_ms * window[0],
            backward_pair_ms=2.5 * flops / profile.backward_flops_per_ms * window[1],
            pair_flops=flops,
            kv_bytes=kv_heads * (layer.head_dim + layer.value_width) * dtype_bytes,
            output_bytes=layer.query_heads / tp_size * layer.value_width * dtype_bytes,
        )

    def stage_ms(self, load: StageLoad, backward: bool = False, remote: bool = False) -> Array:
        """Time of one kernel call per rank; 0 where it has no pair."""
        profile, pairs = self.profile, load.pairs
        factor, underfill, fill = (
            profile.remote_pair_factor,
            profile.underfill_ms,
            profile.fill_flops,
        )
        if backward:
            pair_ms, launch = self.backward_pair_ms, profile.backward_launch_ms
            hidden_factor = profile.backward_hidden_factor
            row_passes, key_passes = profile.backward_row_passes, profile.backward_key_passes
            factor = _or(profile.backward_remote_factor, factor)
            underfill = _or(profile.backward_underfill_ms, underfill)
            fill = _or(profile.backward_fill_flops, fill)
        else:
            pair_ms, launch = self.forward_pair_ms, profile.forward_launch_ms
            hidden_factor = profile.forward_hidden_factor
            row_passes, key_passes = profile.forward_row_passes, 0.0
        work = touched = pairs
        if load.hidden is not None:
            work, touched = pairs + load.hidden * hidden_factor, pairs + load.hidden
        short = np.maximum(1.0 - touched * (self.pair_flops / fill), 0.0)
        ms = launch + work * (pair_ms * (factor if remote else 1.0)) + short * underfill
        if row_passes:
            ms = ms + self.copy_ms(load.queries, row_passes * self.output_bytes)
        if key_passes:
            ms = ms + self.copy_ms(load.keys, key_passes * self.kv_bytes)
        return np.where(pairs > 0, ms, 0.0)

    def copy_ms(self, rows: Array, bytes_per_row: float) -> Array:
        """Time to move ``rows`` through device memory."""
        return rows * (bytes_per_row / self.profile.memory_bytes_per_ms)

    def step_ms(self, rows: Array, bytes_per_row: float, launch_ms: float) -> Array:
        """`copy_ms` and the fixed cost of the step, which it has where there are rows."""
        ms = self.copy_ms(rows, bytes_per_row)
        return ms + np.where(rows > 0, launch_ms, 0.0) if launch_ms else ms


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


@dataclass(frozen=True, eq=False)
class StageLoad:
    """Work of one stage [.., cp]: visible and hidden pairs, queries and keys of the call."""

    pairs: Array
    hidden: Array | None
    queries: Array
    keys: Array


def exchange_ms(sent: Array, received: Array, row_bytes: float, profile: CostProfile) -> Array:
    """[..]: duration of all-to-alls in which ranks send and receive rows [.., L, cp]."""
    moved = np.maximum(sent, received).max(-1) * row_bytes
    nodes = profile.ranks_per_node or sent.shape[-1]
    latency, rate = profile.exchange_rates(max(min(nodes, sent.shape[-1]), 1))
    local = moved[..., 0] / rate
    if moved.shape[-1] == 1:
        return np.asarray(latency + local)
    far = moved[..., 1]
    network = np.where(far > 0, profile.network_latency_ms, 0.0)
    network = network + far / profile.network_bytes_per_ms
    return np.asarray(latency + np.maximum(local, network))


def layer_ms(
    loads: StageLoads, rates: LayerRates, fused: bool, record: Recorder | None = None
) -> tuple[Array, Array]:
    """(forward, backward) ms of one layer's attention, each [.., cp], waits included.

    ``record`` is told of every step, in the executor's order.
    """
    num_waves = loads.pairs.shape[-2]
    entries = loads.sent.shape[-3]
    profile, kv_bytes, output_bytes = rates.profile, rates.kv_bytes, rates.output_bytes
    wire = exchange_ms(loads.sent, loads.received, kv_bytes, profile)
    repeats = num_waves // max(entries, 1)
    sent = loads.sent.sum((-3, -2)) * repeats
    pack = rates.step_ms(sent, profile.pack_passes * kv_bytes, profile.pack_launch_ms * num_waves)
    delta = rates.step_ms(
        loads.queries, profile.delta_passes * output_bytes, profile.delta_launch_ms
    )
    accumulate = rates.step_ms(
        sent, profile.accumulate_passes * kv_bytes, profile.accumulate_launch_ms * num_waves
    )
    start = pack.max(-1, keepdims=True)
    local_keys = loads.queries

    def note(direction: str, kind: str, wave: int, begin: Array, end: Array) -> None:
        if record is not None:
            record(direction, kind, wave, begin, end)

    def beside(begin: Array, end: Array, busy_from: Array, busy_to: Array) -> Array:
        """``end`` of a step, delayed by an exchange that runs beside it."""
        if not profile.exchange_contention:
            return end
        shared = np.minimum(end, busy_to) - np.maximum(begin, busy_from)
        return np.asarray(end + profile.exchange_contention * np.maximum(shared, 0.0))

    note("forward", "pack", -1, np.zeros_like(pack), pack)
    note("backward", "delta", -1, np.zeros_like(delta), delta)
    if fused:
        received = loads.received.sum((-3, -2)) * repeats
        stage = StageLoad(
            loads.local_pairs + loads.pairs.sum(-2),
            None if loads.hidden is None else loads.local_hidden + loads.hidden.sum(-2),
            loads.queries,
            local_keys + received,
        )
        arrive = start + wire.sum(-1)[..., None]
        gather = rates.step_ms(
            stage.keys, profile.assemble_passes * kv_bytes, profile.assemble_launch_ms
        )
        ready = np.maximum(arrive, pack)
        assembled = ready + gather
        forward = assembled + rates.stage_ms(stage)
        clock = delta + gather + rates.stage_ms(stage, backward=True)
        begin = clock.max(-1, keepdims=True)
        returned = begin + wire.sum(-1)[..., None]
        note("forward", "exchange", 0, start, arrive)
        note("forward", "assemble", -1, ready, assembled)
        note("forward", "fused", 0, assembled, forward)
        note("backward", "assemble", -1, delta, delta + gather)
        note("backward", "fused", 0, delta + gather, clock)
        note("backward", "exchange", 0, begin, returned)
        ready = np.where(sent > 0, np.maximum(clock, returned), clock)
        note("backward", "accumulate", -1, ready, ready + accumulate)
        return forward, ready + accumulate
    local = StageLoad(loads.local_pairs, loads.local_hidden, loads.queries, local_keys)
    last = start + wire.sum(-1)[..., None] * repeats
    forward = beside(pack, pack + rates.stage_ms(local), start, last)
    note("forward", "local", -1, pack, forward)
    arrive, backward, returned = start, delta, np.zeros_like(start)
    begin = returned
    for w in range(num_waves):
        step = wire[..., min(w, entries - 1), None]
        received = loads.received[..., min(w, entries - 1), :, :].sum(-2)
        part = StageLoad(
            loads.pairs[..., w, :],
            None if loads.hidden is None else loads.hidden[..., w, :],
            loads.reached[..., w, :],
            received,
        )
        note("forward", "exchange", w, arrive, arrive + step)
        arrive = arrive + step
        ready = np.where(received > 0, np.maximum(forward, arrive), forward)
        computed = beside(ready, ready + rates.stage_ms(part, remote=True), start, last)
        forward = computed + rates.step_ms(
            part.queries, profile.merge_passes * output_bytes, profile.merge_launch_ms
        )
        note("forward", "remote", w, ready, computed)
        note("forward", "merge", w, computed, forward)
        before = backward
        backward = before + rates.stage_ms(part, backward=True, remote=True)
        backward = beside(before, backward, begin, returned)
        note("backward", "remote", w, before, backward)
        begin = np.maximum(returned, backward.max(-1, keepdims=True))
        returned = begin + step
        note("backward", "exchange", w, begin, returned)
    before = backward
    backward = beside(before, before + rates.stage_ms(local, backward=True), begin, returned)
    note("backward", "local", -1, before, backward)
    ready = np.where(sent > 0, np.maximum(backward, returned), backward)
    note("backward", "accumulate", -1, ready, ready + accumulate)
    return forward, ready + accumulate
