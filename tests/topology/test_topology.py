"""Every layer family on every topology against trajectories alone on one rank."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from tests.distributed import RankFailure, run_ranks

from .canonical import Tensors, assemble
from .families import ADAM, COMMON, FAMILIES, SGD, TOPOLOGIES, Topology, matrix
from .mutations import MUTATIONS
from .probe import Trace
from .session import Outcome, Run, session

RUNS_PER_SESSION = 6

MUTANTS = (
    ("dense", "TP2 x SP x CP2", "loss normalised per rank"),
    ("dense", "TP2 x SP x CP2", "norms without sequence-parallel mark"),
    ("moe", "TP2 x EP2 x CP2", "padding counted in router losses"),
    ("moe", "TP2 x EP2 x CP2", "multiplicity forgotten"),
    ("moe", "TP2 x EP2 x CP2", "router losses normalised per rank"),
    ("gated delta net", "TP2 x SP x CP2", "states of other ranks forgotten"),
)


def write_rollouts(path: Path) -> Path:
    """Families of trajectories with trained shared turns, ends inside turns and duplicates."""
    rng = random.Random(11)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(64) for _ in range(count)]

    records = []
    for _ in range(12):
        prompt, turn = tokens(rng.randint(9, 15)), tokens(rng.randint(5, 9))
        paths = [prompt + turn + tokens(rng.randint(3, 9)) for _ in range(3)]
        paths += [prompt + tokens(rng.randint(4, 9)), paths[0][:-2], list(paths[1])]
        for one in paths:
            trained = [0] * 4 + [int(rng.random() < 0.8) for _ in one[4:]]
            trained[-1] = 1
            records.append({"tokens": one, "loss_mask": trained})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Oracle:
    """Runs what tests ask for, many in one session of processes, and keeps the outcomes."""

    def __init__(self, folder: Path, wanted: list[tuple[str, str, str]]):
        self.folder, self.wanted = folder, wanted
        self.failures: dict[str, RankFailure] = {}
        self.data = write_rollouts(folder / "rollouts.jsonl")
        self.ranks: dict[str, list[Outcome]] = {}

    def reference(self, family: str, optimizer: tuple[str, ...]) -> Outcome:
        """The one-rank run of trajectories alone; all that are wanted start together."""
        if not self.ranks:
            wanted = {(f, TOPOLOGIES[t].optimizer) for f, t, _ in self.wanted}
            wanted |= {(f, tuple(SGD)) for f, _ in wanted}
            runs = [
                Run(_label(f, flags), self._argv(f, flags), reference=FAMILIES[f].reference)
                # SGD first: its initial weights are everybody's.
                for f, flags in sorted(wanted, key=lambda one: one[1] != tuple(SGD))
            ]
            half = [run for run in runs if run.name.endswith("sgd")]
            self._session(1, half)
            for run in half:
                family_name = run.name.removesuffix(" sgd")
                torch.save(
                    assemble([self.ranks[run.name][0].trace.initial]), self._weights(family_name)
                )
            rest = [run for run in runs if run not in half]
            if rest:
                self._session(
                    1,
                    [
                        Run(
                            r.name, r.argv, r.reference, self._weights(r.name.removesuffix(" adam"))
                        )
                        for r in rest
                    ],
                )
        return self.ranks[_label(family, optimizer)][0]

    def tree(self, family: str, topology: str, mutation: str = "") -> list[Outcome]:
        """All ranks' outcomes of a tree run; all wanted ones of its size start together."""
        name = f"{family} on {topology} {mutation}".strip()
        if name in self.failures:
            raise self.failures[name]
        if name not in self.ranks:
            size = TOPOLOGIES[topology].ranks
            runs = [
                Run(
                    f"{f} on {t} {m}".strip(),
                    self._argv(f, TOPOLOGIES[t].optimizer, TOPOLOGIES[t]),
                    weights=self._weights(f),
                    mutation=m,
                )
                for f, t, m in self.wanted
                if TOPOLOGIES[t].ranks == size
            ]
            try:
                self._session(size, runs)
            except RankFailure:
                if len(runs) == 1:
                    raise
                self._one_by_one(size, runs)
                return self.tree(family, topology, mutation)
        return self.ranks[name]

    def _one_by_one(self, size: int, runs: list[Run]) -> None:
        """After a session failed: find out which of its runs do."""
        for run in runs:
            try:
                self._session(size, [run])
            except RankFailure as failure:
                self.failures[run.name] = failure

    def _session(self, size: int, runs: list[Run]) -> None:
        # Every run leaves its gloo groups and their threads behind: new processes now and then.
        for begin in range(0, len(runs), RUNS_PER_SESSION):
            some = runs[begin : begin + RUNS_PER_SESSION]
            outcomes = run_ranks(size, session, self.folder, some, timeout=60 + 60 * len(some))
            for run in some:
                self.ranks[run.name] = [of_rank[run.name] for of_rank in outcomes]

    def _argv(
        self, family: str, optimizer: tuple[str, ...], topology: Topology | None = None
    ) -> tuple[str, ...]:
        flags = topology.flags if topology else []
        data = ["--tree-data", str(self.data)]
        return (*COMMON, *FAMILIES[family].flags, *optimizer, *flags, *data)

    def _weights(self, family: str) -> Path:
        return self.folder / f"{family.replace(' ', '_')}.pt"


def _label(family: str, optimizer: tuple[str, ...]) -> str:
    return f"{family} {'adam' if optimizer == tuple(ADAM) else 'sgd'}"


def deviations(reference: Tensors, other: Tensors) -> dict[str, float]:
    """``||delta|| / max(||g||, 1e-6 * norm of all)``; q, k and v of a projection apart."""
    assert reference.keys() == other.keys(), reference.keys() ^ other.keys()
    total = torch.sqrt(sum((t.double() ** 2).sum() for t in reference.values()))
    found = {}
    for name, value in reference.items():
        parts = {"": (value, other[name])}
        if "linear_qkv" in name:
            groups = [t.reshape(2, 4, 8, -1) for t in (value, other[name])]
            cuts = {"[q]": slice(0, 2), "[k]": slice(2, 3), "[v]": slice(3, 4)}
            parts = {key: tuple(g[:, cut] for g in groups) for key, cut in cuts.items()}
        for key, (mine, theirs) in parts.items():
            scale = torch.clamp(mine.double().norm(), min=float(1e-6 * total))
            found[name + key] = float((theirs.double() - mine.double()).norm() / scale)
    return found


def differences(
    reference: Outcome, ranks: list[Outcome], dtype: torch.dtype = torch.float32
) -> dict[str, tuple[float, str]]:
    """Worst deviation, and where, of each thing that is compared; ``dtype`` of the weights."""
    found: dict[str, tuple[float, str]] = {}
    records = [rank.records for rank in ranks]
    for what in ("loss", "grad_norm"):
        pairs = zip(records[0], reference.records, strict=True)
        found[what] = max(abs(a[what] / b[what] - 1) for a, b in pairs), ""
    traces = [rank.trace for rank in ranks]
    gradients = deviations(
        assemble([reference.trace.gradients]), assemble([t.gradients for t in traces])
    )
    updates = _updates(reference.trace, traces, torch.finfo(dtype).eps)
    for what, by_name in (("gradient", gradients), ("update", updates)):
        name = max(by_name, key=lambda one: by_name[one])
        found[what] = by_name[name], name
    found["routes"] = _wrong_routes(reference.trace.routes, traces), ""
    return found


def _updates(reference: Trace, traces: list[Trace], eps: float) -> dict[str, float]:
    """Deviations of what two steps changed, beyond the rounding of the weights themselves."""
    first = assemble([reference.initial])
    last, theirs = assemble([reference.final]), assemble([t.final for t in traces])
    for name, value in assemble([t.initial for t in traces]).items():
        close = torch.allclose(value, first[name], rtol=eps, atol=0)
        assert close, f"{name} starts elsewhere"
    found = {}
    for name, start in first.items():
        update = (last[name].double() - start.double()).norm()
        rounding = 2 * eps * last[name].double().norm()
        delta = (last[name].double() - theirs[name].double()).norm() - rounding
        found[name] = max(0.0, float(delta / update)) if update else float(delta > 0)
    return found


def _wrong_routes(reference: dict, traces: list[Trace]) -> float:
    routes: dict = {}
    for trace in traces:
        for place, experts in trace.routes.items():
            routes.setdefault(place, {}).update(experts)
    assert routes.keys() == reference.keys()
    tokens = [(place, index) for place in reference for index in reference[place]]
    wrong = sum(routes[place].get(index) != reference[place][index] for place, index in tokens)
    return wrong / max(1, len(tokens))


def selected(request: pytest.FixtureRequest, fixture: str) -> list[tuple[str, str, str]]:
    """(family, topology, mutation) of the tests that will run, so that ``-k`` runs no more."""
    items = [i for i in request.session.items if fixture in getattr(i, "fixturenames", ())]
    given = [item.callspec.params for item in items]
    return [(p["family"], p["topology"], p.get("mutation", "")) for p in given]


@pytest.fixture(scope="module")
def fast(request, tmp_path_factory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("fast"), selected(request, "fast"))


@pytest.fixture(scope="module")
def slow(request, tmp_path_factory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("slow"), selected(request, "slow"))


def check(oracle: Oracle, family: str, topology: str) -> None:
    shape = TOPOLOGIES[topology]
    reference = oracle.reference(family, shape.optimizer)
    ranks = oracle.tree(family, topology)
    assert not any(rank.trace.handshakes for rank in ranks), "stages exchanged shapes"
    dtype = torch.bfloat16 if "--bf16" in shape.flags else torch.float32
    found = differences(reference, ranks, dtype)
    print(
        f"{family} on {topology}: " + ", ".join(f"{k} {v:.1e} {n}" for k, (v, n) in found.items())
    )
    for what, (deviation, name) in found.items():
        assert deviation <= shape.tolerance, f"{what} is off by {deviation:.1e} {name}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "topology"), matrix(fast=True))
def test_fast_topologies(fast, family, topology):
    check(fast, family, topology)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("family", "topology"), matrix(fast=False))
def test_topologies(slow, family, topology):
    check(slow, family, topology)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "topology", "mutation"), MUTANTS)
def test_mutations_are_caught(fast, family, topology, mutation):
    reference = fast.reference(family, TOPOLOGIES[topology].optimizer)
    mutant = fast.tree(family, topology, mutation)
    try:
        found = differences(reference, mutant)
    except AssertionError as error:
        assert "replicas" in str(error)
        return
    worst = max(found["gradient"][0], found["update"][0])
    assert worst > 100 * TOPOLOGIES[topology].tolerance, (mutation, found)


def test_every_mutation_is_tried():
    assert {mutation for _, _, mutation in MUTANTS} == set(MUTATIONS)
