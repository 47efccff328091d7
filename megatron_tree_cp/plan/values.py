"""Immutable value types over numpy arrays."""

from __future__ import annotations

from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


def frozen_array(values: ArrayLike, dtype: Any = np.int64) -> Array:
    """A read-only contiguous array of ``dtype`` (a view when ``values`` already is one)."""
    array: Array = np.ascontiguousarray(values, dtype=dtype).view()
    array.flags.writeable = False
    return array


def freeze_arrays(value: Any) -> None:
    """Make the arrays of a frozen dataclass read-only: they come writable out of a pickle."""

    def frozen(held: Any) -> Any:
        if isinstance(held, np.ndarray):
            return frozen_array(held, held.dtype)
        if isinstance(held, tuple) and any(isinstance(item, np.ndarray) for item in held):
            return tuple(frozen(item) for item in held)
        return held

    for field in fields(value):
        held = getattr(value, field.name)
        made = frozen(held)
        if made is not held:
            object.__setattr__(value, field.name, made)


def expand_ranges(starts: Array, lengths: Array) -> Array:
    """int64[sum(lengths)]: the integers of ``[start, start + length)``, range after range."""
    offsets = np.cumsum(lengths) - lengths
    shift: Array = np.repeat(starts - offsets, lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + shift


def merge_sorted(first: Array, second: Array) -> Array:
    """The distinct values of two ascending arrays, ascending (`np.union1d` hashes them first)."""
    both = np.concatenate([first, second])
    both.sort(kind="stable")
    return both[np.concatenate([[True], both[1:] != both[:-1]])] if len(both) else both


class ArrayValue:
    """Base of the frozen dataclasses that hold arrays.

    Unpickling goes through the constructor: read-only flags do not survive a pickle, and derived
    (cached) arrays should not travel.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return type(self), tuple(
            dict(value) if isinstance(value, MappingProxyType) else value for value in values
        )
