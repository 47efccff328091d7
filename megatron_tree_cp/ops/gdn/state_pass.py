"""Triton state passes over runs with parent pointers, forward, summarising and backward.

One launch a level: a program takes one run, one value head and some columns of its state, reads the
incoming state from its parent's slot, walks the run's chunks and leaves the end state in the run's
slot. Decays `g` are base-2 logs, summed from each chunk's start. Shapes: k, q [n, Hk, Dk],
w [n, Hv, Dk], u and writes [n, Hv, Dv], g [n, Hv], states of blocks [NB, Hv, Dk, Dv] in k's dtype,
slots [., Hv, Dk, Dv] in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megatron_tree_cp.ops.gdn.tables import GradientSlots, Level, RecurrenceTables, StateSlots

_COLUMNS = {64: (64, 64), 128: (32, 64), 256: (16, 16)}
"""Columns of a state that one program keeps in registers, by key head dim: where few runs leave
processors idle, and where there are programs for all."""

_WARPS = 4

_THREE_STAGES = 180_000
"""Shared memory (bytes a program) that three stages of the widest pass take at 128 key channels."""


def pass_states(
    inputs: tuple[torch.Tensor, ...],
    blocks: torch.Tensor,
    writes: torch.Tensor,
    level: Level,
    slots: StateSlots,
    states: torch.Tensor,
    tables: RecurrenceTables,
) -> None:
    """Fill `blocks` and `writes` of the level's runs, and their end states in `states`.

    Args:
        inputs: (k, w, u, g).
        blocks: [NB, Hv, Dk, Dv], the state before each block.
        writes: [n, Hv, Dv], u - w S.
    """
    _launch_forward(inputs, blocks, writes, level, slots, states, tables, summary=False)


def summarise(
    inputs: tuple[torch.Tensor, ...],
    level: Level,
    slots: StateSlots,
    table: torch.Tensor,
    tables: RecurrenceTables,
) -> None:
    """(E, M) of the level's runs in `table` [slots, Hv, Dk, Dv + Dk], relative to their heads."""
    _, w, u, _ = inputs
    _launch_forward(inputs, w, u, level, slots, table, tables, summary=True)


def pass_gradients(
    inputs: tuple[torch.Tensor, ...],
    blocks: torch.Tensor,
    dwrites: torch.Tensor,
    level: Level,
    slots: GradientSlots,
    gradients: torch.Tensor,
    tables: RecurrenceTables,
    scale: float,
    keep: bool = True,
) -> None:
    """Fill the dS_in of the level's runs in `gradients`, and with `keep` their `blocks` and
    `dwrites`.

    Args:
        inputs: (q, k, w, g, dout, local): `local` [n, Hv, Dv] is the gradient of the writes through
            the outputs of their own blocks.
        blocks: [NB, Hv, Dk, Dv], gradient of the state after each block.
        dwrites: [n, Hv, Dv], the whole gradient of the writes.
    """
    q, k, w, g, dout, local = inputs
    heads, key_dim, value_dim = w.shape[1], k.shape[2], dout.shape[2]
    tiles = _tiles(key_dim, value_dim, heads * len(level.runs), k.device)
    _launch(
        _gradient_kernel,
        tiles,
        (value_dim, heads, len(level.runs)),
        (
            *(q, k, w, g, dout, local, blocks, dwrites, gradients, level.runs),
            *(tables.starts, tables.block_offsets, slots.offsets, slots.sources, scale),
        ),
        {
            "HK": k.shape[1],
            "HV": heads,
            "K": key_dim,
            "V": value_dim,
            "BT": tables.chunk,
            "KEEP": keep,
        },
    )


def _launch_forward(
    inputs: tuple[torch.Tensor, ...],
    blocks: torch.Tensor,
    writes: torch.Tensor,
    level: Level,
    slots: StateSlots,
    states: torch.Tensor,
    tables: RecurrenceTables,
    summary: bool,
) -> None:
    k, w, u, g = inputs
    heads, key_dim, value_dim = w.shape[1], k.shape[2], u.shape[2]
    tiles = _tiles(key_dim, value_dim, heads * len(level.runs), k.device)
    if summary and key_dim > 128:
        tiles = tuple(tile._replace(stages=1) for tile in tiles)
    columns = value_dim + (key_dim if summary else 0)
    constants = {
        "HK": k.shape[1],
        "HV": heads,
        "K": key_dim,
        "V": value_dim,
        "COLUMNS": columns,
        "BT": tables.chunk,
        "SUMMARY": summary,
    }
    _launch(
        _state_kernel,
        tiles,
        (columns, heads, len(level.runs)),
        (
            *(k, w, u, g, blocks, writes, states, level.runs, tables.starts),
            *(tables.block_offsets, slots.read, slots.write),
        ),
        constants,
    )


def _launch(
    kernel: Any,
    tiles: tuple[_Tile, ...],
    extents: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """Launch with the first tile, for so many columns, heads and runs.

    The other tiles are compiled along, so that no later row compiles them.
    """
    columns, heads, runs = extents
    tile, *others = tiles
    kernel[(triton.cdiv(columns, tile.columns) * heads, runs)](
        *arguments, **constants, **tile.options()
    )
    for other in others:
        kinds = tuple(x.dtype if isinstance(x, torch.Tensor) else x for x in arguments)
        _compile(kernel, other, kinds, tuple(constants.items()))


@cache
def _compile(
    kernel: Any, tile: _Tile, kinds: tuple[Any, ...], constants: tuple[tuple[str, Any], ...]
) -> None:
    kernel.warmup(*kinds, grid=(1,), **dict(constants), **tile.options())


class _Tile(NamedTuple):
    """The part of a state that one program walks with, and the stages of its loop over chunks."""

    rows: int
    columns: int
    stages: int

    def options(self) -> dict[str, int]:
        """Of a launch."""
        return {
            "BK": self.rows,
            "BV": self.columns,
            "num_warps": _WARPS,
            "num_stages": self.stages,
        }


def _tiles(key_dim: int, value_dim: int, states: int, device: torch.device) -> tuple[_Tile, ...]:
    """The tile of a launch that walks so many states, and those of other launches.

    Narrow tiles give a chain more processors and, with a third stage, the loads of a chunk the time
    of the whole chunk before: with two, Triton starts them at its end and waits at once. Wide tiles
    read keys fewer times, and two stages let two programs share a processor.
    """
    rows = max(16, triton.next_power_of_2(key_dim))
    columns = _COLUMNS.get(max(64, rows), (16, 16))
    narrow, wide = (min(count, max(16, triton.next_power_of_2(value_dim))) for count in columns)
    deep = key_dim <= 128 and _shared_memory(device) >= _THREE_STAGES
    tiles = (_Tile(rows, narrow, 3 if deep else 2), _Tile(rows, wide, 2))
    if narrow == wide or device.type != "cuda":
        return tiles[:1]
    programs = states * triton.cdiv(value_dim, narrow)
    return tiles[::-1] if programs > _processors(device) else tiles


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"])


@triton.jit
def _product(a, x, EXACT: tl.constexpr):
    """a x in fp32, of an fp32 x: rounded to a's dtype, or exactly as the sum of two such parts."""
    high = x.to(a.dtype)
    product = tl.dot(a, high)
    if EXACT and a.dtype != tl.float32:
        product = tl.dot(a, (x - high.to(tl.float32)).to(a.dtype), acc=product)
    return product


@triton.jit
def _state_kernel(
    k,
    w,
    u,
    g,
    blocks,
    writes,
    states,
    runs,
    starts,
    block_offsets,
    read,
    write,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    COLUMNS: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SUMMARY: tl.constexpr,
):
    tiles: tl.constexpr = (COLUMNS + BV - 1) // BV
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    run = tl.load(runs + tl.program_id(1))
    begin = tl.load(starts + run)
    end = tl.load(starts + run + 1)
    block = tl.load(block_offsets + run).to(tl.int64)
    chunks = tl.load(block_offsets + run + 1) - tl.load(block_offsets + run)
    source = tl.load(read + run).to(tl.int64)
    target = tl.load(write + run).to(tl.int64)

    o_k = tl.arange(0, BK)
    o_v = tile * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < COLUMNS
    m_u = o_v < V  # the columns of M start from the unit matrix and nothing is written to them
    m_state = m_k[:, None] & m_v[None, :]
    in_state = o_k[:, None] * COLUMNS + o_v[None, :]
    if source >= 0:
        state = tl.load(states + (source * HV + head) * K * COLUMNS + in_state, m_state, 0.0)
    elif SUMMARY:
        state = tl.where(o_k[:, None] == o_v[None, :] - V, 1.0, 0.0).to(tl.float32)
    else:
        state = tl.zeros([BK, BV], dtype=tl.float32)

    for chunk in range(chunks):
        first = begin + chunk * BT
        o_t = (first + tl.arange(0, BT)).to(tl.int64)
        m_t = o_t < end
        if not SUMMARY:
            to_block = blocks + ((block + chunk) * HV + head) * K * V + in_state
            tl.store(to_block, state.to(blocks.dtype.element_ty), mask=m_state)
        m_tk = m_t[:, None] & m_k[None, :]
        b_w = tl.load(w + (o_t[:, None] * HV + head) * K + o_k[None, :], mask=m_tk, other=0.0)
        b_k = tl.load(
            k + (o_t[:, None] * HK + head // (HV // HK)) * K + o_k[None, :], mask=m_tk, other=0.0
        )
        m_tv = m_t[:, None] & m_u[None, :]
        at_v = (o_t[:, None] * HV + head) * V + o_v[None, :]
        b_u = tl.load(u + at_v, mask=m_tv, other=0.0).to(tl.float32)
        b_write = b_u - _product(b_w, state, SUMMARY)
        if not SUMMARY:
            tl.store(writes + at_v, b_write.to(writes.dtype.element_ty), mask=m_tv)
        last = tl.minimum(first + BT, end) - 1
        g_last = tl.load(g + last.to(tl.int64) * HV + head)
        b_g = tl.load(g + o_t * HV + head, mask=m_t, other=0.0)
        b_write = b_write * tl.where(m_t, tl.exp2(g_last - b_g), 0.0)[:, None]
        state = state * tl.exp2(g_last) + _product(tl.trans(b_k), b_write, SUMMARY)

    if target >= 0:
        tl.store(states + (target * HV + head) * K * COLUMNS + in_state, state, mask=m_state)


@triton.jit
def _gradient_kernel(
    q,
    k,
    w,
    g,
    dout,
    local,
    blocks,
    dwrites,
    gradients,
    runs,
    starts,
    block_offsets,
    offsets,
    sources,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    KEEP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    run = tl.load(runs + tl.program_id(1))
    begin = tl.load(starts + run)
    end = tl.load(starts + run + 1)
    block = tl.load(block_offsets + run).to(tl.int64)
    chunks = tl.load(block_offsets + run + 1) - tl.load(block_offsets + run)

    o_k = tl.arange(0, BK)
    o_v = tile * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_state = m_k[:, None] & m_v[None, :]
    in_state = o_k[:, None] * V + o_v[None, :]
    # Children one after the other, in the order of their list: the sum is repeatable.
    grad = tl.zeros([BK, BV], dtype=tl.float32)
    for entry in range(tl.load(offsets + run), tl.load(offsets + run + 1)):
        slot = tl.load(sources + entry).to(tl.int64)
        grad += tl.load(gradients + (slot * HV + head) * K * V + in_state, mask=m_state, other=0.0)

    for step in range(chunks):
        chunk = chunks - 1 - step
        first = begin + chunk * BT
        o_t = (first + tl.arange(0, BT)).to(tl.int64)
        m_t = o_t < end
        if KEEP:
            to_block = blocks + ((block + chunk) * HV + head) * K * V + in_state
            tl.store(to_block, grad.to(blocks.dtype.element_ty), mask=m_state)
        m_tk = m_t[:, None] & m_k[None, :]
        m_tv = m_t[:, None] & m_v[None, :]
        at_key = (o_t[:, None] * HK + head // (HV // HK)) * K + o_k[None, :]
        at_v = (o_t[:, None] * HV + head) * V + o_v[None, :]
        b_k = tl.load(k + at_key, mask=m_tk, other=0.0)
        last = tl.minimum(first + BT, end) - 1
        g_last = tl.load(g + last.to(tl.int64) * HV + head)
        b_g = tl.load(g + o_t * HV + head, mask=m_t, other=0.0)
        b_dw = tl.dot(b_k, grad.to(b_k.dtype))
        b_dw = b_dw * tl.where(m_t, tl.exp2(g_last - b_g), 0.0)[:, None]
        b_dw += tl.load(local + at_v, mask=m_tv, other=0.0).to(tl.float32)
        if KEEP:
            tl.store(dwrites + at_v, b_dw.to(dwrites.dtype.element_ty), mask=m_tv)
        b_q = tl.load(q + at_key, mask=m_tk, other=0.0)
        b_do = tl.load(dout + at_v, mask=m_tv, other=0.0).to(tl.float32)
        b_do = b_do * tl.where(m_t, tl.exp2(b_g) * scale, 0.0)[:, None]
        b_w = tl.load(w + (o_t[:, None] * HV + head) * K + o_k[None, :], mask=m_tk, other=0.0)
        grad = grad * tl.exp2(g_last)
        grad += tl.dot(tl.trans(b_q), b_do.to(b_q.dtype))
        grad -= tl.dot(tl.trans(b_w), b_dw.to(b_w.dtype))

    tl.store(gradients + (run.to(tl.int64) * HV + head) * K * V + in_state, grad, mask=m_state)
