"""Backward of one layer on one rank, stage by stage, for kernels with one call a stage.

A kernel module may bring its own `BackwardPass` with the same interface, to share row-wise work
between stages (flash.py does).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from megatron_tree_cp.ops.attention.interval_mask import IntervalMask


class BackwardPass(Protocol):
    """What the executor asks of a layer's backward."""

    @property
    def delta(self) -> torch.Tensor:
        """rowsum(dout * out) - dlse [n, Hq]."""

    def stage(
        self, rows: slice, k: torch.Tensor, v: torch.Tensor, mask: IntervalMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dK and dV of one stage; adds its part to dQ."""

    def dq(self) -> torch.Tensor:
        """dQ [n, Hq, D] of all stages so far."""


class StageByStage:
    """`BackwardPass` around a kernel's `backward`; sums dQ in fp32 (fp64 for fp64 inputs).

    Args:
        kernel: module with a `backward` as registry.py defines it.
        dout, q, out: [n, Hq, .] of the shard's real rows; lse [n, Hq] global, the sink included.
        dlse: [n, Hq] gradient of lse, or None.
    """

    def __init__(
        self,
        kernel: Any,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        scale: float,
    ) -> None:
        self.kernel, self.scale = kernel, scale
        self.dout, self.q, self.out, self.lse = dout, q, out, lse
        self.delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(2)
        if dlse is not None:
            self.delta = self.delta - dlse
        self._dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))

    def stage(
        self, rows: slice, k: torch.Tensor, v: torch.Tensor, mask: IntervalMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part, dk, dv = self.kernel.backward(
            self.dout[rows],
            self.q[rows],
            k,
            v,
            self.out[rows],
            self.lse[rows],
            self.delta[rows],
            mask,
            self.scale,
        )
        self._dq[rows] += part
        return dk, dv

    def dq(self) -> torch.Tensor:
        return self._dq


def backward_pass(kernel: Any, *arguments: Any) -> BackwardPass:
    """The kernel's own pass, or stage by stage."""
    own = getattr(kernel, "BackwardPass", None)
    return StageByStage(kernel, *arguments) if own is None else own(*arguments)
