"""A model's tensors by canonical name, whatever the topology cut it into.

The canonical tensor is the one that one rank would hold: layers by global number, experts by
global number, tensor-parallel slices together, a tied output layer under its embedding's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a canonical tensor."""

    tensor: torch.Tensor
    dim: int | None
    """Axis that tensor parallelism splits; None where the whole tensor is here."""
    sections: tuple[int, ...]
    """Sizes of the parts that tensor parallelism splits one by one; () for one part."""
    tp_rank: int
    tp_size: int


def named(
    chunks: list[torch.nn.Module],
) -> Iterator[tuple[str, torch.Tensor, int | None, tuple[int, ...]]]:
    """(canonical name, parameter or expert bias, axis that is split, sections) of this rank."""
    from megatron.core import parallel_state as mpu
    from megatron.core.utils import unwrap_model

    experts = mpu.get_expert_model_parallel_rank()
    for chunk in unwrap_model(chunks):
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        biases = [(n, b) for n, b in chunk.named_buffers() if n.endswith("expert_bias")]
        for name, value in [*chunk.named_parameters(), *biases]:
            layer = re.search(r"decoder\.layers\.(\d+)", name)
            if layer:
                name = name.replace(layer[0], f"decoder.layers.{numbers[int(layer[1])]}", 1)
            found = re.search(r"local_experts\.(\d+)", name)
            if found:
                here = chunk.config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
                number = experts * here + int(found[1])
                name = name.replace(found[0], f"local_experts.{number}")
            if name == "output_layer.weight" and getattr(value, "shared_embedding", False):
                name = "embedding.word_embeddings.weight"
            # With one expert-tensor-parallel rank experts are whole, although they carry the mark.
            split = getattr(value, "tensor_model_parallel", False) and not found
            dim = value.partition_dim if split else None
            yield name, value, dim, () if dim is None else _sections(name, chunk.config)


def _sections(name: str, config: Any) -> tuple[int, ...]:
    """Relative sizes of the parts of a split tensor that are split one by one."""
    if "linear_fc1" in name:
        return (1, 1)  # gate and up
    if "conv1d" in name or "in_proj" in name:  # of Gated DeltaNet: the queries, keys and values
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        heads = config.linear_num_value_heads
        values = heads * config.linear_value_head_dim
        gates = (values, heads, heads) if "in_proj" in name else ()
        return (keys, keys, values, *gates)
    return ()


def pieces(
    chunks: list[torch.nn.Module], value: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Piece]:
    """This rank's pieces of ``value(parameter)`` by canonical name."""
    from megatron.core import parallel_state as mpu

    place = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    return {
        name: Piece(value(tensor).detach().clone().float(), dim, sections, *place)
        for name, tensor, dim, sections in named(chunks)
    }


def assemble(ranks: list[dict[str, Piece]]) -> Tensors:
    """Canonical tensors from all ranks' pieces; replicas must agree to the last bit."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    about: dict[str, Piece] = {}
    for held in ranks:
        for name, piece in held.items():
            about[name] = piece
            parts = found.setdefault(name, {})
            place = piece.tp_rank if piece.dim is not None else 0
            if place in parts:
                assert torch.equal(parts[place], piece.tensor), f"replicas of {name} differ"
            parts[place] = piece.tensor
    return {name: _join(about[name], found[name]) for name in found}


def _join(about: Piece, parts: dict[int, torch.Tensor]) -> torch.Tensor:
    if about.dim is None:
        return parts[0]
    assert sorted(parts) == list(range(about.tp_size))
    ordered = [parts[rank] for rank in range(about.tp_size)]
    if about.sections:
        parts_of_rank = [_cut(part, about.dim, about.sections) for part in ordered]
        ordered = [torch.cat(same, about.dim) for same in zip(*parts_of_rank)]
    return torch.cat(ordered, about.dim)


def _cut(tensor: torch.Tensor, dim: int, sections: tuple[int, ...]) -> list[torch.Tensor]:
    """The sections of a tensor, or of one rank's slice of it, along ``dim``."""
    unit, rest = divmod(tensor.shape[dim] * sections[0], sum(sections))
    assert not rest, (tensor.shape, sections)
    sizes = [unit * size // sections[0] for size in sections]
    return list(tensor.split(sizes, dim))


def load(chunks: list[torch.nn.Module], whole: Tensors) -> None:
    """Set this rank's parameters (and expert biases) to canonical values."""
    from megatron.core import parallel_state as mpu

    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for name, tensor, dim, sections in named(chunks):
            value = whole[name]
            if dim is not None:
                parts = _cut(value, dim, sections) if sections else [value]
                value = torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)
            tensor.copy_(value)
