"""Predicted time of Gated DeltaNet layers, in the executor's order.

Forward: halo, convolution, preparation of all tokens; states of roots with exports and summaries of
the other exports; the exchange, beside the roots without exports; composition and the components
below other ranks; outputs. Backward mirrors it and walks all states again first.

    pass = sum over levels of launch + max(longest run's chunks * step, chunks / rate + forks)

Passes over states, over their gradients and for summaries have costs of their own: the first is
bound by what it moves, the others by their products. A step is one chunk that waits for the one
before it. Time of passes is therefore the *longest chain* of a rank where few runs walk side by
side, and its tokens where many do. A fork is what a run costs beside its chunks: its fp32 state is
read and left behind for those below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .model import LayerClass
from .profile import CostProfile
from .recurrence import CHUNK
from .recurrence_loads import ExchangeLoads, PassLoads, RecurrenceLoads, WalkLoads
from .simulate import Recorder, exchange_ms, link_masks
from .values import Array


@dataclass(frozen=True)
class _Traffic:
    """Elements that a layer's kernels read and write, the convolution aside.

    Of tokens they are weights, by value heads and their dims alone, as measured times go: the error
    of the shape that no fit has seen, in a profile's file, says how well.
    """

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
            token=values * (2 * key_dim + 2 * value_dim + 3 * CHUNK),
            token_back=values * (7 * key_dim + 7 * value_dim),
            chunk=CHUNK * (key + values * (key_dim + 2 * value_dim + state)),
        )


class _Pass:
    """One direction of a layer: when every rank is done with the steps so far."""

    def __init__(self, direction: str, cp_size: int, record: Recorder | None) -> None:
        self.direction, self.record, self.at = direction, record, np.zeros(cp_size)

    def do(self, kind: str, ms: Array | float) -> None:
        """A step that every rank takes after its last one."""
        begin, self.at = self.at, self.at + ms
        if self.record:
            self.record(self.direction, kind, -1, begin, self.at)

    def exchange(self, ms: float) -> float:
        """When an exchange ends that starts once every rank has come here; none waits yet."""
        begin = self.at.max()
        if self.record:
            self.record(self.direction, "exchange", 0, np.asarray(begin), np.asarray(begin + ms))
        return float(begin + ms)

    def wait(self, until: float) -> None:
        """No rank goes on before."""
        self.at = np.maximum(self.at, until)


@dataclass(frozen=True)
class PassRates:
    """Coefficients of one kind of pass, in ms."""

    step: float
    """A chunk that waits for the one before it, all heads at once."""

    chunk: float
    """A chunk among many that walk side by side."""

    fork: float
    """A run's state, read and left behind."""

    level: float
    """A level's launch."""

    def ms(self, longest: Array, chunks: Array, runs: Array) -> Array:
        """A level: launch, and the longest run or all runs' chunks and states."""
        work = np.maximum(longest * self.step, chunks * self.chunk + runs * self.fork)
        return np.asarray(np.where(chunks > 0, self.level + work, 0.0))


@dataclass(frozen=True)
class GdnRates:
    """Coefficients of one Gated DeltaNet class on one rank, its heads divided by TP."""

    profile: CostProfile
    token_ms: float
    """Forward ms of a token's preparation and output."""

    token_back_ms: float
    """Backward ms of that, the preparation repeated."""

    padding_ms: float
    padding_back_ms: float
    """The same of a row that fills up a run's last chunk."""

    conv_ms: float
    """Forward ms of a token's convolution."""

    states: PassRates
    gradients: PassRates
    summaries: PassRates
    """Passes over states, over their gradients, and for summaries, which have more columns."""

    row_bytes: float
    """A token's row of the convolution."""

    state_bytes: float
    transfer_bytes: float
    """fp32 matrices [Hv, Dk, Dv] and [Hv, Dk, Dk] on the wire."""

    halo_rows: int
    """Rows that a run takes along from the run before it."""

    peak_row_bytes: float
    """What a layer's backward holds of a token at its peak."""

    @classmethod
    def of(
        cls, layer: LayerClass, profile: CostProfile, dtype_bytes: int, tp_size: int
    ) -> GdnRates:
        """Rates of ``layer``."""
        keys, values = layer.query_heads / tp_size, layer.kv_heads / tp_size
        key_dim, value_dim = layer.head_dim, layer.value_width
        traffic = _Traffic.of(keys, values, key_dim, value_dim)
        state_bytes = 4 * values * key_dim * value_dim
        transfer_bytes = 4 * values * key_dim * key_dim
        product = 2 * CHUNK * values * key_dim  # FLOPs of a chunk's product, for a column
        row_bytes = (2 * keys * key_dim + values * value_dim) * dtype_bytes
        element_ms = dtype_bytes / profile.gdn_token_bytes_per_ms
        token_ms = traffic.token * element_ms
        token_back_ms = traffic.token_back * element_ms * profile.gdn_token_backward_factor
        return cls(
            profile,
            token_ms,
            token_back_ms,
            padding_ms=token_ms * profile.gdn_padding_factor,
            padding_back_ms=token_back_ms * profile.gdn_padding_backward_factor,
            conv_ms=profile.gdn_conv_passes * row_bytes / profile.memory_bytes_per_ms,
            states=PassRates(
                profile.gdn_step_ms,
                traffic.chunk * dtype_bytes / profile.gdn_state_bytes_per_ms,
                profile.gdn_fork_passes * state_bytes / profile.memory_bytes_per_ms,
                profile.gdn_level_ms,
            ),
            gradients=PassRates(
                profile.gdn_gradient_step_ms,
                3 * product * value_dim / profile.gdn_gradient_flops_per_ms,
                profile.gdn_gradient_fork_passes * state_bytes / profile.memory_bytes_per_ms,
                profile.gdn_level_ms,
            ),
            summaries=PassRates(
                profile.gdn_summary_step_ms,
                2 * product * (value_dim + key_dim) / profile.gdn_summary_flops_per_ms,
                profile.gdn_summary_fork_passes
                * (state_bytes + transfer_bytes)
                / profile.memory_bytes_per_ms,
                profile.gdn_level_ms,
            ),
            row_bytes=row_bytes,
            state_bytes=state_bytes,
            transfer_bytes=transfer_bytes,
            halo_rows=layer.conv_width - 1,
            # q, k; dq, dk twice and dw by value heads; v, writes, dwrites, dv and the output; the
            # systems' inverses; in fp32 three of the gates.
            peak_row_bytes=dtype_bytes
            * (2 * keys * key_dim + values * (4 * key_dim + 5 * value_dim + CHUNK))
            + 4 * 3 * values,
        )

    def token_pass_ms(self, backward: bool) -> float:
        """All work of one token that needs no state, whatever the tree."""
        if not backward:
            return self.token_ms + self.conv_ms
        profile = self.profile
        return self.token_back_ms + self.conv_ms * profile.gdn_conv_backward_factor

    def layer_ms(
        self, loads: RecurrenceLoads, record: Recorder | None = None
    ) -> tuple[Array, Array]:
        """(forward, backward) ms of one layer per rank, waits included: float64[cp] each.

        ``record`` is told every step as `simulate.layer_ms` tells it.
        """
        profile = self.profile
        forward, backward = (
            _Pass(way, len(loads.tokens), record) for way in ("forward", "backward")
        )

        def walk(phase: str, rates: PassRates) -> Array:
            one: PassLoads = loads.passes[phase]
            ms = rates.ms(one.longest, one.chunks, one.runs)
            return np.bincount(one.rank, weights=ms, minlength=len(loads.tokens))

        halo = 0.0
        if loads.exchanges and self.halo_rows:
            halo = self._exchange_ms(loads.heads * (self.halo_rows * self.row_bytes))
        padding = loads.walk.chunks * CHUNK - loads.tokens
        conv = loads.tokens * self.conv_ms
        conv_back = conv * profile.gdn_conv_backward_factor
        tokens = loads.tokens * self.token_ms + padding * self.padding_ms
        tokens_back = loads.tokens * self.token_back_ms + padding * self.padding_back_ms
        for way, conv_ms, tokens_ms in (
            (forward, conv, tokens),
            (backward, conv_back, tokens_back),
        ):
            way.do("launch", profile.gdn_layer_ms)
            way.do("exchange", halo)
            way.do("conv", conv_ms)
            way.do("chunks", tokens_ms / 2)
        backward.do("states", walk("every", self.states))
        if loads.exchanges:
            forward.do("states", walk("early", self.states))
            forward.do("summary", walk("summary", self.summaries))
            forward.do("compose", self._carry_ms(loads.forward, 0))
            arrival = forward.exchange(self._moved_ms(loads.forward))
            forward.do("states", walk("rest", self.states))
            forward.wait(arrival)
            forward.do("compose", self._composed_ms(loads.forward))
            forward.do("states", walk("late", self.states))
            below = walk("exact", self.gradients) + walk("partial", self.gradients)
            backward.do("states", below)
            backward.do("compose", self._carry_ms(loads.backward, 0))
            arrival = backward.exchange(self._moved_ms(loads.backward))
            backward.do("states", walk("rest", self.gradients))
            backward.wait(arrival)
            backward.do("compose", self._composed_ms(loads.backward))
            backward.do("states", walk("open", self.gradients))
        else:
            forward.do("states", walk("rest", self.states))
            backward.do("states", walk("rest", self.gradients))
        forward.do("chunks", tokens / 2)
        backward.do("chunks", tokens_back / 2)
        return forward.at, backward.at

    def moved_bytes(self, loads: RecurrenceLoads) -> Array:
        """Bytes that a layer's forward moves, halos and states: float64[cp, cp] by [destination,
        source]."""
        halos = loads.heads * (self.halo_rows * self.row_bytes)
        return np.asarray(halos + self._moved(loads.forward))

    def _moved(self, exchange: ExchangeLoads) -> Array:
        return exchange.states * self.state_bytes + exchange.transfers * self.transfer_bytes

    def _carry_ms(self, exchange: ExchangeLoads, axis: int) -> Array:
        """Putting in order what every rank sends (axis 0), or what it receives (axis 1)."""
        passes = self.profile.gdn_carry_passes / self.profile.memory_bytes_per_ms
        return np.asarray(self._moved(exchange).sum(axis) * passes)

    def _composed_ms(self, exchange: ExchangeLoads) -> Array:
        return self._carry_ms(exchange, 1) + exchange.products * self.profile.gdn_compose_ms

    def _moved_ms(self, exchange: ExchangeLoads) -> float:
        return self._exchange_ms(self._moved(exchange))

    def _exchange_ms(self, moved: Array) -> float:
        """An all-to-all of bytes [destination, source]."""
        traffic = link_masks(len(moved), self.profile) * moved
        return float(exchange_ms(traffic.sum(1), traffic.sum(2), 1.0, self.profile))

    def working_bytes(self, tokens: Array, dtype_bytes: int, loads: WalkLoads | None) -> Array:
        """Bytes that a rank holds at the peak of a layer's backward, beside inputs and outputs'
        gradients: `ops.gdn.fla_kernels.token_gradients` with all that it reads and makes.

        Without ``loads`` every chunk is full and runs, whose gradients are in fp32, are left out.
        """
        chunks, runs = (tokens / CHUNK, 0.0) if loads is None else (loads.chunks, loads.runs)
        state = self.state_bytes / 4 * dtype_bytes
        return tokens * self.peak_row_bytes + chunks * 2 * state + runs * self.state_bytes
