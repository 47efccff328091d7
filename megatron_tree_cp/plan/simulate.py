"""Predicted time of one attention layer on every rank, in the executor's real order.

Forward: pack, issue every wave's exchange at once, local stage, then each wave as it arrives.
Backward: remote stages first, each return overlapping the next stage, the local stage last.
All arrays may carry leading batch axes, so that a search prices many candidates in one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .model import LayerClass
from .profile import CostProfile
from .values import Array


@dataclass(frozen=True, eq=False)
class StageLoads:
    """Work of one layer: leading batch axes, then waves W and ranks cp.

    ``queries`` [.., cp] real tokens; ``local_pairs`` [.., cp]; ``pairs`` and ``reached`` (queries
    of the stage) [.., W, cp]; ``counts`` [.., W, cp source, cp destination] rows
    exchanged, where one entry for W stands for equal waves.
    """

    queries: Array
    local_pairs: Array
    pairs: Array
    reached: Array
    counts: Array


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


def exchange_ms(counts: Array, row_bytes: float, profile: CostProfile) -> Array:
    """[..]: duration of all-to-alls with ``counts`` [.., source, destination] rows."""
    cp_size = counts.shape[-1]

    def busiest(moved: Array) -> Array:
        own = np.diagonal(moved, axis1=-2, axis2=-1)  # a rank's own rows do not travel
        rows = np.maximum((moved.sum(-1) - own).max(-1), (moved.sum(-2) - own).max(-1))
        return np.asarray(rows * row_bytes)

    if profile.ranks_per_node is None or profile.ranks_per_node >= cp_size:
        return profile.exchange_latency_ms + busiest(counts) / profile.exchange_bytes_per_ms
    node = np.arange(cp_size) // profile.ranks_per_node
    near = node[:, None] == node[None, :]
    far = busiest(counts * ~near)
    local = busiest(counts * near) / profile.exchange_bytes_per_ms
    network = np.where(far > 0, profile.network_latency_ms, 0.0)
    network = network + far / profile.network_bytes_per_ms
    return profile.exchange_latency_ms + np.maximum(local, network)


def layer_ms(loads: StageLoads, rates: LayerRates, fused: bool) -> tuple[Array, Array]:
    """(forward, backward) ms of one layer's attention, each [.., cp], waits included."""
    num_waves = loads.pairs.shape[-2]
    shape = loads.pairs.shape
    sent = np.broadcast_to(loads.counts.sum(-1), shape).sum(-2)
    received = np.broadcast_to(loads.counts.sum(-2), shape)
    wire = exchange_ms(loads.counts, rates.kv_bytes, rates.profile)
    wire = np.broadcast_to(wire, shape[:-1])
    pack = rates.copy_ms(sent, 2 * rates.kv_bytes)
    delta = rates.copy_ms(loads.queries, 2 * rates.output_bytes)
    accumulate = rates.copy_ms(sent, 4 * rates.kv_bytes)
    if fused:
        pairs = loads.local_pairs + loads.pairs.sum(-2)
        arrive = pack.max(-1, keepdims=True) + wire.sum(-1)[..., None]
        assemble = rates.copy_ms(loads.queries, 2 * rates.kv_bytes)
        forward = np.maximum(arrive, pack + assemble) + rates.stage_ms(pairs, False, False)
        clock = delta + rates.stage_ms(pairs, True, False)
        returned = clock.max(-1, keepdims=True) + wire.sum(-1)[..., None]
        return forward, np.where(sent > 0, np.maximum(clock, returned), clock) + accumulate
    forward = pack + rates.stage_ms(loads.local_pairs, False, False)
    arrive = pack.max(-1, keepdims=True)
    backward = delta
    returned = np.zeros_like(arrive)
    # Merges read and write an fp32 accumulator and read the stage's output.
    merge_bytes = 5 * rates.output_bytes
    for w in range(num_waves):
        pairs = loads.pairs[..., w, :]
        step = wire[..., w, None]
        arrive = arrive + step
        ready = np.where(received[..., w, :] > 0, np.maximum(forward, arrive), forward)
        forward = ready + rates.stage_ms(pairs, False, True)
        forward = forward + rates.copy_ms(loads.reached[..., w, :], merge_bytes)
        backward = backward + rates.stage_ms(pairs, True, True)
        returned = np.maximum(returned, backward.max(-1, keepdims=True)) + step
    backward = backward + rates.stage_ms(loads.local_pairs, True, False)
    backward = np.where(sent > 0, np.maximum(backward, returned), backward) + accumulate
    return forward, backward
