"""Loss of one shard: a weighted sum and an integer count, which Megatron adds up over ranks."""

from __future__ import annotations

import torch

from .batch import TreeBatch


def weighted_loss(batch: TreeBatch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerator and denominator of one shard.

    ``losses`` ``[1, T]`` per-token negative log-likelihoods -> (fp32 scalar ``sum(w * nll)``, int32
    scalar count).  Tokens of weight 0 (padding, untrained) are left out before they are
    multiplied, so that an infinite loss on one of them cannot turn into NaN.
    """
    per_token = losses.reshape(-1).float()
    kept = torch.where(batch.weights != 0, per_token, torch.zeros_like(per_token))
    return (kept * batch.weights).sum(), batch.count
