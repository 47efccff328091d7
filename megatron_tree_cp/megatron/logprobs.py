"""Log-probabilities of every trajectory's tokens under a Megatron model, shared tokens once.

For RL: old and reference log-probs of packed rows, in the order of the caller's trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from ..plan.planner import plan_row
from ..tree.objective import target_counts
from ..tree.packing import PackedRow
from .batch import TreeBatch, build_batch
from .rows import PlannedRow
from .stream import device_of_rank


@torch.no_grad()
def tree_logprobs(model, rows: Sequence[PackedRow]) -> list[np.ndarray]:
    """Log-probs of all targets of all trajectories, on every rank.

    ``model``: a tree model as Megatron builds it (a module, or the list of model chunks), on any
    mix of TP, CP and PP.  ``rows``: the output of ``pack_trajectories``; all ranks of a model
    replica pass the same rows.  Returns float32 ``[len(tokens) - 1]`` per trajectory, in the
    caller's order: entry ``i`` is ``log p(tokens[i + 1] | tokens[: i + 1])``; with ``keep_last``
    rows the final entry, which has no target, is 0.  Dropout must be 0 (tree models refuse it);
    the model's train/eval mode is restored.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if not rows:
        return []
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    planned = [_planned(row, chunks[0]) for row in rows]
    batches = [
        build_batch(
            p,
            mpu.get_context_parallel_group(),
            device_of_rank(),
            mpu.get_tensor_model_parallel_group(),
        )
        for p in planned
    ]
    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        outputs = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks,
            num_microbatches=len(batches),
            seq_length=max(row.num_tokens for row in rows),
            micro_batch_size=1,
            forward_only=True,
        )
    finally:
        for chunk, mode in zip(chunks, training, strict=True):
            chunk.train(mode)
    last_stage = mpu.is_pipeline_last_stage(ignore_virtual=True)
    by_trajectory: dict[int, np.ndarray] = {}
    for number, (row, batch) in enumerate(zip(rows, batches, strict=True)):
        shard = outputs[number]["logprobs"] if last_stage else None
        values = _whole_row(row, batch, shard)
        for trajectory, path in zip(row.trajectories, row.paths, strict=True):
            by_trajectory[trajectory] = values[path]
    return [by_trajectory[index] for index in sorted(by_trajectory)]


def _planned(row: PackedRow, chunk) -> PlannedRow:
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    from .model_shape import model_shape_from_config
    from .tree_model import shard_granule

    config = get_model_config(chunk)
    try:
        pattern = get_attr_wrapped_model(chunk, "hybrid_layer_pattern")
    except RuntimeError:  # a GPTModel has none
        pattern = None
    plan = plan_row(
        row.tree,
        config.context_parallel_size,
        model_shape_from_config(config, pattern),
        tp_size=config.tensor_model_parallel_size,
        granule=shard_granule(config),
    )
    return PlannedRow(0, row, target_counts(row), plan, "", "", 0, 0.0)


def _forward_step(data_iterator, model):
    batch: TreeBatch = next(data_iterator)
    losses = batch.forward(model)

    def collect(output: torch.Tensor):
        logprobs = -output.reshape(-1).float()
        return logprobs.sum(), batch.count, {"logprobs": logprobs}

    return losses, collect


def _whole_row(row: PackedRow, batch: TreeBatch, shard: torch.Tensor | None) -> np.ndarray:
    """float32 ``[T]`` of one row on every rank, from the shards of the last pipeline stage."""
    from megatron.core import parallel_state as mpu

    values = torch.zeros(row.num_tokens, dtype=torch.float32, device=batch.tokens.device)
    if shard is not None:
        real = batch.context.row_indices >= 0
        values[batch.context.row_indices[real]] = shard[real]
        # Shards are disjoint: the sum only places them.
        dist.all_reduce(values, group=mpu.get_context_parallel_group())
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        last = mpu.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, last, group=mpu.get_pipeline_model_parallel_group())
    result = values.cpu().numpy()
    result[row.labels < 0] = 0.0
    return result
