"""RowPlan: everything that the ranks must agree on for one row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from ..tree.packed_tree import PackedTree
from .attention import AttentionPlan
from .layout import Layout
from .model import ModelShape
from .values import Array, ArrayValue, frozen_array

ISLAND = "gdn"
"""Name of the second layout, of islands."""


@dataclass(frozen=True)
class Candidate:
    """One alternative that the planner priced: what it was and its predicted ms."""

    name: str
    total_ms: float


@dataclass(frozen=True, eq=False)
class Prediction(ArrayValue):
    """What the plan is predicted to cost, over all layers of the model shape.

    Per rank: ``forward_ms``, ``backward_ms`` (attention with its waits, and token-local work),
    ``tokens``, ``peak_bytes``; ``pairs`` and ``remote_tokens`` per layer-class name and rank (one
    layer). ``total_ms`` is the slowest rank's, layers synchronised by their exchanges.
    """

    forward_ms: Array
    backward_ms: Array
    tokens: Array
    pairs: Mapping[str, Array]
    remote_tokens: Mapping[str, Array]
    peak_bytes: Array
    total_ms: float
    candidates: tuple[Candidate, ...] = ()
    chained_runs: int = 0
    """Runs of recurrent layers whose state comes from another rank."""

    def __post_init__(self) -> None:
        for name in ("forward_ms", "backward_ms", "peak_bytes"):
            object.__setattr__(self, name, frozen_array(getattr(self, name), np.float64))
        object.__setattr__(self, "tokens", frozen_array(self.tokens))
        for name in ("pairs", "remote_tokens"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def imbalance(self) -> float:
        """Slowest rank's forward + backward ms over the mean."""
        total = self.forward_ms + self.backward_ms
        return float(total.max() / total.mean()) if total.mean() > 0 else 1.0


@dataclass(frozen=True, eq=False)
class RowPlan(ArrayValue):
    """Layouts, exchanges and stages of one row for one parallel shape and model.

    ``layouts["main"]`` is the order of the residual stream, ``layouts["gdn"]`` (only where it pays)
    its order in islands, runs of recurrent layers without attention between them. ``attention``
    maps the names of the attention classes to their plans (classes with one window share one).
    ``digest`` is equal on two ranks iff they would run the same collectives and stages. Immutable
    and picklable.
    """

    tree: PackedTree
    cp_size: int
    tp_size: int
    model: ModelShape
    layouts: Mapping[str, Layout]
    attention: Mapping[str, AttentionPlan]
    predicted: Prediction

    def __post_init__(self) -> None:
        object.__setattr__(self, "layouts", MappingProxyType(dict(self.layouts)))
        object.__setattr__(self, "attention", MappingProxyType(dict(self.attention)))

    @property
    def recurrent_layout(self) -> str:
        """Name of the layout that recurrent layers run in."""
        return ISLAND if ISLAND in self.layouts else "main"

    def attention_class(self, window: int | None) -> AttentionPlan:
        """The plan of the layers with this window; ``ValueError`` names the known windows."""
        for plan in self.attention.values():
            if plan.window == window:
                return plan
        known = sorted({str(plan.window) for plan in self.attention.values()})
        raise ValueError(
            f"the plan knows no attention class with window {window} (known: {', '.join(known)}); "
            "add a LayerClass with that window to the ModelShape"
        )

    @cached_property
    def digest(self) -> str:
        """sha256 over tree, parallel shape, model, layouts, exchanges and stage choices."""
        state = hashlib.sha256()

        def add(label: str, *arrays: Array) -> None:
            state.update(f"{label};".encode())
            for array in arrays:
                state.update(f"{array.shape};".encode())
                state.update(np.ascontiguousarray(array, dtype="<i8").tobytes())

        add(f"cp={self.cp_size} tp={self.tp_size} {self.model!r}")
        add("tree", self.tree.lengths, self.tree.parents)
        for name, layout in self.layouts.items():
            add(f"layout {name} granule={layout.granule}", *layout.ranges)
        for name, plan in self.attention.items():
            fused = f"fused={plan.forward_fused},{plan.backward_fused}"
            add(f"attention {name} window={plan.window} {fused} waves={plan.num_waves}")
            if plan.two_level:
                add(f"two_level={plan.two_level} ranks_per_node={plan.ranks_per_node}")
            for exchange in plan.exchanges:
                for hop in exchange.hops:
                    add("exchange", hop.source, hop.destination, hop.source_start, hop.length)
        return state.hexdigest()
