"""What a run leaves behind for comparison: gradients, weights and routing, by canonical name."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from .canonical import Piece, Tensors, load, pieces

Routes = dict[tuple[int, int], dict[int, tuple[int, ...]]]
"""{(layer number, sample): {row index: experts}}."""


@dataclass
class Trace:
    """One rank's record of one run."""

    initial: dict[str, Piece] = field(default_factory=dict)
    gradients: dict[str, Piece] = field(default_factory=dict)
    final: dict[str, Piece] = field(default_factory=dict)
    routes: Routes = field(default_factory=dict)
    handshakes: int = 0
    """Shape exchanges between pipeline stages."""


class Probe:
    """Records one run of this process; ``weights`` are canonical initial ones, None keeps them."""

    def __init__(self, weights: Tensors | None):
        self.weights, self.trace = weights, Trace()
        self.step = 0
        self.shards: dict[int, tuple[Any, int, np.ndarray]] = {}
        self.path: tuple[int, np.ndarray] | None = None
        """Of the reference: sample and row indices of the trajectories in the next forward."""

    def installed(self) -> ExitStack:
        """Wrap Megatron and the trainer for the length of one run."""
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.training import training

        from megatron_tree_cp.megatron import trainer
        from megatron_tree_cp.megatron.moe import TreeTopKRouter

        stack = ExitStack()

        def wrap(target: Any, name: str, wrapper: Any) -> None:
            stock = getattr(target, name)
            stack.enter_context(
                mock.patch.object(target, name, lambda *a, **k: wrapper(stock, *a, **k))
            )

        wrap(training, "setup_model_and_optimizer", self._setup)
        wrap(trainer, "build_batch", self._build_batch)
        wrap(TreeTopKRouter, "routing", self._tree_routing)
        wrap(TopKRouter, "routing", self._stock_routing)
        wrap(dist, "batch_isend_irecv", self._exchange)
        return stack

    def _setup(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = stock(*args, **kwargs)
        if self.weights is None:
            _slow_decay(model)
        else:
            load(model, self.weights)
        optimizer.reload_model_params()
        self.trace.initial = pieces(model, lambda p: p)
        step = optimizer.step

        def recorded_step() -> Any:
            self.step += 1
            if self.step == 1:
                _complete_gradients(model)
                self.trace.gradients = pieces(model, lambda p: getattr(p, "main_grad", p * 0))
            result = step()
            if self.step == 2:
                self.trace.final = pieces(model, lambda p: p)
            return result

        optimizer.step = recorded_step
        return model, optimizer, scheduler

    def _build_batch(self, stock: Any, planned: Any, *args: Any, **kwargs: Any) -> Any:
        batch = stock(planned, *args, **kwargs)
        rank, layouts = batch.context.rank, planned.plan.layouts
        for name, routing in (("main", batch.routing), ("gdn", batch.island_routing)):
            if routing is not None:
                indices = layouts[name].row_indices(rank)
                self.shards[id(routing)] = routing, planned.sample, indices
        return batch

    def _tree_routing(self, stock: Any, router: Any, logits: Any, padding_mask: Any) -> Any:
        probs, chosen = stock(router, logits, padding_mask)
        _, sample, indices = self.shards[id(padding_mask)]
        if router.config.sequence_parallel:
            indices = np.split(indices, router.tp_group.size())[router.tp_group.rank()]
        self._note(router, sample, indices, chosen)
        return probs, chosen

    def _stock_routing(self, stock: Any, router: Any, *args: Any, **kwargs: Any) -> Any:
        probs, chosen = stock(router, *args, **kwargs)
        if self.path is not None:
            self._note(router, *self.path, chosen)
        return probs, chosen

    def _note(self, router: Any, sample: int, indices: np.ndarray, chosen: torch.Tensor) -> None:
        if self.step:
            return  # after the first update weights differ by rounding
        routes = self.trace.routes.setdefault((router.layer_number, sample), {})
        for index, row in zip(indices.tolist(), chosen):
            if index >= 0:
                experts = tuple(row.nonzero()[:, 0].tolist())
                assert routes.setdefault(index, experts) == experts, (
                    "a shared token's routes differ"
                )

    def _exchange(self, stock: Any, ops: Any) -> Any:
        self.trace.handshakes += any(op.tensor.dtype == torch.int64 for op in ops)
        return stock(ops)


def _slow_decay(model: list[torch.nn.Module]) -> None:
    """Let recurrent states live for tens of tokens: a state of the wrong branch shows only then.

    Megatron starts decays so strong that a state is gone after two tokens.
    """
    with torch.no_grad():
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if name.endswith("A_log"):
                    parameter -= 5


def _complete_gradients(model: list[torch.nn.Module]) -> None:
    """With the distributed optimizer each rank holds the sums of its shard only: gather them."""
    for chunk in model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            if not buffer.ddp_config.use_distributed_optimizer:
                continue
            for bucket in buffer.buckets:
                group = buffer.data_parallel_group
                shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
