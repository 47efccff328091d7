"""Megatron's model configs with tree layers, and what rows of such a model are planned for."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

from ..plan.profile import CostProfile, load_profile
from ..plan.shipped_profiles import profile_for
from ..tree.errors import InputError
from .islands import install_islands, islands_of_stage
from .model_shape import model_shape_from_config
from .moe import size_router_log
from .rope import install_tree_rope
from .rows import PlanRecipe
from .specs import make_tree_hybrid_stack_spec, tree_gpt_layer_spec
from .validation import reason_of


def model_config_from_args(args: Namespace) -> Any:
    """The GPTModelConfig or, with a layer pattern, HybridModelConfig that a stock script builds.

    Raises InputError with one line for what Megatron's config classes refuse.
    """
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    build = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    try:
        return build(args)
    except (AssertionError, ValueError) as error:
        raise InputError(f"Megatron refuses the model: {reason_of(error)}") from error


def apply_tree(model: Any, args: Namespace) -> None:
    """Give a model config, as Megatron made it from ``args``, tree layers and tree positions.

    Raises InputError for a config of another class, or one that contradicts the arguments.
    """
    from megatron.training.models.gpt import GPTModelConfig
    from megatron.training.models.hybrid import HybridModelConfig

    kind, impl = type(model), args.tree_attention_impl
    if kind not in (GPTModelConfig, HybridModelConfig):
        what = "a model provider" if model is None else kind.__name__
        raise InputError(
            f"the script builds its model by {what}: a tree run needs a GPTModelConfig or a "
            "HybridModelConfig, as pretrain_gpt.py and pretrain_hybrid.py make them"
        )
    if kind is GPTModelConfig:
        if args.hybrid_layer_pattern:
            raise InputError("a GPT model has no --hybrid-layer-pattern: use pretrain_hybrid.py")
        model.transformer_layer_spec = partial(tree_gpt_layer_spec, attention_impl=impl)
        # Megatron's own conversion of arguments forgets it and keeps the default of 8.
        model.rope_scaling_factor = args.rope_scaling_factor
    else:
        if not args.hybrid_layer_pattern:
            raise InputError("a hybrid model has no layers: give --hybrid-layer-pattern")
        layers = model.transformer.transformer_impl
        model.hybrid_stack_spec = make_tree_hybrid_stack_spec(impl, layers)
    model.pre_wrap_hooks += [install_tree_rope, size_router_log]
    if args.tree_islands != "off":
        model.pre_wrap_hooks.append(install_islands)


def shard_granule(args: Any) -> int:
    """What the tokens of every shard are padded to a multiple of; by arguments or model config.

    Sequence parallelism cuts a shard into equal parts. In fp8, Transformer Engine multiplies
    matrices of whole blocks: 32 rows in mxfp8, 16 otherwise, in each of those parts.
    """
    from megatron.core.fp8_utils import get_fp8_align_size

    block = get_fp8_align_size(args.fp8_recipe) if args.fp8 else 1
    return args.tensor_model_parallel_size * block


def plan_recipe(args: Namespace, model: Any) -> PlanRecipe:
    """What rows of this run are planned for."""
    islands = 0
    if args.tree_islands != "off":
        islands = islands_of_stage(model.transformer, args.hybrid_layer_pattern)
    return PlanRecipe(
        cp_size=args.context_parallel_size,
        tp_size=args.tensor_model_parallel_size,
        granule=shard_granule(args),
        model=model_shape_from_config(model.transformer, args.hybrid_layer_pattern),
        waves=None if args.tree_waves == "auto" else args.tree_waves,
        profile=_profile(args),
        islands=islands,
        force_islands=args.tree_islands == "on",
    )


def _profile(args: Namespace) -> CostProfile:
    """The profile that was asked for, else the one that ships for this device."""
    import torch

    if args.tree_profile:
        return load_profile(args.tree_profile)
    if args.distributed_backend == "gloo":
        return CostProfile()
    return profile_for(torch.cuda.get_device_name())[0]
