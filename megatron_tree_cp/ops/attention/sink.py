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

from megatron_tree_cp.ops.attention.merge import merge_into


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> None:
    """Make merged out [n, H, Dv] and lse [n, H] into (y, L') with sink logits [H], in place.

    To the merge, the sink is a stage whose output is zero and whose LSE is the logit.
    """
    nothing = out.new_zeros(out.shape[2]).expand(out.shape)
    merge_into(out, lse, nothing, sink.to(lse.dtype).expand(lse.shape))


def sink_gradient(lse: torch.Tensor, delta: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Gradient [H] of the sink logits from this rank's queries.

    Args:
        lse: L' [n, H], the sink included.
        delta: rowsum(dy * y) - dL' [n, H].
        sink: logits [H]; the result has their dtype.
    """
    weight = torch.exp(sink.to(lse.dtype) - lse)
    return -(weight * delta.to(lse.dtype)).sum(0).to(sink.dtype)
