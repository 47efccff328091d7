"""Attention windows of a Megatron config, in the words of a tree: keys per query by position."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention


def tree_window(config: TransformerConfig, layer_number: int) -> int | None:
    """Window of one attention layer, or None where the layer sees its whole path.

    ``layer_number`` counts from 1, every pattern symbol in a HybridModel. Megatron's
    ``window_size=(left, 0)`` lets a query see itself and ``left`` keys before it; a tree window
    counts the keys seen, ``left + 1``. Raises ValueError for a window into the future.
    """
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return None
    left, right = config.window_size
    if right not in (0, -1):  # -1 is "no bound", which the causal order already gives
        raise ValueError(
            f"--window-size {left},{right} looks ahead, attention over a tree is causal: "
            f"use --window-size {left},0"
        )
    return None if left == -1 else left + 1
