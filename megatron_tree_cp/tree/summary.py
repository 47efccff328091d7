"""What packing saved, in numbers for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import InputError
from .packing import NO_LABEL, PackedRow
from .trajectory import Trajectory
from .trie import Trie


@dataclass(frozen=True)
class DepthSaving:
    """Tokens at positions `begin` to `end - 1`, in all trajectories and as stored in rows."""

    begin: int
    end: int
    logical: int
    stored: int


@dataclass(frozen=True)
class PackingSummary:
    """Sizes of a packing; `logical` counts every trajectory alone, `stored` each shared token once.

    A stored token is an (input, label) pair: a trajectory of n tokens alone has n - 1 of them.
    """

    trajectories: int
    groups: int
    longest: int
    """Stored tokens of the longest trajectory."""
    logical_tokens: int
    trained_tokens: int
    """Entries: trained tokens of every trajectory."""
    trained_stored: int
    """Stored tokens with at least one entry."""
    stored_one_trie: int
    """Stored tokens if one row held everything."""
    stored_tokens: int
    """Stored tokens in all rows; a token is stored once a row."""
    pairs_flat: int
    """Visible (query, key) pairs of all trajectories alone."""
    pairs_tree: int
    """Visible pairs of all rows."""
    rows: int
    rows_flat: int
    """Rows of the same size that trajectories alone fill, best fit."""
    max_tokens: int
    """Size of a row."""
    cut_trajectories: int
    cut_tokens: int
    by_depth: tuple[DepthSaving, ...]

    @property
    def fill(self) -> float:
        """Stored tokens over the room that the rows have."""
        return self.stored_tokens / (self.rows * self.max_tokens) if self.rows else 0.0

    @property
    def saving(self) -> float:
        """Logical over stored tokens: how many times less is computed token by token."""
        return self.logical_tokens / self.stored_tokens if self.stored_tokens else 1.0

    def lines(self) -> list[tuple[str, str]]:
        """(what, value) of each figure."""
        lines = [
            ("trajectories", f"{self.trajectories:,} (longest {self.longest:,} tokens)"),
            ("logical tokens", f"{self.logical_tokens:,}, {self.trained_tokens:,} trained"),
            (
                "stored tokens",
                f"{self.stored_tokens:,} in rows, {self.trained_stored:,} trained; "
                f"{self.stored_one_trie:,} in one trie",
            ),
            ("tokens saved", f"{self.saving:.2f}x fewer than flat"),
            (
                "visible pairs",
                f"{_short(self.pairs_tree)} tree, {_short(self.pairs_flat)} flat "
                f"({self.pairs_flat / max(self.pairs_tree, 1):.2f}x)",
            ),
            (
                "rows",
                f"{self.rows:,} of {self.max_tokens:,} tokens, {self.fill:.1%} full; "
                f"{self.rows_flat:,} flat",
            ),
        ]
        if self.groups:
            lines.insert(1, ("groups", f"{self.groups:,}"))
        if self.cut_trajectories:
            lines.append(
                ("cut", f"{self.cut_trajectories:,} trajectories, {self.cut_tokens:,} tokens lost")
            )
        return lines

    def format(self) -> str:
        """The summary as plain text, saving by depth included."""
        text = [f"{what:<15} {value}" for what, value in self.lines()]
        text.append("saving by depth (positions: logical tokens / stored tokens)")
        for depth in self.by_depth:
            text.append(
                f"  {depth.begin:>7,} - {depth.end - 1:<7,} {depth.logical:>12,} / "
                f"{depth.stored:<12,} {depth.logical / depth.stored:.2f}x"
            )
        return "\n".join(text)

    def to_json(self) -> dict[str, Any]:
        """Plain values of every figure."""
        values = dict(vars(self))
        values["by_depth"] = [vars(depth) for depth in self.by_depth]
        return values | {"fill": self.fill, "saving": self.saving}


def summarise(
    trajectories: Sequence[Trajectory], rows: Sequence[PackedRow], max_tokens: int | None = None
) -> PackingSummary:
    """Measure what `pack_trajectories(trajectories, ...)` returned.

    `max_tokens` is the size of a row, by default that of the fullest one.
    """
    paths = {i: path for row in rows for i, path in zip(row.trajectories, row.paths)}
    if sorted(paths) != list(range(len(trajectories))):
        raise InputError("summary: these rows do not hold exactly these trajectories")
    keep_last = any(bool((row.labels == NO_LABEL).any()) for row in rows)
    stored = np.array([paths[i].size for i in range(len(paths))], np.int64)
    whole = np.array([len(t) for t in trajectories], np.int64) - (not keep_last)
    kept = [
        t if size == full else t.cut(int(size) + (not keep_last))
        for t, size, full in zip(trajectories, stored, whole)
    ]
    if max_tokens is None:
        max_tokens = max((row.num_tokens for row in rows), default=0)
    one_trie = 0
    if kept:
        order = Trie(kept, keep_last=keep_last).first_seen_order()
        one_trie = int((order.stored - order.shared_within(np.arange(len(kept)))).sum())
    return PackingSummary(
        trajectories=len(trajectories),
        groups=len({t.group for t in trajectories if t.group is not None}),
        longest=int(stored.max(initial=0)),
        logical_tokens=int(stored.sum()),
        trained_tokens=sum(row.num_entries for row in rows),
        trained_stored=sum(int((np.diff(row.entries.offsets) > 0).sum()) for row in rows),
        stored_one_trie=one_trie,
        stored_tokens=sum(row.num_tokens for row in rows),
        pairs_flat=int((stored * (stored + 1) // 2).sum()),
        pairs_tree=sum(row.tree.visible_pairs() for row in rows),
        rows=len(rows),
        rows_flat=_flat_rows(stored, max_tokens),
        max_tokens=max_tokens,
        cut_trajectories=int((whole > stored).sum()),
        cut_tokens=int((whole - stored).sum()),
        by_depth=_by_depth(rows),
    )


@dataclass(frozen=True)
class Capacity:
    """How many trajectories of one shape, prompt + completion tokens, a row holds."""

    prompt: int
    completion: int
    max_tokens: int
    flat: int
    """Each trajectory alone, one after the other."""
    tree: int
    """The prompt stored once."""

    def format(self) -> str:
        """One line for the console."""
        ratio = f", {self.tree / self.flat:.1f}x" if self.flat else ""
        return (
            f"a row of {self.max_tokens:,} tokens holds {self.flat:,} trajectories of "
            f"{self.prompt:,} + {self.completion:,} tokens flat, {self.tree:,} as a tree{ratio}"
        )


def capacity(prompt: int, completion: int, max_tokens: int) -> Capacity:
    """Count as `pack_trajectories` stores: completions differ from their first token on.

    A trajectory alone stores `prompt + completion - 1` tokens, the shared prompt `prompt - 1`, each
    branch `completion`, since the trie forks one token before trajectories diverge.
    """
    for name, value in (("prompt", prompt), ("completion", completion), ("max_tokens", max_tokens)):
        if value < 1:
            raise InputError(f"{name}: expected at least 1, got {value}")
    alone = prompt + completion - 1
    return Capacity(
        prompt,
        completion,
        max_tokens,
        flat=max_tokens // alone,
        tree=max(0, (max_tokens - (prompt - 1)) // completion),
    )


def _flat_rows(sizes: np.ndarray, max_tokens: int) -> int:
    """Rows that best fit, longest first, needs without any sharing."""
    room: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fitting = [(left, row) for row, left in enumerate(room) if left >= size]
        if fitting:
            room[min(fitting)[1]] -= size
        else:
            room.append(max_tokens - size)
    return len(room)


def _by_depth(rows: Sequence[PackedRow]) -> tuple[DepthSaving, ...]:
    longest = max((int(row.tree.positions.max()) + 1 for row in rows), default=0)
    logical = np.zeros(longest, np.int64)
    stored = np.zeros(longest, np.int64)
    for row in rows:
        positions = row.tree.positions
        logical += np.bincount(positions, row.multiplicity, longest).astype(np.int64)
        stored += np.bincount(positions, minlength=longest)
    edges = [0]
    while edges[-1] < longest:
        edges.append(max(64, 2 * edges[-1]))
    edges[-1] = longest
    return tuple(
        DepthSaving(begin, end, int(logical[begin:end].sum()), int(stored[begin:end].sum()))
        for begin, end in zip(edges[:-1], edges[1:])
    )


def _short(count: int) -> str:
    return f"{count / 1e6:,.1f}M" if count >= 10**6 else f"{count:,}"
