"""How long planning takes, and what it gains: `python -m megatron_tree_cp.bench.planner`.

Every row is planned once, cold, in one thread. Process time is what the planner costs a node; wall
time also counts who else had the core.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from pathlib import Path

import numpy as np

from ..plan.planner import plan_row
from ..tree.packed_tree import PackedTree
from .evidence import Evidence, spread, write_evidence
from .presets import MEASURED_ROWS, PRESETS

MODULE = "python -m megatron_tree_cp.bench.planner"


def measure_planning(preset: str, cp_size: int, tokens: int, rows: range) -> list[dict[str, float]]:
    """Per row: ``cpu_ms`` and ``wall_ms`` from tree to plan and digest, and predicted ms."""
    plan_row(PackedTree([300, 200, 100], [-1, 0, 0]), 2)  # numpy's own first use is no planning
    result = []
    for row in rows:
        tree = PRESETS[preset].tree(cp_size, row, tokens)
        wall, cpu = time.perf_counter(), time.process_time()
        plan = plan_row(tree, cp_size)
        _ = plan.digest
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        predicted = plan.predicted
        result.append(
            {
                "row": row,
                "cpu_ms": 1e3 * cpu,
                "wall_ms": 1e3 * wall,
                "predicted_ms": predicted.total_ms,
                "contiguous_ms": predicted.candidates[0].total_ms,
            }
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    add = parser.add_argument
    add("--preset", nargs="+", default=list(PRESETS), choices=PRESETS, metavar="NAME")
    add("--cp", type=int, default=8)
    add("--tokens", type=int, default=262_144)
    add("--rows", type=int, default=len(MEASURED_ROWS))
    add("--commit", default="unknown", metavar="HASH")
    add("--evidence", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    command = f"{MODULE} --preset {' '.join(args.preset)} --cp {args.cp} --tokens {args.tokens}"
    records = []
    for preset in args.preset:
        rows = range(MEASURED_ROWS.start, MEASURED_ROWS.start + args.rows)
        measured = measure_planning(preset, args.cp, args.tokens, rows)
        gain = [100 * (1 - m["predicted_ms"] / m["contiguous_ms"]) for m in measured]
        metrics = {
            "planning_cpu_ms": spread([m["cpu_ms"] for m in measured]),
            "planning_wall_ms": spread([m["wall_ms"] for m in measured]),
            "predicted_gain_percent": spread(gain, higher_is_better=True),
        }
        records.append(
            Evidence(
                what="planner",
                preset=preset,
                cp=args.cp,
                metrics=metrics,
                hardware=f"{platform.machine()} CPU, one thread",
                software={"python": platform.python_version(), "numpy": np.__version__},
                commit=args.commit,
                command=f"{command} --rows {args.rows}",
                date=datetime.date.today().isoformat(),
                variant=f"{args.tokens} tokens",
                rows=measured,
            )
        )
        cpu, wall = metrics["planning_cpu_ms"], metrics["planning_wall_ms"]
        print(
            f"{preset:12} {args.tokens:>9,} tokens CP{args.cp:<3} CPU ms {cpu['median']:6.1f} "
            f"(p95 {cpu['p95']:.1f})  wall ms {wall['median']:6.1f}  "
            f"predicted gain {metrics['predicted_gain_percent']['median']:.2f} %",
            flush=True,
        )
    if args.evidence:
        write_evidence(args.evidence, records)


if __name__ == "__main__":
    main()
