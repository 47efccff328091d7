"""Layer specs with tree attention for the Transformer Engine implementation.

Each is Megatron's own Transformer Engine spec with two parts replaced, the attention core and the
MoE router; linear layers, norms, experts, and so parameter names and checkpoint keys are stock.
The core runs in the parameters' dtype; linear layers may run in fp8.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from ..tree.errors import InputError
from .gdn import with_tree_gdn
from .layers import TreeDotProductAttention
from .moe import TreeMoETransformerLayer, tree_moe


def te_gpt_layer_spec(
    config: Any, vp_stage: int | None = None, attention_impl: str = "auto"
) -> TransformerBlockSubmodules:
    """Layers of one pipeline stage of a GPTModel; see ``specs.tree_gpt_layer_spec``.

    Raises InputError without Transformer Engine, and for variants of its layers that replace
    attention themselves.
    """
    transformer: TransformerConfig = config.transformer
    require_te(transformer)
    if config.use_transformer_engine_op_fuser:
        raise InputError("--use-transformer-engine-op-fuser: no tree layers for it: drop it")
    block = get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=True,
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
    )
    ours = {id(layer): with_tree_parts(layer, attention_impl) for layer in block.layer_specs}
    return replace(block, layer_specs=[ours[id(layer)] for layer in block.layer_specs])


def te_hybrid_stack_spec(attention_impl: str = "auto") -> ModuleSpec:
    """Stack spec of a HybridModel: pattern symbols ``*``, ``G``, ``-`` and ``E``."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    stock: HybridStackSubmodules = hybrid_stack_spec.submodules
    # Stock layers of other kinds know no trees; their pattern symbols are refused.
    ours = HybridStackSubmodules(
        attention_layer=with_tree_parts(stock.attention_layer, attention_impl),
        mlp_layer=stock.mlp_layer,
        moe_layer=with_tree_parts(stock.moe_layer, attention_impl),
        gdn_layer=with_tree_gdn(stock.gdn_layer),
    )
    return ModuleSpec(module=TreeTEHybridStack, submodules=ours)


class TreeTEHybridStack(HybridStack):
    """HybridStack whose attention heeds ``--qk-layernorm``, as that of a GPTModel does."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        require_te(config)
        if config.qk_layernorm and not config.qk_l2_norm:
            layer = submodules.attention_layer
            norms = {"q_layernorm": TENorm, "k_layernorm": TENorm}
            submodules = replace(submodules, attention_layer=_with_attention(layer, **norms))
        super().__init__(config, submodules, *args, **kwargs)


def require_te(config: TransformerConfig) -> None:
    """Raise InputError where the Transformer Engine layers of this config cannot be built."""
    if not HAVE_TE:
        raise InputError(
            "--transformer-impl transformer_engine: transformer_engine cannot be imported: "
            "install the [te] extra or use --transformer-impl local"
        )
    if config.multi_latent_attention or config.experimental_attention_variant is not None:
        raise InputError(
            "no tree layers for latent or experimental attention: drop --multi-latent-attention "
            "and --experimental-attention-variant"
        )
    if config.use_kitchen or config.use_kitchen_attention:
        raise InputError("no tree layers with Kitchen's attention: drop --use-kitchen-attention")
    if config.use_grouped_gemm_for_dense_mlp:
        raise InputError("no tree layers for --use-grouped-gemm-for-dense-mlp: drop it")


def with_tree_parts(layer: ModuleSpec, attention_impl: str) -> ModuleSpec:
    """A stock layer spec with the tree's attention core and MoE router where it has such parts."""
    if isinstance(layer.submodules.self_attention, ModuleSpec):
        core = partial(TreeDotProductAttention, impl=attention_impl)
        layer = _with_attention(layer, core_attention=core)
    mlp = layer.submodules.mlp
    if isinstance(mlp, partial) and mlp.func is MoELayer:
        submodules = replace(layer.submodules, mlp=tree_moe(mlp))
        layer = replace(layer, module=TreeMoETransformerLayer, submodules=submodules)
    return layer


def _with_attention(layer: ModuleSpec, **parts: Any) -> ModuleSpec:
    attention = layer.submodules.self_attention
    attention = replace(attention, submodules=replace(attention.submodules, **parts))
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))
