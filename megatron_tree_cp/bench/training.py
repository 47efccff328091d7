"""Evidence of training runs, from their metrics files.

    python -m megatron_tree_cp.bench.training --out FILE --hardware H200 --commit HASH \\
        --command "torchrun ..." --software torch=2.11.0 --skip 2 \\
        --run 1:flash:cp1.jsonl --run 2:flash:cp2.jsonl

Losses and gradient norms are compared with those of the first run of the same variant, or with
`--against-first` of the first run of all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from ..tree.errors import InputError
from .evidence import Evidence, spread, write_evidence


def _records(path: str) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a metrics file: {error}") from error


def training_metrics(
    records: list[dict[str, Any]], reference: list[dict[str, Any]], skip: int, compare: bool = True
) -> dict[str, dict[str, float]]:
    """Speed of the iterations after the first ``skip``; deviation from a reference over all.

    ``compare`` is False for runs that do not start from the reference's weights.
    """
    if len(records) != len(reference) or len(records) <= skip:
        raise InputError(
            f"runs of {len(records)} and {len(reference)} iterations: equal numbers are compared, "
            f"more than the {skip} that are skipped"
        )
    steady = records[skip:]
    rate = [r["stored_tokens"] / r["elapsed_ms"] * 1e3 for r in steady]
    metrics = {
        "iteration_ms": spread([r["elapsed_ms"] for r in steady]),
        "stored_tokens_per_s": spread(rate, higher_is_better=True),
        "exposed_preparation_ms": spread([r["exposed_preparation_ms"] for r in steady]),
        "peak_memory_gib": spread([r["peak_memory_gib"] for r in steady]),
    }
    for name in ("planning_cpu_ms", "predicted_ms", "island_rows"):  # older files have none
        if all(name in r for r in steady):
            metrics[name] = spread([r[name] for r in steady])
    if not compare:
        return metrics
    for name in ("loss", "grad_norm"):
        off = [abs(a[name] - b[name]) / abs(b[name]) for a, b in zip(records, reference)]
        metrics[f"{name}_relative_difference"] = spread(off)
    metrics["agreeing_steps"] = {"median": float(agreeing_steps(records, reference))}
    return metrics


LOSS_TOLERANCE, NORM_TOLERANCE = 0.005, 0.01


def agreeing_steps(records: list[dict[str, Any]], reference: list[dict[str, Any]]) -> int:
    """First steps whose loss and gradient norm stay within 0.5 % and 1 % of the reference's."""
    for step, (ours, theirs) in enumerate(zip(records, reference, strict=True)):
        for name, most in (("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE)):
            if abs(ours[name] - theirs[name]) > most * abs(theirs[name]):
                return step
    return len(records)


def main(argv: list[str] | None = None) -> int:
    """Write one evidence file for several runs."""
    parser = argparse.ArgumentParser(prog="megatron_tree_cp.bench.training", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="rollouts")
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--software", nargs="*", default=[], metavar="NAME=VERSION")
    parser.add_argument("--skip", type=int, default=2)
    parser.add_argument("--against-first", action="store_true")
    parser.add_argument(
        "--own-weights",
        nargs="*",
        default=[],
        metavar="VARIANT",
        help="variants whose initial weights are not the first run's: not compared with it",
    )
    parser.add_argument("--run", action="append", required=True, metavar="CP:VARIANT:FILE")
    args = parser.parse_args(argv)
    try:
        evidence: list[Evidence] = []
        references: dict[str, list[dict[str, Any]]] = {}
        for run in args.run:
            cp, variant, path = run.split(":", 2)
            records = _records(path)
            reference = references.setdefault("" if args.against_first else variant, records)
            evidence.append(
                Evidence(
                    what="train",
                    preset=args.preset,
                    cp=int(cp),
                    variant=variant,
                    metrics=training_metrics(
                        records, reference, args.skip, variant not in args.own_weights
                    ),
                    hardware=args.hardware,
                    software=dict(entry.split("=", 1) for entry in args.software),
                    commit=args.commit,
                    command=args.command,
                    date=args.date,
                    rows=records,
                )
            )
        write_evidence(args.out, evidence)
    except (InputError, ValueError) as error:
        print(f"megatron_tree_cp.bench.training: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
