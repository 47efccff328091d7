"""Gated DeltaNet over packed prefix trees, in the place of Megatron's ``GatedDeltaNet``."""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.gated_delta_net import common as stock
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from ..comm.context import TreeContext
from ..plan.model import LayerClass
from .norms import local_norm
from .params import TreePackedSeqParams

# The local implementation keeps its pre-norm apart; checkpoints have it under the fused name.
INPUT_NORM_KEYS = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}


class TreeGatedDeltaNet(GatedDeltaNet):
    """GatedDeltaNet whose convolution and recurrence follow the paths of a packed tree.

    Parameters, their initialisation and checkpoint keys are Megatron's; so are the projections,
    gates and the gated norm. Tokens stay with their context-parallel rank: the operators exchange
    states, where Megatron's own context parallelism exchanges heads, so that head counts divide
    the tensor-parallel size only. Needs no FLA on CPU.

    Raises ValueError for head counts that tensor parallelism does not divide, an activation other
    than SiLU, and tensor parallelism without sequence parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        *args: Any,
        impl: str = "auto",
        **kwargs: Any,
    ) -> None:
        _check(config)
        _stock_constructor()(self, config, submodules, *args, **kwargs)
        self.impl = impl

    def _setup_variant_attrs(self) -> None:
        # The stock tables divide heads by the CP size; ours keep all heads of the TP rank.
        self.cp_size = 1
        super()._setup_variant_attrs()
        self.gated_delta_rule = _tree_rule

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, hidden] -> [T, 1, hidden], and the bias of the output projection.

        T counts the tokens of the context-parallel rank's shard (their tensor-parallel share with
        sequence parallelism). Raises ValueError without a tree.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError("tree layers are for training: run inference with the stock model")
        if not isinstance(packed_seq_params, TreePackedSeqParams) or packed_seq_params.tree is None:
            raise ValueError(
                "a tree Gated DeltaNet needs the row's tree: pass TreePackedSeqParams(tree=..., "
                "positions=...) as packed_seq_params to the model's forward"
            )
        context = packed_seq_params.tree
        projected, _ = self.in_proj(hidden_states)
        tokens, batch = projected.shape[:2]
        if batch != 1 or tokens != context.num_tokens:
            raise ValueError(
                f"hidden states are [{tokens}, {batch}, ...], the shard holds {context.num_tokens} "
                "tokens: use --micro-batch-size 1 and feed the shard's tokens in layout order"
            )
        qkv, gate, beta, alpha = torch.split(projected.squeeze(1), self.feat_dim_split, dim=-1)
        core = self._core(qkv, beta, alpha, context)
        gate = gate.unflatten(1, (-1, self.value_head_dim)).contiguous()
        if self.recompute_norm_out:
            self.norm_out_checkpoint = CheckpointWithoutOutput()
            normed = self.norm_out_checkpoint.checkpoint(self._gated_norm, core, gate)
        else:
            normed = self._gated_norm(core, gate)
        out, bias = self.out_proj(normed)
        if self.recompute_norm_out:
            self.norm_out_checkpoint.discard_output_and_register_recompute(out)
        return out, bias

    def _core(self, qkv: Tensor, beta: Tensor, alpha: Tensor, context: TreeContext) -> Tensor:
        """Convolution and recurrence: [T, 2 Hk Dk + Hv Dv], [T, Hv], [T, Hv] -> [T, Hv, Dv]."""
        from .. import ops  # kernels load when the first layer runs

        weight = self.conv1d.weight.squeeze(1)
        sizes = (self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp)
        q, k, v = ops.tree_causal_conv1d(
            qkv, weight, self.conv1d.bias, context, impl=self.impl, split=sizes
        )
        g, beta = self._compute_g_and_beta(self.A_log, self.dt_bias, alpha, beta)
        return self.gated_delta_rule(
            q.unflatten(1, (-1, self.key_head_dim)),
            k.unflatten(1, (-1, self.key_head_dim)),
            v.unflatten(1, (-1, self.value_head_dim)),
            g,
            beta,
            context,
            use_qk_l2norm=self.use_qk_l2norm,
            impl=self.impl,
        )

    def _gated_norm(self, core: Tensor, gate: Tensor) -> Tensor:
        return self._apply_gated_norm(core, gate).reshape(core.shape[0], 1, -1)


def _tree_rule(*args: Any, **kwargs: Any) -> Tensor:
    from .. import ops

    return ops.tree_gated_delta_rule(*args, **kwargs)


def _stock_constructor() -> Any:
    """Megatron's constructor, also without FLA.

    It refuses to build a layer without FLA, whose kernels our forward never calls on CPU. Its code
    runs here with a copy of its module's names in which that one check passes.
    """
    init = stock._GDNBase.__init__
    if stock.HAVE_FLA:
        return init
    names = {**init.__globals__, "HAVE_FLA": True}
    made = FunctionType(init.__code__, names, init.__name__, init.__defaults__, init.__closure__)
    made.__kwdefaults__ = init.__kwdefaults__
    return made


def _check(config: TransformerConfig) -> None:
    tp_size = config.tensor_model_parallel_size
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if getattr(config, name) % tp_size:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(config, name)} does not divide by "
                f"--tensor-model-parallel-size {tp_size}: use a divisor"
            )
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise ValueError(
            f"--linear-num-value-heads {config.linear_num_value_heads} is not a multiple of "
            f"--linear-num-key-heads {config.linear_num_key_heads}: change one of them"
        )
    if config.activation_func is not torch.nn.functional.silu:
        raise ValueError("Gated DeltaNet's convolution has SiLU only: use --swiglu")
    if tp_size > 1 and not config.sequence_parallel:
        # Megatron sums the gradient of the norm over heads only where sequences are parallel.
        raise ValueError("Gated DeltaNet under tensor parallelism needs --sequence-parallel")


class _HeadNorm:
    """``local_norm`` as a class: build_module calls classes and hands functions on uncalled."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return local_norm(*args, **kwargs)


def gdn_self_attention(impl: str = "auto") -> ModuleSpec:
    """What stands for self attention in a Gated DeltaNet layer, of GPTModel and HybridModel."""
    return ModuleSpec(
        module=TreeGatedDeltaNet,
        params={"impl": impl},
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=_HeadNorm, out_proj=RowParallelLinear
        ),
    )


def gdn_layer_spec(impl: str = "auto") -> ModuleSpec:
    """Layer of a hybrid stack for the pattern symbol ``G``: ``HybridStackSubmodules.gdn_layer``."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=local_norm,
            self_attention=gdn_self_attention(impl),
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=dict(INPUT_NORM_KEYS),
        ),
    )


def with_tree_gdn(layer: ModuleSpec, impl: str = "auto") -> ModuleSpec:
    """A stock layer spec with our class in the place of ``GatedDeltaNet``: for its own linears."""
    attention = replace(
        layer.submodules.self_attention, module=TreeGatedDeltaNet, params={"impl": impl}
    )
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def gdn_layers(config: TransformerConfig) -> list[bool]:
    """Per decoder layer of a GPTModel: Gated DeltaNet? (``linear_attention_freq``)

    All False unless ``experimental_attention_variant`` is ``gated_delta_net``.
    """
    if config.experimental_attention_variant != "gated_delta_net":
        return [False] * config.num_layers
    return [bool(entry) for entry in get_linear_attention_pattern(config)]


def gdn_projection_flops(config: TransformerConfig) -> float:
    """Forward FLOPs of one token through the projections of a Gated DeltaNet layer.

    What lies between them, convolution and recurrence, is priced by the planner (`plan.cost_gdn`).
    """
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    width = 2 * keys + 2 * values + 2 * config.linear_num_value_heads
    return float(2 * config.hidden_size * (width + values))


def gdn_layer_class(config: TransformerConfig, layers: int) -> LayerClass:
    """Shape of Gated DeltaNet layers for the planner; heads before tensor parallelism."""
    return LayerClass(
        "gdn",
        kind="gdn",
        layers=layers,
        query_heads=config.linear_num_key_heads,
        kv_heads=config.linear_num_value_heads,
        head_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )
