"""The attention plan of one layer class: exchanges, and per rank the stages they feed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .exchange import ExchangePlan
from .remote import RemoteKeys
from .runs import RunTable
from .stages import KeyRanges, StagePlan
from .two_level import TwoLevelExchange, two_level_exchange
from .values import ArrayValue


@dataclass(frozen=True, eq=False)
class RankAttention(ArrayValue):
    """One rank's stages: its own keys, and one stage per wave in receive-buffer order."""

    local: StagePlan
    remote: tuple[StagePlan, ...]

    @cached_property
    def fused(self) -> StagePlan:
        """One call over the keys of [remote waves in order; local]."""
        return StagePlan.concatenate([*self.remote, self.local])


@dataclass(frozen=True, eq=False)
class AttentionPlan(ArrayValue):
    """Exchanges and stages of the layer classes that share one window.

    A fused direction makes one call over [remote; local] keys of the only exchange; a staged one
    calls the local stage and the stage of every wave apart. Forward and backward choose apart: both
    read the same buffers. ``waves[w]`` are the keys that wave w brings. No waves at all (CP 1, or
    no rank needs a remote key) means local stages only. Where ``two_level[w]``, wave w travels in
    two hops between nodes of ``ranks_per_node`` CP ranks; empty stands for no such wave.
    ``ValueError`` for a fused direction without exactly one wave, and for two levels that do not
    fit the waves or lack the size of a node.
    """

    name: str
    window: int | None
    forward_fused: bool
    backward_fused: bool
    runs: RunTable
    waves: tuple[RemoteKeys, ...]
    two_level: tuple[bool, ...] = ()
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if not any(self.two_level):
            object.__setattr__(self, "two_level", ())
        elif len(self.two_level) != self.num_waves or self.ranks_per_node is None:
            raise ValueError(
                f"{self.name}: {len(self.two_level)} two-level choices for {self.num_waves} waves "
                f"and nodes of {self.ranks_per_node} ranks: give one a wave, and ranks_per_node"
            )
        if (self.forward_fused or self.backward_fused) and self.num_waves != 1:
            raise ValueError(
                f"{self.name}: a fused direction needs exactly one wave, the plan has "
                f"{self.num_waves}"
            )

    @property
    def num_waves(self) -> int:
        """Number of exchanges, the same on all ranks."""
        return len(self.waves)

    def describe(self) -> str:
        """``fused``, ``1 wave``, .., ``fused forward, 1 wave backward``, .., ``no exchange``; with
        ``, two-level`` behind it where waves travel so (``, 1 of 2 two-level`` where not all do).
        """
        if not self.num_waves:
            return "no exchange"
        waves = f"{self.num_waves} wave{'s' * (self.num_waves > 1)}"
        forward, backward = (
            "fused" if fused else waves for fused in (self.forward_fused, self.backward_fused)
        )
        text = forward if forward == backward else f"{forward} forward, {backward} backward"
        if not self.two_level:
            return text
        if all(self.two_level):
            return f"{text}, two-level"
        return f"{text}, {sum(self.two_level)} of {self.num_waves} two-level"

    @cached_property
    def exchanges(self) -> tuple[ExchangePlan | TwoLevelExchange, ...]:
        """One exchange per wave: an all-to-all, or two of them."""
        if not self.two_level or self.ranks_per_node is None:
            return tuple(wave.exchange(self.runs) for wave in self.waves)
        return tuple(
            two_level_exchange(wave, self.runs, self.ranks_per_node)
            if relayed
            else wave.exchange(self.runs)
            for wave, relayed in zip(self.waves, self.two_level, strict=True)
        )

    def rank(self, rank: int) -> RankAttention:
        """The stages of ``rank``, built on every call. Padding is in none of them."""
        if not 0 <= rank < self.runs.cp_size:
            raise ValueError(f"rank {rank} is not in 0..{self.runs.cp_size - 1}")
        own = np.flatnonzero(self.runs.owner == rank)
        local = RemoteKeys(
            np.full(len(own), rank), own, self.runs.start[own], self.runs.length[own]
        )
        return RankAttention(
            local=self._stage(local),
            remote=tuple(self._stage(wave.take(wave.destination == rank)) for wave in self.waves),
        )

    def _stage(self, keys: RemoteKeys) -> StagePlan:
        runs, run = self.runs, keys.run
        where = (keys.destination, run, keys.start, keys.length)
        lo, hi = runs.reach(*where, self.window)
        pairs = runs.count_pairs(*where, self.window)
        ranges = KeyRanges(
            start=keys.start,
            length=keys.length,
            query_lo=lo,
            query_hi=hi,
            diagonal=runs.owner[run] == keys.destination,
            position=runs.position[run] + keys.start - runs.start[run],
        )
        query_range = (int(lo[hi > lo].min()), int(hi.max())) if (hi > lo).any() else (0, 0)
        return StagePlan(ranges, query_range, int(pairs.sum()))
