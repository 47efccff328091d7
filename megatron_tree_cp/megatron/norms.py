"""Norms of the local implementation that know sequence parallelism.

Megatron's own local norm asserts that sequence parallelism is off (``WrappedTorchNorm``), and its
other one needs Apex. These have the stock parameter names, shapes and checkpoint keys.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class _LocalNorm(nn.Module):
    """Weight (and its sequence-parallel mark) shared by both norms; [..., hidden] -> same shape.

    The weight is added to 1 when ``layernorm_zero_centered_gamma`` is set. The result has the
    parameters' dtype, so that an fp32 residual stream enters a bf16 layer as bf16.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        # finalize_model_grads sums the gradients of parameters marked so over the TP group.
        self.weight.sequence_parallel = config.sequence_parallel

    def _scale(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return weight + 1 if self.zero_centered_gamma else weight


class LocalRMSNorm(_LocalNorm):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, arXiv:1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x, x.shape[-1:], self._scale(x), self.eps)
        return y.to(self.weight.dtype)


class LocalLayerNorm(_LocalNorm):
    """Layer norm with bias over the last dimension (Ba et al., arXiv:1607.06450)."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object
    ) -> None:
        super().__init__(config, hidden_size, eps, **kwargs)
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self._scale(x), self.bias.to(x.dtype)
        y = nn.functional.layer_norm(x, x.shape[-1:], scale, shift, self.eps)
        return y.to(self.weight.dtype)


def local_norm(
    config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object
) -> nn.Module:
    """Build the norm that ``config.normalization`` names, with the signature of Megatron's.

    Raises ValueError for a normalization without a local implementation.
    """
    kinds = {"RMSNorm": LocalRMSNorm, "LayerNorm": LocalLayerNorm}
    if config.normalization not in kinds:
        raise ValueError(
            f"no local norm for normalization={config.normalization!r}: "
            "use --normalization RMSNorm or LayerNorm"
        )
    return kinds[config.normalization](config, hidden_size, eps, **kwargs)
