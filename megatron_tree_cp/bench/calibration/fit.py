"""Non-negative least squares of relative errors, judged on samples that it has not seen."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...tree.errors import InputError
from ..evidence import spread
from .component import Component, Sample, work_with_ramp

HELD_OUT = 3
"""Every sample of this many is held out of a fit."""


@dataclass(frozen=True)
class Fit:
    """Coefficients of one component (ms per unit of a feature), and relative errors.

    ``tried`` maps every set of features to the mean relative error of the held-out samples.
    """

    name: str
    samples: int
    coefficients: dict[str, float]
    ramp: float | None
    fit_error: dict[str, float]
    held_out_error: dict[str, float]
    tried: dict[str, float]

    def record(self) -> dict[str, Any]:
        """As a profile's file holds it."""
        return asdict(self)


def fit_component(
    component: Component, samples: Sequence[Sample], known: Mapping[str, Any]
) -> tuple[Fit, dict[str, Any]]:
    """Fit every candidate on two thirds of the samples; keep the best on the rest.

    Returns the fit and its fields of the profile, given those ``known`` so far. Raises InputError
    when there are too few samples to hold any out, or when no candidate makes sense.
    """
    held = [s for i, s in enumerate(samples) if i % HELD_OUT == HELD_OUT - 1]
    seen = [s for i, s in enumerate(samples) if i % HELD_OUT != HELD_OUT - 1]
    if len(held) < 2:
        raise InputError(f"{component.name}: {len(samples)} samples are too few to hold some out")
    best: tuple[float, dict[str, float], float | None, dict[str, Any]] | None = None
    tried: dict[str, float] = {}
    every = dict.fromkeys((n for names in component.candidates for n in names), 0.0)
    refusal = None
    for names, ramp in itertools.product(component.candidates, component.ramps or [None]):
        used = names if ramp is None else (*names, "short")
        coefficients = _solve(used, seen, ramp)
        error = statistics.mean(_errors(coefficients, ramp, held))
        label = " + ".join(names) if ramp is None else f"{' + '.join(names)} + short {ramp:.1e}"
        tried[label] = error
        try:
            fields = component.fields({**every, **coefficients}, ramp, known)
        except InputError as reason:
            refusal = reason
            continue
        if best is None or error < best[0]:
            best = (error, coefficients, ramp, fields)
    if best is None:
        raise refusal or InputError(f"{component.name}: no features to fit")
    _, coefficients, ramp, fields = best
    fit = Fit(
        component.name,
        len(samples),
        coefficients,
        ramp,
        spread(_errors(coefficients, ramp, seen)),
        spread(_errors(coefficients, ramp, held)),
        tried,
    )
    return fit, fields


def fit_profile(
    components: Sequence[Component], samples: Mapping[str, Sequence[Sample]]
) -> tuple[dict[str, Any], list[Fit]]:
    """(fields of `CostProfile`, fits) of all components that have samples, in order."""
    fields: dict[str, Any] = {}
    fits = []
    for component in components:
        if component.name not in samples:
            continue
        fit, told = fit_component(component, samples[component.name], fields)
        fields.update(told)
        fits.append(fit)
    return fields, fits


def _solve(names: Sequence[str], samples: Sequence[Sample], ramp: float | None) -> dict[str, float]:
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise InputError("a fit needs scipy: install megatron-tree-cp[bench]") from error
    rows = [[row.get(n, 0.0) for n in names] for row in work_with_ramp(samples, ramp)]
    scale = np.array([sample.scale for sample in samples])
    matrix = np.array(rows) / scale[:, None]
    target = np.array([sample.ms for sample in samples]) / scale
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    solution, _ = nnls(matrix / norms, target)
    return dict(zip(names, (solution / norms).tolist(), strict=True))


def _errors(
    coefficients: Mapping[str, float], ramp: float | None, samples: Sequence[Sample]
) -> list[float]:
    return [
        abs(sum(c * row.get(n, 0.0) for n, c in coefficients.items()) - sample.ms) / sample.scale
        for row, sample in zip(work_with_ramp(samples, ramp), samples, strict=True)
    ]
