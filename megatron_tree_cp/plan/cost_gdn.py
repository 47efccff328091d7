"""Predicted time of Gated DeltaNet layers, in the executor's order.

Forward: halo, convolution, preparation of all tokens; states of roots with exports and summaries of
the other exports; the exchange, beside the roots without exports; composition and the components
below other ranks; outputs. Backward mirrors it and walks all states again first.

    pass    = sum over levels of launch + max(longest run's chunks * step, chunks / rate + forks)
    summary = a pass over value and key columns: (Dv + Dk) / Dv of the same, by a factor

A step is one chunk that waits for the one before it. Time of passes is therefore the *longest
chain* of a rank where few runs walk side by side, and its tokens where many do. A fork is what a
run costs beside its chunks: its fp32 state is read and left behind for those below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .model import LayerClass
from .profile import CostProfile
from .recurrence import CHUNK
from .recurrence_loads import ExchangeLoads, PassLoads, RecurrenceLoads
from .simulate import exchange_ms, link_masks
from .values import Array


@dataclass(frozen=True)
class _Traffic:
    """Elements that a layer's kernels read and write, the convolution aside: they are bound by
    memory."""

    token: float
    """Of a token forward: norm, systems, w and u, outputs from the states."""

    token_back: float
    """Backward: w and u again, local parts, gradients of tokens and systems, the norm's."""

    chunk: float
    """Of a chunk of a pass over states."""

    @classmethod
    def of(cls, keys: float, values: float, key_dim: int, value_dim: int) -> _Traffic:
        """For key and value heads of one rank."""
        key, state = keys * key_dim, key_dim * value_dim / CHUNK
        return cls(
            token=8 * key + values * (key_dim + 4 * value_dim + 2 * CHUNK + state),
            token_back=10 * key + values * (9 * key_dim + 10 * value_dim + 2 * CHUNK + 2 * state),
            chunk=CHUNK * (key + values * (key_dim + 2 * value_dim + state)),
        )


@dataclass(frozen=True)
class GdnRates:
    """Coefficients of one Gated DeltaNet class on one rank, its heads divided by TP."""

    profile: CostProfile
    token_ms: float
    """Forward ms of a token's preparation and output."""

    token_back_ms: float
    """Backward ms of that, the preparation repeated."""

    conv_ms: float
    """Forward ms of a token's convolution."""

    step_ms: float
    """A chunk that waits for the one before it, all heads at once."""

    chunk_ms: float
    """A chunk among many that walk side by side."""

    fork_ms: float
    """A run's state, read and left behind."""

    summary_factor: float
    """Time of a pass for summaries, which have more columns, over one for states."""

    row_bytes: float
    """A token's row of the convolution."""

    state_bytes: float
    transfer_bytes: float
    """fp32 matrices [Hv, Dk, Dv] and [Hv, Dk, Dk] on the wire."""

    halo_rows: int
    """Rows that a run takes along from the run before it."""

    @classmethod
    def of(
        cls, layer: LayerClass, profile: CostProfile, dtype_bytes: int, tp_size: int
    ) -> GdnRates:
        """Rates of ``layer``."""
        keys, values = layer.query_heads / tp_size, layer.kv_heads / tp_size
        key_dim, value_dim = layer.head_dim, layer.value_width
        traffic = _Traffic.of(keys, values, key_dim, value_dim)
        state_bytes = 4 * values * key_dim * value_dim
        row_bytes = (2 * keys * key_dim + values * value_dim) * dtype_bytes
        return cls(
            profile,
            token_ms=traffic.token * dtype_bytes / profile.gdn_token_bytes_per_ms,
            token_back_ms=traffic.token_back
            * dtype_bytes
            * profile.gdn_token_backward_factor
            / profile.gdn_token_bytes_per_ms,
            conv_ms=profile.gdn_conv_passes * row_bytes / profile.memory_bytes_per_ms,
            step_ms=profile.gdn_step_ms,
            chunk_ms=traffic.chunk * dtype_bytes / profile.gdn_state_bytes_per_ms,
            fork_ms=profile.gdn_fork_passes * state_bytes / profile.memory_bytes_per_ms,
            summary_factor=profile.gdn_summary_factor * (value_dim + key_dim) / value_dim,
            row_bytes=row_bytes,
            state_bytes=state_bytes,
            transfer_bytes=4 * values * key_dim * key_dim,
            halo_rows=layer.conv_width - 1,
        )

    def token_pass_ms(self, backward: bool) -> float:
        """All work of one token that needs no state, whatever the tree."""
        if not backward:
            return self.token_ms + self.conv_ms
        profile = self.profile
        return self.token_back_ms + self.conv_ms * profile.gdn_conv_backward_factor

    def pass_ms(self, longest: Array, chunks: Array, runs: Array) -> Array:
        """A level of a pass: launch, and the longest run or all runs' chunks and states."""
        work = np.maximum(longest * self.step_ms, chunks * self.chunk_ms + runs * self.fork_ms)
        return np.asarray(np.where(chunks > 0, self.profile.gdn_level_ms + work, 0.0))

    def layer_ms(self, loads: RecurrenceLoads) -> tuple[Array, Array]:
        """(forward, backward) ms of one layer per rank, waits included: float64[cp] each."""
        cp_size, profile = len(loads.tokens), self.profile

        def walk(phase: str) -> Array:
            one: PassLoads = loads.passes[phase]
            ms = self.pass_ms(one.longest, one.chunks, one.runs)
            return np.bincount(one.rank, weights=ms, minlength=cp_size)

        halo = 0.0
        if loads.exchanges and self.halo_rows:
            halo = self._exchange_ms(loads.heads * (self.halo_rows * self.row_bytes))
        tokens = loads.tokens * self.token_ms
        conv = loads.tokens * self.conv_ms
        tokens_back = loads.tokens * self.token_back_ms
        forward = profile.gdn_layer_ms + halo + conv + tokens / 2
        backward = profile.gdn_layer_ms + halo + conv * profile.gdn_conv_backward_factor
        backward = backward + tokens_back / 2 + walk("every")
        turn = profile.gdn_pass_backward_factor
        if loads.exchanges:
            forward = self._around(
                forward + walk("early") + self.summary_factor * walk("summary"),
                loads.forward,
                beside=walk("rest"),
                after=walk("late"),
            )
            backward = self._around(
                backward + turn * (walk("exact") + walk("partial")),
                loads.backward,
                beside=turn * walk("rest"),
                after=turn * walk("open"),
            )
        else:
            forward, backward = forward + walk("rest"), backward + turn * walk("rest")
        return forward + tokens / 2, backward + tokens_back / 2

    def _around(self, before: Array, exchange: ExchangeLoads, beside: Array, after: Array) -> Array:
        """Work before an exchange, beside it, and after it with the composition."""
        moved = exchange.states * self.state_bytes + exchange.transfers * self.transfer_bytes
        arrived = before.max() + self._exchange_ms(moved)
        composed = exchange.products * self.profile.gdn_compose_ms
        return np.asarray(np.maximum(before + beside, arrived) + composed + after)

    def _exchange_ms(self, moved: Array) -> float:
        """An all-to-all of bytes [destination, source]."""
        traffic = link_masks(len(moved), self.profile) * moved
        return float(exchange_ms(traffic.sum(1), traffic.sum(2), 1.0, self.profile))

    def working_bytes(self, tokens: Array, dtype_bytes: int) -> Array:
        """Bytes that a rank holds beside inputs and outputs while it walks backward.

        A state and its gradient a block, u and w a token; fp32 slots of runs are left out.
        """
        blocks = tokens / CHUNK
        state = self.state_bytes / 4 * dtype_bytes
        return blocks * 2 * state + tokens * 2 * self.row_bytes
