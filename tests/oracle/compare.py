"""Parameter-wise comparison with the tolerance of the design, q, k and v slices apart."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]


def split_qkv(tensors: Tensors, heads: int, groups: int, head_dim: int) -> Tensors:
    """Replace every linear_qkv tensor by its q, k and v rows (Megatron's layout is per group)."""
    parts: Tensors = {}
    for name, value in tensors.items():
        if "linear_qkv.weight" not in name and "linear_qkv.bias" not in name:
            parts[name] = value
            continue
        per_group = heads // groups
        grouped = value.reshape(groups, per_group + 2, head_dim, -1)
        parts[f"{name}[q]"] = grouped[:, :per_group]
        parts[f"{name}[k]"] = grouped[:, per_group]
        parts[f"{name}[v]"] = grouped[:, per_group + 1]
    return parts


def deviations(reference: Tensors, other: Tensors) -> dict[str, float]:
    """``||delta|| / max(||g||, 1e-6 * norm of all)`` for every parameter."""
    assert reference.keys() == other.keys(), reference.keys() ^ other.keys()
    total = torch.sqrt(sum((t.double() ** 2).sum() for t in reference.values()))
    return {
        name: float(
            (other[name].double() - value.double()).norm()
            / torch.clamp(value.double().norm(), min=float(1e-6 * total))
        )
        for name, value in reference.items()
    }


def worst(reference: Tensors, others: list[Tensors]) -> tuple[str, float]:
    """The largest deviation over parameters and ranks, with its parameter's name."""
    found = [max(deviations(reference, o).items(), key=lambda item: item[1]) for o in others]
    return max(found, key=lambda item: item[1])
