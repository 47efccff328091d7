"""Cost profiles from files: fields checked one by one, errors in one line."""

import json

import pytest

from megatron_tree_cp.plan.profile import CostProfile, load_profile
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
        ('{"range_ms": "fast"}', "range_ms: 'fast' is no number"),
        ('{"range_ms": null}', "range_ms: None is no number"),
        ('{"fill_flops": 0}', "fill_flops must be more than 0"),
    ],
)
def test_refuses(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_profile(path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        load_profile(tmp_path / "none.json")
