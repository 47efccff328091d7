"""Layer specs with tree attention, for GPTModel and HybridModel; local ones are made here.

Parameter names, shapes and checkpoint keys are Megatron's. The local implementation keeps its
pre-norms as modules of their own where Transformer Engine fuses them into the next linear layer;
the key maps below write them under the fused names, so that checkpoints of both load into each
other. (Megatron's own local MoE layers map their pre-norm too, which Transformer Engine does not
fuse there; ours keep the name that Transformer Engine writes.)
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from .gdn import INPUT_NORM_KEYS as _GDN_NORM_KEYS
from .gdn import gdn_layer_spec, gdn_layers, gdn_self_attention
from .layers import TreeDotProductAttention
from .model_shape import moe_layers
from .moe import TreeMoETransformerLayer, tree_moe
from .norms import local_norm
from .te_specs import te_gpt_layer_spec, te_hybrid_stack_spec

_INPUT_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_MLP_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def tree_gpt_layer_spec(
    config: Any, vp_stage: int | None = None, attention_impl: str = "auto"
) -> TransformerBlockSubmodules:
    """Layers of one pipeline stage of a GPTModel, with tree attention.

    ``config`` is a GPTModelConfig; the function goes into its ``transformer_layer_spec``, alone or
    as ``functools.partial(tree_gpt_layer_spec, attention_impl=...)``, which picks the attention
    implementation. The layers are those of ``transformer_impl``, local or Transformer Engine.
    Raises ValueError for a transformer that has no tree specs.
    """
    transformer: TransformerConfig = config.transformer
    if transformer.transformer_impl == "transformer_engine":
        return te_gpt_layer_spec(config, vp_stage, attention_impl)
    _require_local(transformer)
    if transformer.pipeline_model_parallel_layout is not None:
        numbers = transformer.pipeline_model_parallel_layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage
        )
    else:
        first = get_transformer_layer_offset(transformer, vp_stage=vp_stage)
        count = get_num_layers_to_build(transformer, vp_stage=vp_stage)
        numbers = list(range(first, first + count))
    moe = moe_layers(transformer)
    kinds = list(zip(moe, gdn_layers(transformer), strict=True))
    specs = {kind: _gpt_layer(transformer, *kind, attention_impl) for kind in set(kinds)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[kinds[number]] for number in numbers], layer_norm=local_norm
    )


def _require_local(config: TransformerConfig) -> None:
    if config.transformer_impl != "local":
        raise ValueError(
            f"no tree layers for the {config.transformer_impl} implementation: "
            "use --transformer-impl local"
        )
    variant = config.experimental_attention_variant
    if config.multi_latent_attention or variant not in (None, "gated_delta_net"):
        raise ValueError(
            "no tree layers for latent attention and this variant: drop --multi-latent-attention, "
            "use --experimental-attention-variant gated_delta_net or none"
        )


def _gpt_layer(
    config: TransformerConfig, is_moe: bool, is_gdn: bool, attention_impl: str
) -> ModuleSpec:
    attention = _self_attention(attention_impl, _qk_norm(config))
    norm_keys = _GDN_NORM_KEYS if is_gdn else _INPUT_NORM_KEYS
    return ModuleSpec(
        module=TreeMoETransformerLayer if is_moe else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=local_norm,
            self_attention=gdn_self_attention() if is_gdn else attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=local_norm,
            mlp=_moe_mlp() if is_moe else _dense_mlp(),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=norm_keys | ({} if is_moe else _MLP_NORM_KEYS),
        ),
    )


def _qk_norm(config: TransformerConfig) -> Any:
    """Norm of queries and keys; None leaves SelfAttention its own (L2) or none at all."""
    return local_norm if config.qk_layernorm and not config.qk_l2_norm else None


def _self_attention(attention_impl: str, qk_norm: Any) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=partial(TreeDotProductAttention, impl=attention_impl),
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _dense_mlp() -> Any:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return partial(MLP.as_mlp_submodule, submodules=linears)


def _moe_mlp() -> Any:
    # num_experts is only asserted to be set; the layer reads config.num_moe_experts.
    return tree_moe(get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=1))


class TreeHybridStack(HybridStack):
    """HybridStack with local norms: the final one, and those of queries and keys."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *args: Any,
        post_layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        _require_local(config)
        # The base class builds its final norm as TENorm, whatever the spec; build it here instead.
        super().__init__(
            config, _with_qk_norm(submodules, config), *args, post_layer_norm=False, **kwargs
        )
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = local_norm(
                config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )


def _with_qk_norm(
    submodules: HybridStackSubmodules, config: TransformerConfig
) -> HybridStackSubmodules:
    """A stack spec is made without a config, so its attention learns of --qk-layernorm here."""
    if _qk_norm(config) is None:
        return submodules
    submodules = copy.deepcopy(submodules)
    attention = submodules.attention_layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = _qk_norm(config)
    return submodules


def make_tree_hybrid_stack_spec(
    attention_impl: str = "auto", transformer_impl: str = "local"
) -> ModuleSpec:
    """Stack spec of a HybridModel with tree layers: symbols ``*``, ``G``, ``-`` and ``E``."""
    if transformer_impl == "transformer_engine":
        return te_hybrid_stack_spec(attention_impl)
    attention = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=local_norm,
            self_attention=_self_attention(attention_impl, qk_norm=None),
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=dict(_INPUT_NORM_KEYS),
        ),
    )
    mlp = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=local_norm,
            mlp=_dense_mlp(),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=dict(_MLP_NORM_KEYS),
        ),
    )
    moe = ModuleSpec(
        module=TreeMoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=local_norm, mlp=_moe_mlp(), mlp_bda=get_bias_dropout_add
        ),
    )
    return ModuleSpec(
        module=TreeHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=attention, mlp_layer=mlp, moe_layer=moe, gdn_layer=gdn_layer_spec()
        ),
    )


tree_hybrid_stack_spec: ModuleSpec = make_tree_hybrid_stack_spec()
"""The local stack spec with automatic choice of kernels."""
