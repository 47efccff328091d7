"""Norms, positions, windows, layers and plan shapes, one at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_tree_cp.megatron.layers import TreeDotProductAttention
from megatron_tree_cp.megatron.model_shape import model_shape_from_config
from megatron_tree_cp.megatron.norms import local_norm
from megatron_tree_cp.megatron.params import TreePackedSeqParams
from megatron_tree_cp.megatron.rope import install_tree_rope
from megatron_tree_cp.megatron.windows import tree_window
from tests.megatron.models import EXPERTS, SIZES


def config(**extra) -> TransformerConfig:
    return TransformerConfig(**(SIZES | extra))


# -- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norm_is_torch_s(normalization):
    torch.manual_seed(0)
    ours = local_norm(config=config(normalization=normalization), hidden_size=32, eps=1e-6)
    stock = WrappedTorchNorm(config(normalization=normalization), 32, eps=1e-6)
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(5, 1, 32)
    assert torch.equal(ours(x), stock(x))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norm_marks_sequence_parallel_parameters(normalization):
    parallel = config(
        normalization=normalization, sequence_parallel=True, tensor_model_parallel_size=2
    )
    for cfg, mark in ((parallel, True), (config(normalization=normalization), False)):
        norm = local_norm(config=cfg, hidden_size=8)
        assert all(p.sequence_parallel is mark for p in norm.parameters())


def test_zero_centered_gamma_starts_at_the_plain_norm():
    x = torch.randn(4, 32)
    centered = local_norm(config=config(layernorm_zero_centered_gamma=True), hidden_size=32)
    assert not centered.weight.any()
    assert torch.equal(centered(x), local_norm(config=config(), hidden_size=32)(x))


def test_norm_takes_an_fp32_residual_stream_into_bf16():
    norm = local_norm(config=config(params_dtype=torch.bfloat16, bf16=True), hidden_size=32)
    assert norm(torch.randn(3, 32)).dtype == torch.bfloat16


def test_unknown_norm_names_the_known_ones():
    cfg = config()
    cfg.normalization = "L2Norm"
    with pytest.raises(ValueError, match="use --normalization RMSNorm or LayerNorm"):
        local_norm(config=cfg, hidden_size=8)


# -- positions ----------------------------------------------------------------------------------


@pytest.fixture
def no_cuda(monkeypatch):
    """Rotary modules move their frequencies to torch.cuda.current_device() on first use."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


ROPES = {
    "plain": (RotaryEmbedding, {"rotary_percent": 1.0}),
    "partial, interpolated": (
        RotaryEmbedding,
        {"rotary_percent": 0.5, "seq_len_interpolation_factor": 2.0},
    ),
    "llama scaling": (RotaryEmbedding, {"rotary_percent": 1.0, "rope_scaling": True}),
    "interleaved": (RotaryEmbedding, {"rotary_percent": 1.0, "rotary_interleaved": True}),
    "yarn": (
        YarnRotaryEmbedding,
        {"scaling_factor": 4.0, "original_max_position_embeddings": 8},
    ),
}


@pytest.mark.parametrize("kind, options", ROPES.values(), ids=ROPES.keys())
def test_angles_are_stock_rows_at_the_positions(no_cuda, kind, options):
    positions = torch.tensor([0, 1, 2, 1, 2, 40, 0, 0])
    rope = kind(kv_channels=16, use_cpu_initialization=True, **options)
    stock = rope.get_emb(41)
    model = torch.nn.ModuleDict({"rotary_pos_emb": rope})
    assert install_tree_rope(install_tree_rope([model])) == [model]
    params = TreePackedSeqParams(positions=positions)
    given = rope.get_rotary_seq_len(None, None, None, None, params)
    got = rope(given, packed_seq=False, cp_group=None)
    if kind is YarnRotaryEmbedding:
        (stock, mscale), (got, tree_mscale) = stock, got
        assert tree_mscale == mscale
    assert torch.equal(got, stock[positions])


def test_rope_refuses_what_it_cannot_place(no_cuda):
    rope = MultimodalRotaryEmbedding(kv_channels=16, rotary_percent=1.0)
    with pytest.raises(ValueError, match="no explicit positions for MultimodalRotaryEmbedding"):
        install_tree_rope([torch.nn.ModuleDict({"rotary_pos_emb": rope})])
    rope = RotaryEmbedding(16, 1.0, use_cpu_initialization=True)
    install_tree_rope([torch.nn.ModuleDict({"rotary_pos_emb": rope})])
    with pytest.raises(ValueError, match="need TreePackedSeqParams"):
        rope.get_rotary_seq_len(None, None, None, None, PackedSeqParams())
    with pytest.raises(ValueError, match="positions is None"):
        rope.get_rotary_seq_len(None, None, None, None, TreePackedSeqParams())


def test_packed_params_refuse_the_thd_format():
    assert TreePackedSeqParams().qkv_format == "sbhd"
    with pytest.raises(ValueError, match="sbhd"):
        TreePackedSeqParams(qkv_format="thd")


# -- windows and plan shapes --------------------------------------------------------------------


def test_window_counts_the_query_itself():
    windowed = config(window_size=(7, 0), window_attn_skip_freq=[1, 0, 1, 0])
    assert [tree_window(windowed, n) for n in (1, 2, 3, 4)] == [8, None, 8, None]
    assert tree_window(config(window_size=(-1, 0)), 1) is None
    assert tree_window(config(window_size=(7, -1)), 1) == 8
    with pytest.raises(ValueError, match="use --window-size 7,0"):
        tree_window(config(window_size=(7, 3)), 1)


def test_shape_has_a_class_a_window():
    shape = model_shape_from_config(config(window_size=(7, 0), window_attn_skip_freq=4))
    assert [(c.name, c.window, c.layers) for c in shape.classes] == [
        ("global", None, 1),
        ("w8", 8, 3),
    ]
    first = shape.classes[0]
    assert (first.query_heads, first.kv_heads, first.head_dim) == (4, 2, 8)
    attention, mlp = 2 * 32 * (2 * 4 + 2 * 2) * 8, 2 * 32 * 3 * 48
    assert shape.token_flops == 4 * (attention + mlp)
    assert shape.dtype_bytes == 4


def test_shape_of_a_pattern_counts_symbols():
    # Layer numbers count every symbol: '*' stands at 1 and 4, and 4 is skipped by the window.
    cfg = config(window_size=(7, 0), window_attn_skip_freq=4, **EXPERTS)
    shape = model_shape_from_config(cfg, "*-E*")
    assert [(c.window, c.layers) for c in shape.classes] == [(None, 1), (8, 1)]
    assert model_shape_from_config(cfg, "*-|E*") == shape
    with pytest.raises(ValueError, match="add at least one"):
        model_shape_from_config(cfg, "-E-E")


def test_pipeline_stages_share_one_mean_shape():
    cfg = config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    assert model_shape_from_config(cfg).classes[0].layers == 2
    assert model_shape_from_config(cfg).token_flops * 2 == (
        model_shape_from_config(config()).token_flops
    )


# -- attention layer ----------------------------------------------------------------------------


class Group:
    """Stands in for a process group where only its size and this rank are asked."""

    def __init__(self, size: int, rank: int):
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def attention(tp_size: int = 1, tp_rank: int = 0, **extra) -> TreeDotProductAttention:
    torch.manual_seed(3)
    return TreeDotProductAttention(
        config(**extra),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        pg_collection=SimpleNamespace(tp=Group(tp_size, tp_rank)),
    )


def test_learnable_sink_is_one_parameter_whatever_the_tp_size():
    whole = attention(softmax_type="learnable").softmax_offset
    assert whole.shape == (4,) and whole.any()
    halves = [attention(2, rank, softmax_type="learnable").softmax_offset for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), whole)
    assert halves[0].tensor_model_parallel and halves[0].partition_dim == 0


def test_off_by_one_sink_is_no_checkpoint_entry():
    layer = attention(softmax_type="off-by-one")
    assert torch.equal(layer.softmax_offset, torch.zeros(4))
    assert not layer.state_dict() and not list(layer.parameters())
    assert attention().softmax_offset is None


def test_attention_says_what_it_needs():
    q = torch.zeros(4, 1, 4, 8)
    with pytest.raises(ValueError, match="pass TreePackedSeqParams"):
        attention()(q, q, q, None, packed_seq_params=PackedSeqParams())
    context = SimpleNamespace(num_tokens=6)
    with pytest.raises(ValueError, match="the shard holds 6 tokens"):
        attention()(q, q, q, None, packed_seq_params=TreePackedSeqParams(tree=context))
    with pytest.raises(ValueError, match="use --attention-dropout 0"):
        attention(attention_dropout=0.1)
