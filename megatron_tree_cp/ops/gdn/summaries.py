"""Exchange of run summaries, and their composition along the tree.

States are [., H, Dk, Dv], transfers M [., H, Dk, Dk]. On the wire they are cut, as they lie in
memory, into rows of H * Dk numbers, Dv or Dk of them: one all-to-all carries both shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.comm.exchange import PendingExchange, RangeExchange
from megatron_tree_cp.plan.exchange import RankExchange
from megatron_tree_cp.plan.recurrence import GradientNode, StateNode, SummaryExchange
from megatron_tree_cp.plan.values import frozen_array

Matrices = Sequence[torch.Tensor]


@dataclass(frozen=True)
class PendingSummaries:
    """Summaries on their way; `wait()` gives them beside the rank's own."""

    states: torch.Tensor
    transfers: torch.Tensor
    plan: SummaryExchange
    pending: PendingExchange

    def wait(self) -> tuple[Matrices, Matrices]:
        """States and transfers, the rank's own first, then those of each source rank."""
        received = self.pending.wait()
        heads, key_dim, value_dim = self.states.shape[1:]
        states, transfers, at = [*self.states], [*self.transfers], 0
        for num_states, num_transfers in zip(
            self.plan.recv_states, self.plan.recv_transfers, strict=True
        ):
            for parts, count, width in (
                (states, num_states, value_dim),
                (transfers, num_transfers, key_dim),
            ):
                rows = received[at : at + count * width]
                parts += rows.view(count, heads, key_dim, width)
                at += count * width
        return states, transfers


def start_exchange(
    ctx: TreeContext,
    name: str,
    plan: SummaryExchange,
    states: torch.Tensor,
    transfers: torch.Tensor,
) -> PendingSummaries:
    """Send what `plan` names of the banks `states` and `transfers`; all ranks call this."""
    exchange = summary_exchange(ctx, name, plan, len(states), *states.shape[2:])
    return PendingSummaries(
        states, transfers, plan, exchange.start(torch.cat([_rows(states), _rows(transfers)]))
    )


def summary_exchange(
    ctx: TreeContext,
    name: str,
    plan: SummaryExchange,
    num_states: int,
    key_dim: int,
    value_dim: int,
) -> RangeExchange:
    """The exchange of a bank of ``num_states`` states and its transfers, made once a row."""
    return ctx.cached(
        ("summary exchange", name, key_dim, value_dim),
        lambda: RangeExchange(
            _row_ranges(plan, num_states, key_dim, value_dim),
            ctx.cp_group,
            ctx.device,
            ctx.stream,
        ),
    )


def _rows(matrices: torch.Tensor) -> torch.Tensor:
    count, heads, key_dim, columns = matrices.shape
    return matrices.reshape(count * columns, heads * key_dim)


def _row_ranges(
    plan: SummaryExchange, num_states: int, key_dim: int, value_dim: int
) -> RankExchange:
    """The exchange in rows of the buffer [states; transfers]."""
    starts, lengths, counts = [], [], []
    for states, transfers in zip(plan.send_states, plan.send_transfers, strict=True):
        starts += [states * value_dim, num_states * value_dim + transfers * key_dim]
        lengths += [np.full(len(states), value_dim), np.full(len(transfers), key_dim)]
        counts.append(len(states) * value_dim + len(transfers) * key_dim)
    received = [
        s * value_dim + t * key_dim
        for s, t in zip(plan.recv_states, plan.recv_transfers, strict=True)
    ]
    total = sum(received)
    return RankExchange(
        send_starts=frozen_array(np.concatenate(starts)),
        send_lengths=frozen_array(np.concatenate(lengths)),
        send_counts=tuple(counts),
        recv_counts=tuple(received),
        recv_starts=frozen_array([0] if total else []),
        recv_lengths=frozen_array([total] if total else []),
    )


def compose_states(
    nodes: tuple[StateNode, ...], states: Matrices, transfers: Matrices
) -> list[torch.Tensor]:
    """End state [H, Dk, Dv] of every node, parents before children."""
    ends: list[torch.Tensor] = []
    for node in nodes:
        end = states[node.state]
        if node.transfer >= 0:
            end = torch.baddbmm(end, transfers[node.transfer], ends[node.parent])
        ends.append(end)
    return ends


def compose_gradients(
    nodes: tuple[GradientNode, ...], states: Matrices, transfers: Matrices, zero: torch.Tensor
) -> list[torch.Tensor]:
    """Gradient [H, Dk, Dv] that enters at the end of every node, children before parents.

    ``zero`` is the gradient of a node that nothing enters.
    """
    gradients: list[torch.Tensor] = []
    for node in nodes:
        total = zero
        for state in node.states:
            total = total + states[state]
        for transfer, child in node.products:
            total = torch.baddbmm(total, transfers[transfer].mT, gradients[child])
        gradients.append(total)
    return gradients
