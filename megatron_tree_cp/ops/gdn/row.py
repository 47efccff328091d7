"""A whole row on one rank, token by token: for the reference implementations."""

from __future__ import annotations

import numpy as np

from megatron_tree_cp.comm.context import TreeContext
from megatron_tree_cp.tree.packed_tree import PackedTree


def parents_of(tree: PackedTree) -> list[int]:
    """Row index of the token before each token on its path, -1 at roots."""
    parents = np.arange(tree.num_tokens) - 1
    above = tree.parents
    parents[tree.segment_starts] = np.where(above < 0, -1, tree.segment_ends[above] - 1)
    return [int(parent) for parent in parents]


def leaf_ends(tree: PackedTree) -> list[int]:
    """Row index of the last token of every leaf segment, in row order."""
    inner = set(tree.parents.tolist())
    return [int(end) - 1 for s, end in enumerate(tree.segment_ends) if s not in inner]


def token_parents(ctx: TreeContext) -> list[int]:
    """`parents_of` the context's row, whose rows are the shard's when one rank has them all."""
    return ctx.cached("token parents", lambda: parents_of(ctx.plan.tree))
