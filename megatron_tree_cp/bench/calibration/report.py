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
    name: str,
    coefficients: Mapping[str, Any],
    fits: Sequence[Fit],
    origin: Mapping[str, Any],
    base: ProfileDocument | None = None,
) -> ProfileDocument:
    """The profile of fitted coefficients.

    ``origin`` holds device, software, date, commit and command. Coefficients that no component told
    are those of ``base``, whose records say where they come from; without it they keep their
    defaults. Those that nothing told are named as unmeasured; limits are no measurements.
    """
    optional = {"name", "ranks_per_node", "processors", "memory_limit_bytes"}
    told = {} if base is None else json.loads(base.to_json())["coefficients"]
    unmeasured = [
        field.name
        for field in fields(CostProfile)
        if field.name not in coefficients
        and field.name not in optional
        and (base is None or field.name in base.unmeasured)
    ]
    records = [fit.record() for fit in fits]
    return ProfileDocument(
        profile=profile_of({**told, **coefficients, "name": name}, "the fitted profile"),
        components=(*records, *_carried(base, {record["name"] for record in records})),
        unmeasured=tuple(unmeasured),
        **origin,
    )


def _carried(base: ProfileDocument | None, measured: set[str]) -> list[dict[str, Any]]:
    """Records of the base's components that were not measured again, with where they were."""
    if base is None:
        return []
    where = {"date": base.date, "commit": base.commit, "command": base.command}
    return [{"from": where, **c} for c in base.components if c["name"] not in measured]


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


def samples_text(samples: Mapping[str, Sequence[Sample]], conditions: Mapping[str, Any]) -> str:
    """JSON of all samples and of what they were taken under; `read_samples` reads it back."""
    found = {name: [asdict(s) for s in some] for name, some in samples.items()}
    return json.dumps({"conditions": dict(conditions), "samples": found})


def read_samples(
    path: Path, conditions: Mapping[str, Any] | None = None
) -> tuple[dict[str, list[Sample]], dict[str, Any]]:
    """(samples of a former calibration, what they were taken under).

    Raises InputError for anything else, and where they were taken under other ``conditions``.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        taken = dict(values["conditions"])
        samples = {name: [Sample(**s) for s in some] for name, some in values["samples"].items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(f"{path}: not a file of calibration samples: {error}") from error
    for name, wanted in (conditions or {}).items():
        if taken.get(name) != wanted:
            raise InputError(
                f"{path}: measured with {name} {taken.get(name)!r}, this run has {wanted!r}; "
                f"leave --resume out to measure anew"
            )
    return samples, taken
