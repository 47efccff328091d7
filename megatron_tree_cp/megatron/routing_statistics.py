"""What the routers of one microbatch weigh their statistics with, made on the CPU from its row.

A router adds up statistics over tokens: balancing losses, the z loss, tokens an expert. ``stored``
counts every stored token once; ``logical`` counts it once a trajectory through it, which gives the
sums of the trajectories alone. Padding counts 0 in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..comm.upload import upload
from ..tree.packing import PackedRow

STATISTICS = ("stored", "logical")


@dataclass(frozen=True)
class Sequences:
    """Which trajectories pass which token, by *pieces*: tokens that the same trajectories pass.

    A piece is a segment, or a part of one where a trajectory ends inside it.
    """

    piece: Tensor
    """int64 ``[T]``: piece of each token of this rank's shard; 0 at padding."""
    num_pieces: int
    """Pieces of the whole row."""
    pairs: Tensor
    """int64 ``[2, N]``: (piece, trajectory) for every piece that a trajectory passes."""
    lengths: Tensor
    """float32 ``[J]``: tokens of each trajectory."""


@dataclass(frozen=True)
class RoutingStatistics:
    """Weights of one microbatch's tokens in router statistics."""

    weights: Tensor
    """int64 ``[T]`` of this context-parallel rank's shard: 1 or the multiplicity; 0 at padding.

    With sequence parallelism these are all T tokens; a router takes its tensor-parallel rank's."""
    total: int
    """Sum of the weights over the whole row, known on every rank without communication."""
    sequences: Sequences | None = None
    """Only where a loss per trajectory asks for it (``seq_aux_loss``)."""


def routing_statistics(
    row: PackedRow,
    row_indices: np.ndarray,
    device: torch.device,
    statistics: str = "stored",
    per_sequence: bool = False,
) -> RoutingStatistics:
    """Statistics weights of one shard.

    ``row_indices`` int64 ``[T]`` are the shard's (-1 padding). ``per_sequence`` adds what losses
    per trajectory need; a stored token belongs to no single sequence, so it needs ``logical``.
    Raises ValueError for another kind of statistics.
    """
    if statistics not in STATISTICS:
        raise ValueError(f"unknown statistics {statistics!r}: use {' or '.join(STATISTICS)}")
    if per_sequence and statistics != "logical":
        raise ValueError("losses per sequence need statistics='logical'")
    real = row_indices >= 0
    source = np.where(real, row_indices, 0)
    counts = np.ones(row.num_tokens, np.int64)
    if statistics == "logical":
        counts = row.multiplicity.astype(np.int64)
    return RoutingStatistics(
        weights=upload(np.where(real, counts[source], 0), device),
        total=int(counts.sum()),
        sequences=_sequences(row, source, real, device) if per_sequence else None,
    )


def _sequences(
    row: PackedRow, source: np.ndarray, real: np.ndarray, device: torch.device
) -> Sequences:
    tree = row.tree
    lasts = np.array([path[-1] for path in row.paths], dtype=np.int64)
    starts = np.unique(np.concatenate([tree.segment_starts, lasts + 1]))
    starts = starts[starts < row.num_tokens]
    piece_of_token = np.searchsorted(starts, np.arange(row.num_tokens), side="right") - 1
    pieces, owners = [], []
    for trajectory, last in enumerate(lasts):
        for segment in tree.path(int(tree.segment_of[last])):
            end = min(int(tree.segment_ends[segment]) - 1, int(last))
            first = piece_of_token[tree.segment_starts[segment]]
            # The last segment of a path may go on after the trajectory's end.
            passed = np.arange(first, piece_of_token[end] + 1)
            pieces.append(passed)
            owners.append(np.full(len(passed), trajectory))
    pairs = np.stack([np.concatenate(pieces), np.concatenate(owners)]).astype(np.int64)
    lengths = np.array([len(path) for path in row.paths], np.float32)
    return Sequences(
        piece=upload(np.where(real, piece_of_token[source], 0), device),
        num_pieces=len(starts),
        pairs=upload(pairs, device),
        lengths=upload(lengths, device),
    )
