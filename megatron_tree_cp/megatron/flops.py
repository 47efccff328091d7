"""Megatron's throughput line from what a tree row really computes."""

from __future__ import annotations

import torch

from .batch import RowStatistics


def report_row(statistics: RowStatistics, device: torch.device) -> None:
    """Add one row to Megatron's packed-sequence statistics of this iteration.

    Megatron counts causal attention as half of ``sum(L^2)``; a tree row with ``P`` visible pairs
    therefore reports ``2 P``.  Every rank of a replica reports the whole row: Megatron sums over
    the world and divides by TP x CP x PP.
    """
    from megatron.training import training

    if training._seqlen_stats_in_iteration is None:
        training._seqlen_stats_in_iteration = torch.zeros(2, dtype=torch.float64, device=device)
    # Scalars go in as kernel arguments: a small host tensor would cost a copy.
    training._seqlen_stats_in_iteration[0] += statistics.stored_tokens
    training._seqlen_stats_in_iteration[1] += 2.0 * statistics.visible_pairs
    training._seqlen_stats_active = True
