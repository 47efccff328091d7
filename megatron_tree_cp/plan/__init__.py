"""Who owns which row indices, what moves when, and what it costs (numpy only).

``plan_row`` turns a :class:`~megatron_tree_cp.tree.PackedTree` into a :class:`RowPlan`: layouts,
exchanges and stages of one row for one parallel shape and one model.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "AttentionPlan": "attention",
    "RankAttention": "attention",
    "CostProfile": "profile",
    "ExchangePlan": "exchange",
    "RankExchange": "exchange",
    "layout_exchange": "exchange",
    "RankTwoLevel": "two_level",
    "TwoLevelExchange": "two_level",
    "KeyRanges": "stages",
    "StagePlan": "stages",
    "LayerClass": "model",
    "ModelShape": "model",
    "Layout": "layout",
    "Prediction": "row_plan",
    "RowPlan": "row_plan",
    "plan_row": "planner",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__
