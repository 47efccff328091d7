"""Packed rows in one `.npz` file: plain arrays, no pickle."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from .errors import InputError
from .packed_tree import PackedTree
from .packing import Entries, PackedRow

_FORMAT = 1


def write_atomically(path: str | PathLike[str], content: bytes) -> None:
    """Write a whole file or, on any error, leave what was there."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)  # mkstemp makes it private
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise InputError(f"{target}: cannot write: {error.strerror}") from error


def save_rows(path: str | PathLike[str], rows: Sequence[PackedRow]) -> None:
    """Write rows to `path`: for each row r the arrays `r/tokens`, `r/labels`, ..."""
    arrays: dict[str, np.ndarray] = {"format": np.array([_FORMAT, len(rows)])}
    for number, row in enumerate(rows):
        columns: dict[str, np.ndarray] = {
            "lengths": row.tree.lengths,
            "parents": row.tree.parents,
            "tokens": row.tokens,
            "labels": row.labels,
            "weights": row.weights,
            "multiplicity": row.multiplicity,
            "trajectories": np.array(row.trajectories, np.int64),
            "path_sizes": np.array([path.size for path in row.paths], np.int64),
            "paths": np.concatenate(row.paths),
            "offsets": row.entries.offsets,
            "trajectory": row.entries.trajectory,
            "weight": row.entries.weight,
            "advantage": row.entries.advantage,
            "old_logprob": row.entries.old_logprob,
        }
        arrays |= {f"{number}/{name}": array for name, array in columns.items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())


def load_rows(path: str | PathLike[str]) -> list[PackedRow]:
    """Read what `save_rows` wrote; InputError when it is something else."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            version, count = (int(value) for value in arrays["format"])
            if version != _FORMAT:
                raise InputError(f"{path}: rows of format {version}, this version reads {_FORMAT}")
            return [_load_row(arrays, number) for number in range(count)]
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error
    except InputError:
        raise
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not a file of packed rows") from error


def _load_row(arrays: np.lib.npyio.NpzFile, number: int) -> PackedRow:
    def column(name: str) -> np.ndarray:
        return np.asarray(arrays[f"{number}/{name}"])

    entry_columns = ("offsets", "trajectory", "weight", "advantage", "old_logprob")
    bounds = np.cumsum(column("path_sizes"))[:-1]
    return PackedRow(
        tree=PackedTree(column("lengths"), column("parents")),
        tokens=column("tokens"),
        labels=column("labels"),
        weights=column("weights"),
        entries=Entries(*map(column, entry_columns)),
        trajectories=tuple(column("trajectories").tolist()),
        paths=tuple(path.copy() for path in np.split(column("paths"), bounds)),
        multiplicity=column("multiplicity"),
    )
