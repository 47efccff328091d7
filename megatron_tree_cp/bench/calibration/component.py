"""Components: what is measured together, and which coefficients of the profile it tells.

An operator joins by one more `Component` in the list that `collect` and `fit_profile` are given:
cases that say what they time, names of the explanatory features, and a function from fitted
coefficients to fields of `CostProfile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Call = Callable[[], Any]
Features = Mapping[str, float]


@dataclass(frozen=True)
class Case:
    """One thing to time. ``features`` explain its ms; ``prepare`` makes the inputs, then the call.

    Where ``prepare`` returns two calls, what the first takes longer than the second is the sample
    (its error is judged against the second).
    """

    label: str
    features: Features
    prepare: Callable[[], Call | tuple[Call, Call]]


@dataclass(frozen=True)
class Sample:
    """One measurement: ``ms`` and what its error is relative to."""

    label: str
    features: Features
    ms: float
    scale: float


Explain = Callable[[Sample, Sequence[str], Mapping[str, Any]], Features]


@dataclass(frozen=True)
class Component:
    """What is measured and fitted together.

    ``candidates`` are sets of features, simplest first; the one with the smallest held-out error is
    kept. ``ramps`` are extents R of work: the feature ``short`` is then ``max(1 - work / R, 0)``,
    and R is chosen with the set. ``fields`` maps the fitted coefficients (ms per unit of a feature,
    0 for features left out), the ramp and the fields known so far to fields of the profile; it
    raises InputError where they make no sense, and such a set of features is not kept.

    Where a price is no plain sum, ``explain`` gives the features of a sample by the names wanted,
    at the fields known so far (its derivatives there); the ms that they leave to what is known are
    the feature ``settled``. The fit then repeats with the fields that it found, from each of
    ``starts``: fields to begin with, beside the defaults. Features left out keep the cost that they
    have, and ``fields`` does not see them; the first set that makes sense is kept, so that what is
    held out has no say.
    """

    name: str
    cases: Callable[[], Iterable[Case]]
    candidates: Sequence[tuple[str, ...]]
    fields: Callable[[Mapping[str, float], float | None, Mapping[str, Any]], dict[str, Any]]
    ramps: Sequence[float] = field(default=())
    explain: Explain | None = None
    starts: Sequence[Mapping[str, float]] = field(default=({},))
    held_out: int = 3
    """Every sample of this many is held out of a fit."""


class Stopwatch(Protocol):
    """Times cases."""

    def sample(self, component: str, case: Case) -> Sample:
        """The sample of one case."""


def collect(
    components: Sequence[Component],
    watch: Stopwatch,
    tell: Callable[[str], None],
    into: dict[str, list[Sample]],
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Put the samples of every component, in order, into ``into``.

    ``tell`` hears one line per component; ``keep`` is called after each, so that a run that is cut
    short loses no more than the component that it was at.
    """
    for component in components:
        into[component.name] = [watch.sample(component.name, case) for case in component.cases()]
        tell(f"{component.name}: {len(into[component.name])} samples")
        keep()


def work_with_ramp(samples: Sequence[Sample], ramp: float | None) -> Iterator[dict[str, float]]:
    """The features of samples, with ``short`` for a ramp."""
    for sample in samples:
        values = dict(sample.features)
        if ramp is not None:
            values["short"] = max(1.0 - values.get("work", 0.0) / ramp, 0.0)
        yield values
