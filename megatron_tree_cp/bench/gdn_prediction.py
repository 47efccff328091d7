"""Hold predictions of a Gated DeltaNet layer against the clock: local, chained and random layouts.

Every plan runs the layer of `gdn_layer` (convolution, gates, delta rule) forward and backward,
interleaved with the others; see `prediction`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..comm.context import TreeContext
from ..plan.cost import CostModel
from ..plan.layout import Layout
from ..plan.planner import plan_row
from ..plan.profile import CostProfile
from ..plan.row_plan import RowPlan
from ..tree.packed_tree import PackedTree
from .calibration.watch import DeviceWatch
from .gdn_layer import GdnShape, draw_inputs, layer, tree_operators
from .prediction import PredictionBench, layouts_of


class GdnPredictionBench(PredictionBench):
    """Rows of one CP size on this rank; every rank of ``group`` makes the same calls."""

    def __init__(
        self,
        shape: GdnShape,
        cp_size: int,
        group: Any,
        device: torch.device,
        profile: CostProfile,
        repeats: int = 5,
        heat_ms: float = 0.0,
    ) -> None:
        self.gdn, self.cp_size, self.group, self.device = shape, cp_size, group, device
        self.profile, self.repeats = profile, repeats
        self.model = replace(shape.model(), activation_bytes=0.0)
        self.watch = DeviceWatch(device, group, repeats, ahead=8, heat_ms=heat_ms)

    def plans(self, tree: PackedTree, row: int) -> tuple[list[tuple[str, RowPlan]], str]:
        """Contiguous shards (whose paths cross ranks), longest processing time, folded, two random
        ownerships, whole families, and the planner's own choice."""
        layouts: dict[str, Layout | None] = dict(
            layouts_of(tree, self.cp_size, CostModel(self.model, self.profile, 1), row)
        )
        layouts |= dict(_whole_families(tree, self.cp_size))
        layouts["chosen"] = None
        found: dict[str, tuple[str, RowPlan]] = {}
        for name, layout in layouts.items():
            plan = plan_row(tree, self.cp_size, self.model, self.profile, layout=layout, granule=1)
            found.setdefault(plan.digest, (name, plan))
        return list(found.values()), found[plan.digest][0]

    def _inputs(self, tokens: int) -> Any:
        return draw_inputs(self.gdn, tokens, self.device)

    def _shard(self, pool: Any, context: TreeContext) -> Any:
        count = context.num_tokens
        per_token = {n: getattr(pool, n)[:count] for n in ("x", "alpha", "strength", "dout")}
        return replace(pool, **per_token)

    def _run(self, context: TreeContext, inputs: Any, mark: Any) -> None:
        leaves = inputs.leaves
        out = layer(self.gdn, *tree_operators(context, self.gdn))(*leaves)
        mark()
        torch.autograd.grad(out, leaves, inputs.dout)
        mark()


def _whole_families(tree: PackedTree, cp_size: int) -> Iterator[tuple[str, Layout]]:
    """Families of whole trees, the largest first to the rank with the fewest tokens so far."""
    roots = np.flatnonzero(tree.parents < 0)
    if len(roots) < cp_size or cp_size == 1:
        return
    cuts = np.append(tree.segment_starts[roots], tree.num_tokens)
    load, owner = np.zeros(cp_size), np.zeros(len(roots), dtype=np.int64)
    for family in np.argsort(-np.diff(cuts), kind="stable"):
        owner[family] = np.argmin(load)
        load[owner[family]] += cuts[family + 1] - cuts[family]
    yield "whole families", Layout.from_pieces(cuts, owner, cp_size, 1)
