"""Evidence files: every published figure with the command, commit and machine that gave it.

``docs/benchmarks/evidence/<what>_<hardware>_<date>.json`` holds a list of records; pages and plots
are generated from these files, never typed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..tree.errors import InputError
from ..tree.row_files import write_atomically

KINDS = ("attention", "gdn", "mamba", "sparse_mla", "planner", "layers", "train", "live")


@dataclass(frozen=True)
class Evidence:
    """One measurement. ``metrics`` maps a name with its unit to median, p95 and worst."""

    what: str
    preset: str
    cp: int
    metrics: dict[str, dict[str, float]]
    hardware: str
    software: dict[str, str]
    commit: str
    command: str
    date: str
    variant: str = "default"
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.what not in KINDS:
            raise InputError(f"evidence: what is {self.what!r}; known: {', '.join(KINDS)}")


def spread(values: Sequence[float], higher_is_better: bool = False) -> dict[str, float]:
    """Median, 95th percentile on the bad side, and worst of a series."""
    if not values:
        raise InputError("evidence: a series needs at least one value")
    ordered = sorted(values, reverse=higher_is_better)
    at = min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))
    return {"median": statistics.median(ordered), "p95": ordered[at], "worst": ordered[-1]}


def write_evidence(path: Path, records: Sequence[Evidence]) -> None:
    """Write a whole evidence file, or nothing."""
    text = json.dumps([asdict(record) for record in records], indent=1) + "\n"
    write_atomically(path, text.encode())


def read_evidence(path: Path) -> list[Evidence]:
    """Read and check an evidence file; InputError names the file and the record."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        return [Evidence(**record) for record in records]
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not an evidence file: {error}") from error
