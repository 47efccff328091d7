"""Operators of a tree row, one folder each: reference, kernels, distributed executor, README.

tree_attention         dense attention over a packed prefix tree (ops/attention)
tree_causal_conv1d     causal convolution along its paths (ops/gdn)
tree_gated_delta_rule  Gated DeltaNet's recurrence along its paths (ops/gdn)
"""

from __future__ import annotations

from typing import Any

_EXPORTS = {
    "tree_attention": "attention.operator",
    "tree_causal_conv1d": "gdn.convolution",
    "tree_gated_delta_rule": "gdn.operator",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import an operator on first use, so that importing the package does not import torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
