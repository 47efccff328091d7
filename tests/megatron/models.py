"""Small Megatron models for tests, with weights and gradients by canonical name.

A canonical gradient is the whole parameter's: summed over context and sequence parallelism,
gathered over tensor parallelism, experts by global number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "variable_seq_lengths": True,
    "calculate_per_token_loss": True,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
}
YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
VOCABULARY = 64


def start(tp: int = 1, cp: int = 1, ep: int = 1) -> None:
    """Model-parallel groups over the default process group, replacing earlier ones."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def transformer_config(extra: dict[str, Any]) -> Any:
    """TransformerConfig of the running groups; ``yarn_*`` become attributes, as Megatron has it."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    yarn = {name: value for name, value in extra.items() if name.startswith("yarn_")}
    fields = SIZES | {name: value for name, value in extra.items() if name not in yarn}
    tp = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        **fields,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=1,
    )
    for name, value in yarn.items():
        setattr(config, name, value)
    return config


def build_model(
    extra: dict[str, Any],
    positions: str = "rope",
    pattern: str | None = None,
    stock_attention: bool = False,
) -> torch.nn.Module:
    """A GPTModel, or a HybridModel of ``pattern``, with tree or with stock attention."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.training.models.gpt import GPTModelConfig
    from megatron.training.models.hybrid import HybridModelConfig

    from megatron_tree_cp.megatron.rope import install_tree_rope
    from megatron_tree_cp.megatron.specs import make_tree_hybrid_stack_spec, tree_gpt_layer_spec

    def replace_attention(layer: Any) -> None:
        layer.submodules.self_attention.submodules.core_attention = DotProductAttention

    shared = {"vocab_size": VOCABULARY, "seq_length": 128, "position_embedding_type": positions}
    if pattern is not None:
        extra = extra | {"num_layers": len(pattern), "is_hybrid_model": True}
        spec = make_tree_hybrid_stack_spec()
        if stock_attention:
            replace_attention(spec.submodules.attention_layer)
        config = HybridModelConfig(
            transformer=transformer_config(extra),
            hybrid_layer_pattern=pattern,
            hybrid_stack_spec=spec,
            **shared,
        )
    else:
        config = GPTModelConfig(transformer=transformer_config(extra), **shared)

        def layers(model_config: Any, vp_stage: int | None = None) -> Any:
            block = tree_gpt_layer_spec(model_config, vp_stage)
            if stock_attention:
                for layer in block.layer_specs:
                    replace_attention(layer)
            return block

        config.transformer_layer_spec = layers
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_model(groups)
    return model if stock_attention else install_tree_rope([model])[0]


def canonical_name(name: str) -> str:
    """Parameter name with the expert's global number in the place of its local one."""
    from megatron.core import parallel_state

    ep = parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS["num_moe_experts"] // ep
    return re.sub(
        r"local_experts\.(\d+)", lambda m: f"local_experts.{first + int(m.group(1))}", name
    )


def _parts(name: str, whole: torch.Tensor, dim: int, tp: int) -> list[torch.Tensor]:
    """One tensor-parallel slice a rank; a gated MLP's gate and up halves are sliced apart."""
    if "linear_fc1" in name:
        gate, up = whole.chunk(2, dim)
        return [torch.cat(pair, dim) for pair in zip(gate.chunk(tp, dim), up.chunk(tp, dim))]
    return list(whole.chunk(tp, dim))


def _is_split(name: str, parameter: torch.nn.Parameter) -> bool:
    # With one expert-tensor-parallel rank, experts are whole although they carry the mark.
    return getattr(parameter, "tensor_model_parallel", False) and "local_experts" not in name


def load_weights(model: torch.nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """Set this rank's parameters from whole ones by canonical name."""
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = whole[canonical_name(name)]
            if _is_split(name, parameter):
                value = _parts(name, value, parameter.partition_dim, tp)[rank]
            parameter.copy_(value)


def summed_gradients(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    """Every parameter with its gradient summed over ranks with copies (a collective call)."""
    from megatron.core import parallel_state

    tp_group = parallel_state.get_tensor_model_parallel_group()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if "local_experts" in name:
            # Data-parallel replicas hold the same row here: count it once.
            dist.all_reduce(grad, group=parallel_state.get_expert_data_parallel_group())
            grad /= parallel_state.get_data_parallel_world_size()
        else:
            dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
            replicated = getattr(parameter, "sequence_parallel", False) or "_layernorm" in name
            if tp > 1 and replicated:
                dist.all_reduce(grad, group=tp_group)
        yield name, parameter, grad


def whole_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Canonical gradients of the parameters that this rank holds (a collective call)."""
    from megatron.core import parallel_state

    tp_group = parallel_state.get_tensor_model_parallel_group()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    gradients = {}
    for name, parameter, grad in summed_gradients(model):
        if tp > 1 and _is_split(name, parameter):
            slices = [torch.empty_like(grad) for _ in range(tp)]
            dist.all_gather(slices, grad, group=tp_group)
            dim = parameter.partition_dim
            if "linear_fc1" in name:
                halves = zip(*(part.chunk(2, dim) for part in slices))
                grad = torch.cat([torch.cat(half, dim) for half in halves], dim)
            else:
                grad = torch.cat(slices, dim)
        gradients[canonical_name(name)] = grad
    return gradients
