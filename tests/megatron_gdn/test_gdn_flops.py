"""Megatron's FLOP count of an iteration with Gated DeltaNet layers, from what rows report."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

HIDDEN, FFN, HEADS, GROUPS, CHANNELS, VOCABULARY = 64, 96, 4, 2, 16, 128
KEY_HEADS, VALUE_HEADS, WIDTH = 2, 4, 4
TOKENS, PAIRS = 50, 700


def arguments(key_dim: int, value_dim: int, **change):
    shape = {
        "num_layers": 4,
        "hybrid_layer_pattern": None,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "swiglu": True,
        "num_attention_heads": HEADS,
        "group_query_attention": True,
        "num_query_groups": GROUPS,
        "kv_channels": CHANNELS,
        "attention_output_gate": False,
        "multi_latent_attention": False,
        "experimental_attention_variant": None,
        "linear_attention_freq": None,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": WIDTH,
        "num_experts": None,
        "moe_router_topk": 0,
        "moe_ffn_hidden_size": None,
        "moe_latent_size": None,
        "moe_shared_expert_intermediate_size": None,
        "mamba_state_dim": 16,
        "mamba_head_dim": 16,
        "mamba_num_groups": 1,
        "mamba_num_heads": 1,
        "mtp_num_layers": None,
        "padded_vocab_size": VOCABULARY,
        "seq_length": 100,
    }
    return SimpleNamespace(**(shape | change))


def forward_flops(key_dim: int, value_dim: int, attention: int, recurrent: int, mlps: int) -> int:
    """Multiplications and additions of the row, layer by layer."""
    keys, values = KEY_HEADS * key_dim, VALUE_HEADS * value_dim
    heads = TOKENS * 2 * HIDDEN * CHANNELS * (2 * HEADS + 2 * GROUPS) + 4 * PAIRS * HEADS * CHANNELS
    projections = HIDDEN * (2 * keys + 2 * values + 2 * VALUE_HEADS + values)
    convolution = WIDTH * (2 * keys + values)
    states = 4 * VALUE_HEADS * key_dim * value_dim
    return (
        attention * heads
        + recurrent * TOKENS * 2 * (projections + convolution + states)
        + mlps * TOKENS * 6 * HIDDEN * FFN
        + TOKENS * 2 * HIDDEN * VOCABULARY
    )


@pytest.mark.parametrize("key_dim, value_dim", [(8, 8), (8, 16), (16, 8)])
@pytest.mark.parametrize("hybrid", [True, False])
def test_rows_report_what_their_layers_compute(key_dim, value_dim, hybrid, monkeypatch):
    from megatron.training import training

    from megatron_tree_cp.megatron.batch import RowStatistics
    from megatron_tree_cp.megatron.flops import report_row

    # A GPTModel has an MLP in each of its layers, a hybrid one where its pattern says so.
    args = arguments(key_dim, value_dim, hybrid_layer_pattern="G*-G" if hybrid else None)
    layers = (1, 2, 1)
    if not hybrid:
        args.experimental_attention_variant = "gated_delta_net"
        args.linear_attention_freq = 4
        layers = (1, 3, 4)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", None)
    monkeypatch.setattr(training, "_seqlen_stats_active", False)
    report_row(RowStatistics(TOKENS, 2 * TOKENS, 3, PAIRS), torch.device("cpu"))
    tokens, squares = training._seqlen_stats_in_iteration.tolist()
    counted = training.num_floating_point_operations(
        args, 1, seqlen_squared_sum_in_batch=squares, total_real_tokens_in_batch=tokens
    )
    assert counted == pytest.approx(3 * forward_flops(key_dim, value_dim, *layers), rel=1e-12)
