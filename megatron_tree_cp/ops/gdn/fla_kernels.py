"""Gated delta rule on GPU: FLA's kernels around our own state passes, which know the tree.

FLA prepares, reads outputs and differentiates the systems of blocks, for all runs at once as if
they were sequences; states and the other gradients of tokens are ours. Needs flash-linear-attention
(checked with 0.6.0); fp16 and bf16. The functions are those of `tiled.py`.

Of a shard's T rows the first n are tokens. FLA reads n rows, since one of its kernels multiplies
rows past a run's end by 0; what it allocates as large as v, beta or the writes has T rows, so that
no result is copied to make room for padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton

from megatron_tree_cp.ops.gdn import norm_triton, state_pass, token_gradients_triton
from megatron_tree_cp.ops.gdn.tables import GradientSlots, Level, RecurrenceTables, StateSlots

Tensors = tuple[torch.Tensor, ...]


@cache
def _fla() -> Any:
    """FLA's functions that we call, imported when the first layer runs."""
    try:
        from fla.ops.common.chunk_o import chunk_bwd_dv_local, chunk_fwd_o
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
        from fla.ops.gated_delta_rule.wy_fast import (
            prepare_wy_repr_bwd_kernel,
            recompute_w_u_fwd,
        )
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2
    except ImportError as error:
        raise ValueError(
            "Gated DeltaNet on GPU needs flash-linear-attention 0.6: "
            f"pip install 'megatron-tree-cp[gpu]' ({error})"
        ) from error
    return SimpleNamespace(
        cumsum=chunk_local_cumsum,
        to_base_2=RCP_LN2,
        solve=chunk_gated_delta_rule_fwd_intra,
        recompute_w_u=recompute_w_u_fwd,
        output=chunk_fwd_o,
        local_gradient=chunk_bwd_dv_local,
        solve_gradient=prepare_wy_repr_bwd_kernel,
    )


@dataclass
class Prepared:
    """State-free results of all tokens ([n, ...]; v, beta, u and writes [T, ...] with padding), and
    what the passes fill in."""

    tables: RecurrenceTables
    scale: float
    q: torch.Tensor
    k: torch.Tensor
    """Normalised where the norm is on."""

    v: torch.Tensor
    g: torch.Tensor
    """fp32 [n, Hv]: base-2 log of the decay from each chunk's start."""

    beta: torch.Tensor
    lengths: Tensors
    """1 / length of q and k where the norm is on, else nothing."""

    solved: torch.Tensor
    """[n, Hv, C]: inverse of each block's triangular system."""

    w: torch.Tensor
    u: torch.Tensor
    states: torch.Tensor
    writes: torch.Tensor
    gradients: torch.Tensor | None = None
    dwrites: torch.Tensor | None = None
    local: torch.Tensor | None = None
    dout: torch.Tensor | None = None
    saved: Tensors = ()


def prepare(inputs: Tensors, tables: RecurrenceTables, scale: float, norm: bool) -> Prepared:
    """State-free work of all tokens of a shard: q, k, v, g, beta [T, ...]."""
    q, k, v, g, beta = inputs
    n, v, beta = tables.num_tokens, v.contiguous(), beta.contiguous()
    lengths: Tensors = ()
    if norm:
        (q, q_length), (k, k_length) = norm_triton.forward(q, n), norm_triton.forward(k, n)
        lengths = (q_length, k_length)
    else:
        q, k = q[:n].contiguous(), k[:n].contiguous()
    if n == 0:
        empty = v.new_empty(*v.shape[:2], k.shape[2])
        solved = v.new_empty(0, v.shape[1], tables.chunk)
        return _prepared((q, k, v, g[:0].float(), beta, solved, *lengths), empty, v, tables, scale)
    fla = _fla()
    g = fla.cumsum(g[:n].contiguous()[None], scale=fla.to_base_2, **_sequences(tables)).squeeze(0)
    w, u, solved = fla.solve(k=k[None], v=v[None], g=g[None], beta=beta[None], **_sequences(tables))
    saved = (q, k, v, g, beta, solved.squeeze(0), *lengths)
    return _prepared(saved, w.squeeze(0), u.squeeze(0), tables, scale)


def restore(saved: Tensors, tables: RecurrenceTables, scale: float, norm: bool) -> Prepared:
    """In backward, what `prepare` gave, from the tensors that it asked to save."""
    _, k, v, g, beta, solved = saved[:6]
    if len(k) == 0:
        empty = v.new_empty(*v.shape[:2], k.shape[2])
        return _prepared(saved, empty, v, tables, scale)
    w, u = _fla().recompute_w_u(
        k=k[None], v=v[None], beta=beta[None], A=solved[None], g=g[None], **_runs(tables)
    )
    return _prepared(saved, w.squeeze(0), u.squeeze(0), tables, scale)


def _prepared(
    saved: Tensors, w: torch.Tensor, u: torch.Tensor, tables: RecurrenceTables, scale: float
) -> Prepared:
    q, k, v, g, beta, solved, *lengths = saved
    return Prepared(
        tables,
        scale,
        q,
        k,
        v,
        g,
        beta,
        tuple(lengths),
        solved,
        w,
        u,
        states=k.new_empty(tables.num_blocks, v.shape[1], k.shape[2], v.shape[2]),
        writes=torch.empty_like(u),
        saved=saved,
    )


def pass_states(
    prep: Prepared, levels: tuple[Level, ...], slots: StateSlots, states: torch.Tensor
) -> None:
    """Walk the runs of `levels`: fill the states of blocks, the writes, and the slots."""
    inputs = (prep.k, prep.w, prep.u, prep.g)
    for level in levels:
        state_pass.pass_states(inputs, prep.states, prep.writes, level, slots, states, prep.tables)


def summarise(prep: Prepared, levels: tuple[Level, ...], slots: StateSlots) -> torch.Tensor:
    """[slots, Hv, Dk, Dv + Dk]: (E, M) of the runs of `levels`, relative to their heads."""
    heads, key_dim = prep.w.shape[1:]
    table = prep.g.new_empty(slots.count, heads, key_dim, prep.v.shape[2] + key_dim)
    for level in levels:
        state_pass.summarise((prep.k, prep.w, prep.u, prep.g), level, slots, table, prep.tables)
    return table


def output(prep: Prepared) -> torch.Tensor:
    """Outputs of all rows, [T, Hv, Dv], once every state is known; padding is 0."""
    n = len(prep.q)
    if n == 0:
        return torch.zeros_like(prep.v)
    out = (
        _fla()
        .output(
            q=prep.q[None],
            k=prep.k[None],
            v=prep.writes[None],
            h=prep.states[None],
            g=prep.g[None],
            scale=prep.scale,
            **_sequences(prep.tables),
        )
        .squeeze(0)
    )
    out[n:].zero_()
    return out


def begin_backward(prep: Prepared, dout: torch.Tensor) -> None:
    """State-free part of backward, for all tokens; dout [T, Hv, Dv]."""
    n = len(prep.q)
    prep.u = _nothing(prep.u)  # only the passes over states read it
    prep.dout = dout[:n].to(prep.v.dtype).contiguous()
    prep.gradients = torch.empty_like(prep.states)
    prep.dwrites = torch.empty_like(prep.dout)
    prep.local = prep.dout
    if n:
        prep.local = (
            _fla()
            .local_gradient(
                q=prep.q[None],
                k=prep.k[None],
                g=prep.g[None],
                do=prep.dout[None],
                scale=prep.scale,
                **_sequences(prep.tables),
            )
            .squeeze(0)
        )


def pass_gradients(
    prep: Prepared,
    levels: tuple[Level, ...],
    slots: GradientSlots,
    gradients: torch.Tensor,
    keep: bool = True,
) -> None:
    """Walk back over the runs of `levels`, children first: fill the slots, and with `keep` block
    gradients."""
    assert prep.dout is not None and prep.local is not None
    assert prep.gradients is not None and prep.dwrites is not None
    inputs = (prep.q, prep.k, prep.w, prep.g, prep.dout, prep.local)
    for level in reversed(levels):
        state_pass.pass_gradients(
            inputs,
            prep.gradients,
            prep.dwrites,
            level,
            slots,
            gradients,
            prep.tables,
            prep.scale,
            keep,
        )


def token_gradients(prep: Prepared, dout: torch.Tensor) -> Tensors:
    """dq, dk, dv, dg, dbeta, once every state's gradient is known.

    [T, ...] with padding 0; dg, and dq and dk without the norm, are [n, ...].
    """
    n, rows = len(prep.q), len(prep.v)
    if n == 0:
        q, k = (x.new_zeros(rows, *x.shape[1:]) for x in (prep.q, prep.k))
        return q, k, torch.zeros_like(prep.v), prep.g, torch.zeros_like(prep.beta)
    assert prep.dout is not None and prep.gradients is not None and prep.dwrites is not None
    # The peak of a layer is below: what only passes read must not count in it.
    prep.w, prep.local = _nothing(prep.w), None
    dq, dk, dw, dg = token_gradients_triton.token_gradients(
        prep.q,
        prep.k,
        prep.writes,
        prep.g,
        prep.dout,
        prep.dwrites,
        prep.states,
        prep.gradients,
        prep.scale,
        prep.tables.starts,
        prep.tables.block_runs,
        prep.tables.chunk,
    )
    dk_system, dv, dbeta, dg_system = _solve_gradient(prep, dw)
    del dw
    dg = _fla().cumsum(dg.add_(dg_system)[None], reverse=True, **_sequences(prep.tables))
    dv[n:].zero_()
    dbeta[n:].zero_()
    if prep.lengths:
        q_length, k_length = prep.lengths
        dq = norm_triton.backward(prep.q, q_length, (dq,), rows)
        dk = norm_triton.backward(prep.k, k_length, (dk, dk_system), rows)
    else:
        group = (prep.q.shape[1], -1)
        dq, dk = (x.unflatten(1, group).sum(2) for x in (dq, dk + dk_system))
    return dq, dk, dv, dg.squeeze(0), dbeta


def _nothing(x: torch.Tensor) -> torch.Tensor:
    """No rows of x's kind, in memory of their own."""
    return x.new_empty(0, *x.shape[1:])


def _solve_gradient(prep: Prepared, dw: torch.Tensor) -> Tensors:
    """dk [n, Hv, Dk], dv and dbeta [T, ...], dg [n, Hv] through the triangular systems of blocks.

    FLA's kernel without the function around it, which would add dk over the heads of a group.
    """
    assert prep.dwrites is not None
    heads, key_dim, value_dim = dw.shape[1], prep.k.shape[2], prep.v.shape[2]
    dk, dv, dbeta, dg = (torch.empty_like(x) for x in (dw, prep.v, prep.beta, prep.g))
    _fla().solve_gradient[(prep.tables.num_blocks, heads)](
        k=prep.k,
        v=prep.v,
        beta=prep.beta,
        g=prep.g,
        A=prep.solved,
        dw=dw,
        du=prep.dwrites,
        dk=dk,
        dv=dv,
        db=dbeta,
        dg=dg,
        **_runs(prep.tables),
        T=len(prep.k),
        H=prep.k.shape[1],
        HV=heads,
        K=key_dim,
        V=value_dim,
        BT=prep.tables.chunk,
        BK=min(triton.next_power_of_2(key_dim), 64),
        BV=min(triton.next_power_of_2(value_dim), 64),
    )
    return dk, dv, dbeta, dg


def _runs(tables: RecurrenceTables) -> dict[str, Any]:
    """Runs as FLA's sequences; blocks are listed here, so that nothing waits for the device."""
    return {"cu_seqlens": tables.starts, "chunk_indices": tables.block_runs}


def _sequences(tables: RecurrenceTables) -> dict[str, Any]:
    return {**_runs(tables), "chunk_size": tables.chunk}
