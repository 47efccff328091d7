#!/usr/bin/env python3
"""Compare two metrics files (`--tree-metrics-file`) iteration by iteration.

Prints a table and fails (exit 1) when a loss differs by more than `--rtol` relatively, when the
integer counts differ at all, or, with `--falling`, when the loss does not fall. The gradient norm
is held to `--grad-norm-rtol`, by default the same tolerance. Bad input exits with 2.

    scripts/compare_metrics.py runs/cp1.jsonl runs/cp2.jsonl --labels CP1 CP2 --falling
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Record = Mapping[str, float]


class BadMetrics(ValueError):
    """A metrics file that cannot be read; the message names file and line."""


def read_metrics(path: Path) -> dict[int, Record]:
    """Iteration -> record. After a resume an iteration may occur twice: the last one counts."""
    records: dict[int, Record] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadMetrics(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records[int(record["iteration"])] = record
            for key in ("loss", "count"):
                float(record[key])
        except (ValueError, KeyError, TypeError) as error:
            raise BadMetrics(f"{path}:{number}: not a metrics record ({error})") from None
    if not records:
        raise BadMetrics(f"{path}: no iterations")
    return records


def relative_difference(a: float, b: float) -> float:
    """|a - b| over the larger magnitude; 0 for two zeros."""
    return abs(a - b) / max(abs(a), abs(b), 1e-300)


def loss_falls(losses: Sequence[float]) -> bool:
    """Whether the mean of the last quarter is below the mean of the first."""
    quarter = max(1, len(losses) // 4)
    return sum(losses[-quarter:]) < sum(losses[:quarter])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reference", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--labels", nargs=2, default=("reference", "other"))
    parser.add_argument("--rtol", type=float, default=1e-5)
    parser.add_argument("--grad-norm-rtol", type=float, default=None)
    parser.add_argument("--iterations", type=int, default=None, help="fail unless this many")
    parser.add_argument("--falling", action="store_true", help="fail unless the loss falls")
    args = parser.parse_args(argv)
    grad_rtol = args.rtol if args.grad_norm_rtol is None else args.grad_norm_rtol
    try:
        first, second = read_metrics(args.reference), read_metrics(args.other)
    except BadMetrics as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    failures = []
    if first.keys() != second.keys():
        failures.append(f"iterations differ: {len(first)} and {len(second)}")
    if args.iterations is not None and len(first) != args.iterations:
        failures.append(f"{len(first)} iterations, {args.iterations} expected")

    a_name, b_name = (f"loss {label}" for label in args.labels)
    print(f"{'iter':>5} {a_name:>14} {b_name:>14} {'rel. diff':>10} {'grad norm diff':>15}")
    worst_loss = worst_norm = 0.0
    for iteration in sorted(first.keys() & second.keys()):
        a, b = first[iteration], second[iteration]
        loss = relative_difference(a["loss"], b["loss"])
        worst_loss = max(worst_loss, loss)
        shown = "-"
        if a.get("grad_norm") is not None and b.get("grad_norm") is not None:
            norm = relative_difference(a["grad_norm"], b["grad_norm"])
            worst_norm = max(worst_norm, norm)
            shown = f"{norm:.1e}"
            if not norm <= grad_rtol:
                failures.append(f"iteration {iteration}: grad norms differ by {norm:.1e}")
        if not loss <= args.rtol:  # also true for NaN
            failures.append(f"iteration {iteration}: losses differ by {loss:.1e}")
        if a["count"] != b["count"]:
            failures.append(f"iteration {iteration}: counts {a['count']} and {b['count']}")
        print(f"{iteration:>5} {a['loss']:>14.8f} {b['loss']:>14.8f} {loss:>10.1e} {shown:>15}")

    if args.falling and not loss_falls([first[i]["loss"] for i in sorted(first)]):
        failures.append("the loss does not fall")
    print(
        f"largest relative difference: loss {worst_loss:.1e} (limit {args.rtol:.0e}), "
        f"grad norm {worst_norm:.1e} (limit {grad_rtol:.0e})"
    )
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
