"""Attention sink: a logit per head in the softmax denominator, with a zero value.

Applied once per query, after all stages are merged; kernels never see it. With (o, L) the merged
output and LSE and `a` the logit:

    y = sigmoid(L - a) o,    L' = logaddexp(L, a)

Backward hands y and L' to every stage as its global out and LSE, which is exact: the weights
exp(s - L') are those of the softmax with the sink, and D = rowsum(dy * y) is its mean. The logit's
weight is 1 - w = exp(a - L') and its value is zero, hence da = sum_q (1 - w) (dL' - D).
`a = 0` is the off-by-one softmax.
"""

from __future__ import annotations

import torch


def apply_sink(
    out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, L') of merged out [n, H, Dv] and lse [n, H] with sink logits [H]."""
    logit = sink.to(lse.dtype)
    weight = torch.sigmoid(lse - logit)
    return out * weight[:, :, None].to(out.dtype), torch.logaddexp(lse, logit)


def sink_gradient(lse: torch.Tensor, delta: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Gradient [H] of the sink logits from this rank's queries.

    Args:
        lse: L' [n, H], the sink included.
        delta: rowsum(dy * y) - dL' [n, H].
        sink: logits [H]; the result has their dtype.
    """
    weight = torch.exp(sink.to(lse.dtype) - lse)
    return -(weight * delta.to(lse.dtype)).sum(0).to(sink.dtype)
