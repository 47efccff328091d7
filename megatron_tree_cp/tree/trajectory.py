"""Trajectory: one token sequence with what training wants of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import InputError
from .packed_tree import BoolArray, IntArray, integer_vector, read_only

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One root-to-leaf token sequence of n tokens.

    `loss_mask[i]`, `weights[i]`, `advantages[i]` and `old_logprobs[i]` belong to token i *as a
    target*. Token 0 is never a target: what stands there is ignored, NaN too.

    Args:
        tokens: token ids, [n], not negative.
        loss_mask: [n], nonzero where the token is trained, whatever its weight; None trains all.
        weights: loss weights, [n] or one number for all tokens; None means 1. Finite.
        advantages: [n] or one number for all tokens; finite where trained.
        old_logprobs: log-probs under the sampling policy, [n]; finite where trained.
        group: the group of a group-relative objective, an integer or a string.
        source: where it was read, "FILE:LINE", for error messages only.

    Raises:
        InputError: one line that names the field and, where it can, the index.
    """

    tokens: IntArray
    loss_mask: BoolArray | None = None
    weights: FloatArray | None = None
    advantages: FloatArray | None = None
    old_logprobs: FloatArray | None = None
    group: int | str | None = None
    source: str | None = None

    def __init__(
        self,
        tokens: ArrayLike,
        loss_mask: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        advantages: ArrayLike | None = None,
        old_logprobs: ArrayLike | None = None,
        group: int | str | None = None,
        source: str | None = None,
    ) -> None:
        ids = integer_vector(tokens, "tokens")
        if ids.size == 0:
            raise InputError("tokens: a trajectory needs tokens, got none")
        if ids.min() < 0:
            index = int(np.argmax(ids < 0))
            raise InputError(f"tokens[{index}]: token ids are not negative, got {ids[index]}")
        mask = None if loss_mask is None else _mask(loss_mask, ids.size)
        where = np.ones(ids.size, bool) if mask is None else mask.copy()
        where[0] = False
        everywhere = np.arange(ids.size) > 0
        if group is not None and (isinstance(group, bool) or not isinstance(group, int | str)):
            raise InputError(f"group: expected an integer or a string, got {group!r}")
        fields = {
            "tokens": read_only(ids),
            "loss_mask": mask,
            "weights": _floats(weights, "weights", ids.size, everywhere, scalar=True),
            "advantages": _floats(advantages, "advantages", ids.size, where, scalar=True),
            "old_logprobs": _floats(old_logprobs, "old_logprobs", ids.size, where, scalar=False),
            "group": group,
            "source": source,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.tokens, self.loss_mask, self.weights, self.advantages, self.old_logprobs)
        return Trajectory, (*fields, self.group, self.source)

    def __len__(self) -> int:
        return int(self.tokens.size)

    def trained(self) -> BoolArray:
        """Which tokens are trained as targets, bool [n]; always False at 0."""
        mask = np.ones(len(self), bool) if self.loss_mask is None else self.loss_mask.copy()
        mask[0] = False
        return mask

    def cut(self, num_tokens: int) -> Trajectory:
        """The first `num_tokens` tokens with their fields."""

        def first(values: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if values is None else values[:num_tokens]

        return replace(
            self,
            tokens=self.tokens[:num_tokens],
            loss_mask=first(self.loss_mask),
            weights=first(self.weights),
            advantages=first(self.advantages),
            old_logprobs=first(self.old_logprobs),
        )

    def described(self, index: int) -> str:
        """How an error message names the trajectory at `index` of the caller's list."""
        return f"{self.source}: trajectory {index}" if self.source else f"trajectory {index}"


def check_vocabulary(trajectories: Sequence[Trajectory], vocab_size: int) -> None:
    """InputError naming the first token id that is not below `vocab_size`."""
    for index, trajectory in enumerate(trajectories):
        if trajectory.tokens.max() >= vocab_size:
            place = int(np.argmax(trajectory.tokens >= vocab_size))
            raise InputError(
                f"{trajectory.described(index)}: tokens[{place}]: {trajectory.tokens[place]} is "
                f"outside the vocabulary of {vocab_size}"
            )


def _mask(values: ArrayLike, size: int) -> BoolArray:
    array = _numeric(values, "loss_mask", size)
    if array.dtype.kind == "f":
        bad = np.isnan(array)
        bad[0] = False
        if bad.any():
            raise InputError(f"loss_mask[{int(np.argmax(bad))}]: is NaN")
    return read_only(array != 0)


def _floats(
    values: ArrayLike | None, name: str, size: int, where: BoolArray, scalar: bool
) -> FloatArray | None:
    if values is None:
        return None
    if scalar and isinstance(values, int | float | np.number) and not isinstance(values, bool):
        values = np.full(size, float(values))
    array = _numeric(values, name, size).astype(np.float64)
    bad = ~np.isfinite(array) & where
    if bad.any():
        index = int(np.argmax(bad))
        raise InputError(f"{name}[{index}]: must be finite, got {array[index]}")
    return read_only(array)


def _numeric(values: ArrayLike, name: str, size: int) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise InputError(f"{name}: not a vector of numbers (ragged or mixed values)") from error
    if array.ndim != 1:
        raise InputError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.dtype.kind not in "biuf":
        raise InputError(f"{name}: expected numbers, got {array.dtype} values")
    if array.size != size:
        raise InputError(f"{name}: {array.size} values for {size} tokens")
    return array
