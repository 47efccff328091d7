"""Gated DeltaNet costs: known ones come back from times that the planner's own price gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_tree_cp.bench.calibration.component import Sample
from megatron_tree_cp.bench.calibration.fit import fit_component
from megatron_tree_cp.bench.calibration.recurrence import (
    DIRECT,
    INVERSE,
    QUICK_SHAPES,
    SHAPES,
    chained_components,
    derivatives,
    layer_price,
    recurrent_components,
)
from megatron_tree_cp.bench.calibration.recurrence_rows import local_rows
from megatron_tree_cp.bench.gdn_layer import GdnShape
from megatron_tree_cp.plan import CostProfile, Layout
from megatron_tree_cp.plan.recurrence import CHUNK, RecurrencePlan
from megatron_tree_cp.plan.recurrence_loads import recurrence_loads
from megatron_tree_cp.tree.errors import InputError

CPU = torch.device("cpu")
BASE = {"memory_bytes_per_ms": 3e9, "exchange_latency_ms": 0.05}
TRUTH = {
    "gdn_conv_passes": 3.0,
    "gdn_conv_backward_factor": 2.0,
    "gdn_token_bytes_per_ms": 5e9,
    "gdn_token_backward_factor": 0.9,
    "gdn_padding_factor": 0.6,
    "gdn_padding_backward_factor": 0.7,
    "gdn_step_ms": 0.004,
    "gdn_state_bytes_per_ms": 2e9,
    "gdn_fork_passes": 3.0,
    "gdn_gradient_step_ms": 0.006,
    "gdn_gradient_flops_per_ms": 9e10,
    "gdn_gradient_fork_passes": 2.5,
    "gdn_summary_step_ms": 0.005,
    "gdn_summary_flops_per_ms": 1.5e11,
    "gdn_summary_fork_passes": 1.5,
    "gdn_level_ms": 0.008,
    "gdn_layer_ms": 0.09,
    "gdn_carry_passes": 6.0,
    "gdn_compose_ms": 0.03,
}


def components(scale=1):
    local = recurrent_components(torch.bfloat16, scale, CPU)
    return [*local, *chained_components(torch.bfloat16, scale, CPU, 2, None)]


def timed(component, noise, **changes):
    """Samples as a device would give whose costs are TRUTH."""
    random, truth = np.random.default_rng(1), {**BASE, **TRUTH, **changes}
    samples = []
    for case in component.cases():
        f = case.features
        if component.explain is None:
            passes = truth["gdn_conv_passes"] / truth["memory_bytes_per_ms"]
            back = passes * truth["gdn_conv_backward_factor"]
            ms = 0.01 + passes * f.get("bytes", 0.0) + back * f.get("back_bytes", 0.0)
        else:
            ms = component.explain(Sample(case.label, f, 1.0, 1.0), (), truth)["settled"]
        ms *= random.normal(1, noise)
        samples.append(Sample(case.label, f, ms, ms))
    return samples


def fitted(noise, **changes):
    known, fits = dict(BASE), {}
    for component in components():
        fit, fields = fit_component(component, timed(component, noise, **changes), known)
        known.update(fields)
        fits[component.name] = fit
    return known, fits


@pytest.mark.parametrize("changes", [{}, {"gdn_step_ms": 0.02}, {"gdn_state_bytes_per_ms": 1e11}])
def test_recovers_known_costs(changes):
    """Whether steps or chunks count differs between these; the fit must find out which."""
    found, fits = fitted(0.0, **changes)
    for name, value in {**TRUTH, **changes}.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name
    assert list(fits) == ["gdn_conv", "gdn_pass", "gdn", "gdn_chained_cp2"]
    assert max(fit.held_out_error["worst"] for fit in fits.values()) < 1e-6


def test_noise_moves_costs_little():
    found, fits = fitted(0.01)
    for name, value in TRUTH.items():
        assert found[name] == pytest.approx(value, rel=0.2), name
    for fit in fits.values():
        assert 0 < fit.held_out_error["median"] < 0.02 and fit.held_out_error["p95"] < 0.05


def test_the_last_shape_is_held_out():
    assert len(SHAPES) == len(QUICK_SHAPES) == 4
    for component in components():
        labels = [case.label for case in component.cases()]
        held = labels[component.held_out - 1 :: component.held_out]
        assert all("16/64/128/128" in label for label in held) and len(held) == len(labels) // 4
        assert not any("16/64/128/128" in label for label in set(labels) - set(held))


def test_a_shape_with_costs_of_its_own_shows_as_held_out_error():
    component = components()[1]
    known = dict(BASE)
    samples = timed(component, 0.0)
    slow = [
        replace(s, ms=2 * s.ms, scale=2 * s.ms) if "16/64/128/128" in s.label else s
        for s in samples
    ]
    fit, fields = fit_component(component, slow, known)
    assert fit.fit_error["worst"] < 1e-6 and fit.held_out_error["median"] == pytest.approx(0.5)
    assert fields["gdn_step_ms"] == pytest.approx(TRUTH["gdn_step_ms"])


def test_derivatives_add_up_to_the_price():
    profile = CostProfile(**BASE, **TRUTH)
    names = [*INVERSE, *DIRECT]
    shape = GdnShape()
    for row in local_rows(8):
        cuts = np.linspace(0, row.tree.num_tokens, 5).astype(np.int64)
        layout = Layout.from_pieces(cuts, np.array([0, 1, 1, 0]), 2)
        loads = recurrence_loads(RecurrencePlan(row.tree, layout), CHUNK)
        for backward in (False, True):

            def price(costs, backward=backward, loads=loads):
                return layer_price(shape, loads, backward, costs)

            d = derivatives(price, names, profile)
            costs = {n: 1 / getattr(profile, f) for n, f in INVERSE.items()}
            costs |= {n: getattr(profile, f) for n, f in DIRECT.items()}
            told = d["settled"] + sum(costs[n] * d[n] for n in names)
            assert told == pytest.approx(price(profile), rel=1e-9)
            assert d["layer"] == pytest.approx(1.0) and (
                d["gradient_step"] + d["gradients"] == 0 or backward
            )


def test_rows_tell_the_terms_apart():
    """Some wait for their longest run, some for all chunks, some for states and launches."""
    profile, shape = CostProfile(**BASE, **TRUTH), GdnShape()
    shares = []
    for row in local_rows(1):
        layout = Layout.from_pieces(np.array([0, row.tree.num_tokens]), np.array([0]), 1)
        loads = recurrence_loads(RecurrencePlan(row.tree, layout), CHUNK)

        def price(costs, loads=loads):
            return layer_price(shape, loads, False, costs)

        d, here = derivatives(price, ["step", "states", "forks", "levels"], profile), price(profile)
        state = 1 / profile.gdn_state_bytes_per_ms
        shares.append(
            (
                profile.gdn_step_ms * d["step"] / here,
                state * d["states"] / here,
                profile.gdn_fork_passes * d["forks"] / here,
                profile.gdn_level_ms * d["levels"] / here,
            )
        )
    assert all(share > 0.25 for share in np.max(shares, axis=0))
    assert np.linalg.matrix_rank(np.array(shares), tol=0.05) == 4


def test_samples_of_other_rows_are_refused():
    component = components(scale=16)[1]
    case = next(iter(component.cases()))
    known = Sample(case.label, case.features, 1.0, 1.0)
    assert component.explain(known, ["step"], BASE)["step"] > 0
    for wrong in (
        replace(known, label="another"),
        replace(known, features={**known.features, "row": 99.0}),
    ):
        with pytest.raises(InputError, match="no sample of this release"):
            component.explain(wrong, ["step"], BASE)
