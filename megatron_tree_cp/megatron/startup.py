"""What a run prints once, before its first iteration."""

from __future__ import annotations

from argparse import Namespace

import torch

from ..ops.attention.registry import AttentionCase, describe_choice
from ..plan.model import ModelShape


def implementation_table(model: ModelShape, args: Namespace, device: torch.device) -> str:
    """Which attention kernel serves each layer class, and why not a faster one."""
    tp_size = args.tensor_model_parallel_size
    lines = ["attention kernels"]
    for layer in model.attention_classes:
        case = AttentionCase(
            device_type=device.type,
            dtype=args.params_dtype,
            query_heads=layer.query_heads // tp_size,
            kv_heads=max(1, layer.kv_heads // tp_size),
            head_dim=layer.head_dim,
            value_dim=layer.value_dim or layer.head_dim,
            window=layer.window,
            sink=args.softmax_type != "vanilla",
        )
        shape = f"{case.query_heads}/{case.kv_heads} heads of {case.head_dim}"
        choice = describe_choice(case, args.tree_attention_impl)
        lines.append(f"  {layer.name:<10} {shape:<22} {choice}")
    return "\n".join(lines)
