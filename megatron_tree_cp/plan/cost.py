"""Prices of whole plans: token-local work, attention per layer class, and memory per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .model import LayerClass, ModelShape
from .profile import CostProfile
from .remote import RemoteKeys
from .runs import RunTable
from .simulate import LayerRates, StageLoads, layer_ms, link_masks
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
        """Layers that are no attention: token-local work only."""
        attention = sum(layer.layers for layer in self.model.attention_classes)
        return self.model.num_layers - attention

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

    def rates(self, layer: LayerClass) -> LayerRates:
        """Coefficients of ``layer``."""
        return LayerRates.of(layer, self.profile, self.model.dtype_bytes, self.tp_size)

    def token_ms(self, tokens: Array) -> tuple[Array, Array]:
        """(forward, backward) ms of one layer's token-local work for ``tokens`` per rank."""
        forward = tokens * self.token_forward_ms
        return forward, forward * self.profile.token_backward_factor

    def window_ms(self, window: int | None, loads: StageLoads, fused: bool) -> WindowCost:
        """Price of all layers with ``window``: per rank, and synchronised layer by layer."""
        token_forward, token_backward = self.token_ms(loads.queries)
        forward = np.zeros_like(token_forward)
        backward = np.zeros_like(token_forward)
        total = np.zeros(token_forward.shape[:-1])
        for layers, rates in self._priced[window]:
            ahead, back = layer_ms(loads, rates, fused)
            ahead, back = ahead + token_forward, back + token_backward
            forward = forward + layers * ahead
            backward = backward + layers * back
            total = total + layers * (ahead.max(-1) + back.max(-1))
        return WindowCost(forward, backward, total)

    def other_ms(self, tokens: Array) -> WindowCost:
        """Price of the layers that are no attention."""
        forward, backward = self.token_ms(tokens)
        forward, backward = forward * self.other_layers, backward * self.other_layers
        return WindowCost(forward, backward, forward.max(-1) + backward.max(-1))

    def peak_bytes(self, tokens: Array, remote: Sequence[Array]) -> Array:
        """Bytes per rank: kept activations plus the largest working set of one attention stage.

        ``tokens`` int[.., cp]; ``remote`` holds the remote keys int[.., cp] per window. The
        working set is the fp32 accumulators of queries and keys, the receive buffers and their
        gradients.
        """
        kept = tokens * (self.model.total_activation_bytes() / self.tp_size)
        working = np.zeros(np.shape(tokens))
        for window, keys in zip(self.windows, remote, strict=True):
            for layer in self.classes_of(window):
                rates = self.rates(layer)
                wide = 4 / self.model.dtype_bytes
                need = tokens * rates.output_bytes * (2 + 2 * wide)
                need = need + (tokens + keys) * rates.kv_bytes * (1 + wide)
                working = np.maximum(working, need)
        return kept + working


@dataclass(frozen=True, eq=False)
class WindowCost:
    """``forward`` and ``backward`` ms per rank [.., cp]; ``total`` ms [..] of the slowest ranks."""

    forward: Array
    backward: Array
    total: Array


def local_loads(runs: RunTable, window: int | None) -> tuple[Array, Array]:
    """(tokens, visible pairs among a rank's own tokens), int64[cp] each."""
    every = np.arange(len(runs))
    local = runs.count_pairs(runs.owner, every, runs.start, runs.length, window)
    return (
        _by_rank(runs.owner, runs.length, runs.cp_size),
        _by_rank(runs.owner, local, runs.cp_size),
    )


def stage_loads(
    runs: RunTable,
    waves: Sequence[RemoteKeys],
    window: int | None,
    local: tuple[Array, Array],
    profile: CostProfile,
) -> StageLoads:
    """Exact loads of a plan's stages; ``local`` is what ``local_loads`` returns."""
    cp_size = runs.cp_size
    links = link_masks(cp_size, profile)
    shape = (len(waves), cp_size)
    pairs, reached = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    moved = np.zeros((2, len(waves), len(links), cp_size))
    for w, keys in enumerate(waves):
        where = (keys.destination, keys.run, keys.start, keys.length)
        lo, hi = runs.reach(*where, window)
        seen = keys.length * (hi - lo) if window is None else runs.count_pairs(*where, window)
        pairs[w] = _by_rank(keys.destination, seen, cp_size)
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
    )


def _by_rank(rank: Array, values: Array, cp_size: int) -> Array:
    # Sums stay far below 2^53, so that float64 holds them exactly.
    return np.bincount(rank, weights=values, minlength=cp_size).astype(np.int64)
