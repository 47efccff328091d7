"""Megatron's throughput line from what a tree row really computes."""

from __future__ import annotations

from typing import Any

import torch

from .batch import RowStatistics


def report_row(statistics: RowStatistics, device: torch.device) -> None:
    """Add one row to Megatron's packed-sequence statistics of this iteration.

    Megatron counts causal attention as half of ``sum(L^2)``; a tree row with ``P`` visible pairs
    therefore reports ``2 P``.  Every rank of a replica reports the whole row: Megatron sums over
    the world and divides by TP x CP x PP.
    """
    from megatron.training import get_args, training

    if training._seqlen_stats_in_iteration is None:
        training._seqlen_stats_in_iteration = torch.zeros(2, dtype=torch.float64, device=device)
    tokens = statistics.stored_tokens
    # Scalars go in as kernel arguments: a small host tensor would cost a copy.
    training._seqlen_stats_in_iteration[0] += tokens
    training._seqlen_stats_in_iteration[1] += (
        2.0 * statistics.visible_pairs + squares_of_states(get_args()) * tokens
    )
    training._seqlen_stats_active = True


def squares_of_states(args: Any) -> float:
    """What one token adds to Megatron's ``sum(L^2)`` so that Gated DeltaNet states are counted.

    Megatron counts every Gated DeltaNet layer by its tokens, and its states as [Dv, Dv]; they are
    [Dk, Dv]. The difference is 0 for equal head dims, the usual case, and may be negative; it is
    given as attention work, which every tree model has.
    """
    key_dim, value_dim = args.linear_key_head_dim, args.linear_value_head_dim
    if key_dim == value_dim:
        return 0.0
    recurrent, attention = _layer_counts(args)
    if not recurrent:
        return 0.0
    missing = 8.0 * args.linear_num_value_heads * value_dim * (key_dim - value_dim) * recurrent
    return missing / (2.0 * args.kv_channels * args.num_attention_heads * attention)


def _layer_counts(args: Any) -> tuple[int, int]:
    """Gated DeltaNet layers and attention layers of the whole model."""
    from megatron.core.models.hybrid.hybrid_layer_allocation import (
        Symbols,
        get_hybrid_layer_counts,
    )

    from .gdn import gdn_layers

    if args.hybrid_layer_pattern:
        counts = get_hybrid_layer_counts(args.hybrid_layer_pattern)
        return counts[Symbols.GDN], counts[Symbols.ATTENTION]
    recurrent = sum(gdn_layers(args))
    return recurrent, args.num_layers - recurrent
