"""The two FlashAttention-4 kernels that flash.py launches: their tiles and compilation.

Kernels are specialised on dtype, head dims, query heads a KV head and the mask's kind; lengths
are runtime values. They are launched without the package's own entry points, which check and hash
their arguments at every call: host time before a layer's first launch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cutlass.cute as cute
import torch
from flash_attn.cute import interface
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, to_cute_block_sparse_tensors
from flash_attn.cute.cache_utils import get_jit_cache
from flash_attn.cute.cute_dsl_utils import to_cute_tensor, torch2cute_dtype_map

from megatron_tree_cp.ops.attention import flash_mask
from megatron_tree_cp.ops.attention.flash_mask import IntervalBackward, IntervalForward, MaskKind

QUERY_TILE = 128
"""Query rows of a tile in the backward's block tables; a kernel takes them whole or in halves."""


class StageTables(NamedTuple):
    """What the kernels read of one mask, built once a row."""

    kind: MaskKind
    aux: list[torch.Tensor]
    forward: BlockSparseTensorsTorch
    backward: BlockSparseTensorsTorch

    def of_heads(self, tables: BlockSparseTensorsTorch, heads: int) -> BlockSparseTensorsTorch:
        """The tables for every head: views that do not move along the head dimension."""
        views = (x.expand(1, heads, *x.shape[2:]) for x in tables[:4])
        return BlockSparseTensorsTorch(*views, block_size=tables.block_size)


def forward_config(dim: int, value_dim: int) -> Any:
    """The package's Hopper tiles of a block-sparse forward."""
    return interface._tile_size_fwd_sm90(dim, value_dim, False, False, True)


def backward_config(dim: int, value_dim: int) -> Any:
    """The package's Hopper tiles, where they halve or fill a table's; 64 query rows elsewhere."""
    config = interface._tile_size_bwd_sm90(dim, value_dim, False, False)
    if QUERY_TILE % config.m_block_size == 0:
        return config
    return dataclasses.replace(config, m_block_size=64, dQ_swapAB=False, AtomLayoutMdQ=1)


def _sources() -> str:
    """Names what decides these kernels beside the package, which tells its own versions apart."""
    files = (Path(__file__), Path(flash_mask.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


_forward, _backward = (get_jit_cache(f"tree_{name}_{_sources()}") for name in ("fwd", "bwd"))
"""Compiled kernels. Kept on disk where the package is told to keep its own
(FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1)."""


def compilations() -> int:
    """Kernels that this process has compiled so far; a benchmark counts them."""
    return len(_forward.cache) + len(_backward.cache)


def forward_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tables: StageTables,
    scale: float,
) -> None:
    """Write out [1, Tq, Hq, Dv] and natural-log lse [1, Hq, Tq] of q, k, v [1, rows, heads, .]."""
    sparse = tables.of_heads(tables.forward, q.shape[2])
    key = _key(q, k, v, tables)
    if key not in _forward:
        config = forward_config(q.shape[3], v.shape[3])
        group = q.shape[2] // k.shape[2]
        kernel = IntervalForward(
            torch2cute_dtype_map[q.dtype],
            q.shape[3],
            v.shape[3],
            group,
            is_causal=False,
            is_local=False,
            pack_gqa=group > 1,
            tile_m=config.m_block_size,
            tile_n=config.n_block_size,
            num_stages=2,
            num_threads=384,
            Q_in_regs=False,
            intra_wg_overlap=config.intra_wg_overlap,
            mma_pv_is_rs=config.mma_pv_is_rs,
            mask_mod=tables.kind,
            has_aux_tensors=True,
            q_subtile_factor=1,
        )
        _forward[key] = cute.compile(
            kernel,
            *(to_cute_tensor(x) for x in (q, k, v, out)),
            to_cute_tensor(lse, assumed_align=4),
            scale,
            *_UNUSED_FORWARD,
            to_cute_block_sparse_tensors(sparse),
            _cute_aux(tables),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options="--enable-tvm-ffi",
        )
    _forward[key](q, k, v, out, lse, scale, *_UNUSED_FORWARD, sparse[:4], tables.aux)


def backward_kernel(arguments: Sequence[torch.Tensor], tables: StageTables, scale: float) -> None:
    """One stage's dQ, added to an accumulator, and its dK and dV.

    ``arguments``: q, k, v, dout [1, rows, heads, .], base-2 lse and D [1, Hq, rows], the fp32
    accumulator of dQ, and where dK and dV go.
    """
    q, k, v = arguments[:3]
    sparse = tables.of_heads(tables.backward, q.shape[2])
    key = _key(q, k, v, tables)
    if key not in _backward:
        config = backward_config(q.shape[3], v.shape[3])
        kernel = IntervalBackward(
            torch2cute_dtype_map[q.dtype],
            q.shape[3],
            v.shape[3],
            q.shape[2] // k.shape[2],
            False,
            is_local=False,
            deterministic=False,
            tile_m=config.m_block_size,
            tile_n=config.n_block_size,
            Q_stage=config.num_stages_Q,
            dO_stage=config.num_stages_dO,
            PdS_stage=config.num_stages_PdS,
            SdP_swapAB=config.SdP_swapAB,
            dKV_swapAB=config.dKV_swapAB,
            dQ_swapAB=config.dQ_swapAB,
            AtomLayoutMSdP=config.AtomLayoutMSdP,
            AtomLayoutNdKV=config.AtomLayoutNdKV,
            AtomLayoutMdQ=config.AtomLayoutMdQ,
            num_threads=(config.num_wg + 1) * 128,
            mask_mod=tables.kind,
            has_aux_tensors=True,
            subtile_factor=QUERY_TILE // config.m_block_size,
            dQ_single_wg=config.dQ_single_wg,
        )
        _backward[key] = cute.compile(
            kernel,
            *(to_cute_tensor(x) for x in arguments),
            scale,
            *_UNUSED_BACKWARD,
            _cute_aux(tables),
            to_cute_block_sparse_tensors(sparse),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options="--enable-tvm-ffi",
        )
    _backward[key](*arguments, scale, *_UNUSED_BACKWARD, tables.aux, sparse[:4])


_UNUSED_FORWARD = (None,) * 8
"""Sequence offsets and lengths, a page table, window sizes and a sink, none of which we have."""

_UNUSED_BACKWARD = (None,) * 10
"""Sequence offsets and lengths, soft cap, window sizes and semaphores, none of which we have."""


def _key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: StageTables) -> tuple:
    return str(q.dtype), q.shape[3], v.shape[3], q.shape[2] // k.shape[2], tables.kind


def _cute_aux(tables: StageTables) -> list[Any]:
    return [to_cute_tensor(x, assumed_align=None, fully_dynamic=True) for x in tables.aux]
