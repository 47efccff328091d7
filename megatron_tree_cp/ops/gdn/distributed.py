"""Distributed gated delta rule: preparation, state passes, one exchange each way, outputs.

    forward    prepare all tokens | roots with exports, (M, E) of other exports | start exchange
               | roots without exports | wait, compose | runs below other ranks | outputs
    backward   prepare and walk all states again | local parts | components below other ranks:
               dS_in or B | start exchange | roots without exports | wait, compose
               | components with exports | gradients of tokens

Every rank calls the same exchanges, with or without anything to send; a row whose paths never cross
ranks calls none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.ops.gdn.registry import Implementation
from megatron_tree_cp.ops.gdn.summaries import compose_gradients, compose_states, start_exchange
from megatron_tree_cp.ops.gdn.tables import RecurrenceTables, StateSlots, recurrence_tables

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class DeltaRule:
    """What one call fixes beside its tensors."""

    ctx: TreeContext
    tables: RecurrenceTables
    kernel: Any
    scale: float
    norm: bool
    final: bool
    state: tuple[int, int, int]
    """Hv, Dk, Dv."""

    dtype: torch.dtype
    """Of states between runs: fp32, fp64 for fp64."""

    def slots(self, initial: bool) -> StateSlots:
        """Where runs read and leave states in this call."""
        return self.tables.state_slots[int(initial) + 2 * int(self.final)]


class DistributedDeltaRule(torch.autograd.Function):
    """One layer on one rank; returns (out [T, Hv, Dv], final states [leaves, Hv, Dk, Dv])."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial: torch.Tensor | None,
        tree: TreeContext,
        scale: float,
        norm: bool,
        final: bool,
        implementation: Implementation,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rule = DeltaRule(
            tree,
            recurrence_tables(tree),
            implementation.load(),
            scale,
            norm,
            final,
            state=(v.shape[1], k.shape[2], v.shape[2]),
            dtype=torch.promote_types(q.dtype, torch.float32),
        )
        inputs = (q, k, v, g, beta)
        out, ends, (incoming, transfers, saved) = forward_states(inputs, initial, rule)
        ctx.save_for_backward(initial, incoming, transfers, *saved)
        ctx.rule, ctx.dtypes = rule, tuple(x.dtype for x in inputs)
        ctx.set_materialize_grads(False)
        return pad(out.to(q.dtype), tree.num_tokens), ends

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dfinal: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        initial, incoming, transfers, *saved = ctx.saved_tensors
        rule: DeltaRule = ctx.rule
        tree = rule.ctx
        if dout is None:
            heads, _, value_dim = rule.state
            dout = incoming.new_zeros(tree.num_tokens, heads, value_dim)
        grads, dinitial = backward_states(
            dout, dfinal, initial, (incoming, transfers, tuple(saved)), rule
        )
        padded = tuple(
            pad(grad.to(dtype), tree.num_tokens)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return *padded, dinitial, None, None, None, None, None


def forward_states(
    inputs: Tensors, initial: torch.Tensor | None, rule: DeltaRule
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor, Tensors]]:
    """Outputs and final states from inputs [T, ...], and what backward needs again.

    Outputs are [n, Hv, Dv] of the real rows, or of all T with padding 0. Backward needs the states
    that enter at the heads, the transfers of this rank's exports, and what the kernel restores its
    preparation from.
    """
    tables, kernel, part = rule.tables, rule.kernel, rule.tables.part
    slots = rule.slots(initial is not None)
    prep = kernel.prepare(inputs, tables, rule.scale, rule.norm)
    states = _initial_slots(initial, rule, slots)
    incoming = states[: len(part.heads)]
    heads, key_dim, value_dim = rule.state
    transfers = states.new_zeros(0, heads, key_dim, key_dim)
    if tables.exchanges:
        kernel.pass_states(prep, tables.early, slots, states)
        bank = states[slots.write[tables.export_runs].long()]
        if len(part.transfers):
            table = kernel.summarise(prep, tables.summary, tables.summary_slots)
            summary = table[tables.summary_slots.write[tables.transfer_runs].long()]
            bank[tables.transfer_places] = summary[..., :value_dim]
            transfers = summary[..., value_dim:].contiguous()
        pending = start_exchange(rule.ctx, "states", part.forward, bank, transfers)
    kernel.pass_states(prep, tables.rest, slots, states)
    if tables.exchanges:
        ends = compose_states(part.state_nodes, *pending.wait())
        if len(part.incoming):
            torch.stack([ends[node] for node in part.incoming], out=incoming)
        kernel.pass_states(prep, tables.late, slots, states)
    final = _final_states(states, rule, slots) if rule.final else None
    # A copy: a view would keep the states of all slots alive until backward.
    return kernel.output(prep), final, (incoming.clone(), transfers, prep.saved)


def backward_states(
    dout: torch.Tensor,
    dfinal: torch.Tensor | None,
    initial: torch.Tensor | None,
    kept: tuple[torch.Tensor, torch.Tensor, Tensors],
    rule: DeltaRule,
) -> tuple[Tensors, torch.Tensor | None]:
    """(dq, dk, dv, dg, dbeta) from dout [T, Hv, Dv], and the gradient of the initial states.

    Each of the first is [n, ...] of the real rows, or of all T with padding 0.
    """
    tables, kernel, part = rule.tables, rule.kernel, rule.tables.part
    incoming, transfers, saved = kept
    slots = rule.slots(initial is not None)
    prep = kernel.restore(saved, tables, rule.scale, rule.norm)
    states = _initial_slots(initial, rule, slots)
    states[: len(part.heads)] = incoming
    kernel.pass_states(prep, tables.every, slots, states)
    del states
    kernel.begin_backward(prep, dout)
    into = tables.gradient_slots[dfinal is not None]
    grads = incoming.new_empty(into.count, *rule.state)
    runs, exports = len(part.start), len(part.exports)
    grads[runs : runs + exports] = 0
    if dfinal is not None:
        grads[runs + exports :] = dfinal[tables.leaf_ids].to(grads.dtype)
    if tables.exchanges:
        kernel.pass_gradients(prep, tables.exact, into, grads)
        # What stands between runs alone: `open` walks them again with all that enters.
        kernel.pass_gradients(prep, tables.partial, into, grads, keep=False)
        bank = grads.new_zeros(len(part.gradient_bank), *rule.state)
        for entry, heads in enumerate(part.gradient_bank):
            for head in heads:
                bank[entry] += grads[head]
        pending = start_exchange(rule.ctx, "gradients", part.backward, bank, transfers)
    kernel.pass_gradients(prep, tables.rest, into, grads)
    if tables.exchanges:
        zero = grads.new_zeros(rule.state)
        nodes = compose_gradients(part.gradient_nodes, *pending.wait(), zero)
        if exports:
            entering = grads[runs : runs + exports]
            torch.stack([nodes[node] for node in part.outgoing], out=entering)
        kernel.pass_gradients(prep, tables.open, into, grads)
    dinitial = None
    if initial is not None:
        dinitial = torch.zeros_like(initial)
        dinitial[tables.root_ids] = grads[tables.root_runs].to(initial.dtype)
    return kernel.token_gradients(prep, dout), dinitial


def _initial_slots(
    initial: torch.Tensor | None, rule: DeltaRule, slots: StateSlots
) -> torch.Tensor:
    """The state slots [count, Hv, Dk, Dv], the local roots' initial states in their places."""
    states = torch.empty(slots.count, *rule.state, dtype=rule.dtype, device=rule.ctx.device)
    if initial is not None:
        first = len(rule.tables.part.heads)
        roots = rule.tables.root_ids
        states[first : first + len(roots)] = initial[roots].to(rule.dtype)
    return states


def _final_states(states: torch.Tensor, rule: DeltaRule, slots: StateSlots) -> torch.Tensor:
    tables = rule.tables
    final = states.new_zeros(tables.num_leaves, *states.shape[1:])
    final[tables.leaf_ids] = states[slots.write[tables.leaf_runs].long()]
    return final


def pad(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Append zero rows up to `rows`: padding comes out exactly 0, whatever the inputs hold."""
    if x.shape[0] == rows:
        return x
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded
