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
from ..plan.profile import CostProfile
from ..plan.shipped_profiles import profile_for
from ..tree.packed_tree import PackedTree
from .evidence import Evidence, spread, write_evidence
from .presets import MEASURED_ROWS, PRESETS

SIZES = ((262_144, 8), (1_048_576, 64))

MODULE = "python -m megatron_tree_cp.bench.planner"


def measure_planning(
    preset: str, cp_size: int, tokens: int, rows: range, profile: CostProfile | None = None
) -> list[dict[str, float]]:
    """Per row: ``cpu_ms`` and ``wall_ms`` from tree to plan and digest, and predicted ms."""
    plan_row(PackedTree([300, 200, 100], [-1, 0, 0]), 2)  # numpy's own first use is no planning
    result = []
    for row in rows:
        tree = PRESETS[preset].tree(cp_size, row, tokens)
        wall, cpu = time.perf_counter(), time.process_time()
        plan = plan_row(tree, cp_size, None, profile)
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


def _record(
    preset: str,
    tokens: int,
    cp_size: int,
    count: int,
    profile: CostProfile,
    commit: str,
    command: str,
) -> Evidence:
    rows = range(MEASURED_ROWS.start, MEASURED_ROWS.start + count)
    measured = measure_planning(preset, cp_size, tokens, rows, profile)
    gain = [100 * (1 - m["predicted_ms"] / m["contiguous_ms"]) for m in measured]
    metrics = {
        "planning_cpu_ms": spread([m["cpu_ms"] for m in measured]),
        "planning_wall_ms": spread([m["wall_ms"] for m in measured]),
        "predicted_gain_percent": spread(gain, higher_is_better=True),
    }
    cpu, wall = metrics["planning_cpu_ms"], metrics["planning_wall_ms"]
    print(
        f"{preset:12} {tokens:>9,} tokens CP{cp_size:<3} CPU ms {cpu['median']:6.1f} "
        f"(p95 {cpu['p95']:.1f})  wall ms {wall['median']:6.1f}  "
        f"predicted gain {metrics['predicted_gain_percent']['median']:.2f} %",
        flush=True,
    )
    return Evidence(
        what="planner",
        preset=preset,
        cp=cp_size,
        metrics=metrics,
        hardware=f"{platform.machine()} CPU, one thread, shared with other work",
        software={"python": platform.python_version(), "numpy": np.__version__},
        commit=commit,
        command=command,
        date=datetime.date.today().isoformat(),
        variant=f"{tokens} tokens, profile {profile.name}",
        rows=measured,
    )


def _size(text: str) -> tuple[int, int]:
    tokens, _, cp_size = text.partition("x")
    return int(tokens), int(cp_size)


def main() -> None:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    add = parser.add_argument
    add("--preset", nargs="+", default=list(PRESETS), choices=PRESETS, metavar="NAME")
    add("--size", nargs="+", type=_size, default=SIZES, metavar="TOKENSxCP", help="rows and ranks")
    add("--rows", type=int, default=len(MEASURED_ROWS))
    add("--device", default="H200", metavar="NAME", help="plan with this device's shipped costs")
    add("--commit", default="unknown", metavar="HASH")
    add("--evidence", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    sizes = " ".join(f"{tokens}x{cp}" for tokens, cp in args.size)
    command = f"{MODULE} --preset {' '.join(args.preset)} --size {sizes} --rows {args.rows}"
    command += f" --device {args.device}"
    profile, note = profile_for(args.device)
    print(note, flush=True)
    records = [
        _record(preset, tokens, cp, args.rows, profile, args.commit, command)
        for tokens, cp in args.size
        for preset in args.preset
    ]
    if args.evidence:
        write_evidence(args.evidence, records)


if __name__ == "__main__":
    main()
