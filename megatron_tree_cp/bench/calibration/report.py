"""What a calibration found: a table for people, a profile for the planner, samples for a refit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ...plan.profile import CostProfile, ProfileDocument, profile_of
from ...tree.errors import InputError
from .component import Sample
from .fit import Fit


def profile_document(
    name: str, coefficients: Mapping[str, Any], fits: Sequence[Fit], origin: Mapping[str, Any]
) -> ProfileDocument:
    """The profile of fitted coefficients.

    ``origin`` holds device, software, date, commit and command. Coefficients that no component told
    keep their defaults and are named as unmeasured; limits are no measurements.
    """
    optional = {"name", "ranks_per_node", "memory_limit_bytes"}
    unmeasured = [
        field.name
        for field in fields(CostProfile)
        if field.name not in coefficients and field.name not in optional
    ]
    values = {"name": name, **coefficients}
    return ProfileDocument(
        profile=profile_of(values, "the fitted profile"),
        components=tuple(fit.record() for fit in fits),
        unmeasured=tuple(unmeasured),
        **origin,
    )


def fit_table(fits: Sequence[Fit]) -> Table:
    """Errors of every component, in per cent of the measured time."""
    table = Table(box=box.SIMPLE_HEAD, title="fits; errors in % of the measured time")
    heads = ("component", "samples", "fit median", "fit p95", "held out median", "held out p95")
    for head in (*heads, "worst"):
        table.add_column(head, justify="left" if head == "component" else "right")
    table.add_column("kept features")
    for fit in fits:
        shown = (
            *(fit.fit_error[k] for k in ("median", "p95")),
            *(fit.held_out_error[k] for k in ("median", "p95", "worst")),
        )
        kept = ", ".join(name for name, value in fit.coefficients.items() if value > 0)
        table.add_row(fit.name, str(fit.samples), *(f"{100 * value:.2f}" for value in shown), kept)
    return table


def samples_text(samples: Mapping[str, Sequence[Sample]]) -> str:
    """JSON of all samples; `read_samples` reads it back."""
    return json.dumps({name: [asdict(s) for s in found] for name, found in samples.items()})


def read_samples(path: Path) -> dict[str, list[Sample]]:
    """Samples of a former calibration. Raises InputError for anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {name: [Sample(**s) for s in found] for name, found in values.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a file of calibration samples: {error}") from error
