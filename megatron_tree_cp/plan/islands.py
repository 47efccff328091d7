"""Islands: a second layout for runs of consecutive recurrent layers, where it is predicted to win.

Attention pulls a chain apart by visible keys, recurrent layers by tokens and chains. An island is a
run of consecutive layers that holds recurrent layers and token-wise modules but no attention: its
tokens may lie elsewhere, at the price of two exchanges of the residual stream, there and back, in
each direction.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..tree.packed_tree import PackedTree
from .exchange import layout_exchange
from .layout import Layout
from .model import ModelShape
from .planner import plan_row
from .profile import CostProfile
from .row_plan import ISLAND, Candidate, Prediction, RowPlan
from .simulate import exchange_ms, link_masks
from .values import Array


def plan_row_with_islands(
    tree: PackedTree,
    cp_size: int,
    islands: int,
    model: ModelShape,
    profile: CostProfile | None = None,
    tp_size: int = 1,
    waves: int | None = None,
    granule: int | None = None,
    force: bool = False,
) -> RowPlan:
    """Plan one row whose recurrent layers form ``islands`` runs without attention between them.

    The result is what `plan_row` gives for ``islands`` 0, and for more too unless a second layout
    is predicted to win: then ``layouts["gdn"]`` holds the islands' tokens, ``layouts["main"]`` is
    for the other layers alone, and ``predicted`` counts the exchanges between them. ``force`` takes
    the second layout whatever it costs, for tests and measurements. One rank has one layout. With
    more ranks ``predicted.candidates`` ends with both totals. Token-local work of an average layer
    goes with every recurrent layer.

    Raises ``ValueError`` as `plan_row` does; with ``islands`` for a model without recurrent layers
    or without others, when it is not between 0 and the number of recurrent layers, and when two
    layouts are forced and do not fit.
    """
    if not islands:
        return plan_row(tree, cp_size, model, profile, tp_size, waves, granule)
    profile = CostProfile() if profile is None else profile
    inside, outside = _split(model, islands)
    together = plan_row(tree, cp_size, model, profile, tp_size, waves, granule)
    if cp_size == 1:
        return together
    # Whether both fit together is checked below: memory of the parts alone says nothing.
    free = replace(profile, memory_limit_bytes=None)
    rest, own = (
        plan_row(tree, cp_size, part, free, tp_size, waves, granule) for part in (outside, inside)
    )
    main, island = rest.layouts["main"], own.layouts["main"]
    moves = 2 * islands * _turn_ms(main, island, model, profile, tp_size)
    predicted = _sum(rest.predicted, own.predicted, moves)
    totals = (together.predicted.total_ms, predicted.total_ms)
    tried = (Candidate("one layout", totals[0]), Candidate("islands", totals[1]))
    fits = profile.memory_limit_bytes is None or (
        predicted.peak_bytes.max() <= profile.memory_limit_bytes
    )
    if force and not fits:
        peak, limit = predicted.peak_bytes.max(), profile.memory_limit_bytes or 0
        raise ValueError(
            f"two layouts need {peak / 2**30:.2f} GiB, the limit is {limit / 2**30:.2f} GiB: "
            "plan one layout"
        )
    if not force and (totals[1] >= totals[0] or not fits):
        known = together.predicted.candidates
        return replace(together, predicted=replace(together.predicted, candidates=known + tried))
    known = rest.predicted.candidates
    return replace(
        together,
        layouts={"main": main, ISLAND: island},
        attention=rest.attention,
        predicted=replace(predicted, candidates=known + tried),
    )


def _split(model: ModelShape, islands: int) -> tuple[ModelShape, ModelShape]:
    """The islands' layers and the others, each with its share of the token-local work."""
    recurrent = model.recurrent_classes
    others = tuple(layer for layer in model.classes if layer not in recurrent)
    if not recurrent or not others:
        missing = "recurrent" if not recurrent else "other"
        raise ValueError(f"islands need recurrent and other layers; this model has no {missing}")
    layers = sum(layer.layers for layer in recurrent)
    if not 1 <= islands <= layers:
        raise ValueError(f"islands must be 1 to {layers}, the recurrent layers, got {islands}")

    def part(classes: tuple, count: int) -> ModelShape:
        share = count / model.num_layers
        return replace(
            model,
            classes=classes,
            token_flops=model.total_token_flops() * share,
            activation_bytes=model.total_activation_bytes() * share,
        )

    return part(recurrent, layers), part(others, model.num_layers - layers)


def _turn_ms(
    main: Layout, island: Layout, model: ModelShape, profile: CostProfile, tp_size: int
) -> float:
    """One exchange of the residual stream, which sequence parallelism divides by ``tp_size``."""
    plan = layout_exchange(main, island)
    moved = np.zeros((plan.cp_size, plan.cp_size))
    np.add.at(moved, (plan.destination, plan.source), plan.length)
    traffic = link_masks(plan.cp_size, profile) * moved
    row_bytes = model.hidden_size * model.dtype_bytes / tp_size
    return float(exchange_ms(traffic.sum(1), traffic.sum(2), row_bytes, profile))


def _sum(rest: Prediction, own: Prediction, moves: float) -> Prediction:
    """Both layouts' costs, with ``moves`` ms of exchanges in each direction."""

    def both(a: Array, b: Array, more: float = 0.0) -> Array:
        return np.asarray(a + b + more)

    return replace(
        rest,
        forward_ms=both(rest.forward_ms, own.forward_ms, moves),
        backward_ms=both(rest.backward_ms, own.backward_ms, moves),
        peak_bytes=both(rest.peak_bytes, own.peak_bytes),
        total_ms=rest.total_ms + own.total_ms + 2 * moves,
        chained_runs=own.chained_runs,
    )
