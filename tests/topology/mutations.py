"""Errors that the matrix must notice, each as a patch of the package for one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch


def _loss_per_rank() -> AbstractContextManager:
    """Each rank divides by its own count, as Megatron does without --calculate-per-token-loss."""
    from megatron_tree_cp.megatron import trainer

    stock = trainer.weighted_loss

    def mutated(batch: Any, losses: torch.Tensor) -> Any:
        loss_sum, count = stock(batch, losses)
        return loss_sum / count.clamp(min=1), torch.ones_like(count)

    return mock.patch.object(trainer, "weighted_loss", mutated)


def _statistics(change: Callable[[Any], Any]) -> AbstractContextManager:
    from megatron_tree_cp.megatron import batch

    stock = batch.routing_statistics
    return mock.patch.object(batch, "routing_statistics", lambda *a, **k: change(stock(*a, **k)))


def _padding_counted() -> AbstractContextManager:
    """Padding weighs 1 in router losses."""
    return _statistics(lambda made: dataclasses.replace(made, weights=made.weights.clamp(min=1)))


def _multiplicity_forgotten() -> AbstractContextManager:
    """A shared token counts once, whatever the trajectories through it."""
    return _statistics(lambda made: dataclasses.replace(made, weights=made.weights.clamp(max=1)))


def _total_per_rank() -> AbstractContextManager:
    """Router losses are normalised by the rank's tokens times the number of ranks."""
    return _statistics(lambda made: dataclasses.replace(made, total=2 * int(made.weights.sum())))


def _norms_unmarked() -> AbstractContextManager:
    """Norm weights lack the mark by which Megatron sums their gradients over the TP group."""
    from megatron_tree_cp.megatron import norms

    stock = norms._LocalNorm.__init__

    def mutated(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.weight.sequence_parallel = False

    return mock.patch.object(norms._LocalNorm, "__init__", mutated)


def _states_forgotten() -> AbstractContextManager:
    """Recurrent runs below another rank start from zero."""
    from megatron_tree_cp.ops.gdn import distributed

    stock = distributed.compose_states

    def mutated(*args: Any) -> Any:
        return [torch.zeros_like(state) for state in stock(*args)]

    return mock.patch.object(distributed, "compose_states", mutated)


MUTATIONS: dict[str, Callable[[], AbstractContextManager]] = {
    "loss normalised per rank": _loss_per_rank,
    "padding counted in router losses": _padding_counted,
    "multiplicity forgotten": _multiplicity_forgotten,
    "router losses normalised per rank": _total_per_rank,
    "norms without sequence-parallel mark": _norms_unmarked,
    "states of other ranks forgotten": _states_forgotten,
}
