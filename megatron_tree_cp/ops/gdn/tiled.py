"""Blockwise gated delta rule in plain torch: the CPU default, any float dtype, any device.

All blocks of a rank are prepared and read at once, whatever their place in the tree; only the state
pass walks, level by level and chunk by chunk. Its backward is explicit; the gradients of tokens
come from autograd through the maps of single blocks (`_block_maps`), which backward evaluates
again, with the block's incoming state held fixed and the gradient of its end state put in.

Shapes: NB blocks of C tokens (rows past a run's end are 0: no decay, no write), Hv value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_tree_cp.ops.gdn.reference import l2norm
from megatron_tree_cp.ops.gdn.tables import GradientSlots, Level, RecurrenceTables, StateSlots

Tensors = tuple[torch.Tensor, ...]


@dataclass
class Prepared:
    """What is known of every block, without any incoming state, and what passes fill in."""

    tables: RecurrenceTables
    blocks: Tensors
    """q, k [NB, C, Hk, D], v [NB, C, Hv, Dv], g, beta [NB, C, Hv] in the dtype of computation."""

    scale: float
    norm: bool
    read: torch.Tensor
    """[NB, Hv, C, Dk]: queries with decay and scale, through which outputs read the state."""

    keys: torch.Tensor
    """[NB, Hv, C, Dk]: keys with the decay to the block's end; writes enter the state by it."""

    w: torch.Tensor
    u: torch.Tensor
    """[NB, Hv, C, Dk], [NB, Hv, C, Dv]: the writes are u - w S."""

    scores: torch.Tensor
    """[NB, Hv, C, C]: what each token's output reads of the writes up to its own."""

    decay: torch.Tensor
    """[NB, Hv]: the block's whole decay."""

    states: torch.Tensor
    """[NB, Hv, Dk, Dv]: state before each block."""

    gradients: torch.Tensor | None = None
    """[NB, Hv, Dk, Dv]: gradient of the state after each block."""

    direct: tuple[torch.Tensor, torch.Tensor] | None = None
    """Through the block's own outputs: gradient of the state before it, and of its writes."""

    saved: Tensors = ()
    """What `restore` needs in backward."""


def prepare(inputs: Tensors, tables: RecurrenceTables, scale: float, norm: bool) -> Prepared:
    """State-free work of all tokens of a shard: q, k, v, g, beta [T, ...], padding unread."""
    inputs = tuple(x[: tables.num_tokens] for x in inputs)
    dtype = torch.promote_types(inputs[0].dtype, torch.float32)
    blocks = tuple(_to_blocks(x.to(dtype), tables) for x in inputs)
    read, keys, w, u, scores, decay = _block_maps(blocks, scale, norm)
    states = u.new_zeros(tables.num_blocks, u.shape[1], w.shape[3], u.shape[3])
    return Prepared(
        tables, blocks, scale, norm, read, keys, w, u, scores, decay, states, saved=inputs
    )


def restore(saved: Tensors, tables: RecurrenceTables, scale: float, norm: bool) -> Prepared:
    """In backward, what `prepare` gave, from the tensors that it asked to save."""
    return prepare(saved, tables, scale, norm)


def pass_states(
    prep: Prepared, levels: tuple[Level, ...], slots: StateSlots, states: torch.Tensor
) -> None:
    """Walk the runs of `levels`: fill `prep.states` and the end states in `states` [slots, ...]."""
    for level, state, blocks in _enter(prep, levels, slots, states):
        for count, block in blocks:
            prep.states[block] = state[:count]
            state[:count] = _step(prep, block, prep.u[block], state[:count])
        _leave(level, slots, states, state)


def summarise(prep: Prepared, levels: tuple[Level, ...], slots: StateSlots) -> torch.Tensor:
    """[slots, Hv, Dk, Dv + Dk]: (E, M) of the runs of `levels`, relative to their heads."""
    heads, key_dim, value_dim = prep.w.shape[1], prep.w.shape[3], prep.u.shape[3]
    table = prep.u.new_zeros(slots.count, heads, key_dim, value_dim + key_dim)
    start = prep.u.new_zeros(heads, key_dim, value_dim + key_dim)
    start[:, :, value_dim:] = torch.eye(key_dim, dtype=start.dtype, device=start.device)
    for level, state, blocks in _enter(prep, levels, slots, table, start):
        for count, block in blocks:
            u = prep.u[block]
            u = torch.cat([u, u.new_zeros(*u.shape[:3], key_dim)], dim=3)
            state[:count] = _step(prep, block, u, state[:count])
        _leave(level, slots, table, state)
    return table


def output(prep: Prepared) -> torch.Tensor:
    """Outputs of all tokens, [n, Hv, Dv], once every state is known."""
    writes = prep.u - prep.w @ prep.states
    out = prep.read @ prep.states + prep.scores @ writes
    return _from_blocks(out.transpose(1, 2), prep.tables)


def begin_backward(prep: Prepared, dout: torch.Tensor) -> None:
    """State-free part of backward, for all blocks; dout [T, Hv, Dv], padding unread."""
    dout_blocks = _to_blocks(dout.to(prep.u.dtype), prep.tables).transpose(1, 2)
    prep.gradients = torch.zeros_like(prep.states)
    prep.direct = (prep.read.mT @ dout_blocks, prep.scores.mT @ dout_blocks)


def pass_gradients(
    prep: Prepared,
    levels: tuple[Level, ...],
    slots: GradientSlots,
    gradients: torch.Tensor,
    keep: bool = True,
) -> None:
    """Walk back over the runs of `levels`, children first: fill the slots, and with `keep`
    `prep.gradients`.

    `gradients` [slots, Hv, Dk, Dv] holds what enters from outside in the slots of exports and
    leaves; every run leaves its dS_in in its own slot.
    """
    assert prep.gradients is not None and prep.direct is not None
    dstate, dwrites = prep.direct
    offsets = prep.tables.block_offsets.long()
    for level in reversed(levels):
        runs = level.runs.long()
        grad = gradients.new_zeros(len(runs), *gradients.shape[1:])
        for i, run in enumerate(runs.tolist()):
            for slot in slots.lists[run]:
                grad[i] += gradients[slot]
        for chunk in reversed(range(len(level.active))):
            count = level.active[chunk]
            block = offsets[runs[:count]] + chunk
            end = grad[:count]
            if keep:
                prep.gradients[block] = end
            writes = dwrites[block] + prep.keys[block] @ end
            grad[:count] = (
                prep.decay[block][:, :, None, None] * end
                + dstate[block]
                - prep.w[block].mT @ writes
            )
        gradients[runs] = grad


def token_gradients(prep: Prepared, dout: torch.Tensor) -> Tensors:
    """dq, dk, dv, dg, dbeta of all tokens [n, ...], once every state's gradient is known."""
    dout_blocks = _to_blocks(dout.to(prep.u.dtype), prep.tables).transpose(1, 2)
    with torch.enable_grad():
        inputs = tuple(x.detach().requires_grad_() for x in prep.blocks)
        read, keys, w, u, scores, decay = _block_maps(inputs, prep.scale, prep.norm)
        writes = u - w @ prep.states
        out = read @ prep.states + scores @ writes
        end = decay[:, :, None, None] * prep.states + keys.mT @ writes
    grads = torch.autograd.grad([out, end], inputs, [dout_blocks, prep.gradients])
    return tuple(_from_blocks(grad, prep.tables) for grad in grads)


def _block_maps(inputs: Tensors, scale: float, norm: bool) -> Tensors:
    """(read, keys, w, u, scores, decay) of every block, differentiable."""
    q, k, v, g, beta = inputs
    if norm:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[2] // k.shape[2]
    q = q.transpose(1, 2).repeat_interleave(group, dim=1)
    k = k.transpose(1, 2).repeat_interleave(group, dim=1)
    v, g, beta = v.transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2)
    # In fp64: under strong decay, gradients of gates are small differences of large sums.
    total = g.double().cumsum(2)
    # Above the diagonal exp(G_i - G_j) may overflow: it is masked before the exponential.
    chunk = g.shape[2]
    upper = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
    between = (total[:, :, :, None] - total[:, :, None, :]).masked_fill(upper, float("-inf"))
    between = between.exp().to(k.dtype)
    since = total.exp()[:, :, :, None].to(k.dtype)
    until = (total[:, :, -1:] - total).exp()[:, :, :, None].to(k.dtype)
    whole = total[:, :, -1].exp().to(k.dtype)
    k_beta = k * beta[:, :, :, None]
    system = (k_beta @ k.mT * between).tril(-1)
    right = torch.cat([k_beta * since, v * beta[:, :, :, None]], dim=3)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    w, u = solved[..., : k.shape[3]], solved[..., k.shape[3] :]
    scores = scale * (q @ k.mT) * between
    return scale * q * since, k * until, w, u, scores, whole


def _step(
    prep: Prepared, block: torch.Tensor, u: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    writes = u - prep.w[block] @ state
    return prep.decay[block][:, :, None, None] * state + prep.keys[block].mT @ writes


def _enter(
    prep: Prepared,
    levels: tuple[Level, ...],
    slots: StateSlots,
    states: torch.Tensor,
    start: torch.Tensor | None = None,
) -> Iterator[tuple[Level, torch.Tensor, Iterator[tuple[int, torch.Tensor]]]]:
    """Each level with its incoming states and its chunks: (runs that have it, their blocks)."""
    offsets = prep.tables.block_offsets.long()
    for level in levels:
        runs = level.runs.long()
        read = slots.read[runs].long()
        state = states.new_zeros(len(runs), *states.shape[1:])
        if start is not None:
            state[:] = start
        state[read >= 0] = states[read[read >= 0]]
        yield (
            level,
            state,
            ((count, offsets[runs[:count]] + c) for c, count in enumerate(level.active)),
        )


def _leave(level: Level, slots: StateSlots, states: torch.Tensor, state: torch.Tensor) -> None:
    write = slots.write[level.runs.long()].long()
    states[write[write >= 0]] = state[write >= 0]


def _block_tokens(tables: RecurrenceTables) -> torch.Tensor:
    """int64[NB, C]: token of each row of each block; rows past a run's end point one past all."""
    run, number = tables.block_runs.long().unbind(1)
    starts = tables.starts.long()
    rows = torch.arange(tables.chunk, device=starts.device)
    tokens = (starts[run] + number * tables.chunk)[:, None] + rows
    return torch.where(tokens < starts[run + 1][:, None], tokens, tables.num_tokens)


def _to_blocks(x: torch.Tensor, tables: RecurrenceTables) -> torch.Tensor:
    padded = torch.cat([x[: tables.num_tokens], x.new_zeros(1, *x.shape[1:])])
    return padded[_block_tokens(tables)]


def _from_blocks(x: torch.Tensor, tables: RecurrenceTables) -> torch.Tensor:
    result = x.new_zeros(tables.num_tokens + 1, *x.shape[2:])
    result[_block_tokens(tables)] = x
    return result[:-1]
