"""What a row's plan and positions travel in through Megatron's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

if TYPE_CHECKING:
    from ..comm.context import TreeContext
    from .routing_statistics import RoutingStatistics


@dataclass
class TreePackedSeqParams(PackedSeqParams):
    """PackedSeqParams that carry one rank's side of a row plan to every layer.

    Megatron hands this object unchanged from the model's forward to each core attention, also
    through pipeline schedules and recomputation. ``qkv_format`` stays ``"sbhd"``: the ``"thd"``
    paths of Megatron assume equal zigzag shards. ``tokens_per_sample`` stays None, since it makes
    MoE layers reshape their input to equal sequences.
    """

    qkv_format: str = "sbhd"

    tree: TreeContext | None = None
    """Plan and groups of this microbatch's row, shared by all layers."""

    positions: Tensor | None = None
    """int64 [T]: position of each token of this context-parallel rank's shard (0 at padding).

    With sequence parallelism these are still all T tokens, because attention runs on the sequence
    gathered over the tensor-parallel group."""

    routing: RoutingStatistics | None = None
    """Token weights in router statistics; only layers with experts read it."""

    island: TreePackedSeqParams | None = None
    """What stands for these parameters in layers of islands, where the row's plan has a layout for
    them (`megatron.islands`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qkv_format != "sbhd":
            raise ValueError(
                f"TreePackedSeqParams needs qkv_format='sbhd', got {self.qkv_format!r}: "
                "leave the field at its default"
            )
