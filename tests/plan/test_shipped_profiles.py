"""Which profile a device gets, and what it is told."""

from dataclasses import replace

import pytest

from megatron_tree_cp.plan.profile import CostProfile
from megatron_tree_cp.plan.shipped_profiles import profile_for, scaled_profile, shipped_profiles

H200 = CostProfile(name="measured H200", exchange_latency_ms=0.07, backward_fill_flops=1e10)
SHIPPED = {"H200": H200}


def test_own_device_takes_its_own():
    profile, note = profile_for("NVIDIA H200", SHIPPED)
    assert profile is H200 and note == "NVIDIA H200: the shipped profile measured H200"


def test_another_device_is_scaled_and_says_so():
    profile, note = profile_for("NVIDIA A100-SXM4-80GB", SHIPPED)
    assert profile.forward_flops_per_ms == pytest.approx(H200.forward_flops_per_ms * 312 / 989)
    assert profile.memory_bytes_per_ms == pytest.approx(H200.memory_bytes_per_ms * 2 / 4.8)
    assert profile.backward_fill_flops == pytest.approx(1e10 * 312 / 989)
    assert profile.exchange_latency_ms == 0.07
    assert "profile of H200, compute scaled by 0.32 and memory by 0.42" in note
    assert "\n" not in note and profile.name != H200.name
    near = {**SHIPPED, "B200": replace(H200, name="measured B200")}
    assert "profile of H200" in profile_for("NVIDIA H100 80GB HBM3", near)[1]


def test_an_unknown_device_is_told():
    profile, note = profile_for("Other 9000", SHIPPED)
    assert profile is H200 and "unknown device" in note and "unscaled" in note


def test_nothing_shipped_is_uncalibrated():
    profile, note = profile_for("NVIDIA H200", {})
    assert profile == CostProfile() and "uncalibrated default costs" in note


def test_what_the_package_ships_can_be_read():
    for word, profile in shipped_profiles().items():
        assert word.isupper() and profile_for(f"NVIDIA {word}")[0] == profile


def test_scaling_leaves_optional_fields_alone():
    assert scaled_profile(CostProfile(), 2.0, 3.0).backward_fill_flops is None
