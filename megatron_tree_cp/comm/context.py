"""`TreeContext`: one rank's torch side of a row plan, shared by all layers of one row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_tree_cp.comm.exchange import RangeExchange, exchange_stream
from megatron_tree_cp.comm.upload import upload
from megatron_tree_cp.plan.exchange import layout_exchange

if TYPE_CHECKING:
    from megatron_tree_cp.comm.transport import Transport
    from megatron_tree_cp.plan.layout import Layout
    from megatron_tree_cp.plan.row_plan import RowPlan

T = TypeVar("T")


class TreeContext:
    """One rank's view of a plan: where its tokens are, and what layers share about the row.

    A context shows the row in one layout, at first in "main"; `in_layout` gives it in another.

    Args:
        plan: the row's plan, equal on all ranks of the CP group.
        cp_group: process group of the plan's ranks; None for CP1.
        device: device of the shard.
        tp_group: tensor-parallel group, for operators that need it.
        stream: CUDA side stream of the exchanges; by default one per device.
        transport: how rows travel between the ranks; by default the group's own all-to-all.

    Attributes:
        rank, cp_size: this rank in the CP group, and the group's size.
        layout_name, layout: the layout that this context shows; what follows is of it.
        num_tokens: T, rows of this rank's shard, padding included.
        num_real: real tokens of the shard; they are its leading rows.
        row_indices: int64[T] row index of every shard row, -1 at padding.
        positions: int64[T] logical position of every shard row, 0 at padding.
    """

    def __init__(
        self,
        plan: RowPlan,
        cp_group: dist.ProcessGroup | None,
        device: torch.device | str,
        tp_group: dist.ProcessGroup | None = None,
        stream: torch.cuda.Stream | None = None,
        transport: Transport | None = None,
    ) -> None:
        group_size = 1 if cp_group is None else dist.get_world_size(cp_group)
        if group_size != plan.cp_size:
            raise ValueError(
                f"plan was made for {plan.cp_size} context-parallel ranks but cp_group has "
                f"{group_size}; plan the row with cp_size={group_size}"
            )
        self.plan = plan
        # A single rank has nobody to talk to; its exchanges are plain gathers.
        self.cp_group = cp_group if group_size > 1 else None
        self.tp_group = tp_group
        self.transport = transport if group_size > 1 else None
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.cp_size = group_size
        self.rank = 0 if cp_group is None else dist.get_rank(cp_group)
        self.stream = stream if stream is not None else exchange_stream(self.device)
        self._memo: dict[Hashable, Any] = {}
        self._show("main")

    def _show(self, name: str) -> None:
        if name not in self.plan.layouts:
            known = ", ".join(sorted(self.plan.layouts))
            raise ValueError(f"the plan has no layout {name!r}; it has: {known}")
        self.layout_name = name
        self.layout: Layout = self.plan.layouts[name]
        self.num_tokens = self.layout.shard_size(self.rank)
        self.num_real = self.layout.num_real(self.rank)
        self.row_indices: torch.Tensor = self.cached("row_indices", self._upload_row_indices)
        self.positions: torch.Tensor = self.cached("positions", self._upload_positions)

    def in_layout(self, name: str) -> TreeContext:
        """This context in layout `name`: the same row, groups and device, that layout's shard.

        What `cached` holds for a layout is made once, however often the layout is asked for. A
        ValueError names the layouts that the plan has.
        """
        if name == self.layout_name:
            return self
        other = copy.copy(self)
        other._show(name)
        return other

    def _upload_row_indices(self) -> torch.Tensor:
        return upload(self.layout.row_indices(self.rank), self.device)

    def _upload_positions(self) -> torch.Tensor:
        rows = self.layout.row_indices(self.rank)
        positions = self.plan.tree.positions[rows.clip(min=0)]
        positions[rows < 0] = 0
        return upload(positions, self.device)

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the value built for `key` once in the life of this row, for this layout."""
        return self._once((self.layout_name, key), build)

    def _once(self, key: Hashable, build: Callable[[], T]) -> T:
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]

    def exchange(self, x: torch.Tensor, src: str, dst: str) -> torch.Tensor:
        """Move rows [T_src, ...] of layout `src` to layout `dst`: [T_dst, ...], differentiable.

        Padding rows come out 0, whatever the input holds there, and receive no gradient. Every
        rank of the CP group calls this in the same order.
        """
        rows = self.in_layout(src).num_tokens
        if x.shape[0] != rows:
            raise ValueError(
                f"x has {x.shape[0]} rows but layout {src!r} gives rank {self.rank} {rows}"
            )
        return _LayoutExchange.apply(x, self.prepare_exchange(src, dst))

    def prepare_exchange(self, src: str, dst: str) -> RangeExchange:
        """What `exchange` between these layouts needs on the device, made once a row."""

        def build() -> RangeExchange:
            target = self.in_layout(dst)
            plan = layout_exchange(self.in_layout(src).layout, target.layout)
            return RangeExchange(
                plan.rank(self.rank),
                self.cp_group,
                self.device,
                self.stream,
                num_rows=target.num_tokens,
                transport=self.transport,
                counts=plan.counts,
            )

        return self._once(("layout_exchange", src, dst), build)


class _LayoutExchange(torch.autograd.Function):
    """Layout change; its gradient travels the same routes backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: RangeExchange) -> torch.Tensor:
        ctx.exchange, ctx.rows = exchange, x.shape[0]
        return exchange.start(x).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        returned = ctx.exchange.start_transposed(grad).wait()
        total = grad.new_zeros((ctx.rows, *grad.shape[1:]))
        # Every row has one owner in either layout: this places rows, it sums nothing.
        return ctx.exchange.accumulate(total, returned), None
