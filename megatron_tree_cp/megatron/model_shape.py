"""What the planner needs to know of a Megatron model: its layer classes and token-local work."""

from __future__ import annotations

from collections import Counter

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern
from megatron.core.transformer.transformer_config import TransformerConfig

from ..plan.model import LayerClass, ModelShape
from .gdn import gdn_layer_class, gdn_layers, gdn_projection_flops
from .windows import tree_window


def model_shape_from_config(
    config: TransformerConfig, hybrid_layer_pattern: str | None = None
) -> ModelShape:
    """Shape of one pipeline stage: a class for each distinct window, one of Gated DeltaNet layers,
    FLOPs of the rest.

    Every stage gets the same shape (the mean one), since all stages must make the same plan of a
    row. Head counts are those before tensor parallelism. Raises ValueError for a model without
    attention layers.
    """
    symbols = layer_symbols(config, hybrid_layer_pattern)
    stages = config.pipeline_model_parallel_size
    windows = Counter(
        tree_window(config, number)
        for number, kinds in enumerate(symbols, start=1)
        if Symbols.ATTENTION in kinds
    )
    if not windows:
        raise ValueError(
            f"the pattern {hybrid_layer_pattern!r} has no attention layer: add at least one '*'"
        )
    classes = tuple(
        LayerClass(
            name="global" if window is None else f"w{window}",
            window=window,
            layers=-(-count // stages),
            query_heads=config.num_attention_heads,
            kv_heads=config.num_query_groups,
            head_dim=config.kv_channels,
        )
        for window, count in sorted(windows.items(), key=lambda item: item[0] or 0)
    )
    if recurrent := sum(Symbols.GDN in kinds for kinds in symbols):
        classes += (gdn_layer_class(config, -(-recurrent // stages)),)
    flops = sum(_token_flops(config, kind) for kinds in symbols for kind in kinds)
    return ModelShape(
        classes=classes,
        hidden_size=config.hidden_size,
        token_flops=flops / stages,
        dtype_bytes=config.params_dtype.itemsize,
    )


def layer_symbols(config: TransformerConfig, hybrid_layer_pattern: str | None) -> list[str]:
    """Per layer, the pattern symbols of what it holds: one for HybridModel, two for GPTModel."""
    if hybrid_layer_pattern is not None:
        main = parse_hybrid_pattern(hybrid_layer_pattern).main_pattern or ""
        return [symbol for symbol in main if symbol != Symbols.PIPE]
    mlp = {True: Symbols.MOE, False: Symbols.MLP}
    mixer = {True: Symbols.GDN, False: Symbols.ATTENTION}
    kinds = zip(gdn_layers(config), moe_layers(config), strict=True)
    return [mixer[is_gdn] + mlp[is_moe] for is_gdn, is_moe in kinds]


def moe_layers(config: TransformerConfig) -> list[bool]:
    """Per decoder layer of a GPTModel: is its MLP a mixture of experts (``moe_layer_freq``)?"""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [number % frequency == 0 for number in range(config.num_layers)]
    if len(frequency) != config.num_layers:
        raise ValueError(
            f"--moe-layer-freq has {len(frequency)} entries for {config.num_layers} layers: "
            "give one entry a layer"
        )
    return [bool(entry) for entry in frequency]


def _token_flops(config: TransformerConfig, symbol: str) -> float:
    """Forward FLOPs of one token through the linear layers of one block."""
    per_weight = 2 * config.hidden_size
    matrices = 3 if config.gated_linear_unit else 2
    if symbol == Symbols.ATTENTION:
        heads = 2 * config.num_attention_heads + 2 * config.num_query_groups
        if config.attention_output_gate:
            heads += config.num_attention_heads
        return per_weight * heads * config.kv_channels
    if symbol == Symbols.GDN:
        return gdn_projection_flops(config)
    if symbol == Symbols.MLP:
        return per_weight * matrices * config.ffn_hidden_size
    if symbol == Symbols.MOE:
        width = config.moe_router_topk * config.moe_ffn_hidden_size
        width += config.moe_shared_expert_intermediate_size or 0
        return per_weight * (matrices * width + config.num_moe_experts)
    raise ValueError(f"no tree layer for the pattern symbol {symbol!r}: use '*', 'G', '-' and 'E'")
