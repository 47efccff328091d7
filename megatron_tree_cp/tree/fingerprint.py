"""A digest of packed rows: two runs with the same one train on the same tokens in the same rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import numpy as np

from .packing import PackedRow


def packing_fingerprint(rows: Iterable[PackedRow], **options: object) -> str:
    """SHA-256 in hex of every array of every row and of `options` (plain JSON values).

    Checkpoints carry it: with other data or packing options a resumed run would visit other rows.
    """
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for row in rows:
        entries = row.entries
        for array in (
            row.tree.lengths,
            row.tree.parents,
            row.tokens,
            row.labels,
            np.array(row.trajectories, np.int64),
            np.array([path[-1] for path in row.paths], np.int64),  # an end determines its path
            entries.offsets,
            entries.trajectory,
            entries.weight,
            entries.advantage,
            entries.old_logprob,
        ):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
