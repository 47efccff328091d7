"""plan_row: from a packed tree to the immutable plan of one row."""

from __future__ import annotations

import numpy as np

from ..tree.packed_tree import PackedTree
from .cost import CostModel
from .layout import Layout
from .model import ModelShape
from .profile import CostProfile
from .row_plan import Candidate, Prediction, RowPlan
from .schedule import Schedule, schedule
from .search import search_layout
from .values import frozen_array


def plan_row(
    tree: PackedTree,
    cp_size: int,
    model: ModelShape | None = None,
    profile: CostProfile | None = None,
    tp_size: int = 1,
    waves: int | None = None,
    granule: int | None = None,
    layout: Layout | None = None,
) -> RowPlan:
    """Plan one row: who owns which tokens, what moves when, which stages run.

    Args:
        tree: the row's packed tree.
        cp_size: ranks of the context-parallel group.
        model: layer classes and token-local work; ``ModelShape()`` when None.
        profile: cost coefficients; ``CostProfile()`` when None.
        tp_size: tensor-parallel ranks, which divide heads and token-local work.
        waves: None lets the predicted time choose, 0 forces fused, N forces N waves.
        granule: shards pad to multiples of it; ``tp_size`` when None.
        layout: forces the ownership and skips the search (its granule stays).

    Equal arguments give equal plans. Raises ``ValueError`` for arguments out of range, and when the
    predicted peak of a rank exceeds ``profile.memory_limit_bytes``.
    """
    model = ModelShape() if model is None else model
    profile = CostProfile() if profile is None else profile
    if cp_size < 1 or tp_size < 1:
        raise ValueError(f"cp_size and tp_size must be at least 1, got {cp_size} and {tp_size}")
    if waves is not None and waves < 0:
        raise ValueError(f"waves must be None (choose), 0 (fused) or positive, got {waves}")
    if granule is None:
        granule = tp_size if layout is None else layout.granule
    if granule < 1 or granule % tp_size:
        raise ValueError(f"granule must be a positive multiple of tp_size {tp_size}, got {granule}")
    costs = CostModel(model, profile, tp_size)
    tried: tuple[Candidate, ...] = ()
    if layout is not None:
        if layout.granule != granule:
            raise ValueError(
                f"the forced layout has granule {layout.granule}, not {granule}: build it with that"
            )
        if layout.cp_size != cp_size or layout.num_tokens != tree.num_tokens:
            raise ValueError(
                f"the forced layout is for {layout.num_tokens} tokens on {layout.cp_size} ranks; "
                f"this row has {tree.num_tokens} tokens on {cp_size}"
            )
        chosen = schedule(tree, layout, costs, waves)
    else:
        chosen, tried = search_layout(tree, cp_size, costs, waves, granule)
    predicted = _predict(chosen, costs, tried)
    _check_memory(predicted, profile)
    by_window = {part.window: part for part in chosen.windows}
    plans = {}
    for layer in model.attention_classes:
        first = costs.classes_of(layer.window)[0].name
        if first not in plans:
            plans[first] = by_window[layer.window].plan(first, chosen.runs)
    attention = {
        layer.name: plans[costs.classes_of(layer.window)[0].name]
        for layer in model.attention_classes
    }
    return RowPlan(tree, cp_size, tp_size, model, {"main": chosen.layout}, attention, predicted)


def _predict(chosen: Schedule, costs: CostModel, tried: tuple[Candidate, ...]) -> Prediction:
    pairs, remote = {}, {}
    for part in chosen.windows:
        received = part.loads.received.sum((0, 1)).astype(np.int64)
        for layer in costs.classes_of(part.window):
            pairs[layer.name] = frozen_array(part.loads.local_pairs + part.loads.pairs.sum(0))
            remote[layer.name] = frozen_array(received)
    return Prediction(
        forward_ms=np.sum([cost.forward for cost in chosen.costs], axis=0),
        backward_ms=np.sum([cost.backward for cost in chosen.costs], axis=0),
        tokens=chosen.tokens,
        pairs=pairs,
        remote_tokens=remote,
        peak_bytes=chosen.peak_bytes(costs),
        total_ms=chosen.total_ms,
        candidates=tried + tuple(c for part in chosen.windows for c in part.candidates),
        chained_runs=chosen.recurrent.loads.chained if chosen.recurrent else 0,
    )


def _check_memory(predicted: Prediction, profile: CostProfile) -> None:
    limit = profile.memory_limit_bytes
    if limit is None or predicted.peak_bytes.max() <= limit:
        return
    rank = int(predicted.peak_bytes.argmax())
    raise ValueError(
        f"the plan needs {predicted.peak_bytes[rank] / 2**30:.2f} GiB on CP rank {rank}, the limit "
        f"is {limit / 2**30:.2f} GiB: use shorter rows, a larger CP or TP size, or recompute "
        "activations"
    )
