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
    stands for equal waves.
    """

    queries: Array
    local_pairs: Array
    pairs: Array
    reached: Array
    sent: Array
    received: Array


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
        return cls(
            profile,
            forward_pair_ms=flops / profile.forward_flops_per_ms,
            backward_pair_ms=2.5 * flops / profile.backward_flops_per_ms,
            pair_flops=flops,
            kv_bytes=kv_heads * (layer.head_dim + layer.value_width) * dtype_bytes,
            output_bytes=layer.query_heads / tp_size * layer.value_width * dtype_bytes,
        )

    def stage_ms(self, pairs: Array, backward: bool, remote: bool) -> Array:
        """Time of one kernel call per rank; 0 where it has no pair."""
        profile = self.profile
        pair_ms = self.backward_pair_ms if backward else self.forward_pair_ms
        launch = profile.backward_launch_ms if backward else profile.forward_launch_ms
        factor = profile.remote_pair_factor if remote else 1.0
        short = np.maximum(1.0 - pairs * (self.pair_flops / profile.fill_flops), 0.0)
        ms = launch + pairs * (pair_ms * factor) + short * profile.underfill_ms
        return np.where(pairs > 0, ms, 0.0)

    def copy_ms(self, rows: Array, bytes_per_row: float) -> Array:
        """Time to move ``rows`` through device memory."""
        return rows * (bytes_per_row / self.profile.memory_bytes_per_ms)


def exchange_ms(sent: Array, received: Array, row_bytes: float, profile: CostProfile) -> Array:
    """[..]: duration of all-to-alls in which ranks send and receive rows [.., L, cp]."""
    moved = np.maximum(sent, received).max(-1) * row_bytes
    local = moved[..., 0] / profile.exchange_bytes_per_ms
    if moved.shape[-1] == 1:
        return np.asarray(profile.exchange_latency_ms + local)
    far = moved[..., 1]
    network = np.where(far > 0, profile.network_latency_ms, 0.0)
    network = network + far / profile.network_bytes_per_ms
    return np.asarray(profile.exchange_latency_ms + np.maximum(local, network))


def layer_ms(
    loads: StageLoads, rates: LayerRates, fused: bool, record: Recorder | None = None
) -> tuple[Array, Array]:
    """(forward, backward) ms of one layer's attention, each [.., cp], waits included.

    ``record`` is told of every step, in the executor's order.
    """
    num_waves = loads.pairs.shape[-2]
    entries = loads.sent.shape[-3]
    wire = exchange_ms(loads.sent, loads.received, rates.kv_bytes, rates.profile)
    sent = loads.sent.sum((-3, -2)) * (num_waves // max(entries, 1))
    pack = rates.copy_ms(sent, 2 * rates.kv_bytes)
    delta = rates.copy_ms(loads.queries, 2 * rates.output_bytes)
    accumulate = rates.copy_ms(sent, 4 * rates.kv_bytes)
    start = pack.max(-1, keepdims=True)

    def note(direction: str, kind: str, wave: int, begin: Array, end: Array) -> None:
        if record is not None:
            record(direction, kind, wave, begin, end)

    note("forward", "pack", -1, np.zeros_like(pack), pack)
    note("backward", "delta", -1, np.zeros_like(delta), delta)
    if fused:
        pairs = loads.local_pairs + loads.pairs.sum(-2)
        arrive = start + wire.sum(-1)[..., None]
        assembled = pack + rates.copy_ms(loads.queries, 2 * rates.kv_bytes)
        ready = np.maximum(arrive, assembled)
        forward = ready + rates.stage_ms(pairs, False, False)
        clock = delta + rates.stage_ms(pairs, True, False)
        begin = clock.max(-1, keepdims=True)
        returned = begin + wire.sum(-1)[..., None]
        note("forward", "exchange", 0, start, arrive)
        note("forward", "assemble", -1, pack, assembled)
        note("forward", "fused", 0, ready, forward)
        note("backward", "fused", 0, delta, clock)
        note("backward", "exchange", 0, begin, returned)
        ready = np.where(sent > 0, np.maximum(clock, returned), clock)
        note("backward", "accumulate", -1, ready, ready + accumulate)
        return forward, ready + accumulate
    forward = pack + rates.stage_ms(loads.local_pairs, False, False)
    note("forward", "local", -1, pack, forward)
    arrive, backward, returned = start, delta, np.zeros_like(start)
    # Merges read and write an fp32 accumulator and read the stage's output.
    merge_bytes = 5 * rates.output_bytes
    for w in range(num_waves):
        pairs = loads.pairs[..., w, :]
        step = wire[..., min(w, entries - 1), None]
        received = loads.received[..., min(w, entries - 1), :, :].sum(-2)
        note("forward", "exchange", w, arrive, arrive + step)
        arrive = arrive + step
        ready = np.where(received > 0, np.maximum(forward, arrive), forward)
        stage = ready + rates.stage_ms(pairs, False, True)
        forward = stage + rates.copy_ms(loads.reached[..., w, :], merge_bytes)
        note("forward", "remote", w, ready, stage)
        note("forward", "merge", w, stage, forward)
        before = backward
        backward = backward + rates.stage_ms(pairs, True, True)
        note("backward", "remote", w, before, backward)
        begin = np.maximum(returned, backward.max(-1, keepdims=True))
        returned = begin + step
        note("backward", "exchange", w, begin, returned)
    before = backward
    backward = backward + rates.stage_ms(loads.local_pairs, True, False)
    note("backward", "local", -1, before, backward)
    ready = np.where(sent > 0, np.maximum(backward, returned), backward)
    note("backward", "accumulate", -1, ready, ready + accumulate)
    return forward, ready + accumulate
