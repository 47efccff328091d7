"""A model's tensors by canonical name, whatever the topology cut it into.

The canonical tensor is the one that one rank would hold: layers by global number, experts by
global number, tensor-parallel slices together, a tied output layer under its embedding's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a canonical tensor."""

    tensor: torch.Tensor
    dim: int | None
    """Axis that tensor parallelism splits; None where the whole tensor is here."""
    gated: bool
    """Gate and up halves of a gated MLP are split apart."""
    tp_rank: int
    tp_size: int


def named(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """(canonical name, parameter or expert bias, axis that is split) of this rank's chunks."""
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
            yield name, value, value.partition_dim if split else None


def pieces(
    chunks: list[torch.nn.Module], value: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Piece]:
    """This rank's pieces of ``value(parameter)`` by canonical name."""
    from megatron.core import parallel_state as mpu

    place = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    return {
        name: Piece(value(tensor).detach().clone().float(), dim, "linear_fc1" in name, *place)
        for name, tensor, dim in named(chunks)
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
    if about.gated:
        halves = zip(*(part.chunk(2, about.dim) for part in ordered))
        ordered = [torch.cat(half, about.dim) for half in halves]
    return torch.cat(ordered, about.dim)


def load(chunks: list[torch.nn.Module], whole: Tensors) -> None:
    """Set this rank's parameters (and expert biases) to canonical values."""
    from megatron.core import parallel_state as mpu

    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for name, tensor, dim in named(chunks):
            value = whole[name]
            if dim is not None and "linear_fc1" in name:
                halves = [half.chunk(size, dim)[rank] for half in value.chunk(2, dim)]
                value = torch.cat(halves, dim)
            elif dim is not None:
                value = value.chunk(size, dim)[rank]
            tensor.copy_(value)
