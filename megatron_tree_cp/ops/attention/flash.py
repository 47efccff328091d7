"""Tree attention through FlashAttention-4's CuTe kernels on Hopper, called directly.

Forward is one block-sparse call a stage. Backward shares its row-wise work between the stages of a
layer: one preprocess (D, LSE in base 2, a zeroed fp32 dQ accumulator), every stage's kernel under
the *global* LSE and D into that accumulator, one postprocess. No autograd is nested, and no stage
needs its own softmax again.

A stage's queries start at a multiple of `QUERY_TILE` (see stages.py), so that its slice of the
accumulator begins at a tile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from flash_attn.cute import interface
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.cute_dsl_utils import torch2cute_dtype_map

from megatron_tree_cp.ops.attention import flash_kernels
from megatron_tree_cp.ops.attention.block_mask import block_tables
from megatron_tree_cp.ops.attention.flash_kernels import (
    QUERY_TILE,
    StageTables,
    backward_config,
    forward_config,
)
from megatron_tree_cp.ops.attention.flash_mask import MaskKind
from megatron_tree_cp.ops.attention.interval_mask import IntervalMask


def _tables(mask: IntervalMask, dim: int, value_dim: int) -> StageTables:
    def build() -> StageTables:
        config = forward_config(dim, value_dim)
        key_tile = backward_config(dim, value_dim).n_block_size
        kind = MaskKind.of(mask)
        return StageTables(
            kind,
            kind.arrays(mask),
            _sparse(mask, config.m_block_size, config.n_block_size, by_key=False),
            _sparse(mask, QUERY_TILE, key_tile, by_key=True),
        )

    return mask.cached(("flash", dim, value_dim), build)


def _sparse(mask: IntervalMask, q_tile: int, k_tile: int, by_key: bool) -> BlockSparseTensorsTorch:
    tables = block_tables(mask, q_tile, k_tile, by_key=by_key)
    return BlockSparseTensorsTorch(*tables, block_size=(q_tile, k_tile))


def prepare(mask: IntervalMask, head_dim: int, value_dim: int) -> int:
    """Build the tables of a mask ahead of its first call; returns their bytes on the device."""
    tables = _tables(mask, head_dim, value_dim)
    held = (*tables.aux, *tables.forward[:4], *tables.backward[:4])
    return sum(x.nbytes for x in held if x is not None)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: IntervalMask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local kernel: out [Tq, Hq, Dv] in q's dtype and lse fp32 [Tq, Hq]; see registry."""
    tables = _tables(mask, q.shape[2], v.shape[2])
    out = q.new_empty(1, *q.shape[:2], v.shape[2])
    lse = q.new_empty(1, q.shape[1], q.shape[0], dtype=torch.float32)
    flash_kernels.forward_kernel(q[None], k[None], v[None], out, lse, tables, scale)
    return out[0], lse[0].t()


class BackwardPass:
    """Backward of one layer on one rank: `stage` for each stage, then `dq`.

    Args:
        dout, q, out: [n, Hq, .] of the shard's real rows; lse [n, Hq] global, the sink included.
        dlse: [n, Hq] gradient of lse, or None.
    """

    def __init__(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        scale: float,
    ) -> None:
        self.dout, self.q, self.scale = dout.contiguous(), q.contiguous(), scale
        rows, heads, self.dim = q.shape
        self.value_dim = out.shape[2]
        padded = -(-rows // QUERY_TILE) * QUERY_TILE
        self.width = -(-self.dim // 32) * 32
        self.config = backward_config(self.dim, self.value_dim)
        empty = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
        self.dq_accumulator = empty(1, heads, padded * self.width)
        self.mean, self.lse_base2 = empty(1, heads, padded), empty(1, heads, padded)
        interface._bwd_preprocess(
            out.contiguous()[None],
            self.dout[None],
            self.mean,
            lse.t().contiguous()[None],
            self.lse_base2,
            self.dq_accumulator,
            None,
            None,
            None if dlse is None else dlse.t().contiguous()[None],
            torch2cute_dtype_map[q.dtype],
            self.dim,
            self.value_dim,
            self.config.m_block_size,
        )

    @property
    def delta(self) -> torch.Tensor:
        """rowsum(dout * out) - dlse, fp32 [n, Hq]."""
        return self.mean[0, :, : self.q.shape[0]].t()

    def stage(
        self, rows: slice, k: torch.Tensor, v: torch.Tensor, mask: IntervalMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dK [K, Hkv, D] and dV [K, Hkv, Dv] of one stage, in the dtype of k and v."""
        begin, tile = rows.start, self.config.m_block_size
        end = begin + -(-(rows.stop - begin) // tile) * tile
        tables = _tables(mask, self.dim, self.value_dim)
        gradients = _KeyGradients.empty(k, v, self.q.shape[1] // k.shape[1])
        arguments = (
            self.q[rows][None],
            k[None],
            v[None],
            self.dout[rows][None],
            self.lse_base2[:, :, begin:end],
            self.mean[:, :, begin:end],
            self.dq_accumulator[:, :, begin * self.width : end * self.width],
            *gradients.targets,
        )
        flash_kernels.backward_kernel(arguments, tables, self.scale)
        return gradients.finish(self.scale)

    def dq(self) -> torch.Tensor:
        """dQ [n, Hq, D] in q's dtype, of all stages."""
        config = self.config
        dq = torch.empty_like(self.q)
        threads = 128 if config.dQ_single_wg else config.num_wg * 128
        interface._bwd_postprocess_convert(
            self.dq_accumulator,
            dq[None],
            self.scale,
            None,
            None,
            interface._get_device_arch(),
            torch2cute_dtype_map[dq.dtype],
            self.dim,
            config.m_block_size,
            threads,
            config.AtomLayoutMdQ,
            False,
        )
        return dq


class _KeyGradients(NamedTuple):
    """dK and dV of a stage: written directly, or summed over a group's heads in fp32 first."""

    dk: torch.Tensor
    dv: torch.Tensor
    accumulators: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def empty(cls, k: torch.Tensor, v: torch.Tensor, group: int) -> _KeyGradients:
        dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if group == 1:
            return cls(dk, dv, None)
        tile = backward_config(k.shape[2], v.shape[2]).n_block_size
        rows = -(-k.shape[0] // tile) * tile
        sum_k, sum_v = (
            torch.zeros(1, x.shape[1], rows * (-(-x.shape[2] // 32) * 32), device=x.device)
            for x in (k, v)
        )
        return cls(dk, dv, (sum_k, sum_v))

    @property
    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the kernel writes to."""
        return self.accumulators or (self.dk[None], self.dv[None])

    def finish(self, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        if self.accumulators is not None:
            config = backward_config(self.dk.shape[2], self.dv.shape[2])
            for total, target, factor in zip(
                self.accumulators, (self.dk, self.dv), (scale, 1.0), strict=True
            ):
                interface._bwd_postprocess_convert(
                    total,
                    target[None],
                    factor,
                    None,
                    None,
                    interface._get_device_arch(),
                    torch2cute_dtype_map[target.dtype],
                    target.shape[2],
                    config.n_block_size,
                    config.num_wg * 128,
                    config.AtomLayoutNdKV,
                    config.dKV_swapAB,
                )
        return self.dk, self.dv
