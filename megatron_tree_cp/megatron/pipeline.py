"""Pipeline stages that know from the plan how large the next tensor is.

Shards change size with every row. Megatron's answer (``variable_seq_lengths``) is to send a shape
ahead of every tensor and to wait for the device before it is read. But all stages of a pipeline
work on the same rows, and a microbatch has one shard size on one context-parallel rank, whatever
the stage, the model chunk or the direction; so shapes follow from the order of the schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config

Shape = tuple[int, ...]


class PlannedP2PCommunicator(P2PCommunicator):
    """Megatron's communicator for one forward-backward pass, without its exchange of shapes.

    ``shard_size(m)`` is the number of tokens of microbatch ``m`` of this pass on this
    context-parallel rank. Tensors between two ranks arrive in the order they were sent in, and
    every rank runs its (microbatch, model chunk) pairs in the order of one table. Between
    neighbouring stages all of them travel; from the last rank back to the first (and, backward,
    from the first to the last) all but those of the model's last chunk.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        shard_size: Callable[[int], int],
        num_microbatches: int,
        num_chunks: int = 1,
    ) -> None:
        super().__init__(pp_group, config)
        group_size = config.microbatch_group_size_per_vp_stage or num_microbatches
        table = get_schedule_table(num_microbatches, num_chunks, group_size)
        every = [microbatch for microbatch, _ in table]
        between_ends = [microbatch for microbatch, chunk in table if chunk != num_chunks - 1]
        before = between_ends if self.is_pp_first_stage else every
        after = between_ends if self.is_pp_last_stage else every
        self._shard_size = shard_size
        self._shapes: dict[int, Shape] = {}
        self._order: dict[str, Iterator[int]] = {
            "receive forward": iter(before),
            "send backward": iter(before),
            "receive backward": iter(after),
            "send forward": iter(after),
        }

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        """Shapes of what is about to arrive from the stage before and the stage after."""
        for what, tensor in (("forward", tensor_send_next), ("backward", tensor_send_prev)):
            if tensor is not None:
                self._check(f"send {what}", tensor)
        return (
            self._shape("receive forward") if recv_prev else None,
            self._shape("receive backward") if recv_next else None,
        )

    def _shape(self, event: str) -> Shape:
        microbatch = next(self._order[event])
        if microbatch not in self._shapes:
            tokens = self._shard_size(microbatch)
            if self.config.sequence_parallel:
                tokens //= self.config.tensor_model_parallel_size
            self._shapes[microbatch] = (tokens, 1, self.config.hidden_size)
        return self._shapes[microbatch]

    def _check(self, event: str, tensor: torch.Tensor) -> None:
        """The receiver takes the planned shape for granted, so another one must not leave."""
        microbatch = next(self._order[event])
        shape = self._shapes.setdefault(microbatch, tuple(tensor.shape))
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{event} of microbatch {microbatch}: tensor is {list(tensor.shape)}, its plan "
                f"says {list(shape)}: feed the model the shard's tokens, one row a microbatch"
            )


def with_planned_shapes(forward_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's forward-backward function with a ``PlannedP2PCommunicator``, where PP > 1.

    Its data iterators must be ``RowIterator``s, or Megatron's rerun wrappers of them.
    """

    @functools.wraps(forward_backward)
    def planned(**kwargs: Any) -> Any:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1 or kwargs.get("p2p_communicator") is not None:
            return forward_backward(**kwargs)
        models, iterators = (
            value if isinstance(value, list) else [value]
            for value in (kwargs["model"], kwargs["data_iterator"])
        )
        communicator = PlannedP2PCommunicator(
            group,
            get_model_config(models[0]),
            _shard_sizes(iterators[0]),
            kwargs["num_microbatches"],
            len(models),
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return forward_backward(
            **{**kwargs, "p2p_communicator": communicator, "pg_collection": groups}
        )

    return planned


def _shard_sizes(iterator: Any) -> Callable[[int], int]:
    """Shard size by microbatch of the pass that is about to start."""
    if isinstance(iterator, RerunDataIterator):
        if iterator.replaying:
            batches = iterator.saved_microbatches
            return lambda microbatch: batches[microbatch].context.num_tokens
        iterator = iterator.iterable
    first = iterator.position
    return lambda microbatch: iterator.peek(first + microbatch).context.num_tokens
