"""From an argument list to `megatron.training.pretrain()`."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from functools import partial

import torch.distributed as dist

from ..tree.errors import InputError
from ..tree.tokenizers import load_tokenizer
from .arguments import requested_backend
from .install import install_log
from .model_shape import model_shape_from_config
from .rope import install_tree_rope
from .rows import PlanRecipe
from .specs import make_tree_hybrid_stack_spec, tree_gpt_layer_spec
from .trainer import TreeTrainer
from .validation import parse_tree_args
from .wheel import allow_wheel_install


def with_vocabulary(argv: list[str]) -> list[str]:
    """Add ``--vocab-size`` from the tree tokenizer where the user gave none."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--tree-tokenizer", default="bytes")
    peek.add_argument("--vocab-size", default=None)
    known, _ = peek.parse_known_args(argv)
    if known.vocab_size is not None:
        return argv
    return [*argv, "--vocab-size", str(load_tokenizer(known.tree_tokenizer).vocab_size)]


def parse(argv: list[str]) -> Namespace:
    """Megatron's parsing and validation with the tree options; sets Megatron's globals."""
    if requested_backend(argv) != "tree":
        raise InputError(
            "this entry trains with --context-parallel-backend tree only; for 'te' start the "
            "stock Megatron script"
        )
    sys.argv = [sys.argv[0], *with_vocabulary(argv)]
    args = parse_tree_args()
    if not args.tree_data:
        raise InputError("no rollouts to train on: give --tree-data PATH [PATH ...]")
    return args


def tree_model_config(args: Namespace):
    """Megatron's model config with tree layer specs and position modules."""
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    impl = args.tree_attention_impl
    if args.hybrid_layer_pattern:
        model = hybrid_config_from_args(args)
        model.hybrid_stack_spec = make_tree_hybrid_stack_spec(impl)
    else:
        model = gpt_config_from_args(args)
        model.transformer_layer_spec = partial(tree_gpt_layer_spec, attention_impl=impl)
    model.pre_wrap_hooks.append(install_tree_rope)
    return model


def plan_recipe(args: Namespace, model) -> PlanRecipe:
    """What rows of this run are planned for."""
    return PlanRecipe(
        cp_size=args.context_parallel_size,
        tp_size=args.tensor_model_parallel_size,
        granule=args.tensor_model_parallel_size,
        model=model_shape_from_config(model.transformer, args.hybrid_layer_pattern),
        waves=None if args.tree_waves == "auto" else args.tree_waves,
    )


def run(argv: list[str]) -> None:
    """Train; returns when Megatron's loop ends."""
    allow_wheel_install()
    args = parse(argv)
    model = tree_model_config(args)
    trainer = TreeTrainer(args, plan_recipe(args, model))
    install_log(trainer)

    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    pretrain(
        pretrain_cfg_container_from_args(args, model),
        trainer,
        ModelType.encoder_or_decoder,
        trainer.forward_step,
    )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
