"""Predicted memory, buffer by buffer, and held to what was measured on the device."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.plan.cost import CostModel
from megatron_tree_cp.plan.memory import CrossingRows, LayerBytes, attention_call_bytes
from megatron_tree_cp.plan.model import LayerClass, ModelShape
from megatron_tree_cp.plan.planner import plan_row
from megatron_tree_cp.plan.profile import CostProfile
from megatron_tree_cp.tree.packed_tree import PackedTree

EVIDENCE = Path(__file__).parents[2] / "docs" / "benchmarks" / "evidence"
WORKSPACES = 2 * 32 * 2**20
"""cuBLAS keeps 32 MiB a stream and host thread on Hopper; the check before a measurement multiplies
matrices in the main thread and in backward's."""

# 4 query heads over 2 KV heads of 32 columns, 2 bytes: q and out 256, K and V together 256.
LAYER = LayerClass("x", query_heads=4, kv_heads=2, head_dim=32)
SIZES = LayerBytes.of(LAYER, 2, 1)


def waves(*rows: tuple[int, int], fused: bool = False) -> CrossingRows:
    """One rank's (received, sent) rows a wave."""
    received, sent = (np.array([w[i] for w in rows]).reshape(-1, 1) for i in (0, 1))
    return CrossingRows(received, sent, fused)


def backward(tokens: int, rows: CrossingRows, sizes: LayerBytes = SIZES) -> float:
    return float(sizes.backward(np.array([tokens]), rows)[0])


HELD = 100 * (256 + 2 * 16 + 512)  # dout, two row sums, fp32 sums of dQ


def test_backward_alone_is_most_at_its_call():
    # Gradients of K and V in bf16, and their fp32 sums; at the end dQ instead of the sums.
    assert backward(100, waves()) == HELD + 100 * (256 + 512)


def test_backward_ends_with_dq_beside_its_sums():
    wide = LayerBytes.of(replace(LAYER, query_heads=16), 2, 1)
    assert backward(100, waves(), wide) == 100 * (1024 + 2 * 64 + 2048) + 100 * (256 + 1024)


def test_heads_of_their_own_need_no_sums():
    own = LayerBytes.of(replace(LAYER, kv_heads=4), 2, 1)
    assert own.key_value_sum == 0 and SIZES.key_value_sum == 512


def test_tensor_parallel_ranks_hold_their_heads_and_a_whole_kv_head():
    half, most = (LayerBytes.of(LAYER, 2, size) for size in (2, 4))
    assert (half.query, half.key_value) == (128, 128)
    assert (most.query, most.key_value, most.key_value_sum) == (64, 128, 0)


def test_a_received_wave_is_most_at_its_call_or_on_its_way_home():
    assert backward(100, waves((1000, 0))) == HELD + 1000 * (256 + 512)
    # Gradients and their packed copy, and 5000 rows that come home.
    assert backward(100, waves((1000, 5000))) == HELD + 7000 * 256
    # The second call meets what came home, and the gradients of the first.
    two = waves((1000, 900), (1000, 0))
    assert backward(100, two) == HELD + (900 + 1000 + 1000) * 256 + 1000 * 512
    # So does the call over its own keys.
    assert backward(1000, waves((1000, 900))) == 10 * HELD + 2900 * 256 + 1000 * 512


def test_a_fused_call_joins_keys_in_a_copy():
    assert backward(100, waves((1000, 0), fused=True)) == HELD + 1100 * (2 * 256 + 512)
    assert backward(100, waves((10, 9000), fused=True)) == HELD + (110 + 10 + 9000) * 256


def test_every_layer_keeps_its_row_sums_and_what_it_received():
    model = ModelShape((replace(LAYER, layers=3),), token_flops=0.0, activation_bytes=10.0)
    rows = CrossingRows.one_wave(np.array([0, 1000]))
    peak = CostModel(model, CostProfile(), 1).peak_bytes(np.array([100, 100]), [rows])
    kept = 100 * (10 + 3 * 16)
    assert peak[0] == kept + HELD + 100 * (256 + 512)
    # Its own call comes last: the wave's gradients, the rows that came home, and 100 keys.
    wave = max(1000 * (256 + 512), 3000 * 256, 2100 * 256 + 100 * 512)
    assert peak[1] == kept + 3 * 1000 * 256 + HELD + wave


def test_the_planner_predicts_with_the_chosen_waves():
    tree = PackedTree([9000, 600, 700], [-1, 0, 0])
    model = ModelShape((LAYER,), activation_bytes=0.0)
    fused, staged = (plan_row(tree, 2, model, waves=count) for count in (0, 1))
    for plan in (fused, staged):
        attention = plan.attention_class(None)
        rows = CrossingRows.of_plan(attention)
        assert rows.received.sum() == rows.sent.sum() > 0
        tokens = plan.predicted.tokens
        want = SIZES.backward(tokens, rows) + tokens * 16 + rows.received.sum(0) * 256
        assert plan.predicted.peak_bytes.tolist() == want.tolist()


@cache
def _measured() -> list[tuple[str, int, dict]]:
    records = []
    for path in sorted(EVIDENCE.glob("attention_h200_*.json")):
        for record in json.loads(path.read_text(encoding="utf-8")):
            heads, kernel, *more = record["variant"].split()
            # Under a sink more was held when these were measured, 1 % at the peak.
            if kernel == "flash" and "peer" not in more and "sink" not in more:
                records.append((heads, record["cp"], record))
    return records


def _shape(record: dict) -> ModelShape:
    heads, _, *more = record["variant"].split()
    query_heads, kv_heads, head_dim = (int(part) for part in heads.split("/"))
    windows = [int(part[1:]) for part in more if part[0] == "w"]
    layer = LayerClass(
        "x",
        window=windows[0] if windows else None,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    return ModelShape((layer,), token_flops=0.0)


def _cases():
    return [
        pytest.param(record, id=f"{record['preset']}-cp{cp}-{heads}")
        for heads, cp, record in _measured()
    ]


@pytest.mark.parametrize("record", _cases())
def test_a_measured_call_holds_what_is_predicted(record):
    model = _shape(record)
    window = model.classes[0].window
    for row in record["rows"][:3]:
        tree = preset_tree(record["preset"], record["cp"], row["row"], row["tokens"])
        plan = plan_row(tree, record["cp"], model)
        predicted = (attention_call_bytes(plan, window).max() + WORKSPACES) / 2**30
        # Of one rank all is known; a plan of several may not be the one that was measured.
        allowed = 0.002 if record["cp"] == 1 else 0.08
        assert predicted == pytest.approx(row["peak_gib"], rel=allowed)


def test_there_is_evidence():
    assert {cp for _, cp, _ in _measured()} >= {1, 2}
