"""Every own GPU kernel once on small rows, for compute-sanitizer: see scripts/sanitize.sh.

    python -m tests.sanitized own|flash

FLA's kernels, which would tune themselves under the sanitizer, are replaced by torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_tree_cp import ops
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.gdn import fla_kernels, state_pass
from megatron_tree_cp.ops.gdn.tables import StateSlots, recurrence_tables
from megatron_tree_cp.plan import plan_row
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.comm import test_ranges, test_returned_rows_triton
from tests.ops import gpu_cases, test_block_mask_triton, test_merge_triton
from tests.ops_gdn.fla_in_torch import FLA

TREE = PackedTree((90, 33, 1, 70, 64), (-1, 0, 0, 2, -1))
RULES = ((64, 64, 2, 4), (128, 128, 16, 32), (96, 80, 2, 2), (256, 256, 1, 2))
"""Key and value dims, key and value heads; the second takes both tiles of the state pass."""


def convolutions() -> None:
    ctx = TreeContext(plan_row(TREE, 1), None, "cuda")
    for width, dtype in ((1, torch.float32), (4, torch.bfloat16), (8, torch.float32)):
        x = torch.randn(ctx.num_tokens, 200, device="cuda", dtype=dtype, requires_grad=True)
        weight = torch.randn(200, width, device="cuda", dtype=dtype, requires_grad=True)
        bias = torch.randn(200, device="cuda", dtype=dtype, requires_grad=True)
        parts = ops.tree_causal_conv1d(x, weight, bias, ctx, impl="triton", split=(72, 128))
        sum(part.float().square().sum() for part in parts).backward()


class _InHalf:
    """FLA's functions as torch has them in fp32, for bf16 operands."""

    to_base_2 = FLA.to_base_2
    solve_gradient: Any

    def __init__(self) -> None:
        self.solve_gradient = self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*inputs: Any, **named: Any) -> Any:
            wide = {key: _wide(x) for key, x in named.items()}
            made = getattr(FLA, name)(*map(_wide, inputs), **wide)
            if name == "cumsum":
                return made
            half = [x.bfloat16() for x in (made if isinstance(made, tuple) else (made,))]
            return tuple(half) if isinstance(made, tuple) else half[0]

        return call

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**named: Any) -> None:
            results = ("dk", "dv", "db", "dg")
            wide = {key: x if key in results else _wide(x) for key, x in named.items()}
            FLA.solve_gradient[grid](**wide)

        return launch


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x


def rules() -> None:
    fla_kernels._fla = _InHalf
    ctx = TreeContext(plan_row(TREE, 1), None, "cuda")
    for key_dim, value_dim, key_heads, heads in RULES:

        def normal(*size: int) -> torch.Tensor:
            drawn = torch.randn(ctx.num_tokens, *size, device="cuda", dtype=torch.bfloat16)
            return drawn.requires_grad_()

        q, k = normal(key_heads, key_dim), normal(key_heads, key_dim)
        v, gate, strength = normal(heads, value_dim), normal(heads), normal(heads)
        g, beta = -gate.float().exp() * 0.05, strength.sigmoid()
        out, final = ops.tree_gated_delta_rule(
            q, k, v, g, beta, ctx, impl="triton", return_final_state=True
        )
        (out.float().square().sum() + final.square().sum()).backward()


def summaries() -> None:
    """What runs below other ranks' runs send: needs several ranks, so it is called directly."""
    ctx = TreeContext(plan_row(TREE, 1), None, "cuda")
    tables = recurrence_tables(ctx)
    runs = len(tables.part.start)
    none = torch.full((runs,), -1, dtype=torch.int32, device="cuda")
    slots = StateSlots(runs, none, torch.arange(runs, dtype=torch.int32, device="cuda"))
    for key_dim, value_dim, key_heads, heads in RULES:

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(tables.num_tokens, *size, device="cuda", dtype=torch.bfloat16)

        inputs = (normal(key_heads, key_dim), normal(heads, key_dim), normal(heads, value_dim))
        gates = -torch.rand(tables.num_tokens, heads, device="cuda")
        table = gates.new_empty(runs, heads, key_dim, value_dim + key_dim)
        for level in tables.every:
            state_pass.summarise((*inputs, gates), level, slots, table, tables)


def small_kernels(device: str = "cuda") -> None:
    sys.argv[1:] = [device]  # of the scripts, which also run by themselves
    tables = (test_ranges, test_block_mask_triton)
    for module in (*tables, test_merge_triton, test_returned_rows_triton):
        exec(compile(module.CHECK, module.__name__, "exec"), {})


def flash() -> None:
    for shape in ((8, 2, 64, 64), (4, 1, 128, 128), (4, 2, 256, 256)):
        ctx = gpu_cases.context((300, 41, 1, 129), (-1, 0, 0, 2))
        tensors = gpu_cases.random_tensors(ctx, shape, 0)
        for window in (None, gpu_cases.WINDOW):
            gpu_cases.run(ctx, tensors, "flash", window, torch.bfloat16)


STEPS = {"own": (small_kernels, convolutions, rules, summaries), "flash": (flash,)}


def main() -> None:
    for step in STEPS[sys.argv[1]]:
        step()
        torch.cuda.synchronize()
        print(f"{step.__name__}: done", flush=True)


if __name__ == "__main__":
    main()
