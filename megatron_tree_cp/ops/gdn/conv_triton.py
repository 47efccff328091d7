"""Causal convolution along tree paths in Triton: 1 to 8 taps, SiLU or none; see `conv_torch.py`.

Taps are rows of [shard; halo] from a table, so that a run's start, a fork and a rank border cost
nothing beside their loads. Inside a run the transpose of a tap is the row j further on; readers
across a run's start are listed, and added by a kernel of their own in the order of the list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_tree_cp.ops.gdn.conv_tables import ConvTables

_BLOCK_T, _BLOCK_C = 16, 128
# Each program of the weight gradient walks several token blocks; their sums meet in torch. A block
# is small, since it keeps a sum of every element and tap in registers.
_WEIGHT_PROGRAMS, _WEIGHT_BLOCK_T = 64, 8


def forward(
    x: torch.Tensor,
    halo: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tables: ConvTables,
    silu: bool,
    rows: int,
    sizes: tuple[int, ...],
) -> tuple[torch.Tensor, ...]:
    """[rows, size] for each size: the channels, in parts that are contiguous; padding is 0.

    From the real rows x [n, C] and the received rows halo [h, C].
    """
    x = _rows(x)
    tokens, channels = x.shape
    outs = tuple(x.new_empty(rows, size) for size in sizes)
    for out, (first, size) in zip(outs, _parts(sizes), strict=True):
        out[tokens:].zero_()
        if tokens:
            _forward_kernel[(triton.cdiv(tokens, _BLOCK_T), triton.cdiv(size, _BLOCK_C))](
                x,
                halo,
                weight.contiguous(),
                bias,
                tables.taps,
                out,
                tokens,
                x.stride(0),
                C=channels,
                FIRST=first,
                PART=size,
                WIDTH=weight.shape[1],
                BT=_BLOCK_T,
                BC=_BLOCK_C,
                SILU=silu,
                HALO=tables.distributed,
            )
    return outs


def backward_local(
    douts: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    halo: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tables: ConvTables,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dpre [n, C], dhalo [h, C], dweight [C, K], dbias [C]): all but the gradient of x.

    From the gradients [n, size] of the parts.
    """
    x = _rows(x)
    tokens, channels = x.shape
    width, weight = weight.shape[1], weight.contiguous()
    dpre = x.new_empty(tokens, channels)
    programs = min(triton.cdiv(tokens, _WEIGHT_BLOCK_T), _WEIGHT_PROGRAMS)
    partial = x.new_empty(programs, width, channels, dtype=torch.float32)
    partial_bias = x.new_empty(programs, channels, dtype=torch.float32)
    for dout, (first, size) in zip(douts, _parts(tuple(d.shape[1] for d in douts)), strict=True):
        dout = _rows(dout)
        if tokens:
            _local_kernel[(programs, triton.cdiv(size, _BLOCK_C))](
                dout,
                x,
                halo,
                weight,
                bias,
                tables.taps,
                dpre,
                partial,
                partial_bias,
                tokens,
                x.stride(0),
                dout.stride(0),
                C=channels,
                FIRST=first,
                PART=size,
                WIDTH=width,
                BT=_WEIGHT_BLOCK_T,
                BC=_BLOCK_C,
                SILU=silu,
                HALO=tables.distributed,
            )
    dhalo = torch.zeros_like(halo)
    _add_late(dpre, weight, dhalo, tables, tables.num_local_late, len(tables.late_rows), tokens)
    return dpre, dhalo, partial.sum(0).T, partial_bias.sum(0)


def backward_input(
    dpre: torch.Tensor, weight: torch.Tensor, tables: ConvTables, rows: int
) -> torch.Tensor:
    """dx [rows, C]; padding is 0."""
    tokens, channels = dpre.shape
    weight = weight.contiguous()
    dx = dpre.new_empty(rows, channels)
    dx[tokens:].zero_()
    if tokens:
        grid = (triton.cdiv(tokens, _BLOCK_T), triton.cdiv(channels, _BLOCK_C))
        _input_kernel[grid](
            dpre,
            weight,
            tables.ends,
            dx,
            tokens,
            C=channels,
            WIDTH=weight.shape[1],
            BT=_BLOCK_T,
            BC=_BLOCK_C,
        )
    _add_late(dpre, weight, dx, tables, 0, tables.num_local_late, 0)
    return dx


def _parts(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """First channel and size of each part."""
    return [(sum(sizes[:at]), size) for at, size in enumerate(sizes)]


def _add_late(
    dpre: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    tables: ConvTables,
    begin: int,
    end: int,
    shift: int,
) -> None:
    """Add what readers across run starts send to the late rows [begin, end)."""
    if end == begin:
        return
    channels = dpre.shape[1]
    _late_kernel[(end - begin, triton.cdiv(channels, _BLOCK_C))](
        dpre,
        weight,
        target,
        tables.late_rows,
        tables.late_offsets,
        tables.late_readers,
        begin,
        shift,
        tables.num_tokens,
        C=channels,
        WIDTH=weight.shape[1],
        BC=_BLOCK_C,
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Rows whose channels lie side by side; a slice of wider rows stays a view."""
    return x if x.stride(1) == 1 else x.contiguous()


@triton.jit
def _tap_rows(
    x,
    halo,
    taps,
    o_t,
    o_c,
    m_t,
    m_c,
    num_tokens,
    x_stride,
    TAP: tl.constexpr,
    C: tl.constexpr,
    HALO: tl.constexpr,
):
    """Inputs [BT, BC] that tap TAP of the tokens reads, 0 where there is none."""
    if TAP == 0:
        row, own = o_t, m_t
    else:
        entry = (TAP - 1) * num_tokens.to(tl.int64) + o_t
        row = tl.load(taps + entry, mask=m_t, other=-1).to(tl.int64)
        own = (row >= 0) & (row < num_tokens)
    at = row[:, None] * x_stride + o_c[None, :]
    value = tl.load(x + at, mask=own[:, None] & m_c[None, :], other=0.0).to(tl.float32)
    if HALO and TAP > 0:
        far = (row >= num_tokens)[:, None] & m_c[None, :]
        at = (row - num_tokens)[:, None] * C + o_c[None, :]
        value += tl.load(halo + at, mask=far, other=0.0).to(tl.float32)
    return value


@triton.jit
def _pre_activation(
    x,
    halo,
    weight,
    bias,
    taps,
    o_t,
    o_c,
    m_t,
    m_c,
    num_tokens,
    x_stride,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    HALO: tl.constexpr,
):
    pre = tl.zeros([BT, BC], dtype=tl.float32)
    if bias is not None:
        pre += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        value = _tap_rows(x, halo, taps, o_t, o_c, m_t, m_c, num_tokens, x_stride, tap, C, HALO)
        factor = tl.load(weight + o_c * WIDTH + WIDTH - 1 - tap, mask=m_c, other=0.0)
        pre += factor.to(tl.float32)[None, :] * value
    return pre


@triton.jit(do_not_specialize=["num_tokens"])
def _forward_kernel(
    x,
    halo,
    weight,
    bias,
    taps,
    out,
    num_tokens,
    x_stride,
    C: tl.constexpr,
    FIRST: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    SILU: tl.constexpr,
    HALO: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_c = FIRST + tl.program_id(1) * BC + tl.arange(0, BC)
    m_t, m_c = o_t < num_tokens, o_c < FIRST + PART
    pre = _pre_activation(
        x,
        halo,
        weight,
        bias,
        taps,
        o_t,
        o_c,
        m_t,
        m_c,
        num_tokens,
        x_stride,
        C,
        WIDTH,
        BT,
        BC,
        HALO,
    )
    if SILU:
        pre = pre * tl.sigmoid(pre)
    mask = m_t[:, None] & m_c[None, :]
    at = o_t[:, None] * PART + o_c[None, :] - FIRST
    tl.store(out + at, pre.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _local_kernel(
    dout,
    x,
    halo,
    weight,
    bias,
    taps,
    dpre,
    partial,
    partial_bias,
    num_tokens,
    x_stride,
    dout_stride,
    C: tl.constexpr,
    FIRST: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    SILU: tl.constexpr,
    HALO: tl.constexpr,
):
    program = tl.program_id(0)
    o_c = FIRST + tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < FIRST + PART
    # Sums of single elements: their rows meet once, behind the loop.
    dbias = tl.zeros([BT, BC], dtype=tl.float32)
    dweight = ()
    for _ in tl.static_range(WIDTH):
        dweight += (dbias,)  # type: ignore[assignment]
    for block in range(program, tl.cdiv(num_tokens, BT), tl.num_programs(0)):
        o_t = (block * BT + tl.arange(0, BT)).to(tl.int64)
        m_t = o_t < num_tokens
        mask = m_t[:, None] & m_c[None, :]
        at = o_t[:, None] * dout_stride + o_c[None, :] - FIRST
        grad = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            pre = _pre_activation(
                x,
                halo,
                weight,
                bias,
                taps,
                o_t,
                o_c,
                m_t,
                m_c,
                num_tokens,
                x_stride,
                C,
                WIDTH,
                BT,
                BC,
                HALO,
            )
            gate = tl.sigmoid(pre)
            grad = grad * gate * (1 + pre * (1 - gate))
        tl.store(dpre + o_t[:, None] * C + o_c[None, :], grad.to(dpre.dtype.element_ty), mask=mask)
        sums = ()
        for tap in tl.static_range(WIDTH):
            value = _tap_rows(x, halo, taps, o_t, o_c, m_t, m_c, num_tokens, x_stride, tap, C, HALO)
            sums += (dweight[tap] + grad * value,)  # type: ignore[assignment]
        dweight = sums
        dbias += grad
    first = program.to(tl.int64) * WIDTH
    for tap in tl.static_range(WIDTH):
        to_row = partial + (first + WIDTH - 1 - tap) * C + o_c
        tl.store(to_row, tl.sum(dweight[tap], axis=0), mask=m_c)
    tl.store(partial_bias + program.to(tl.int64) * C + o_c, tl.sum(dbias, axis=0), mask=m_c)


@triton.jit(do_not_specialize=["num_tokens"])
def _input_kernel(
    dpre,
    weight,
    ends,
    dx,
    num_tokens,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_t, m_c = o_t < num_tokens, o_c < C
    end = tl.load(ends + o_t, mask=m_t, other=0)
    total = tl.zeros([BT, BC], dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        mask = (o_t + tap < end)[:, None] & m_c[None, :]
        grad = tl.load(dpre + (o_t + tap)[:, None] * C + o_c[None, :], mask=mask, other=0.0)
        factor = tl.load(weight + o_c * WIDTH + WIDTH - 1 - tap, mask=m_c, other=0.0)
        total += factor.to(tl.float32)[None, :] * grad.to(tl.float32)
    mask = m_t[:, None] & m_c[None, :]
    tl.store(dx + o_t[:, None] * C + o_c[None, :], total.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["begin", "shift", "num_tokens"])
def _late_kernel(
    dpre,
    weight,
    target,
    rows,
    offsets,
    readers,
    begin,
    shift,
    num_tokens,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BC: tl.constexpr,
):
    late = begin + tl.program_id(0)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < C
    to_row = target + (tl.load(rows + late) - shift).to(tl.int64) * C + o_c
    total = tl.load(to_row, mask=m_c, other=0.0).to(tl.float32)
    for entry in range(tl.load(offsets + late), tl.load(offsets + late + 1)):
        reader = tl.load(readers + entry)
        tap = reader // num_tokens + 1
        token = (reader % num_tokens).to(tl.int64)
        factor = tl.load(weight + o_c * WIDTH + WIDTH - 1 - tap, mask=m_c, other=0.0)
        grad = tl.load(dpre + token * C + o_c, mask=m_c, other=0.0)
        total += factor.to(tl.float32) * grad.to(tl.float32)
    tl.store(to_row, total.to(target.dtype.element_ty), mask=m_c)
