"""Plan rows for a CP size and print who owns what, what travels and what it may cost."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..plan.row_plan import RowPlan
from .row_source import (
    RowPlanner,
    add_plan_arguments,
    add_row_arguments,
    named_rows,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_row_arguments(parser)
    add_plan_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a row, a line each")


def run(args: argparse.Namespace) -> None:
    planner = RowPlanner(args)
    console = Console()
    for row in named_rows(args):
        plan, planning_ms = planner.plan(row)
        if args.json:
            print(json.dumps(plan_record(row.name, plan, planning_ms, planner.profile.name)))
        else:
            console.print(plan_table(row.name, plan, planning_ms))


def plan_record(name: str, plan: RowPlan, planning_ms: float, profile: str) -> dict[str, Any]:
    """A plan as JSON: predicted times, a table of ranks, layout, exchanges and digest.

    Times in ms over all layers of the model shape, ranges as [begin, end) row indices; ``pairs``
    and ``remote_tokens`` of one layer per class. ``exchanges`` are rows [source, destination] of
    every wave, of both hops where it is ``two_level``.
    """
    layout, predicted = plan.layouts["main"], plan.predicted
    return {
        "row": name,
        "num_tokens": plan.tree.num_tokens,
        "num_segments": plan.tree.num_segments,
        "cp_size": plan.cp_size,
        "tp_size": plan.tp_size,
        "profile": profile,
        "planning_ms": planning_ms,
        "predicted": {
            "total_ms": predicted.total_ms,
            "forward_ms": float(predicted.forward_ms.max()),
            "backward_ms": float(predicted.backward_ms.max()),
            "imbalance": predicted.imbalance,
            "peak_bytes": float(predicted.peak_bytes.max()),
            "chained_runs": predicted.chained_runs,
        },
        "ranks": [
            {
                "rank": rank,
                "tokens": int(predicted.tokens[rank]),
                "shard_size": layout.shard_size(rank),
                "forward_ms": float(predicted.forward_ms[rank]),
                "backward_ms": float(predicted.backward_ms[rank]),
                "peak_bytes": float(predicted.peak_bytes[rank]),
                "pairs": {n: int(pairs[rank]) for n, pairs in predicted.pairs.items()},
                "remote_tokens": {n: int(k[rank]) for n, k in predicted.remote_tokens.items()},
            }
            for rank in range(plan.cp_size)
        ],
        "plan": {
            "digest": plan.digest,
            "layout": {
                "granule": layout.granule,
                "ranges": [part.tolist() for part in layout.ranges],
            },
            "recurrent_layout": [
                part.tolist() for part in plan.layouts[plan.recurrent_layout].ranges
            ],
            "attention": {
                name: {
                    "window": part.window,
                    "forward_fused": part.forward_fused,
                    "backward_fused": part.backward_fused,
                    "waves": part.num_waves,
                    "two_level": list(part.two_level or [False] * part.num_waves),
                    "exchanges": [exchange.counts.tolist() for exchange in part.exchanges],
                }
                for name, part in plan.attention.items()
            },
        },
        "tried": [{"name": c.name, "total_ms": c.total_ms} for c in predicted.candidates],
    }


def plan_table(name: str, plan: RowPlan, planning_ms: float) -> Table:
    """One row's plan, a line a rank. Times are the cost model's."""
    layout, predicted = plan.layouts["main"], plan.predicted
    waves = "; ".join(f"{name}: {part.describe()}" for name, part in plan.attention.items())
    if plan.model.recurrent_classes:
        own = "" if plan.recurrent_layout == "main" else ", in a layout of their own"
        waves += f"; recurrent: {predicted.chained_runs} runs chained{own}"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{name}: {plan.tree.num_tokens:,} tokens, {waves}",
        caption=f"predicted {predicted.total_ms:.2f} ms, slowest rank / mean "
        f"{predicted.imbalance:.3f}, planned in {planning_ms:.1f} ms, digest {plan.digest[:16]}",
    )
    names = list(plan.attention)
    heads = ["rank", "ranges", "tokens", *(f"pairs\n{n}" for n in names)]
    for head in (*heads, *(f"KV in\n{n}" for n in names), "fwd ms", "bwd ms", "peak GiB"):
        table.add_column(head, justify="right")
    for rank in range(plan.cp_size):
        table.add_row(
            str(rank),
            str(len(layout.ranges[rank])),
            f"{layout.num_real(rank):,}",
            *(f"{int(predicted.pairs[n][rank]):,}" for n in names),
            *(f"{int(predicted.remote_tokens[n][rank]):,}" for n in names),
            f"{predicted.forward_ms[rank]:.2f}",
            f"{predicted.backward_ms[rank]:.2f}",
            f"{predicted.peak_bytes[rank] / 2**30:.2f}",
        )
    return table
