"""Fits against a clock whose costs are known: coefficients come back, errors are reported."""

import time

import numpy as np
import pytest
import torch

from megatron_tree_cp.bench.calibration.component import Case, Component, Sample, collect
from megatron_tree_cp.bench.calibration.fit import fit_component, fit_profile
from megatron_tree_cp.bench.calibration.head_dims import head_dim_component
from megatron_tree_cp.bench.calibration.measure import (
    RAMPS,
    Workload,
    device_components,
    device_mask,
)
from megatron_tree_cp.bench.calibration.report import (
    fit_table,
    profile_document,
    read_samples,
    samples_text,
)
from megatron_tree_cp.bench.calibration.samples import stage_cases
from megatron_tree_cp.bench.calibration.watch import MAX_HEAT_CALLS, DeviceWatch
from megatron_tree_cp.ops.attention.block_mask import tile_classes
from megatron_tree_cp.plan.profile import load_profile
from megatron_tree_cp.plan.remote import TILE
from megatron_tree_cp.tree.errors import InputError

WORK = Workload()
ORIGIN = {"device": "none", "software": {}, "date": "today", "commit": "x", "command": "y"}
TRUTH = {
    "memory_bytes_per_ms": 3e9,
    "merge_launch_ms": 0.01,
    "pack_launch_ms": 0.05,
    "merge_passes": 2.5,
    "accumulate_passes": 4.0,
    "forward_flops_per_ms": 5e11,
    "forward_hidden_factor": 1.5,
    "forward_idle_factor": 0.4,
    "backward_idle_factor": 0.7,
    "remote_pair_factor": 1.1,
    "forward_window_factor": 1.2,
    "forward_window_row_ms": 2e-7,
    "forward_launch_ms": 0.02,
    "forward_row_passes": 1.0,
    "underfill_ms": 0.1,
    "fill_flops": RAMPS[3],
    "backward_flops_per_ms": 4e11,
    "backward_hidden_factor": 0.8,
    "backward_remote_factor": 1.05,
    "backward_key_passes": 5.0,
    "token_flops_per_ms": 6e11,
    "token_backward_factor": 2.1,
}


class KnownClock:
    """Times every case by the costs of TRUTH, with noise; prepares nothing."""

    def __init__(self, noise=0.01, **changes):
        self.random, self.noise = np.random.default_rng(0), noise
        self.truth = {**TRUTH, **changes}

    def sample(self, component, case):
        ms = getattr(self, component)(dict(case.features)) * self.random.normal(1, self.noise)
        return Sample(case.label, case.features, float(ms), float(ms))

    def copies(self, f):
        t = self.truth
        passes = {"copy": 1, "delta": 6.0, "pack": 4.0, "assemble": 2.0}
        for step in ("merge", "accumulate"):
            passes[step] = t[f"{step}_passes"]
        moved = sum(passes[step] * f.get(f"{step}_bytes", 0.0) for step in passes)
        launch = t["merge_launch_ms"] * f.get("merge_launch", 0.0)
        launch += t["pack_launch_ms"] * f.get("pack_launch", 0.0)
        return launch + moved / t["memory_bytes_per_ms"]

    def _stage(self, f, pair, hidden, idle, remote, window, launch, passes):
        t = self.truth
        local, far = f.get("local_flops", 0.0), f.get("remote_flops", 0.0)
        pairs = local + far * remote + f["hidden_flops"] * hidden + f["window_flops"] * (window - 1)
        pairs += f["idle_flops"] * idle
        short = max(1 - f["work"] / t["fill_flops"], 0.0) * t["underfill_ms"]
        moved = sum(count * f[name] for name, count in passes.items())
        edges = f["window_rows"] * t["forward_window_row_ms"]
        return launch + pairs * pair + edges + short + moved / t["memory_bytes_per_ms"]

    def attention_forward(self, f):
        t = self.truth
        return self._stage(
            f,
            1 / t["forward_flops_per_ms"],
            t["forward_hidden_factor"],
            t["forward_idle_factor"],
            t["remote_pair_factor"],
            t["forward_window_factor"],
            t["forward_launch_ms"],
            {"row_bytes": t["forward_row_passes"]},
        )

    def attention_backward(self, f):
        t = self.truth
        return self._stage(
            f,
            2.5 / t["backward_flops_per_ms"],
            t["backward_hidden_factor"],
            t["backward_idle_factor"],
            t["backward_remote_factor"],
            1.0,
            0.05,
            {"key_bytes": t["backward_key_passes"]},
        )

    def tokens_forward(self, f):
        return 0.05 + f["flops"] / self.truth["token_flops_per_ms"]

    def tokens_backward(self, f):
        t = self.truth
        return 0.1 + t["token_backward_factor"] * f["flops"] / t["token_flops_per_ms"]


@pytest.fixture(scope="module")
def components():
    return device_components(WORK, torch.device("cpu"), processors=132.0)


def test_head_dims_are_priced_beside_the_calibrated_one():
    class Clock:
        def sample(self, component, case):
            ((name, flops),) = case.features.items()
            way, _, dim = name.partition("_")
            cost = {"64": 1.2, "128": 1.0, "256": 0.8}[dim] * (1 if way == "forward" else 3)
            ms = 1e-9 * cost * flops
            return Sample(case.label, case.features, ms, ms)

    (work, device) = Workload(scale=16), torch.device("cpu")
    component = head_dim_component(work, device)
    cases = list(component.cases())
    assert len(cases) == 18 and all(len(case.features) == 1 for case in cases)
    assert len({round(sum(case.features.values())) for case in cases}) == 3  # equal FLOPs
    fields, (fit,) = fit_profile([component], gather([component], Clock()))
    for dim, forward, backward in fields["head_dim_factors"]:
        want = {64: 1.2, 128: 1.0, 256: 0.8}[dim]
        assert (forward, backward) == pytest.approx((want, want))
    assert fit.held_out_error["worst"] < 1e-9


def gather(components, watch, tell=lambda line: None):
    samples, kept = {}, []
    collect(components, watch, tell, samples, lambda: kept.append(len(samples)))
    assert kept == list(range(1, len(components) + 1))
    return samples


def test_recovers_known_costs(components, tmp_path):
    heard = []
    samples = gather(components, KnownClock(), heard.append)
    assert [line.split(":")[0] for line in heard] == [c.name for c in components]
    fields, fits = fit_profile(components, samples)
    loose = {
        "merge_launch_ms",
        "pack_launch_ms",
        "forward_launch_ms",
        "forward_row_passes",
        "backward_key_passes",
        "underfill_ms",
    }
    for name, value in TRUTH.items():
        assert fields[name] == pytest.approx(value, rel=0.5 if name in loose else 0.1), name
    for fit in fits:
        assert 0 < fit.held_out_error["median"] < 0.015 and fit.held_out_error["p95"] < 0.05
    path = tmp_path / "profile.json"
    path.write_text(profile_document("known", fields, fits, ORIGIN).to_json())
    profile = load_profile(path)
    assert profile.name == "known" and profile.counts_tiles
    assert profile.token_backward_factor == fields["token_backward_factor"]
    assert len(fits) == len(components) == fit_table(fits).row_count


def test_tiles_are_kept_only_where_they_explain_more(components):
    forward = next(c for c in components if c.name == "attention_forward")
    plain = KnownClock(0.0, forward_hidden_factor=0.0, forward_row_passes=0.0)
    samples = gather([forward], plain)["attention_forward"]
    known = {"memory_bytes_per_ms": 3e9}
    _, found = fit_component(forward, samples, known)
    assert found["forward_hidden_factor"] < 1e-6
    with_tiles = gather([forward], KnownClock(0.0))["attention_forward"]
    tried = fit_component(forward, with_tiles, known)[0].tried
    best = min(tried, key=tried.get)
    assert "hidden_flops" in best and tried[best] < 1e-6
    assert min(error for name, error in tried.items() if "hidden_flops" not in name) > 1e-3


def test_held_out_samples_are_not_seen():
    """A wrong third sample in three changes the reported error, never the coefficients."""
    component = Component("x", list, [("launch", "flops")], lambda c, r, k: dict(c))
    samples = [
        Sample(str(n), {"launch": 1.0, "flops": n}, 1.0 + 2 * n, 1.0 + 2 * n) for n in range(1, 13)
    ]
    spoilt = [
        Sample(s.label, s.features, s.ms * 3, s.scale) if i % 3 == 2 else s
        for i, s in enumerate(samples)
    ]
    (good, _), (bad, _) = (fit_component(component, s, {}) for s in (samples, spoilt))
    assert bad.coefficients == good.coefficients == pytest.approx({"launch": 1.0, "flops": 2.0})
    assert good.held_out_error["worst"] < 1e-9 and bad.held_out_error["median"] > 1
    with pytest.raises(InputError, match="x: 3 samples are too few"):
        fit_component(component, samples[:3], {})


def test_a_component_without_cost_is_named(components):
    copies = components[0]
    samples = {"copies": [Sample("s", {"copy_launch": 1.0, "copy_bytes": 0.0}, 1.0, 1.0)] * 9}
    with pytest.raises(InputError, match="copies: the fit gives copy_bytes no cost"):
        fit_profile([copies], samples)


def test_device_watch_takes_differences():
    calls = []

    def prepare():
        return (lambda: calls.append("both"), lambda: calls.append("alone"))

    watch = DeviceWatch(torch.device("cpu"), repeats=3)
    sample = watch.sample("x", Case("c", {"launch": 1.0}, prepare))
    assert calls == ["both", "alone"] * 4 and sample.scale > 0


def test_a_case_is_timed_after_so_much_of_itself():
    calls = []

    def prepare():
        return lambda: (calls.append(len(calls)), time.sleep(0.004))

    watch = DeviceWatch(torch.device("cpu"), repeats=2, heat_ms=20.0)
    sample = watch.sample("x", Case("c", {"launch": 1.0}, prepare))
    # Once for what compiles, once to know how long it takes, 20 ms of it, and the two that count.
    assert 4 + 1 <= len(calls) <= 4 + 5 and sample.ms >= 4
    calls.clear()
    watch.heat(lambda: calls.append(1), 1e-9)
    assert len(calls) == MAX_HEAT_CALLS


def test_stage_features_are_the_kernels_tiles():
    """Features come from the planner; the mask that is timed must touch the same tiles."""
    checked = 0
    for stage in stage_cases(32):
        mask, rows = device_mask(stage, torch.device("cpu"))
        assert rows.stop <= stage.queries and mask.dense().sum() == stage.pairs
        if stage.window is None:
            touched = int(tile_classes(mask, TILE, TILE).touched.sum())
            assert touched * TILE * TILE - stage.pairs == stage.hidden
            checked += stage.remote
    assert checked > 10


def test_samples_survive_a_file(tmp_path):
    samples = {"copies": [Sample("a", {"launch": 1.0}, 2.0, 2.0)]}
    path = tmp_path / "samples.json"
    path.write_text(samples_text(samples, {"heat": 60.0}))
    assert read_samples(path)[0] == samples
    assert read_samples(path, {"heat": 60.0}) == (samples, {"heat": 60.0})
    with pytest.raises(InputError, match="measured with heat 60.0, this run has 0.0"):
        read_samples(path, {"heat": 0.0})
    for text in ('{"conditions": {}, "samples": {"copies": [{"what": 1}]}}', '{"copies": []}'):
        path.write_text(text)
        with pytest.raises(InputError, match="not a file of calibration samples"):
            read_samples(path)
