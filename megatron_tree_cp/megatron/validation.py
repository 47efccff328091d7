"""What a tree run sets in Megatron's arguments, and what it refuses, each with the fix.

A value that has one right setting gets it (``arguments.tree_defaults`` and ``_settle`` below); a
value that the user asked for and that a tree run cannot honour is refused by name. Nothing that
Megatron would get silently wrong on unequal shards or shared prefixes is let through.
"""

from __future__ import annotations

import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..tree.errors import InputError
from ..tree.tokenizers import load_tokenizer
from . import cpu
from .arguments import TREE_ARGS_DEFAULTS
from .refusals import REFUSALS


def prepare_tree_args(args: Namespace) -> None:
    """Fill and check parsed arguments before Megatron validates them.

    Raises InputError for what a tree run refuses, and for what Megatron would only assert.
    """
    if args.tree_max_tokens is None:
        args.tree_max_tokens = args.seq_length
    if args.tree_max_tokens is None:
        raise InputError("no row length: give --tree-max-tokens")
    if args.seq_length != args.tree_max_tokens:
        raise InputError(
            f"--tree-max-tokens {args.tree_max_tokens} contradicts --seq-length "
            f"{args.seq_length}: give one"
        )
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    _refuse(args)
    _check_lengths(args)
    _check_resume(args)
    if args.vocab_size is None:
        args.vocab_size = load_tokenizer(args.tree_tokenizer).vocab_size


def validate_tree_args(args: Namespace) -> None:
    """Settle a tree run's arguments after Megatron validated them, and before configs are built.

    Logs on rank 0 what it changed. Raises InputError for what a tree run refuses (also for values
    that Megatron derived, such as latent attention from a layer pattern).
    """
    if args.tree_max_tokens is None:
        args.tree_max_tokens = args.seq_length
    _refuse(args)
    _check_lengths(args)
    changed = _settle(args)
    if changed and args.rank == 0:
        print("tree run sets " + ", ".join(f"{k}={v}" for k, v in changed.items()), flush=True)


def validate_args_of_tree_run(
    stock: Callable[..., Any], args: Namespace, defaults: dict[str, Any]
) -> Namespace:
    """Megatron's ``validate_args`` (``stock``) between the tree's own checks and settings.

    Raises InputError with one line for every bad option, Megatron's own assertions included.
    """
    if args.tree_cpu and not cpu.is_enabled():
        raise InputError(
            "--tree-cpu comes too late, Megatron is imported: start the script by "
            "python -m megatron_tree_cp.launch"
        )
    prepare_tree_args(args)
    try:
        stock(args, {**defaults, **TREE_ARGS_DEFAULTS})
    except (AssertionError, ValueError) as error:
        raise InputError(f"Megatron refuses the arguments: {reason_of(error)}") from error
    validate_tree_args(args)
    return args


def reason_of(error: Exception) -> str:
    """What an error of Megatron says, in one line; of an assertion without a message, its code."""
    text = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or "no reason given"
    return " ".join(text.split())


def _refuse(args: Namespace) -> None:
    for refusal in REFUSALS:
        given = refusal.given(args)
        if given:
            raise InputError(f"{given}: {refusal.reason}: {refusal.fix}")


def _check_lengths(args: Namespace) -> None:
    multiple = 2 * args.context_parallel_size
    if args.context_parallel_size > 1 and args.seq_length % multiple:
        longer = -(-args.seq_length // multiple) * multiple
        raise InputError(
            f"--tree-max-tokens {args.seq_length} is no multiple of 2 x "
            f"--context-parallel-size ({multiple}), which Megatron asks of --seq-length: "
            f"use {longer}"
        )


def _check_resume(args: Namespace) -> None:
    """Optimizer states that Megatron cannot save, or saves and cannot load again."""
    without_experts = _stage_without_experts(args)
    saves = args.save and not args.no_save_optim
    if saves and args.use_distributed_optimizer and without_experts and not _have_fused_adam():
        raise InputError(
            f"--use-distributed-optimizer with no experts on pipeline stage {without_experts}: "
            "Megatron cannot save an empty state of torch's Adam: add --no-save-optim, drop "
            "--use-distributed-optimizer, or install Transformer Engine or Apex"
        )
    tracker = Path(args.load or "", "latest_checkpointed_iteration.txt")
    resumes = args.load and tracker.exists() and not (args.no_load_optim or args.finetune)
    if resumes and args.use_distributed_optimizer and not _have_fused_adam():
        raise InputError(
            "--use-distributed-optimizer without Transformer Engine or Apex: Megatron cannot load "
            "the state of torch's Adam: add --no-load-optim or drop --use-distributed-optimizer"
        )


def _stage_without_experts(args: Namespace) -> int | None:
    """First pipeline stage, from 1, of an MoE model that holds dense layers alone, or None."""
    stages = args.pipeline_model_parallel_size
    if not args.num_experts or stages == 1 or args.pipeline_model_parallel_layout:
        return None
    if args.hybrid_layer_pattern:
        parts = args.hybrid_layer_pattern.partition("/")[0].split("|")
        moe = [["E" in part] for part in parts]
    else:
        # Megatron's interleaving: chunk i of a stage is part i * stages + stage of the layers.
        every = args.moe_layer_freq
        layers = args.num_layers or 0
        kinds = every if isinstance(every, list) else [n % every == 0 for n in range(layers)]
        size = args.num_layers_per_virtual_pipeline_stage or max(1, -(-layers // stages))
        moe = [[bool(kind) for kind in kinds[n : n + size]] for n in range(0, layers, size)]
    for stage in range(min(stages, len(moe))):
        if not any(any(part) for part in moe[stage::stages]):
            return stage + 1
    return None


def _have_fused_adam() -> bool:
    import importlib.util

    return any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex"))


def _settle(args: Namespace) -> dict[str, Any]:
    """Set what has one right value; returns the changes."""
    wanted: dict[str, Any] = {
        # Shards differ in length from row to row and rank to rank; validate_args resets this.
        "variable_seq_lengths": True,
        # Otherwise each rank divides by its own count before gradients are averaged.
        "calculate_per_token_loss": True,
        # The fused kernels read positions from equal zigzag shards.
        "apply_rope_fusion": False,
        "no_persist_layer_norm": True,
        "create_attention_mask_in_dataloader": False,
    }
    if args.tree_deterministic and args.tree_attention_impl == "auto":
        wanted["tree_attention_impl"] = "repeatable"
    if args.tree_shuffle_seed is None:
        wanted["tree_shuffle_seed"] = args.seed
    groups = args.high_priority_stream_groups or []
    if args.context_parallel_size > 1 and args.distributed_backend == "nccl" and "cp" not in groups:
        # An exchange launched behind the attention call that hides it would start at its end.
        wanted["high_priority_stream_groups"] = [*groups, "cp"]
    changed = {name: value for name, value in wanted.items() if getattr(args, name) != value}
    for name, value in changed.items():
        setattr(args, name, value)
    return changed
