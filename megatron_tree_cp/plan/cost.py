"""Prices of whole plans: token-local work, attention per layer class, and memory per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .cost_gdn import GdnRates
from .memory import CrossingRows, LayerBytes
from .model import LayerClass, ModelShape
from .profile import CostProfile
from .recurrence_loads import RecurrenceLoads, WalkLoads
from .remote import RemoteKeys
from .runs import RunTable
from .simulate import HopLoads, LayerRates, StageLoads, layer_ms, link_masks, node_size, wave_ms
from .tiles import hidden_pairs
from .two_level import two_level_exchange
from .values import Array


@dataclass(frozen=True)
class CostModel:
    """A model shape on a device: the rates of every attention class and of token-local work."""

    model: ModelShape
    profile: CostProfile
    tp_size: int

    @cached_property
    def token_forward_ms(self) -> float:
        """Forward ms of one token's token-local work, an average layer."""
        flops = self.model.total_token_flops() / self.model.num_layers
        return flops / self.tp_size / self.profile.token_flops_per_ms

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the attention classes, in order of appearance."""
        return tuple(dict.fromkeys(layer.window for layer in self.model.attention_classes))

    @cached_property
    def other_layers(self) -> int:
        """Layers that are neither attention nor recurrent: token-local work only."""
        priced = (*self.model.attention_classes, *self.model.recurrent_classes)
        return self.model.num_layers - sum(layer.layers for layer in priced)

    def classes_of(self, window: int | None) -> tuple[LayerClass, ...]:
        """The attention classes with ``window``."""
        return tuple(c for c in self.model.attention_classes if c.window == window)

    @cached_property
    def _priced(self) -> dict[int | None, list[tuple[int, LayerRates]]]:
        """(layers, rates) of what has one price, per window: equal classes are priced once."""
        result: dict[int | None, list[tuple[int, LayerRates]]] = {}
        for window in self.windows:
            layers: dict[LayerRates, int] = {}
            for layer in self.classes_of(window):
                rates = self.rates(layer)
                layers[rates] = layers.get(rates, 0) + layer.layers
            result[window] = [(count, rates) for rates, count in layers.items()]
        return result

    @cached_property
    def recurrent_rates(self) -> list[tuple[int, GdnRates]]:
        """(layers, rates) of every Gated DeltaNet class."""
        return [
            (
                layer.layers,
                GdnRates.of(layer, self.profile, self.model.dtype_bytes, self.tp_size),
            )
            for layer in self.model.recurrent_classes
        ]

    def rates(self, layer: LayerClass) -> LayerRates:
        """Coefficients of ``layer``."""
        return LayerRates.of(layer, self.profile, self.model.dtype_bytes, self.tp_size)

    def token_ms(self, tokens: Array) -> tuple[Array, Array]:
        """(forward, backward) ms of one layer's token-local work for ``tokens`` per rank."""
        forward = tokens * self.token_forward_ms
        return forward, forward * self.profile.token_backward_factor

    def window_ms(
        self, window: int | None, loads: StageLoads, forward_fused: bool, backward_fused: bool
    ) -> WindowCost:
        """Price of all layers with ``window``: per rank, and synchronised layer by layer."""
        token_forward, token_backward = self.token_ms(loads.queries)
        forward = np.zeros_like(token_forward)
        backward = np.zeros_like(token_forward)
        forward_total = backward_total = np.zeros(token_forward.shape[:-1])
        for layers, rates in self._priced[window]:
            ahead, back = layer_ms(loads, rates, forward_fused, backward_fused)
            ahead, back = ahead + token_forward, back + token_backward
            forward = forward + layers * ahead
            backward = backward + layers * back
            forward_total = forward_total + layers * ahead.max(-1)
            backward_total = backward_total + layers * back.max(-1)
        return WindowCost(forward, backward, forward_total, backward_total)

    def exchanges_ms(self, window: int | None, loads: StageLoads) -> Array:
        """float64[W]: ms of every wave's exchange over all layers with ``window``."""
        total = np.zeros(loads.pairs.shape[-2])
        for layers, rates in self._priced[window]:
            total += layers * sum(hop for hop in wave_ms(loads, rates) if hop is not None)
        return total

    def recurrent_ms(self, loads: RecurrenceLoads) -> WindowCost:
        """Price of all Gated DeltaNet layers, run by run, synchronised layer by layer."""
        token_forward, token_backward = self.token_ms(loads.tokens)
        forward, backward = np.zeros_like(token_forward), np.zeros_like(token_forward)
        forward_total = backward_total = 0.0
        for layers, rates in self.recurrent_rates:
            ahead, back = rates.layer_ms(loads)
            ahead, back = ahead + token_forward, back + token_backward
            forward = forward + layers * ahead
            backward = backward + layers * back
            forward_total += layers * float(ahead.max())
            backward_total += layers * float(back.max())
        return WindowCost(forward, backward, np.asarray(forward_total), np.asarray(backward_total))

    def other_ms(self, tokens: Array) -> WindowCost:
        """Price of the layers that are neither attention nor recurrent."""
        forward, backward = self.token_ms(tokens)
        forward, backward = forward * self.other_layers, backward * self.other_layers
        return WindowCost(forward, backward, forward.max(-1), backward.max(-1))

    def peak_bytes(
        self,
        tokens: Array,
        crossing: Sequence[CrossingRows],
        walk: WalkLoads | None = None,
    ) -> Array:
        """Bytes per rank: what all layers keep for backward, and the most that one layer's
        backward holds beside it (memory.py lists its buffers).

        ``tokens`` int[.., cp]; ``crossing`` holds the exchanged rows of one layer per window,
        ``walk`` the chunks and runs of recurrent layers (None: all chunks are full).
        Every attention layer keeps its row sums and the rows that it received.
        """
        kept = tokens * (self.model.total_activation_bytes() / self.tp_size)
        working = np.zeros(np.shape(tokens))
        for window, rows in zip(self.windows, crossing, strict=True):
            for layer in self.classes_of(window):
                sizes = LayerBytes.of(layer, self.model.dtype_bytes, self.tp_size)
                received = rows.received.sum(0) * sizes.key_value
                kept = kept + layer.layers * (tokens * sizes.row_sum + received)
                working = np.maximum(working, sizes.backward(tokens, rows))
        for _, recurrent in self.recurrent_rates:
            need = recurrent.working_bytes(tokens, self.model.dtype_bytes, walk)
            working = np.maximum(working, need)
        return kept + working


@dataclass(frozen=True, eq=False)
class WindowCost:
    """``forward`` and ``backward`` ms per rank [.., cp]; of the slowest ranks, layer by layer,
    ``forward_total`` and ``backward_total`` ms [..]."""

    forward: Array
    backward: Array
    forward_total: Array
    backward_total: Array

    @property
    def total(self) -> Array:
        """ms [..] of both directions on the slowest ranks."""
        return np.asarray(self.forward_total + self.backward_total)

    def with_backward(self, other: WindowCost) -> WindowCost:
        """This forward and the backward of ``other``, a price of the same loads."""
        return WindowCost(self.forward, other.backward, self.forward_total, other.backward_total)


def local_loads(
    runs: RunTable, window: int | None, profile: CostProfile | None = None
) -> tuple[Array, Array, Array | None]:
    """(tokens, visible pairs among a rank's own tokens) int64[cp] each, and float64[cp] the hidden
    pairs of their tiles where ``profile`` counts them, else None."""
    every = np.arange(len(runs))
    local = runs.count_pairs(runs.owner, every, runs.start, runs.length, window)
    tokens = _by_rank(runs.owner, runs.length, runs.cp_size)
    pairs = _by_rank(runs.owner, local, runs.cp_size)
    if profile is None or not profile.counts_tiles:
        return tokens, pairs, None
    own = runs.order
    keys = RemoteKeys(runs.owner[own], own, runs.start[own], runs.length[own])
    interval = runs.reach(keys.destination, own, keys.start, keys.length, window)
    return tokens, pairs, hidden_pairs(runs, keys, window, pairs, interval)


def stage_loads(
    runs: RunTable,
    waves: Sequence[RemoteKeys],
    window: int | None,
    local: tuple[Array, Array, Array | None],
    profile: CostProfile,
) -> StageLoads:
    """Exact loads of a plan's stages; ``local`` is what ``local_loads`` returns."""
    cp_size = runs.cp_size
    links = link_masks(cp_size, profile)
    shape = (len(waves), cp_size)
    pairs, reached = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    hidden = None if local[2] is None else np.zeros(shape)
    moved = np.zeros((2, len(waves), len(links), cp_size))
    for w, keys in enumerate(waves):
        where = (keys.destination, keys.run, keys.start, keys.length)
        lo, hi = runs.reach(*where, window)
        seen = keys.length * (hi - lo) if window is None else runs.count_pairs(*where, window)
        pairs[w] = _by_rank(keys.destination, seen, cp_size)
        if hidden is not None:
            hidden[w] = hidden_pairs(runs, keys, window, pairs[w], (lo, hi))
        first = np.full(cp_size, runs.tree.num_tokens)
        last = np.zeros(cp_size, np.int64)
        np.minimum.at(first, keys.destination, np.where(hi > lo, lo, runs.tree.num_tokens))
        np.maximum.at(last, keys.destination, hi)
        reached[w] = np.maximum(last - first, 0)
        counts = links * keys.counts(runs)
        moved[0, w], moved[1, w] = counts.sum(2), counts.sum(1)
    return StageLoads(
        queries=local[0],
        local_pairs=local[1],
        pairs=pairs,
        reached=reached,
        sent=moved[0],
        received=moved[1],
        local_hidden=local[2],
        hidden=hidden,
    )


def two_level_loads(
    loads: StageLoads,
    runs: RunTable,
    waves: Sequence[RemoteKeys],
    profile: CostProfile,
    two_level: Sequence[bool],
) -> StageLoads:
    """``loads`` of ``waves`` (`stage_loads`) of which those marked travel in two hops."""
    if not any(two_level):
        return loads
    links, nodes = link_masks(runs.cp_size, profile), node_size(runs.cp_size, profile)
    if nodes is None:
        raise ValueError("two-level waves need a profile whose ranks_per_node is below the CP size")
    moved = np.zeros((len(waves), 2, 2, len(links), runs.cp_size))
    moved[:, 0, 0], moved[:, 0, 1] = loads.sent, loads.received
    for w, keys in enumerate(waves):
        if not two_level[w]:
            continue
        for hop, plan in enumerate(two_level_exchange(keys, runs, nodes).hops):
            counts = links * plan.counts
            moved[w, hop, 0], moved[w, hop, 1] = counts.sum(2), counts.sum(1)
    return replace(loads, hops=HopLoads(np.asarray(two_level, dtype=bool), moved))


def _by_rank(rank: Array, values: Array, cp_size: int) -> Array:
    # Sums stay far below 2^53, so that float64 holds them exactly.
    return np.bincount(rank, weights=values, minlength=cp_size).astype(np.int64)
