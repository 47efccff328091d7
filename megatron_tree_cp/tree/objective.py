"""Loss weights of the three usual means, divided before packing (DESIGN: counts are integers).

Megatron accumulates the loss numerator and an *integer* denominator.  A mean over sequences or
groups is therefore written into the weights of the trajectories before they are packed; what is
left to count is a whole number of entries or of trajectories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .packing import PackedRow
from .trajectory import Trajectory

OBJECTIVES = ("token", "sequence", "group")


def trained_tokens(trajectory: Trajectory) -> int:
    """Number of targets with a non-zero loss mask; token 0 is never a target."""
    if trajectory.loss_mask is None:
        return len(trajectory.tokens) - 1
    return int(np.count_nonzero(np.asarray(trajectory.loss_mask)[1:]))


def weigh_trajectories(
    trajectories: Sequence[Trajectory], objective: str = "token"
) -> list[Trajectory]:
    """Divide each trajectory's weights so that ``sum(w * nll) / count`` is the asked-for mean.

    ``token``: unchanged, the count is the number of trained entries.
    ``sequence``: each trajectory contributes the mean of its own trained tokens.
    ``group``: each group contributes the mean over all its trained tokens, times its number of
    trajectories; trajectories without a group are groups of one.
    For the last two the count is the number of trajectories (see :func:`target_counts`).
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}")
    if objective == "token":
        return list(trajectories)
    lengths = [trained_tokens(t) for t in trajectories]
    divisors = [float(n) for n in lengths]
    if objective == "group":
        members: dict[object, list[int]] = defaultdict(list)
        for i, t in enumerate(trajectories):
            members[("alone", i) if t.group is None else ("group", t.group)].append(i)
        for indices in members.values():
            mean_length = sum(lengths[i] for i in indices) / len(indices)
            for i in indices:
                divisors[i] = mean_length
    weighed = []
    for trajectory, divisor in zip(trajectories, divisors, strict=True):
        weights = trajectory.weights
        if weights is None:
            weights = np.ones(len(trajectory.tokens), dtype=np.float64)
        scale = 1.0 / divisor if divisor else 0.0
        weighed.append(replace(trajectory, weights=np.asarray(weights, np.float64) * scale))
    return weighed


def target_counts(row: PackedRow, objective: str = "token") -> np.ndarray:
    """int64 ``[T]``: what each stored token adds to the integer loss denominator.

    ``token``: its number of trained entries.  ``sequence`` and ``group``: the number of
    trajectories that end at this token, so that each trajectory is counted by one rank only.
    """
    if objective == "token":
        return np.diff(row.entries.offsets)
    ends = np.array([path[-1] for path in row.paths], dtype=np.int64)
    return np.bincount(ends, minlength=row.num_tokens)
