"""What else computes the same layer: stock kernels on sequences, and another tree package.

    flattened        flash-linear-attention on every trajectory by itself, shared tokens repeated
    fla.ops.cp       flash-linear-attention's context parallelism, on a row that is one sequence
    tree-recurrence  its forks and rescans of the same row on one rank, over the same kernels

Each is held against the same fp32 results as our layer before it is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..plan.values import Array
from ..tree.errors import InputError
from ..tree.packed_tree import PackedTree
from .gdn import GdnBench, RowResult
from .gdn_layer import draw_inputs, expected, layer, results

PASS_TOKENS = 262_144
"""Flattened tokens of one pass: trajectories of a row go in several, and their times add up."""

Operator = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Part:
    """A forward of this rank's tokens, and the row index of each; copies of a token are equal."""

    forward: Operator
    rows: Array


Build = Callable[[GdnBench, PackedTree], Sequence[Part]]


@dataclass(frozen=True)
class BaselineResult:
    """Times of a baseline beside ours on the same row, the slowest rank's, in ms."""

    name: str
    row: int
    tokens: int
    """That the baseline computes, copies included."""
    forward_ms: float
    backward_ms: float
    fwd_bwd_ms: float
    speed_up: float
    """Its time over ours."""
    token_saving: float
    """Its tokens over ours."""
    speed_up_per_saving: float
    check_error: float


def compare(
    name: str,
    build: Build,
    bench: GdnBench,
    small: PackedTree,
    tree: PackedTree,
    ours: RowResult,
    repeats: int = 3,
) -> BaselineResult:
    """Check a baseline on a small row, then time it on the row of `ours`.

    Raises InputError, before anything is timed, when it computes something else.
    """
    bench.say(f"{name}: check, first calls")
    error = check(name, build(bench, small), bench, small)
    bench.say(f"{name}: row {ours.row}")
    forward_ms = backward_ms = 0.0
    tokens = 0
    for part in build(bench, tree):
        inputs = draw_inputs(bench.shape, len(part.rows), bench.device)
        call = (part.forward, inputs.leaves, inputs.dout)
        bench.clock.timed(*call)  # kernels, allocator
        times = [bench.clock.timed(*call) for _ in range(repeats)]
        forward_ms += statistics.median(forward for forward, _ in times)
        backward_ms += statistics.median(backward for _, backward in times)
        tokens += len(part.rows)
    saving = bench.cp * tokens / tree.num_tokens
    speed_up = (forward_ms + backward_ms) / ours.fwd_bwd_ms
    return BaselineResult(
        name=name,
        row=ours.row,
        tokens=bench.cp * tokens,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        fwd_bwd_ms=forward_ms + backward_ms,
        speed_up=speed_up,
        token_saving=saving,
        speed_up_per_saving=speed_up / saving,
        check_error=error,
    )


def check(name: str, parts: Sequence[Part], bench: GdnBench, tree: PackedTree) -> float:
    """Worst relative error of a baseline on a small row; InputError when it is too large."""
    (part,) = parts
    # The first copy of a token stands for its output; from the others no gradient comes.
    rows, first, copies = np.unique(part.rows, return_index=True, return_inverse=True)
    keep, gather = (torch.as_tensor(index, device=bench.device) for index in (first, copies))

    def forward(
        x: torch.Tensor, alpha: torch.Tensor, strength: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        return part.forward(x[gather], alpha[gather], strength[gather], *parameters)[keep]

    index = torch.as_tensor(rows, device=bench.device)
    inputs = draw_inputs(bench.shape, tree.num_tokens, bench.device, seed=0)
    want = expected(tree, bench.shape, inputs)
    return bench.hold(results(forward, inputs.rows(index)), want, index, name)


def trajectories(tree: PackedTree) -> list[Array]:
    """Row indices of every root-to-leaf path."""
    inner = set(tree.parents.tolist())
    paths: list[Array] = []
    for leaf in range(tree.num_segments):
        pieces, segment = [], leaf
        while leaf not in inner and segment >= 0:
            pieces.append(np.arange(tree.segment_starts[segment], tree.segment_ends[segment]))
            segment = int(tree.parents[segment])
        if pieces:
            paths.append(np.concatenate(pieces[::-1]))
    return paths


def flattened(
    bench: GdnBench,
    tree: PackedTree,
    operators: Callable[..., tuple[Operator, Operator]] | None = None,
    limit: int = PASS_TOKENS,
) -> list[Part]:
    """Whole trajectories in passes of at most `limit` tokens (or one that is longer).

    Args:
        operators: (offsets int64[n + 1], device) -> (conv, rule) on sequences end to end; FLA's
            when None.
    """
    operators = fla_operators if operators is None else operators
    groups: list[list[Array]] = [[]]
    for path in trajectories(tree):
        if groups[-1] and sum(map(len, groups[-1])) + len(path) > limit:
            groups.append([])
        groups[-1].append(path)
    parts = []
    for group in groups:
        offsets = np.cumsum([0, *map(len, group)])
        forward = layer(bench.shape, *operators(offsets, bench.device))
        parts.append(Part(forward, np.concatenate(group)))
    return parts


def fla_operators(
    offsets: Array, device: torch.device, context: Any = None
) -> tuple[Operator, Operator]:
    """flash-linear-attention's `conv` and `rule` on sequences end to end, [T, ...].

    Args:
        offsets: int64[n + 1].
        context: of its context parallelism; tensors are then this rank's part.
    """
    conv_kernel, rule_kernel = fla_kernels()
    on_host = torch.as_tensor(offsets, dtype=torch.int32)
    where: dict[str, Any] = {"cp_context": context}
    if context is None:
        where = {"cu_seqlens": on_host.to(device), "cu_seqlens_cpu": on_host}

    def conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return conv_kernel(x[None], weight, activation="silu", **where)[0].squeeze(0)

    def rule(*inputs: torch.Tensor) -> torch.Tensor:
        batched = (x[None] for x in inputs)
        return rule_kernel(*batched, use_qk_l2norm_in_kernel=True, **where)[0].squeeze(0)

    return conv, rule


def one_sequence(bench: GdnBench, tree: PackedTree) -> list[Part]:
    """This rank's equal share of a row that is one sequence, by fla.ops.cp."""
    if not is_one_sequence(tree) or bench.cp == 1:
        raise InputError("fla.ops.cp takes a row that is one sequence, on several ranks")
    from fla.ops.cp import build_cp_context

    whole = torch.tensor([0, tree.num_tokens], dtype=torch.int32)
    context = build_cp_context(
        whole.to(bench.device),
        group=bench.group,
        conv1d_kernel_size=bench.shape.width,
        cu_seqlens_cpu=whole,
    )
    share = tree.num_tokens // bench.cp
    first = share * dist.get_rank(bench.group)
    operators = fla_operators(whole.numpy(), bench.device, context)
    return [Part(layer(bench.shape, *operators), np.arange(first, first + share))]


def is_one_sequence(tree: PackedTree) -> bool:
    """Whether a row has no branch."""
    return bool((tree.parents == np.arange(tree.num_segments) - 1).all())


def tree_recurrence(bench: GdnBench, tree: PackedTree) -> list[Part]:
    """The row by tree-recurrence over FLA's kernels, fork or rescan by its own policy."""
    from tree_recurrence import TreePlan, tree_conv, tree_scan
    from tree_recurrence.components import fla_conv, gated_delta_rule_scan

    conv_kernel, rule_kernel = fla_kernels()
    offsets = np.append(tree.segment_starts, tree.num_tokens)
    plan = TreePlan.from_kwargs(
        {"tree_cu_seqlens_q": offsets, "tree_segment_parents": tree.parents}
    )
    scan = gated_delta_rule_scan(rule_kernel)

    def conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kernel = fla_conv(conv_kernel, weight, activation="silu")
        return tree_conv(kernel, x[None], plan, bench.shape.width).squeeze(0)

    def rule(*inputs: torch.Tensor) -> torch.Tensor:
        return tree_scan(scan, [x[None] for x in inputs], plan).squeeze(0)

    return [Part(layer(bench.shape, conv, rule), np.arange(tree.num_tokens))]


def fla_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """flash-linear-attention's ``causal_conv1d`` and ``chunk_gated_delta_rule``.

    Raises InputError, with the fix, where it is not installed.
    """
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise InputError(
            f"baselines need flash-linear-attention 0.6 ({error}): "
            "pip install 'megatron-tree-cp[gpu]', or leave --baselines out"
        ) from error
    return causal_conv1d, chunk_gated_delta_rule
