"""Several training runs in the same processes: imports cost more than a tiny run.

Each run goes through the package's own entry and Megatron's real loop; between runs Megatron's
globals are taken down.
"""

from __future__ import annotations

import os
import re
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from .mutations import MUTATIONS
from .probe import Probe, Trace


@dataclass(frozen=True)
class Run:
    """One training run of a session."""

    name: str
    argv: tuple[str, ...]
    reference: str = ""
    """A Family's ``reference`` for the reference side, '' for the tree."""
    weights: Path | None = None
    """Canonical initial weights."""
    mutation: str = ""


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of one run."""

    trace: Trace
    records: list[dict]


def session(rank: int, world_size: int, folder: Path, runs: list[Run]) -> dict[str, Outcome]:
    """Train every run on this rank; a failure names its run. For ``run_ranks``."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    _print_to(folder / f"rank{rank}.log")
    from megatron_tree_cp.megatron import cpu

    cpu.enable()
    outcomes = {}
    for run in runs:
        name = re.sub(r"\W+", "_", run.name)
        try:
            outcomes[run.name] = _train(run, folder / f"{name}.jsonl")
        except BaseException:
            raise AssertionError(f"{run.name} failed:\n{traceback.format_exc()}") from None
        _take_down()
    return outcomes


def _train(run: Run, metrics: Path) -> Outcome:
    import json

    from megatron.training import training

    from megatron_tree_cp.megatron.run import run as train

    from .reference import run_reference

    argv = [*run.argv, "--tree-metrics-file", str(metrics)]
    weights = None if run.weights is None else torch.load(run.weights)
    probe = Probe(weights)
    with ExitStack() as stack:
        if run.mutation:
            stack.enter_context(MUTATIONS[run.mutation]())
        for hooked in ("training_log", "get_forward_backward_func"):  # hooks must not pile up
            stack.enter_context(mock.patch.object(training, hooked, getattr(training, hooked)))
        # The entry ends its process groups; here the next run needs them.
        stack.enter_context(mock.patch.object(dist, "destroy_process_group", lambda: None))
        stack.enter_context(probe.installed())
        if run.reference:
            run_reference(argv, run.reference, probe)
        else:
            train(argv)
    dist.barrier()
    return Outcome(probe.trace, [json.loads(line) for line in metrics.read_text().splitlines()])


def _take_down() -> None:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.training.global_vars import destroy_global_vars

    destroy_global_vars()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    destroy_moe_metrics_tracker()
    parallel_state.destroy_model_parallel()


def _print_to(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
