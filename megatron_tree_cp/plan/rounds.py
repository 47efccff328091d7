"""The last round of a kernel: fewer programs than multiprocessors leave some of them idle.

Attention kernels run one program a multiprocessor at a time. n equal programs on P of them take
ceil(n / P) rounds, as long as ceil(n / P) * P of them would: what is more than n is idle.
"""

from __future__ import annotations

import numpy as np

from .remote import TILE
from .values import Array


def idle_share(programs: Array, processors: float) -> Array:
    """[..]: idle time of ``processors`` over the time that equal ``programs`` compute."""
    rounds = np.ceil(programs / processors)
    return np.where(programs > 0, rounds * processors / np.maximum(programs, 1) - 1, 0.0)


def forward_programs(queries: Array, query_heads: float, kv_heads: float) -> Array:
    """Programs of a forward call: a tile of rows, which are queries of the heads of a KV head."""
    return np.ceil(queries * (query_heads / kv_heads) / TILE) * kv_heads


def backward_programs(keys: Array, query_heads: float) -> Array:
    """Programs of a backward call: a tile of keys for each query head."""
    return np.ceil(keys / TILE) * query_heads
