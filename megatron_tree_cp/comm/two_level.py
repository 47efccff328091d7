"""A two-level exchange: one hop to a relay on every node, a second one inside the nodes.

Both hops are all-to-alls of the whole CP group; rows of the second stay on their node, so no other
process groups are needed. The transpose runs the hops backwards: a relay adds up what its node
returns, in fp32 and a fixed order (its own share, then ranks ascending), rounds once to the dtype
on the wire, and sends one row home.

The two hops are launched apart. With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) whatever is
launched behind a kernel that waits, waits too: a second hop launched with the first would hold up
the kernel that should run beside both. `start` launches the first hop; `proceed`, or `wait`, the
second, once the caller has launched what may run meanwhile. All ranks call in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_tree_cp.comm.exchange import PendingExchange, RangeExchange
from megatron_tree_cp.comm.ranges import range_indices
from megatron_tree_cp.comm.transport import CollectiveTransport, Transport, all_to_all

if TYPE_CHECKING:
    from megatron_tree_cp.plan.two_level import RankTwoLevel


@dataclass
class PendingHops(PendingExchange):
    """The first of two hops is under way, `buffer` and `event` are its; `second` launches more."""

    second: Callable[[], PendingExchange] | None

    def proceed(self) -> None:
        """Launch the second hop, once."""
        if self.second is not None:
            last = self.second()
            self.buffer, self.event, self.second = last.buffer, last.event, None

    def wait(self) -> torch.Tensor:
        """Launch the second hop if that is left to do, and order the current stream behind it."""
        self.proceed()
        return super().wait()


class TwoLevelRangeExchange(RangeExchange):
    """One rank's part of a planned two-level exchange, ready on a device.

    What leaves the rank and comes home to it, and so `accumulate`, is its first hop's: a row comes
    home once from every node that reads it.

    Args:
        plan: this rank's side of both hops.
        group: process group of all ranks of the exchange.
        device: device of the index tensors.
        stream: CUDA side stream; None runs on the current stream (and on CPU).
        transport: None, or the group's own all-to-all. Peers of one NVLink domain have no second
            level: another transport raises ValueError.
    """

    def __init__(
        self,
        plan: RankTwoLevel,
        group: dist.ProcessGroup | None,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
        transport: Transport | None = None,
    ) -> None:
        if transport is not None and not isinstance(transport, CollectiveTransport):
            raise ValueError(
                f"the {transport.name} exchange has no two-level waves: use --tree-exchange group, "
                "or a cost profile without ranks_per_node"
            )
        super().__init__(plan.first, group, device, stream)
        self.fan_out = RangeExchange(plan.second, group, device, stream)
        self.num_relayed = self.num_recv
        self.num_recv = self.num_rows = plan.num_recv
        self.arrival = range_indices(plan.arrival_starts, plan.arrival_lengths, device)

    def start(self, *tensors: torch.Tensor, after: torch.cuda.Event | None = None) -> PendingHops:
        """As `RangeExchange.start`; of the two hops only the first is launched."""
        self._check(tensors)

        def to_relays() -> torch.Tensor:
            send = self._gather(tensors, self.send_index)
            arrived = send.new_empty((self._num_arriving, *send.shape[1:]))
            self._hop(self, send, arrived[: self.num_relayed])
            return arrived

        first = self._launch(to_relays, tensors, after)
        arrived = first.buffer

        def to_readers() -> torch.Tensor:
            send = arrived.index_select(0, self.fan_out.send_index)
            self._hop(self.fan_out, send, arrived[self.num_relayed :])
            return arrived.index_select(0, self.arrival)

        return self._then(first, to_readers)

    def start_transposed(self, *grads: torch.Tensor) -> PendingHops:
        """As `RangeExchange.start_transposed`; only the hop to the relays is launched."""

        def to_relays() -> torch.Tensor:
            grad = self._gather(grads, None)
            arrived = grad.new_zeros((self._num_arriving, *grad.shape[1:]))
            arrived.index_copy_(0, self.arrival, grad)
            shares = grad.new_empty((self.num_relayed + self.fan_out.num_send, *grad.shape[1:]))
            shares[: self.num_relayed] = arrived[: self.num_relayed]
            self._hop(
                self.fan_out, arrived[self.num_relayed :], shares[self.num_relayed :], back=True
            )
            return shares

        first = self._launch(to_relays, grads)
        shares = first.buffer

        def to_owners() -> torch.Tensor:
            own, returned = shares[: self.num_relayed], shares[self.num_relayed :]
            self.fan_out.accumulate(own, returned)
            home = own.new_empty((self.num_send, *own.shape[1:]))
            self._hop(self, own, home, back=True)
            return home

        return self._then(first, to_owners)

    @property
    def _num_arriving(self) -> int:
        """Rows that either hop brings to this rank."""
        return self.num_relayed + self.fan_out.num_recv

    def _then(self, first: PendingExchange, work: Callable[[], torch.Tensor]) -> PendingHops:
        def second() -> PendingExchange:
            # It reads what the side stream wrote, and nothing of the current one.
            return self._launch(work, ())

        return PendingHops(first.buffer, first.event, second)

    def _hop(
        self,
        hop: RangeExchange,
        send: torch.Tensor,
        received: torch.Tensor,
        back: bool = False,
    ) -> None:
        if self.group is None:
            received.copy_(send)
            return
        counts = hop.recv_counts, hop.send_counts
        if not back:
            counts = counts[::-1]
        all_to_all(send.contiguous(), *counts, self.group, received)
