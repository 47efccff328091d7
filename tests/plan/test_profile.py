"""Cost profiles from files: fields checked one by one, errors in one line."""

import json

import pytest

from megatron_tree_cp.plan.profile import CostProfile, ProfileDocument, load_profile
from megatron_tree_cp.tree.errors import InputError


def test_reads_fields_and_keeps_defaults(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"name": "here", "exchange_latency_ms": 0.5, "ranks_per_node": 8}))
    assert load_profile(path) == CostProfile(name="here", exchange_latency_ms=0.5, ranks_per_node=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "profile.json:1: not JSON"),
        ("[1]", "a profile is one JSON object"),
        ('{"speed": 1}', "unknown coefficient 'speed'"),
        ('{"pack_launch_ms": "fast"}', "pack_launch_ms: 'fast' is no number"),
        ('{"pack_launch_ms": null}', "pack_launch_ms: None is no number"),
        ('{"fill_flops": 0}', "fill_flops must be more than 0"),
    ],
)
def test_refuses(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_profile(path)
    assert message in str(error.value) and "\n" not in str(error.value)


DOCUMENT = {
    "version": 1,
    "device": "NVIDIA H200",
    "software": {"torch": "2"},
    "date": "2026-01-01",
    "commit": "abc",
    "command": "tree-cp calibrate",
    "coefficients": {"name": "mine", "exchange_sizes": [[2, 0.1, 2e8], [8, 0.3, 1e8]]},
    "unmeasured": ["network_latency_ms"],
    "components": [
        {
            "name": "copies",
            "samples": 9,
            "coefficients": {"launch": 0.1},
            "fit_error": {"median": 0.01},
            "held_out_error": {"median": 0.02},
        }
    ],
}


def test_versioned_document(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(DOCUMENT))
    profile = load_profile(path)
    assert profile.name == "mine" and profile.exchange_sizes == ((2, 0.1, 2e8), (8, 0.3, 1e8))
    document = ProfileDocument.of(DOCUMENT, "here")
    assert ProfileDocument.of(json.loads(document.to_json()), "there") == document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "profile version 2; this release reads 1: run tree-cp calibrate again"),
        ({"speed": 1}, "unknown field 'speed'"),
        ({"device": None}, "device must be a text, got None"),
        ({"components": {}}, "components must be a list"),
        ({"components": [{"name": "x"}]}, "components: each has coefficients, fit_error"),
        ({"coefficients": {"speed": 1}}, "unknown coefficient 'speed'"),
        ({"coefficients": {"name": 1}}, "name: 1 is no text"),
        ({"coefficients": {"exchange_sizes": [[2, 1]]}}, "no list of number triples"),
        ({"coefficients": {"exchange_sizes": [[1, 0.1, 1e8]]}}, "CP size from 2"),
        ({"coefficients": {"head_dim_factors": [[64, 1.0, 0]]}}, "all above 0"),
    ],
)
def test_refuses_documents(tmp_path, change, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**DOCUMENT, **change}))
    with pytest.raises(InputError) as error:
        load_profile(path)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(str(path))


def test_every_field_of_a_document_is_needed(tmp_path):
    for name in DOCUMENT:
        if name == "version":
            continue  # without one it is an object of coefficients
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({k: v for k, v in DOCUMENT.items() if k != name}))
        with pytest.raises(InputError, match=f"{name} must be"):
            load_profile(path)


def test_exchange_rates_of_the_nearest_size():
    profile = CostProfile(exchange_sizes=((2, 0.1, 2e8), (8, 0.3, 1e8)))
    assert profile.exchange_rates(2) == profile.exchange_rates(3) == (0.1, 2e8)
    assert profile.exchange_rates(4) == (0.1, 2e8)  # as near to both: the smaller
    assert profile.exchange_rates(6) == profile.exchange_rates(64) == (0.3, 1e8)
    assert CostProfile().exchange_rates(8) == (0.1, 2.2e8)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        load_profile(tmp_path / "none.json")
