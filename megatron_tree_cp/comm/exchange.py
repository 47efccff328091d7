"""Planned exchange of row ranges between the ranks of a CP group, and its transpose.

One exchange is a gather of planned ranges, one `all_to_all_single`, and (for layout changes) a
placement. Its transpose sends every received row's gradient back to the row's owner, who adds the
contributions in ascending order of the returning rank. Every rank calls every collective, with
nothing to send or receive too: the list of collectives is part of the plan, not of the data.

Shapes: n_send rows leave this rank, n_recv rows arrive, W is the product of the trailing dims.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megatron_tree_cp.comm.ranges import range_indices
from megatron_tree_cp.comm.transport import Route, Transport, all_to_all

if TYPE_CHECKING:
    from megatron_tree_cp.plan.exchange import RankExchange


@functools.cache
def exchange_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the side stream of a CUDA device for exchanges, None on CPU.

    One stream per device for the life of the process: the caching allocator keeps a pool per
    stream, so a stream per row would multiply the memory held for receive buffers.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device=device, priority=-1)


@dataclass
class PendingExchange:
    """A started exchange; `wait()` makes the current stream wait and returns the buffer."""

    buffer: torch.Tensor
    event: torch.cuda.Event | None

    def proceed(self) -> None:
        """Launch what is left to launch: nothing. A two-level exchange has a second hop."""

    def wait(self) -> torch.Tensor:
        """Order the current stream behind the exchange (no host wait) and return its buffer."""
        if self.event is not None:
            current = torch.cuda.current_stream(self.buffer.device)
            current.wait_event(self.event)
            # The buffer belongs to the side stream's pool: keep it from being handed out again
            # there while kernels of the current stream still read it.
            self.buffer.record_stream(current)
        return self.buffer


class RangeExchange:
    """One rank's part of a planned exchange, ready on a device.

    Args:
        plan: this rank's send and receive ranges.
        group: process group of the exchange; None for a single rank.
        device: device of the index tensors.
        stream: CUDA side stream; None runs on the current stream (and on CPU).
        transport: how rows travel; the all-to-all of `group` by default.
        counts: int[cp, cp] rows from every source to every destination, for a transport.
        num_rows: rows of the destination buffer, `plan.num_recv` by default. Rows that no range
            covers come out 0 (padding of a layout).
    """

    def __init__(
        self,
        plan: RankExchange,
        group: dist.ProcessGroup | None,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
        num_rows: int | None = None,
        transport: Transport | None = None,
        counts: np.ndarray | None = None,
    ) -> None:
        self.group = group
        self.device = device
        self.stream = stream
        self.send_counts = [int(count) for count in plan.send_counts]
        self.recv_counts = [int(count) for count in plan.recv_counts]
        self.num_send = sum(self.send_counts)
        self.num_recv = int(plan.num_recv)
        self.num_rows = self.num_recv if num_rows is None else num_rows
        if group is None and len(self.send_counts) != 1:
            raise ValueError(
                f"an exchange between {len(self.send_counts)} ranks needs their process group; "
                "pass cp_group to TreeContext"
            )
        self._transport = transport
        if transport is not None:
            if group is None or counts is None:
                raise ValueError("a transport needs the process group and the counts of all ranks")
            rank = dist.get_rank(group)
            self._routes = Route.of(counts, rank), Route.of(counts.T, rank)
        ends = plan.send_starts + plan.send_lengths
        self.min_source_rows = int(ends.max()) if len(ends) else 0
        self.send_index = range_indices(plan.send_starts, plan.send_lengths, device)
        in_order = np.array_equal(
            plan.recv_starts, np.cumsum(plan.recv_lengths) - plan.recv_lengths
        )
        identity = self.num_rows == self.num_recv and in_order
        self.placement = (
            None if identity else range_indices(plan.recv_starts, plan.recv_lengths, device)
        )

    def mark(self) -> torch.cuda.Event | None:
        """This point of the current stream, for `start` to begin behind; None on CPU."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def start(
        self, *tensors: torch.Tensor, after: torch.cuda.Event | None = None
    ) -> PendingExchange:
        """Gather the planned rows of `tensors` [rows, ...] and send them.

        Several tensors travel side by side in one buffer of flattened columns. Returns the pending
        buffer: [num_rows, ...] for one tensor, [num_rows, sum of W] for several. Begins behind the
        work of the current stream so far, or behind ``after``, a mark where the tensors were ready.
        """
        self._check(tensors)

        def gather() -> torch.Tensor:
            received = self._all_to_all(self._gather(tensors, self.send_index), back=False)
            if self.placement is None:
                return received
            buffer = received.new_zeros((self.num_rows, *received.shape[1:]))
            return buffer.index_copy_(0, self.placement, received)

        return self._launch(gather, tensors, after)

    def start_transposed(self, *grads: torch.Tensor) -> PendingExchange:
        """Send gradients of received rows [num_rows, ...] back: pending [num_send, ...].

        Several tensors travel side by side as in `start`. The returned rows are destination-major,
        in the order in which `start` sent them; `accumulate` adds them up.
        """

        def scatter() -> torch.Tensor:
            return self._all_to_all(self._gather(grads, self.placement), back=True)

        return self._launch(scatter, grads)

    def accumulate(self, total: torch.Tensor, returned: torch.Tensor) -> torch.Tensor:
        """Add returned rows [num_send, ...] to their source rows of `total` [rows, ...], in place.

        The sum is fp32 (fp64 for fp64) and rounded once to `total`'s dtype. Contributions to a row
        add up in ascending order of the returning rank, so the sum is bitwise repeatable.
        """
        if total.is_cuda and total.dtype != torch.float64:
            from megatron_tree_cp.comm.returned_rows_triton import add_rows

            # A view, never a copy: the rows of `total` are written.
            flat = total.view(total.shape[0], math.prod(total.shape[1:]))
            add_rows(flat, _rows(returned), *self._by_source_row)
            return total
        wide = total.to(torch.promote_types(total.dtype, torch.float32))
        begin = 0
        for count in self.send_counts:
            # A destination asks for a row once: no two adds of one launch meet.
            rows = slice(begin, begin + count)
            wide.index_add_(0, self.send_index[rows], returned[rows].to(wide.dtype))
            begin += count
        return total if wide is total else total.copy_(wide)

    @functools.cached_property
    def _by_source_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(source rows ascending, their places in the send order), equal rows in send order."""
        target, order = torch.sort(self.send_index, stable=True)
        return target, order

    def _check(self, tensors: tuple[torch.Tensor, ...]) -> None:
        for tensor in tensors:
            if tensor.shape[0] < self.min_source_rows:
                raise ValueError(
                    f"exchange reads row {self.min_source_rows - 1} of a tensor with "
                    f"{tensor.shape[0]} rows; pass the shard of the plan's layout"
                )

    def _gather(
        self, tensors: tuple[torch.Tensor, ...], index: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows `index` of `tensors` (all for None), several side by side as flat columns."""
        parts = tensors
        if index is not None:
            parts = tuple(tensor.index_select(0, index) for tensor in tensors)
        return parts[0] if len(parts) == 1 else torch.cat([_rows(p) for p in parts], dim=1)

    def _launch(
        self,
        work: Callable[[], torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        after: torch.cuda.Event | None = None,
    ) -> PendingExchange:
        """Run `work` on the side stream, behind ``after`` or all that the current stream has.

        Without inputs it reads nothing of the current stream and waits for nothing there.
        """
        if self.stream is None:
            return PendingExchange(work(), None)
        if after is not None:
            self.stream.wait_event(after)
        elif inputs:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            buffer = work()
            event = torch.cuda.Event()
            event.record(self.stream)
        for tensor in inputs:
            tensor.record_stream(self.stream)
        return PendingExchange(buffer, event)

    def _all_to_all(self, send: torch.Tensor, back: bool) -> torch.Tensor:
        if self.group is None:
            return send
        send = send.contiguous()
        if self._transport is not None:
            return self._transport.all_to_all(send, self._routes[back])
        if back:
            return all_to_all(send, self.recv_counts, self.send_counts, self.group)
        return all_to_all(send, self.send_counts, self.recv_counts, self.group)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Flatten the trailing dims, by explicit width: -1 is ambiguous for zero rows."""
    return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
