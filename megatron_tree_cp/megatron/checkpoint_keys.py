"""Where a checkpoint's keys differ between Megatron's own specs, ask for those that it has.

Megatron's local spec writes the norm before an MoE layer under the name that Transformer Engine
gives to a norm fused into a dense MLP. Its Transformer Engine spec, which cannot fuse there, writes
the norm by its own name, and so do our specs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values

_OURS, _LOCAL = ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"


def has_such_keys(sharded_state_dict: Any) -> bool:
    """Could any key of this state dict have another name in a checkpoint?"""
    return any(_OURS in getattr(value, "key", "") for value in nested_values(sharded_state_dict))


def follow_stored_keys(sharded_state_dict: Any, stored: Collection[str]) -> int:
    """Rename in place what is stored under the local spec's name; returns how many were.

    ``sharded_state_dict`` holds the sharded tensors that a load asks for, of model and optimizer;
    ``stored`` are the keys in the checkpoint.
    """
    renamed = 0
    for value in nested_values(sharded_state_dict):
        key = getattr(value, "key", "")
        local = key.replace(_OURS, _LOCAL)
        if local != key and key not in stored and local in stored:
            value.key = local
            renamed += 1
    return renamed
