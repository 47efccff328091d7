"""Specs of the Transformer Engine implementation: stock but for attention core and MoE router.

What they compute is tested where Transformer Engine runs; how they are put together, everywhere.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import pytest

from tests.distributed import run_ranks
from tests.megatron import models

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None


def stand_in_layer(moe: bool):
    """A spec of the shape that Megatron makes for Transformer Engine, with names as modules."""
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    experts = partial(MoELayer, submodules=MoESubmodules(experts="experts", shared_experts="all"))
    attention = SelfAttentionSubmodules(
        linear_qkv="qkv", core_attention="core", linear_proj="proj", q_layernorm="q"
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(module=SelfAttention, submodules=attention),
            pre_mlp_layernorm="norm",
            mlp=experts if moe else partial(MLP, submodules="mlp"),
        ),
    )


@pytest.mark.parametrize("moe", [False, True])
def test_core_and_router_are_all_that_changes(moe):
    from megatron_tree_cp.megatron.layers import TreeDotProductAttention
    from megatron_tree_cp.megatron.moe import TreeMoETransformerLayer, TreeTopKRouter
    from megatron_tree_cp.megatron.te_specs import with_tree_parts

    stock = stand_in_layer(moe)
    ours = with_tree_parts(stock, "tiled")
    attention = ours.submodules.self_attention.submodules
    assert attention.core_attention.func is TreeDotProductAttention
    assert attention.core_attention.keywords == {"impl": "tiled"}
    kept = (attention.linear_qkv, attention.linear_proj, attention.q_layernorm)
    assert kept == ("qkv", "proj", "q")
    assert ours.submodules.pre_mlp_layernorm == "norm"
    assert stock.submodules.self_attention.submodules.core_attention == "core"
    if moe:
        assert ours.module is TreeMoETransformerLayer
        parts = ours.submodules.mlp.keywords["submodules"]
        kept = (parts.experts, parts.shared_experts)
        assert parts.router is TreeTopKRouter and kept == ("experts", "all")
    else:
        assert ours.module is stock.module and ours.submodules.mlp is stock.submodules.mlp


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is installed")
def test_without_transformer_engine_the_fix_is_named():
    from megatron_tree_cp.megatron.specs import tree_gpt_layer_spec
    from megatron_tree_cp.tree.errors import InputError

    config = SimpleNamespace(transformer=SimpleNamespace(transformer_impl="transformer_engine"))
    with pytest.raises(InputError, match=r"install the \[te\] extra or use --transformer-impl loc"):
        tree_gpt_layer_spec(config)


@pytest.mark.parametrize(
    ("fp8", "recipe", "granule"),
    [(None, "delayed", 2), ("hybrid", "delayed", 32), ("e4m3", "mxfp8", 64)],
)
def test_shards_hold_whole_fp8_blocks_on_every_tensor_parallel_rank(fp8, recipe, granule):
    from megatron_tree_cp.megatron.tree_model import shard_granule

    args = Namespace(fp8=fp8, fp8_recipe=recipe, tensor_model_parallel_size=2)
    assert shard_granule(args) == granule


NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Local name -> Transformer Engine's, which fuses both norms into the next linear layer."""


def te_name(name: str) -> str:
    for local, fused in NAMES.items():
        name = name.replace(local, fused)
    return name


def te_against_local(rank: int, world_size: int):
    """Relative errors of loss and gradients of the TE layers against the local ones, in bf16."""
    import torch

    from megatron_tree_cp import TreeContext, pack_trajectories, plan_row
    from megatron_tree_cp.megatron.model_shape import model_shape_from_config
    from megatron_tree_cp.megatron.params import TreePackedSeqParams
    from tests.megatron.test_model import trajectories

    torch.cuda.set_device(0)
    models.start()
    (row,) = pack_trajectories(trajectories(), max_tokens=128)
    sizes = {
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_layers": 2,
        "qk_layernorm": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
    }

    def run(model):
        shape = model_shape_from_config(model.config, None)
        plan = plan_row(row.tree, 1, model=shape, granule=16)
        context = TreeContext(plan, None, torch.device("cuda", 0))
        real = context.row_indices >= 0
        index = context.row_indices.clamp(min=0).cpu()

        def shard(values):
            return torch.where(real, torch.as_tensor(values.copy())[index].cuda(), 0)

        params = TreePackedSeqParams(tree=context, positions=context.positions)
        labels = shard(row.labels).clamp(min=0)[None]
        tokens = shard(row.tokens)[None]
        nll = model(tokens, context.positions[None], None, labels=labels, packed_seq_params=params)
        loss = torch.where(real, nll[0].float() * shard(row.weights), 0.0).sum()
        loss.backward()
        return loss.item(), {name: p.grad.float() for name, p in model.named_parameters()}

    local = models.build_model(dict(sizes)).cuda()
    te = models.build_model(sizes | {"transformer_impl": "transformer_engine"}).cuda()
    weights = {te_name(name): p.detach() for name, p in local.named_parameters()}
    theirs = dict(te.named_parameters())
    assert weights.keys() == theirs.keys(), weights.keys() ^ theirs.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(weights[name])
    (loss, gradients), (te_loss, te_gradients) = run(local), run(te)
    errors = {"loss": abs(te_loss / loss - 1)}
    for name, gradient in gradients.items():
        ours = te_gradients[te_name(name)]
        errors[name] = float((ours - gradient).norm() / gradient.norm().clamp(min=1e-6))
    return errors


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_TE, reason="needs transformer_engine (the [te] extra)")
def test_te_layers_compute_what_local_ones_do():
    (errors,) = run_ranks(1, te_against_local, timeout=250)
    worst = max(errors, key=errors.get)
    assert errors["loss"] < 5e-3 and errors[worst] < 5e-2, f"{worst}: {errors[worst]:.1e}"
