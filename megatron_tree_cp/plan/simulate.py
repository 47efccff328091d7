"""Predicted time of one attention layer on every rank, in the executor's real order.

Forward: pack, issue the first exchange, local stage, then each wave as it arrives, the next one's
exchange issued before its stage.
Backward: remote stages first, each return overlapping the next stage, the local stage last.
The second hop of a two-level wave is issued once the stage before its own has been.
A fused direction makes one call instead, after the only exchange (forward) or before it (backward).
All arrays may carry leading batch axes, so that a search prices many candidates in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .model import LayerClass
from .profile import CostProfile
from .rounds import backward_programs, forward_programs, idle_share
from .values import Array

Recorder = Callable[[str, str, int, Array, Array], None]
"""Called with (direction, kind, wave or -1, begin, end) of every step, ms [.., cp] or [.., 1]."""


def node_size(cp_size: int, profile: CostProfile) -> int | None:
    """CP ranks of a node where they lie on several nodes, None where on one."""
    size = profile.ranks_per_node
    return None if size is None or size >= cp_size else int(size)


def link_masks(cp_size: int, profile: CostProfile) -> Array:
    """float64[L, cp, cp]: 1 where rows between two ranks use a link class, 0 at a rank and itself.

    One class on one node; else those inside the nodes and those between them.
    """
    apart = 1.0 - np.eye(cp_size)
    size = node_size(cp_size, profile)
    if size is None:
        return apart[None]
    node = np.arange(cp_size) // size
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
    hops: HopLoads | None = None
    """How the waves travel where some take two hops (without batch axes)."""

    @property
    def relay_rows(self) -> Array:
        """float64[cp]: most rows that a wave's hops hold beside the receive buffer."""
        return np.zeros(self.queries.shape[-1]) if self.hops is None else self.hops.held


@dataclass(frozen=True, eq=False)
class HopLoads:
    """Waves of which some travel in two hops.

    ``two_level`` bool[W]; ``moved`` float64[W, 2, 2, L, cp]: rows per hop, sent and received. A
    wave of one hop has zeros in the second.
    """

    two_level: Array
    moved: Array

    @cached_property
    def sent(self) -> Array:
        """float64[cp]: rows that leave their owners in all waves."""
        return np.asarray(self.moved[:, 0, 0].sum((0, 1)))

    @cached_property
    def held(self) -> Array:
        """float64[cp]: rows of both hops' buffers and of returns to a relay, the largest wave's."""
        rows = self.moved[:, :, 1].sum((1, 2)) + self.moved[:, 1, 0].sum(1)
        return np.asarray((rows * self.two_level[:, None]).max(0, initial=0))


@dataclass(frozen=True)
class LayerRates:
    """Coefficients of one layer class on one rank: ms per pair, per row and per byte."""

    profile: CostProfile
    forward_pair_ms: float
    backward_pair_ms: float
    pair_flops: float
    kv_bytes: float
    output_bytes: float
    query_heads: float
    kv_heads: float
    """On a rank."""
    forward_edge_ms: float = 0.0
    backward_edge_ms: float = 0.0
    """A query row of all heads at the edges of its window."""

    @classmethod
    def of(
        cls, layer: LayerClass, profile: CostProfile, dtype_bytes: int, tp_size: int
    ) -> LayerRates:
        """Rates of ``layer`` with its heads divided over ``tp_size`` ranks."""
        flops = layer.pair_flops / tp_size
        kv_heads = max(layer.kv_heads / tp_size, 1.0)  # fewer heads than ranks are replicated
        ahead, back = profile.head_dim_factor(layer.head_dim)
        edges = (0.0, 0.0)
        if layer.window is not None:
            ahead *= profile.forward_window_factor
            back *= profile.backward_window_factor
            heads = layer.query_heads / tp_size
            edges = (
                heads * profile.forward_window_row_ms,
                heads * profile.backward_window_row_ms,
            )
        return cls(
            profile,
            forward_pair_ms=flops / profile.forward_flops_per_ms * ahead,
            backward_pair_ms=2.5 * flops / profile.backward_flops_per_ms * back,
            pair_flops=flops,
            kv_bytes=kv_heads * (layer.head_dim + layer.value_width) * dtype_bytes,
            output_bytes=layer.query_heads / tp_size * layer.value_width * dtype_bytes,
            query_heads=layer.query_heads / tp_size,
            kv_heads=kv_heads,
            forward_edge_ms=edges[0],
            backward_edge_ms=edges[1],
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
            edge_ms = self.backward_edge_ms
            hidden_factor = profile.backward_hidden_factor
            idle_factor = profile.backward_idle_factor
            row_passes, key_passes = profile.backward_row_passes, profile.backward_key_passes
            factor = _or(profile.backward_remote_factor, factor)
            underfill = _or(profile.backward_underfill_ms, underfill)
            fill = _or(profile.backward_fill_flops, fill)
        else:
            pair_ms, launch = self.forward_pair_ms, profile.forward_launch_ms
            edge_ms = self.forward_edge_ms
            hidden_factor = profile.forward_hidden_factor
            idle_factor = profile.forward_idle_factor
            row_passes, key_passes = profile.forward_row_passes, 0.0
        work = touched = pairs
        if load.hidden is not None:
            work, touched = pairs + load.hidden * hidden_factor, pairs + load.hidden
        if idle_factor and profile.processors:
            work = work + idle_factor * touched * self._idle(load, backward, profile.processors)
        short = np.maximum(1.0 - touched * (self.pair_flops / fill), 0.0)
        ms = launch + work * (pair_ms * (factor if remote else 1.0)) + short * underfill
        if edge_ms:
            ms = ms + load.queries * edge_ms
        if row_passes:
            ms = ms + self.copy_ms(load.queries, row_passes * self.output_bytes)
        if key_passes:
            ms = ms + self.copy_ms(load.keys, key_passes * self.kv_bytes)
        return np.where(pairs > 0, ms, 0.0)

    def _idle(self, load: StageLoad, backward: bool, processors: float) -> Array:
        """Idle time of a call's last round over the time that it computes."""
        if backward:
            return idle_share(backward_programs(load.keys, self.query_heads), processors)
        programs = forward_programs(load.queries, self.query_heads, self.kv_heads)
        return idle_share(programs, processors)

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


def wave_ms(loads: StageLoads, rates: LayerRates) -> tuple[Array, Array | None]:
    """ms [.., W] of every wave's first hop, and of what follows it where waves have two (else
    None): the copies of its relays, the second hop, and the rows put in order."""
    profile, hops = rates.profile, loads.hops
    if hops is None:
        return exchange_ms(loads.sent, loads.received, rates.kv_bytes, profile), None
    first, second = (
        exchange_ms(hops.moved[:, hop, 0], hops.moved[:, hop, 1], rates.kv_bytes, profile)
        for hop in range(2)
    )
    passed, kept = hops.moved[:, 1, 0].sum(1), loads.received.sum(1)
    copies = rates.step_ms(
        passed, profile.pack_passes * rates.kv_bytes, profile.pack_launch_ms
    ) + rates.step_ms(kept, profile.assemble_passes * rates.kv_bytes, profile.assemble_launch_ms)
    return first, np.where(hops.two_level, second + copies.max(-1), 0.0)


def layer_ms(
    loads: StageLoads,
    rates: LayerRates,
    forward_fused: bool,
    backward_fused: bool,
    record: Recorder | None = None,
) -> tuple[Array, Array]:
    """(forward, backward) ms of one layer's attention, each [.., cp], waits included.

    A fused direction makes one call over all keys of its single exchange and its own; the other
    direction does not depend on it. ``record`` is told of every step, in the executor's order.
    """
    layer = _Layer(loads, rates, record)
    return (
        layer.forward_fused() if forward_fused else layer.forward_staged(),
        layer.backward_fused() if backward_fused else layer.backward_staged(),
    )


class _Layer:
    """Both directions of one layer: what they share, and the steps of each, fused and staged."""

    def __init__(self, loads: StageLoads, rates: LayerRates, record: Recorder | None) -> None:
        self.loads, self.rates, self.record = loads, rates, record
        self.profile = rates.profile
        self.num_waves = loads.pairs.shape[-2]
        self.entries = loads.sent.shape[-3]
        self.repeats = self.num_waves // max(self.entries, 1)
        self.first, self.second = wave_ms(loads, rates)
        self.wire = self.first if self.second is None else self.first + self.second
        self.sent = loads.sent.sum((-3, -2)) * self.repeats
        if loads.hops is not None:
            self.sent = loads.hops.sent
        self.local = StageLoad(loads.local_pairs, loads.local_hidden, loads.queries, loads.queries)

    def note(self, direction: str, kind: str, wave: int, begin: Array, end: Array) -> None:
        if self.record is not None:
            self.record(direction, kind, wave, begin, end)

    def beside(self, begin: Array, end: Array, busy_from: Array, busy_to: Array) -> Array:
        """``end`` of a step, delayed by an exchange that runs beside it."""
        contention = self.profile.exchange_contention
        if not contention:
            return end
        shared = np.minimum(end, busy_to) - np.maximum(begin, busy_from)
        return np.asarray(end + contention * np.maximum(shared, 0.0))

    def wave(self, w: int) -> tuple[Array, StageLoad]:
        """(ms of the exchange [.., 1], load of the stage) of wave ``w``."""
        loads, entry = self.loads, min(w, self.entries - 1)
        return self.wire[..., entry, None], StageLoad(
            loads.pairs[..., w, :],
            None if loads.hidden is None else loads.hidden[..., w, :],
            loads.reached[..., w, :],
            loads.received[..., entry, :, :].sum(-2),
        )

    @cached_property
    def fused(self) -> StageLoad:
        """The only call of a fused direction."""
        loads = self.loads
        return StageLoad(
            loads.local_pairs + loads.pairs.sum(-2),
            None if loads.hidden is None else loads.local_hidden + loads.hidden.sum(-2),
            loads.queries,
            loads.queries + loads.received.sum((-3, -2)) * self.repeats,
        )

    @cached_property
    def assemble(self) -> Array:
        """ms of putting the keys and values of that call together."""
        return self.rates.step_ms(
            self.fused.keys,
            self.profile.assemble_passes * self.rates.kv_bytes,
            self.profile.assemble_launch_ms,
        )

    def pack(self) -> tuple[Array, Array]:
        """(end of the pack per rank, start of the exchanges [.., 1])."""
        pack = self.rates.step_ms(
            self.sent,
            self.profile.pack_passes * self.rates.kv_bytes,
            self.profile.pack_launch_ms * self.num_waves,
        )
        self.note("forward", "pack", -1, np.zeros_like(pack), pack)
        return pack, pack.max(-1, keepdims=True)

    def delta(self) -> Array:
        """End of the row sums, with which a backward begins."""
        delta = self.rates.step_ms(
            self.loads.queries,
            self.profile.delta_passes * self.rates.output_bytes,
            self.profile.delta_launch_ms,
        )
        self.note("backward", "delta", -1, np.zeros_like(delta), delta)
        return delta

    def accumulate(self, computed: Array, returned: Array) -> Array:
        """End of a backward whose last stage ends at ``computed``: adding what came back."""
        ready = np.where(self.sent > 0, np.maximum(computed, returned), computed)
        end = ready + self.rates.step_ms(
            self.sent,
            self.profile.accumulate_passes * self.rates.kv_bytes,
            self.profile.accumulate_launch_ms * self.num_waves,
        )
        self.note("backward", "accumulate", -1, ready, end)
        return np.asarray(end)

    def forward_fused(self) -> Array:
        pack, start = self.pack()
        arrive = start + self.wire.sum(-1)[..., None]
        self.note("forward", "exchange", 0, start, arrive)
        ready = np.maximum(arrive, pack)
        assembled = ready + self.assemble
        self.note("forward", "assemble", -1, ready, assembled)
        end = assembled + self.rates.stage_ms(self.fused)
        self.note("forward", "fused", 0, assembled, end)
        return np.asarray(end)

    def backward_fused(self) -> Array:
        delta = self.delta()
        assembled = delta + self.assemble
        self.note("backward", "assemble", -1, delta, assembled)
        computed = assembled + self.rates.stage_ms(self.fused, backward=True)
        self.note("backward", "fused", 0, assembled, computed)
        begin = computed.max(-1, keepdims=True)
        returned = begin + self.wire.sum(-1)[..., None]
        self.note("backward", "exchange", 0, begin, returned)
        return self.accumulate(computed, returned)

    def forward_staged(self) -> Array:
        profile, rates = self.profile, self.rates
        pack, start = self.pack()
        last = start + self.wire.sum(-1)[..., None] * self.repeats
        end = self.beside(pack, pack + rates.stage_ms(self.local), start, last)
        self.note("forward", "local", -1, pack, end)
        begun, arrivals = start, self.arrivals(start)
        for w in range(self.num_waves):
            _, part = self.wave(w)
            arrive = arrivals(w, begun)
            ready = np.where(part.keys > 0, np.maximum(end, arrive), end)
            computed = self.beside(ready, ready + rates.stage_ms(part, remote=True), start, last)
            end = computed + rates.step_ms(
                part.queries, profile.merge_passes * rates.output_bytes, profile.merge_launch_ms
            )
            self.note("forward", "remote", w, ready, computed)
            self.note("forward", "merge", w, computed, end)
            begun = ready
        return end

    def arrivals(self, start: Array) -> Callable[[int, Array], Array]:
        """A function of a wave, and of the begin [.., cp] of the step before its own, that gives
        the time [.., 1] at which the wave has arrived. To be called wave by wave.

        The first wave's first hop is issued at ``start``; a second hop, and behind it the first one
        of the wave that follows, when the step before the wave's has begun.
        """
        clock = start

        def hop(w: int, at: Array, ms: Array) -> Array:
            nonlocal clock
            begin = np.maximum(clock, at)
            clock = begin + ms[..., min(w, self.entries - 1), None]
            self.note("forward", "exchange", w, begin, clock)
            return clock

        first = [hop(0, start, self.first)] if self.num_waves else []

        def arrive(w: int, begun: Array) -> Array:
            at, arrived = begun.max(-1, keepdims=True), first[w]
            hops = self.loads.hops
            if self.second is not None and hops is not None and hops.two_level[w]:
                arrived = hop(w, at, self.second)
            if w + 1 < self.num_waves:
                first.append(hop(w + 1, at, self.first))
            return arrived

        return arrive

    def backward_staged(self) -> Array:
        clock = self.delta()
        begin = returned = np.zeros_like(clock.max(-1, keepdims=True))
        for w in range(self.num_waves):
            step, part = self.wave(w)
            before = clock
            clock = before + self.rates.stage_ms(part, backward=True, remote=True)
            clock = self.beside(before, clock, begin, returned)
            self.note("backward", "remote", w, before, clock)
            begin = np.maximum(returned, clock.max(-1, keepdims=True))
            returned = begin + step
            self.note("backward", "exchange", w, begin, returned)
        before = clock
        clock = before + self.rates.stage_ms(self.local, backward=True)
        clock = self.beside(before, clock, begin, returned)
        self.note("backward", "local", -1, before, clock)
        return self.accumulate(clock, returned)
