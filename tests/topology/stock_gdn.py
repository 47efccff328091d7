"""Megatron's own Gated DeltaNet on CPU, its recurrence taken token by token from our reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from megatron_tree_cp.ops.gdn import reference


def token_by_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The reference in the signature of Megatron's kernel, one sequence, q and k normalised."""
    chain = list(range(-1, q.shape[1] - 1))
    inputs = (x[0] for x in (q, k, v, g, beta))
    out, _ = reference.gated_delta_rule(*inputs, chain, q.shape[3] ** -0.5, use_qk_l2norm=False)
    return out[None], None


@contextmanager
def token_recurrence() -> Iterator[None]:
    """Megatron's layer can be built without FLA and walks one token after another.

    The stock layer refuses to be built without FLA and takes its l2norm from there; its chunked
    torch kernel loses three digits of the gates' gradients to fp32 sums. It needs
    ``deterministic_mode``, which chooses that kernel.
    """
    from megatron.core.ssm.gated_delta_net import common, gdn

    with (
        mock.patch.object(common, "HAVE_FLA", True),
        mock.patch.object(common, "l2norm", reference.l2norm),
        mock.patch.object(gdn, "torch_chunk_gated_delta_rule", token_by_token),
    ):
        yield


def stock_gdn(layer: Any) -> Any:
    """The self attention of a Gated DeltaNet layer's spec, with Megatron's class for ours."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    return replace(layer.submodules.self_attention, module=GatedDeltaNet, params={})
