"""Plan packed rows for a CP size and print who owns what, what travels and what it may cost."""

from __future__ import annotations

import argparse

from rich import box
from rich.console import Console
from rich.table import Table

from ..plan.model import LayerClass, ModelShape
from ..plan.planner import plan_row
from ..plan.row_plan import RowPlan
from ..tree.errors import InputError
from .rollouts import add_rollout_arguments, pack_rollouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rollout_arguments(parser)
    add = parser.add_argument
    add("--cp-size", type=int, required=True, metavar="N", help="context-parallel ranks")
    add("--tp-size", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    add("--waves", type=int, metavar="N", help="force N waves, 0 for fused; default: by cost")
    add("--windows", type=int, nargs="+", default=[], metavar="W", help="windowed layers beside")
    add("--row", type=int, metavar="N", help="this row only")


def run(args: argparse.Namespace) -> None:
    rows = pack_rollouts(args).rows
    if args.row is not None and not 0 <= args.row < len(rows):
        raise InputError(f"--row {args.row}: there are {len(rows)} rows, from 0")
    classes = (LayerClass("global"), *(LayerClass(f"w{w}", window=w) for w in args.windows))
    console = Console()
    for number in range(len(rows)) if args.row is None else [args.row]:
        plan = plan_row(
            rows[number].tree,
            args.cp_size,
            ModelShape(classes=classes),
            tp_size=args.tp_size,
            waves=args.waves,
        )
        console.print(plan_table(number, plan))


def plan_table(number: int, plan: RowPlan) -> Table:
    """One row's plan, a line a rank. Times are the cost model's with its default coefficients."""
    layout, predicted = plan.layouts["main"], plan.predicted
    waves = ", ".join(
        f"{name}: {'fused' if part.fused else f'{part.num_waves} waves'}"
        for name, part in plan.attention.items()
    )
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"row {number}: {plan.tree.num_tokens} tokens, {waves}",
        caption=f"digest {plan.digest[:16]}, slowest rank / mean {predicted.imbalance:.3f}",
    )
    names = list(plan.attention)
    heads = ["rank", "ranges", "tokens", *(f"pairs\n{n}" for n in names)]
    for head in (*heads, *(f"KV in\n{n}" for n in names), "fwd ms", "bwd ms"):
        table.add_column(head, justify="right")
    for rank in range(plan.cp_size):
        table.add_row(
            str(rank),
            str(len(layout.ranges[rank])),
            f"{layout.num_real(rank):,}",
            *(f"{int(predicted.pairs[name][rank]):,}" for name in names),
            *(f"{int(predicted.remote_tokens[name][rank]):,}" for name in names),
            f"{predicted.forward_ms[rank]:.2f}",
            f"{predicted.backward_ms[rank]:.2f}",
        )
    return table
