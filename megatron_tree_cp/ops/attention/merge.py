"""Merge of two stages' outputs over disjoint key sets, through their log-sum-exps.

L = logaddexp(L_a, L_b),   o = exp(L_a - L) o_a + exp(L_b - L) o_b
"""

from __future__ import annotations

import torch

_NO_KEY = float("-inf")


def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge a stage's (part_out, part_lse) into the running (out, lse), in place.

    Shapes [n, H, Dv] and [n, H]; `out` has the dtype that the kernel gives, `lse` is fp32 (fp64 for
    fp64 inputs); both may be views of the rows that the stage reaches. The maths is fp32 or wider,
    so a merge rounds `out` once. Rows with `part_lse == -inf` (no key) stay bit for bit as
    they were, whatever `part_out` holds there: 0 * NaN would be NaN.
    """
    if out.is_cuda and out.dtype != torch.float64:
        from megatron_tree_cp.ops.attention import merge_triton

        merge_triton.merge_into(out, lse, part_out, part_lse)
        return
    part_lse = part_lse.to(lse.dtype)
    total = torch.logaddexp(lse, part_lse)
    anchor = total.masked_fill(total == _NO_KEY, 0.0)
    absent = (part_lse == _NO_KEY)[:, :, None]
    part = (
        part_out.to(lse.dtype).masked_fill(absent, 0.0) * torch.exp(part_lse - anchor)[:, :, None]
    )
    out.copy_(out.to(lse.dtype) * torch.exp(lse - anchor)[:, :, None] + part)
    lse.copy_(total)
