"""A tree context whose attention exchanges move nothing: what a layer costs without its links."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..comm.context import TreeContext
from ..comm.exchange import PendingExchange, RangeExchange
from ..ops.attention.stages import attention_stages


class SilentExchange(RangeExchange):
    """A `RangeExchange` that hands out buffers of the right shape at once."""

    def __init__(self, exchange: RangeExchange) -> None:
        vars(self).update(vars(exchange))

    def start(
        self, *tensors: torch.Tensor, after: torch.cuda.Event | None = None
    ) -> PendingExchange:
        """A buffer as the exchange would receive it."""
        return PendingExchange(_buffer(tensors, self.num_rows), None)

    def start_transposed(self, *grads: torch.Tensor) -> PendingExchange:
        """A buffer as the exchange would return it."""
        return PendingExchange(_buffer(grads, self.num_send), None)


def _buffer(tensors: tuple[torch.Tensor, ...], rows: int) -> torch.Tensor:
    first = tensors[0]
    if len(tensors) == 1:
        return first.new_zeros((rows, *first.shape[1:]))
    return first.new_zeros(rows, sum(math.prod(x.shape[1:]) for x in tensors))


def without_exchanges(context: TreeContext, window: int | None) -> TreeContext:
    """A second context of the same plan with silent attention exchanges."""
    silent = TreeContext(context.plan, context.cp_group, context.device, context.tp_group)
    stages = attention_stages(context, window)
    quiet = replace(stages, exchanges=tuple(SilentExchange(e) for e in stages.exchanges))
    silent.cached(("attention_stages", window), lambda: quiet)
    return silent
