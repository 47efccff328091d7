"""Causal convolution along tree paths in Triton: 1 to 8 taps, SiLU or none; see `conv_torch.py`.

Runs are cut into pieces. A program walks a piece token by token, some channels side by side, and
keeps the last inputs in registers, so that every row is read once; only what lies before a piece
comes from the table of taps, wherever on the tree or on another rank that is. Backward walks the
same way and K - 1 tokens past the piece, since those read it: gradients of the input, of the weight
and of the bias come from one pass, and none of the pre-activation is stored.

What reads across a run's start is listed, K - 1 tokens a run at most. Their gradients are computed
first, by a kernel of their own, so that those of other ranks' rows can leave before the pass; both
kinds are added in the order of the list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_tree_cp.ops.gdn.conv_tables import ConvolutionCall, ConvTables, Receive

# Channels of a program (one warp), and tokens that it loads at once, by direction.
_FORWARD = {"BC": 128, "STEP": 8}
_BACKWARD = {"BC": 128, "STEP": 8}
_WARPS = 1
_HEAD_BLOCK = 256

# The gradient of the weight has a partial sum of every program, added by torch.
_PROGRAMS = 384


def forward(
    call: ConvolutionCall, rows: int, sizes: tuple[int, ...], receive: Receive
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """([rows, size] for each size: the channels, in parts that are contiguous, padding 0; halo).

    What needs no halo is launched before ``receive`` waits for it.
    """
    tables, pieces = call.tables, call.tables.pieces.shape[1]
    outs = tuple(call.x.new_empty(rows, size) for size in sizes)
    for out in outs:
        out[tables.num_tokens :].zero_()
    _forward_pieces(call, outs, 0, tables.num_near_pieces)
    halo = receive()
    _forward_pieces(call._replace(halo=halo), outs, tables.num_near_pieces, pieces)
    return outs, halo


def _forward_pieces(
    call: ConvolutionCall, outs: tuple[torch.Tensor, ...], begin: int, end: int
) -> None:
    if begin == end:
        return
    tables, (x, stride) = call.tables, _rows(call.x)
    for out, (first, size) in _of_parts(outs):
        _forward_kernel[(end - begin, triton.cdiv(size, _FORWARD["BC"]))](
            x,
            *(call.halo, call.weight, call.bias, tables.taps, tables.pieces, out),
            *(tables.num_tokens, tables.pieces.shape[1], begin, stride),
            FIRST=first,
            PART=size,
            **_constants(call),
            **_FORWARD,
            num_warps=_WARPS,
        )


def backward_heads(
    call: ConvolutionCall, douts: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the pre-activation fp32 [heads, C], dhalo [h, C]).

    Heads are the tokens that read across their run's start; douts [n, size] are the parts'.
    """
    tables, (x, stride) = call.tables, _rows(call.x)
    heads = x.new_empty(len(tables.heads), x.shape[1], dtype=torch.float32)
    for dout, (first, size) in _of_parts(douts):
        dout, dout_stride = _rows(dout)
        if len(heads):
            _head_kernel[(len(heads), triton.cdiv(size, _HEAD_BLOCK))](
                dout,
                x,
                *(call.halo, call.weight, call.bias, tables.taps, tables.heads, heads),
                *(tables.num_tokens, stride, dout_stride),
                FIRST=first,
                PART=size,
                **_constants(call),
                BC=_HEAD_BLOCK,
            )
    dhalo = torch.zeros_like(call.halo)
    late = tables.num_local_late, len(tables.late_rows)
    _add_late(heads, call.weight, dhalo, tables, late, tables.num_tokens)
    return heads, dhalo


def backward_rows(
    call: ConvolutionCall, douts: tuple[torch.Tensor, ...], heads: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx [rows, C], padding 0; dweight [C, K], dbias [C]), without what other ranks return."""
    tables, (x, stride) = call.tables, _rows(call.x)
    tokens, channels, width = tables.num_tokens, x.shape[1], call.weight.shape[1]
    pieces = tables.pieces.shape[1]
    programs = min(pieces, _PROGRAMS)
    dx = x.new_empty(rows, channels)
    dx[tokens:].zero_()
    partial = x.new_empty(programs, width + 1, channels, dtype=torch.float32)
    for dout, (first, size) in _of_parts(douts):
        dout, dout_stride = _rows(dout)
        if tokens:
            _backward_kernel[(programs, triton.cdiv(size, _BACKWARD["BC"]))](
                dout,
                x,
                *(call.halo, call.weight, call.bias, tables.taps, tables.pieces, dx, partial),
                *(tokens, pieces, stride, dout_stride),
                FIRST=first,
                PART=size,
                **_constants(call),
                **_BACKWARD,
                num_warps=_WARPS,
            )
    _add_late(heads, call.weight, dx, tables, (0, tables.num_local_late), 0)
    sums = partial.sum(0)
    return dx, sums[:width].T, sums[width]


def _constants(call: ConvolutionCall) -> dict[str, int | bool]:
    """What all kernels but the late one are specialised on."""
    channels, width = call.weight.shape
    return {"C": channels, "WIDTH": width, "SILU": call.silu, "HALO": call.tables.distributed}


def _of_parts(
    tensors: tuple[torch.Tensor, ...],
) -> list[tuple[torch.Tensor, tuple[int, int]]]:
    """Tensors with the first channel and size of the part that each is."""
    sizes = [x.shape[1] for x in tensors]
    return [(x, (sum(sizes[:at]), size)) for at, (x, size) in enumerate(zip(tensors, sizes))]


def _add_late(
    heads: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    tables: ConvTables,
    late: tuple[int, int],
    shift: int,
) -> None:
    """Add what heads send to the late rows `late` (begin, end), to row - shift of `target`."""
    begin, end = late
    if end == begin:
        return
    channels, width = weight.shape
    _late_kernel[(end - begin, triton.cdiv(channels, _HEAD_BLOCK))](
        *(heads, weight, target, tables.late_rows, tables.late_offsets, tables.late_readers),
        *(begin, shift, len(tables.heads)),
        C=channels,
        WIDTH=width,
        BC=_HEAD_BLOCK,
    )


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rows whose channels lie side by side, and their stride; a slice of wider rows is a view."""
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


@triton.jit
def _factors(weight, o_c, m_c, WIDTH: tl.constexpr):
    """What each tap multiplies by, fp32 [BC] each."""
    found = ()
    for tap in tl.static_range(WIDTH):
        factor = tl.load(weight + o_c * WIDTH + WIDTH - 1 - tap, mask=m_c, other=0.0)
        found += (factor.to(tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def _bias(bias, o_c, m_c):
    if bias is None:
        value = tl.zeros_like(o_c).to(tl.float32)
    else:
        value = tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    return value


@triton.jit
def _before(
    x,
    halo,
    taps,
    token,
    o_c,
    m_c,
    num_tokens,
    x_stride,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    HALO: tl.constexpr,
):
    """The WIDTH - 1 inputs before a token on its path, the last one last; 0 where there is none."""
    found = ()
    for at in tl.static_range(WIDTH - 1):
        entry = (WIDTH - 2 - at) * num_tokens.to(tl.int64) + token
        row = tl.load(taps + entry).to(tl.int64)
        own = (row >= 0) & (row < num_tokens)
        value = tl.load(x + row * x_stride + o_c, mask=m_c & own, other=0.0)
        if HALO:
            far = m_c & (row >= num_tokens)
            value += tl.load(halo + (row - num_tokens) * C + o_c, mask=far, other=0.0)
        found += (value,)  # type: ignore[assignment]
    return found


@triton.jit
def _next_rows(rows, x, token, end, o_c, m_c, stride, STEP: tl.constexpr):
    """`rows`, and after them those of the STEP tokens from `token`; 0 from `end` on."""
    for at in tl.static_range(STEP):
        here = x + (token + at).to(tl.int64) * stride + o_c
        rows += (tl.load(here, mask=m_c & (token + at < end), other=0.0),)
    return rows


@triton.jit
def _last(rows, SKIP: tl.constexpr, COUNT: tl.constexpr):
    """COUNT of the rows, from SKIP on."""
    kept = ()
    for at in tl.static_range(COUNT):
        kept += (rows[SKIP + at],)  # type: ignore[assignment]
    return kept


@triton.jit
def _convolve(rows, factors, start, AT: tl.constexpr, WIDTH: tl.constexpr):
    """start + sum of factors[tap] rows[AT - tap]."""
    total = start
    for tap in tl.static_range(WIDTH):
        total += factors[tap] * rows[AT - tap].to(tl.float32)
    return total


@triton.jit
def _through_activation(grad, pre, SILU: tl.constexpr):
    """Gradient of the pre-activation."""
    if SILU:
        gate = tl.sigmoid(pre)
        grad = grad * gate * (1 + pre * (1 - gate))
    return grad


@triton.jit(do_not_specialize=["num_tokens", "num_pieces", "first_piece"])
def _forward_kernel(
    x,
    halo,
    weight,
    bias,
    taps,
    pieces,
    out,
    num_tokens,
    num_pieces,
    first_piece,
    x_stride,
    FIRST: tl.constexpr,
    PART: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    HALO: tl.constexpr,
    BC: tl.constexpr,
    STEP: tl.constexpr,
):
    piece = first_piece + tl.program_id(0)
    start = tl.load(pieces + piece)
    end = tl.load(pieces + num_pieces + piece)
    o_c = FIRST + tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < FIRST + PART
    factors, b_bias = _factors(weight, o_c, m_c, WIDTH), _bias(bias, o_c, m_c)
    rows = _before(x, halo, taps, start, o_c, m_c, num_tokens, x_stride, C, WIDTH, HALO)
    for step in range(tl.cdiv(end - start, STEP)):
        token = start + step * STEP
        window = _next_rows(rows, x, token, end, o_c, m_c, x_stride, STEP)
        for at in tl.static_range(STEP):
            value = _convolve(window, factors, b_bias, WIDTH - 1 + at, WIDTH)
            if SILU:
                value = value * tl.sigmoid(value)
            here = out + (token + at).to(tl.int64) * PART + o_c - FIRST
            tl.store(here, value.to(out.dtype.element_ty), mask=m_c & (token + at < end))
        rows = _last(window, STEP, WIDTH - 1)


@triton.jit(do_not_specialize=["num_tokens"])
def _head_kernel(
    dout,
    x,
    halo,
    weight,
    bias,
    taps,
    tokens,
    heads,
    num_tokens,
    x_stride,
    dout_stride,
    FIRST: tl.constexpr,
    PART: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    HALO: tl.constexpr,
    BC: tl.constexpr,
):
    token = tl.load(tokens + tl.program_id(0)).to(tl.int64)
    o_c = FIRST + tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < FIRST + PART
    rows = _before(x, halo, taps, token, o_c, m_c, num_tokens, x_stride, C, WIDTH, HALO)
    window = _next_rows(rows, x, token, token + 1, o_c, m_c, x_stride, 1)
    factors, b_bias = _factors(weight, o_c, m_c, WIDTH), _bias(bias, o_c, m_c)
    pre = _convolve(window, factors, b_bias, WIDTH - 1, WIDTH)
    grad = tl.load(dout + token * dout_stride + o_c - FIRST, mask=m_c, other=0.0).to(tl.float32)
    here = heads + tl.program_id(0).to(tl.int64) * C + o_c
    tl.store(here, _through_activation(grad, pre, SILU), mask=m_c)


@triton.jit(do_not_specialize=["num_tokens", "num_pieces"])
def _backward_kernel(
    dout,
    x,
    halo,
    weight,
    bias,
    taps,
    pieces,
    dx,
    partial,
    num_tokens,
    num_pieces,
    x_stride,
    dout_stride,
    FIRST: tl.constexpr,
    PART: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    HALO: tl.constexpr,
    BC: tl.constexpr,
    STEP: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    o_c = FIRST + tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < FIRST + PART
    factors, b_bias = _factors(weight, o_c, m_c, WIDTH), _bias(bias, o_c, m_c)
    dbias = tl.zeros([BC], dtype=tl.float32)
    dweight = ()
    for _ in tl.static_range(WIDTH):
        dweight += (dbias,)  # type: ignore[assignment]
    zeros = _last(dweight, 0, WIDTH - 1)

    first_piece = (program * num_pieces // programs).to(tl.int32)
    last_piece = ((program + 1) * num_pieces // programs).to(tl.int32)
    for piece in range(first_piece, last_piece):
        start = tl.load(pieces + piece)
        end = tl.load(pieces + num_pieces + piece)
        run_end = tl.load(pieces + 2 * num_pieces + piece)
        rows = _before(x, halo, taps, start, o_c, m_c, num_tokens, x_stride, C, WIDTH, HALO)
        grads = zeros
        for step in range(tl.cdiv(end + WIDTH - 1 - start, STEP)):
            token = start + step * STEP
            window = _next_rows(rows, x, token, run_end, o_c, m_c, x_stride, STEP)
            douts = _next_rows((), dout, token, run_end, o_c - FIRST, m_c, dout_stride, STEP)
            for at in tl.static_range(STEP):
                pre = _convolve(window, factors, b_bias, WIDTH - 1 + at, WIDTH)
                grad = _through_activation(douts[at].to(tl.float32), pre, SILU)
                grads += (grad,)
                # The piece's own tokens count for the weight; those after it, for its rows alone.
                grad = tl.where(token + at < end, grad, 0.0)
                dbias += grad
                sums = ()
                for tap in tl.static_range(WIDTH):
                    value = window[WIDTH - 1 + at - tap].to(tl.float32)
                    sums += (dweight[tap] + grad * value,)  # type: ignore[assignment]
                dweight = sums
                total = tl.zeros([BC], dtype=tl.float32)
                for tap in tl.static_range(WIDTH):
                    total += factors[tap] * grads[at + tap]
                row = token + at - (WIDTH - 1)
                here = dx + row.to(tl.int64) * C + o_c
                mask = m_c & (row >= start) & (row < end)
                tl.store(here, total.to(dx.dtype.element_ty), mask=mask)
            rows = _last(window, STEP, WIDTH - 1)
            grads = _last(grads, STEP, WIDTH - 1)

    to_row = partial + program * (WIDTH + 1) * C + o_c
    for tap in tl.static_range(WIDTH):
        tl.store(to_row + (WIDTH - 1 - tap) * C, dweight[tap], mask=m_c)
    tl.store(to_row + WIDTH * C, dbias, mask=m_c)


@triton.jit(do_not_specialize=["begin", "shift", "num_heads"])
def _late_kernel(
    heads,
    weight,
    target,
    rows,
    offsets,
    readers,
    begin,
    shift,
    num_heads,
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
        tap = reader // num_heads + 1
        head = (reader % num_heads).to(tl.int64)
        factor = tl.load(weight + o_c * WIDTH + WIDTH - 1 - tap, mask=m_c, other=0.0)
        total += factor.to(tl.float32) * tl.load(heads + head * C + o_c, mask=m_c, other=0.0)
    tl.store(to_row, total.to(target.dtype.element_ty), mask=m_c)
