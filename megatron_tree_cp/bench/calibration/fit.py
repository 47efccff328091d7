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
from .component import Component, Features, Sample, work_with_ramp

ROUNDS = 12
"""At most so often a fit repeats whose features depend on its coefficients."""

STILL = 1e-6
"""Change of the mean relative error from which on it repeats no more."""


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
    """Fit every candidate on the samples that are not held out; keep the best on the rest.

    Returns the fit and its fields of the profile, given those ``known`` so far. Raises InputError
    when there are too few samples to hold any out, or when no candidate makes sense.
    """
    every = component.held_out
    held = [s for i, s in enumerate(samples) if i % every == every - 1]
    seen = [s for i, s in enumerate(samples) if i % every != every - 1]
    if len(held) < 2:
        raise InputError(f"{component.name}: {len(samples)} samples are too few to hold some out")
    best: _Candidate | None = None
    tried: dict[str, float] = {}
    refusal = None
    for names, ramp in itertools.product(component.candidates, component.ramps or [None]):
        candidate = _Candidate(component, names if ramp is None else (*names, "short"), ramp)
        try:
            candidate.solve(seen, known)
        except InputError as reason:
            refusal = reason
        error = statistics.mean(candidate.errors(held))
        tried[" + ".join(names) + ("" if ramp is None else f" + short {ramp:.1e}")] = error
        if candidate.fields and (best is None or error < statistics.mean(best.errors(held))):
            best = candidate
            if component.explain is not None:
                break
    if best is None:
        raise refusal or InputError(f"{component.name}: no features to fit")
    fit = Fit(
        component.name,
        len(samples),
        best.coefficients,
        best.ramp,
        spread(best.errors(seen)),
        spread(best.errors(held)),
        tried,
    )
    return fit, best.fields


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


class _Candidate:
    """One set of features of a component, and what a fit of them finds."""

    def __init__(self, component: Component, names: Sequence[str], ramp: float | None) -> None:
        self.component, self.names, self.ramp = component, names, ramp
        self.coefficients: dict[str, float] = {}
        self.fields: dict[str, Any] = {}
        self._costs: dict[str, Any] = {}

    def solve(self, samples: Sequence[Sample], known: Mapping[str, Any]) -> None:
        """Find the coefficients; of features that depend on them, those of the best round.

        Raises InputError, with coefficients but without fields, where these make no sense.
        """
        best: tuple[float, dict[str, float], dict[str, Any]] | None = None
        refusal = None
        for start in self.component.starts:
            try:
                found = self._rounds(samples, known, start)
            except InputError as reason:
                refusal = reason
                continue
            if best is None or found[0] < best[0]:
                best = found
        if best is None:
            raise refusal or InputError(f"{self.component.name}: a fit needs somewhere to start")
        _, self.coefficients, self.fields = best
        self._costs = {**known, **self.fields}

    def _rounds(
        self, samples: Sequence[Sample], known: Mapping[str, Any], start: Mapping[str, float]
    ) -> tuple[float, dict[str, float], dict[str, Any]]:
        """(mean error of the samples, coefficients, fields) of the best round from one start."""
        found: list[tuple[float, dict[str, float], dict[str, Any]]] = []
        self._costs = {**start, **known}
        component, plain = self.component, self.component.explain is None
        # Of a plain sum, what a set leaves out costs nothing; else it keeps the cost it has.
        names = (n for names in component.candidates for n in names)
        absent = dict.fromkeys(names, 0.0) if plain else {}
        for _ in range(1 if plain else ROUNDS):
            self.coefficients = _solve(self.names, self._rows(samples), samples)
            try:
                fields = component.fields({**absent, **self.coefficients}, self.ramp, known)
            except InputError:
                if not found:
                    raise
                break
            self._costs = {**known, **fields}
            error = statistics.mean(self.errors(samples))
            found.append((error, self.coefficients, fields))
            if len(found) > 1 and abs(error - found[-2][0]) <= STILL:
                break
        return min(found, key=lambda one: one[0])

    def errors(self, samples: Sequence[Sample]) -> list[float]:
        """Relative errors of the coefficients found."""
        return [
            abs(_told(self.coefficients, row) - sample.ms) / sample.scale
            for row, sample in zip(self._rows(samples), samples, strict=True)
        ]

    def _rows(self, samples: Sequence[Sample]) -> list[Features]:
        explain = self.component.explain
        if explain is None:
            return list(work_with_ramp(samples, self.ramp))
        return [explain(sample, self.names, self._costs) for sample in samples]


def _told(coefficients: Mapping[str, float], row: Features) -> float:
    return row.get("settled", 0.0) + sum(c * row.get(n, 0.0) for n, c in coefficients.items())


def _solve(
    names: Sequence[str], rows: Sequence[Features], samples: Sequence[Sample]
) -> dict[str, float]:
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise InputError("a fit needs scipy: install megatron-tree-cp[bench]") from error
    scale = np.array([sample.scale for sample in samples])
    matrix = np.array([[row.get(n, 0.0) for n in names] for row in rows]) / scale[:, None]
    left = [s.ms - row.get("settled", 0.0) for row, s in zip(rows, samples, strict=True)]
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    solution, _ = nnls(matrix / norms, np.array(left) / scale)
    return dict(zip(names, (solution / norms).tolist(), strict=True))
