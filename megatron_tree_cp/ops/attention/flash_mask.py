"""The tile masks of the FlashAttention-4 kernels, in place of the package's general ones.

A general mask function is asked for one pair at a time: the kernels divide each index by its length
and compare it with the extents, in full tiles too. An interval mask needs none of this: its tables
end in entries that hide whatever lies past the extents, and a tile is called full only inside them.
So full tiles stay as they are. In partial ones of a backward that holds scores transposed, a thread
has a key's queries in one column, and the interval is one word of bits; elsewhere it is two
comparisons a pair.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Uint32, const_expr
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.mask import (
    AttentionMask,
    r2p_bitmask_above,
    r2p_bitmask_below,
    sm90_col_to_r2p_idx,
)
from quack import layout_utils

from megatron_tree_cp.ops.attention.interval_mask import IntervalMask

_ROWS_OF_A_WORD = 16
"""With more rows a thread, words make the compiler run the products around them one by one."""


class MaskKind(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        own: key j's interval begins at query j, so lo is neither kept nor read.
        window: pairs also need position(query) - position(key) < window.
    """

    own: bool
    window: int | None

    @classmethod
    def of(cls, mask: IntervalMask) -> MaskKind:
        return cls(mask.diagonal, mask.window)

    def arrays(self, mask: IntervalMask) -> list[torch.Tensor]:
        """What tiles look up, int32 each: hi, lo, positions of queries, of keys."""
        lo, hi, *positions = mask.with_spare()
        return [hi, *(() if self.own else (lo,)), *positions]


@dataclass(frozen=True)
class IntervalTileMask(AttentionMask):
    """Hides a tile's scores by the arrays of a `MaskKind`, which comes as ``mask_mod``."""

    @cute.jit
    def apply_mask(
        self,
        acc_S: cute.Tensor,
        batch_idx: Int32,
        head_idx: Int32,
        m_block: Int32,
        n_block: Int32,
        thr_mma: cute.TiledMma,
        mask_seqlen: cutlass.Constexpr[bool],
        mask_causal: cutlass.Constexpr[bool],
        mask_local: cutlass.Constexpr[bool] = False,
        mask_mod: cutlass.Constexpr = None,
        aux_tensors: list | None = None,
        fastdiv_mods=(None, None),
    ) -> None:
        if const_expr(mask_mod is not None):
            transposed = const_expr(self.swap_AB)
            shape = (self.tile_m, self.tile_n)
            identity = cute.make_identity_tensor(shape[::-1] if transposed else shape)
            scores = layout_utils.reshape_acc_to_mn(acc_S, transpose=transposed)
            mine = layout_utils.reshape_acc_to_mn(
                thr_mma.partition_C(identity), transpose=transposed
            )
            # Thread 0's places are known at compile time; another thread's lie a step further.
            steps = layout_utils.reshape_acc_to_mn(
                thr_mma.get_slice(0).partition_C(identity), transpose=transposed
            )
            Q = const_expr(1 if transposed else 0)
            K = const_expr(1 - Q)
            row = m_block * self.tile_m + mine[0, 0][Q]
            key = n_block * self.tile_n + mine[0, 0][K]
            rows = const_expr(cute.size(scores.shape[0]))
            queries = [(row + steps[r, 0][Q]) // self.qhead_per_kvhead_packgqa for r in range(rows)]
            for c in cutlass.range_constexpr(cute.size(scores.shape[1])):
                at = key + steps[0, c][K]
                hi = aux_tensors[0][at]
                lo = at if const_expr(mask_mod.own) else aux_tensors[1][at]
                if const_expr(transposed):
                    # In a column's own count of rows, where bounds are the same for all threads.
                    begin, end = sm90_col_to_r2p_idx(lo - row), sm90_col_to_r2p_idx(hi - row)
                    bits = r2p_bitmask_above(begin, 0) & r2p_bitmask_below(end, 0)
                    for r in cutlass.range_constexpr(rows):
                        if const_expr(rows <= _ROWS_OF_A_WORD):
                            visible = Boolean(bits & (Uint32(1) << r))
                        else:
                            visible = (begin <= r) & (r < end)
                        scores[r, c] = scores[r, c] if visible else -Float32.inf
                else:
                    for r in cutlass.range_constexpr(rows):
                        visible = (lo <= queries[r]) & (queries[r] < hi)
                        scores[r, c] = scores[r, c] if visible else -Float32.inf
            if const_expr(mask_mod.window is not None):
                q_positions, k_positions = aux_tensors[-2], aux_tensors[-1]
                since = [q_positions[query] - mask_mod.window for query in queries]
                for c in cutlass.range_constexpr(cute.size(scores.shape[1])):
                    position = k_positions[key + steps[0, c][K]]
                    for r in cutlass.range_constexpr(rows):
                        visible = since[r] < position
                        scores[r, c] = scores[r, c] if visible else -Float32.inf


class _UnderIntervals:
    """A kernel of the package whose products see `IntervalTileMask` in place of its own mask."""

    def mma(self, *arguments: Any, **named: Any) -> None:
        swapped = {name: _masked(x) for name, x in named.items()}
        super().mma(*map(_masked, arguments), **swapped)  # type: ignore[misc]


class IntervalForward(_UnderIntervals, FlashAttentionForwardSm90):
    """The package's Hopper forward under interval masks."""


class IntervalBackward(_UnderIntervals, FlashAttentionBackwardSm90):
    """The package's Hopper backward under interval masks."""


def _masked(argument: Any) -> Any:
    """Ours where the argument is the package's mask, a partial of its class."""
    if isinstance(argument, functools.partial) and argument.func is AttentionMask:
        return functools.partial(IntervalTileMask, *argument.args, **argument.keywords)
    return argument
