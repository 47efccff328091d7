"""Trajectories into packed rows: one prefix forest a row, shared tokens stored once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .packed_tree import IntArray, PackedTree, read_only
from .row_filling import fill_rows
from .trajectory import Trajectory
from .trie import PrefixOrder, Trie

NO_LABEL = -100
_log = logging.getLogger(__name__)


class _Pickled:
    """Pickle a frozen dataclass by its constructor, which makes the arrays read-only again."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            for array in value if isinstance(value, tuple) else (value,):
                if isinstance(array, np.ndarray):
                    read_only(array)

    def __reduce__(self) -> tuple[Any, ...]:
        values = tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return type(self), values


@dataclass(frozen=True, eq=False)
class Entries(_Pickled):
    """What each trajectory wants of each stored token it trains, E entries in CSR form.

    The entries of stored token t are `offsets[t]` to `offsets[t + 1]`, by trajectory ascending.
    """

    offsets: IntArray
    """[T + 1]"""
    trajectory: IntArray
    """Caller's index of the trajectory, [E]."""
    weight: NDArray[np.float32]
    """Loss weight, [E]; 1 where the trajectory gives none."""
    advantage: NDArray[np.float32]
    """[E], NaN where the trajectory gives none."""
    old_logprob: NDArray[np.float32]
    """[E], NaN where the trajectory gives none."""


@dataclass(frozen=True, eq=False)
class PackedRow(_Pickled):
    """One row: a forest of T stored tokens and the trajectories that run through it."""

    tree: PackedTree
    tokens: IntArray
    """Input token ids, [T]."""
    labels: IntArray
    """The token that follows, [T]; -100 only at ends stored by `keep_last`."""
    weights: NDArray[np.float32]
    """Sum of the entry weights of each stored token, [T]; 0 where nothing is trained."""
    entries: Entries
    trajectories: tuple[int, ...]
    """Caller's indices of the trajectories in this row, ascending."""
    paths: tuple[IntArray, ...]
    """Row indices of each trajectory's stored tokens, from its root to its end."""
    multiplicity: NDArray[np.int32]
    """How many of the row's trajectories pass each stored token, [T]."""

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.size)

    @property
    def num_entries(self) -> int:
        return int(self.entries.trajectory.size)


def pack_trajectories(
    trajectories: Sequence[Trajectory],
    max_tokens: int,
    min_shared: int = 1,
    keep_last: bool = False,
    overlong: str = "error",
    progress: Callable[[int, int], None] | None = None,
) -> list[PackedRow]:
    """Pack trajectories into rows of at most `max_tokens` stored tokens; nothing is dropped.

    Stored inputs are `tokens[:-1]`, the label of token t is token t + 1. Trajectories share the
    prefix on which their (input, label) pairs agree, so every stored token has one label.
    A token is stored once per row. Equal inputs give equal rows.

    Args:
        trajectories: at least 2 tokens each, 1 with `keep_last`.
        max_tokens: stored tokens that a row holds.
        min_shared: paths that diverge after fewer shared stored tokens than this do not share
            them; a trajectory equal to another, or a prefix of it, always shares.
        keep_last: also store the final token of each trajectory, with label -100.
        overlong: "error" refuses a trajectory longer than a row, "cut" drops its tail.
        progress: called with (rows built, rows in all).

    Raises:
        InputError: names the trajectory by its index in the list.
    """
    for name, value in (("max_tokens", max_tokens), ("min_shared", min_shared)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise InputError(f"{name}: expected an integer of at least 1, got {value!r}")
    if overlong not in ("error", "cut"):
        raise InputError(f"overlong: expected 'error' or 'cut', got {overlong!r}")
    trajectories = _fitting(trajectories, int(max_tokens), keep_last, overlong)
    if not trajectories:
        return []
    trie = Trie(trajectories, int(min_shared), keep_last)
    order = trie.first_seen_order()
    place_of = np.empty(len(trajectories), np.int64)
    place_of[order.index] = np.arange(len(trajectories))
    rows: list[PackedRow] = []
    filled = fill_rows(trie.heaviest_first_order(), int(max_tokens))
    for members in filled:
        rows.append(_build_row(trajectories, order, np.sort(place_of[members])))
        if progress is not None:
            progress(len(rows), len(filled))
    return rows


def _fitting(
    trajectories: Sequence[Trajectory], max_tokens: int, keep_last: bool, overlong: str
) -> list[Trajectory]:
    least = 1 if keep_last else 2
    fitting: list[Trajectory] = []
    num_cut = tokens_cut = 0
    for index, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Trajectory):
            raise InputError(
                f"trajectory {index}: expected a Trajectory, got {type(trajectory).__name__}"
            )
        size = len(trajectory)
        if size < least:
            raise InputError(
                f"{trajectory.described(index)}: {size} token leaves nothing to train; it needs "
                f"{least}"
            )
        stored = size if keep_last else size - 1
        if stored > max_tokens:
            if overlong == "error":
                raise InputError(
                    f"{trajectory.described(index)}: {stored} stored tokens do not fit a row of "
                    f"{max_tokens}; raise max_tokens (--tree-max-tokens) or ask for a cut "
                    "(--tree-overlong cut)"
                )
            num_cut += 1
            tokens_cut += stored - max_tokens
            trajectory = trajectory.cut(size - (stored - max_tokens))
        fitting.append(trajectory)
    if num_cut:
        _log.warning("%d trajectories cut to %d tokens: %d tokens left out",
                     num_cut, max_tokens, tokens_cut)  # fmt: skip
    return fitting


def _build_row(
    trajectories: Sequence[Trajectory], order: PrefixOrder, members: IntArray
) -> PackedRow:
    """The row of the trajectories at `members`, ascending places in `order`."""
    shared = order.shared_within(members)
    stored = order.stored[members]
    ends = np.cumsum(stored - shared)
    num_tokens = int(ends[-1])
    tokens = np.empty(num_tokens, np.int64)
    labels = np.empty(num_tokens, np.int64)
    parents = np.arange(-1, num_tokens - 1)
    paths: dict[int, IntArray] = {}
    path = np.empty(0, np.int64)
    start = 0
    for place, common, size, end in zip(
        members.tolist(), shared.tolist(), stored.tolist(), ends.tolist()
    ):
        index = int(order.index[place])
        if end > start:  # new tokens; none for a duplicate
            ids = trajectories[index].tokens
            tokens[start:end] = ids[common:size]
            following = ids[common + 1 : size + 1]
            labels[start : start + following.size] = following
            labels[start + following.size : end] = NO_LABEL
            parents[start] = path[common - 1] if common else -1
            path = np.concatenate([path[:common], np.arange(start, end)])
        paths[index] = path
        start = end
    indices = tuple(sorted(paths))
    entries = _entries(trajectories, indices, paths, num_tokens)
    token_of_entry = np.repeat(np.arange(num_tokens), np.diff(entries.offsets))
    weights = np.bincount(token_of_entry, entries.weight.astype(np.float64), num_tokens)
    multiplicity = np.zeros(num_tokens, np.int32)
    for index in indices:
        multiplicity[paths[index]] += 1
    return PackedRow(
        tree=_tree(parents),
        tokens=tokens,
        labels=labels,
        weights=weights.astype(np.float32),
        entries=entries,
        trajectories=indices,
        paths=tuple(paths[index] for index in indices),
        multiplicity=multiplicity,
    )


def _tree(parents: IntArray) -> PackedTree:
    """Maximal segments from the parent of each token, -1 at roots."""
    children = np.bincount(parents + 1, minlength=parents.size + 1)[1:]
    begins = parents != np.arange(-1, parents.size - 1)
    begins[0] = True
    begins[1:] |= children[:-1] > 1  # the token after a fork
    starts = np.flatnonzero(begins)
    segment_of = np.cumsum(begins) - 1
    above = parents[starts]
    return PackedTree(
        np.diff(starts, append=parents.size), np.where(above < 0, -1, segment_of[above])
    )


def _entries(
    trajectories: Sequence[Trajectory],
    indices: Sequence[int],
    paths: dict[int, IntArray],
    num_tokens: int,
) -> Entries:
    columns: list[tuple[NDArray[Any], ...]] = []
    for index in indices:
        trajectory = trajectories[index]
        targets = np.flatnonzero(trajectory.trained())
        columns.append(
            (
                paths[index][targets - 1],  # the stored token whose label the target is
                np.full(targets.size, index, np.int64),
                _picked(trajectory.weights, targets, 1.0),
                _picked(trajectory.advantages, targets, np.nan),
                _picked(trajectory.old_logprobs, targets, np.nan),
            )
        )
    token, owner, weight, advantage, old_logprob = (
        np.concatenate(column) for column in zip(*columns)
    )
    order = np.argsort(token, kind="stable")  # by trajectory within a token: indices ascend
    offsets = np.zeros(num_tokens + 1, np.int64)
    np.cumsum(np.bincount(token, minlength=num_tokens), out=offsets[1:])
    return Entries(offsets, owner[order], weight[order], advantage[order], old_logprob[order])


def _picked(
    values: NDArray[np.float64] | None, targets: IntArray, default: float
) -> NDArray[np.float32]:
    if values is None:
        return np.full(targets.size, default, np.float32)
    return values[targets].astype(np.float32)
