"""Torch side of a plan: exchanges of ranges, the context of one rank, and agreement between ranks.

Collectives run on the process groups handed in; nothing here asks `parallel_state`.
"""

from __future__ import annotations

from typing import Any

_EXPORTS = {
    "RangeExchange": "exchange",
    "PendingExchange": "exchange",
    "TwoLevelRangeExchange": "two_level",
    "TreeContext": "context",
    "Agreement": "agreement",
    "AgreementError": "agreement",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing the package does not import torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
