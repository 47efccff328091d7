"""The command-line options of a tree run, beside Megatron's own."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from ..tree.errors import InputError

BACKENDS = ("te", "tree")
EXCHANGES = ("group", "peer", "auto")
ISLANDS = ("off", "auto", "on")
ATTENTION_IMPLS = ("auto", "repeatable", "reference", "tiled", "flex", "flash")

TREE_ARGS_DEFAULTS: dict[str, Any] = {
    "dataloader_type": "external",
    "tokenizer_type": "NullTokenizer",
    "micro_batch_size": 1,
}
"""``args_defaults`` for Megatron's validation: options whose own default is None."""


def tree_defaults(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Defaults of Megatron options that have one right value in a tree run of these arguments.

    A user who gives another value still gets it, and ``validate_tree_args`` then refuses it by
    name: nothing that was asked for is overruled in silence.
    """
    defaults: dict[str, Any] = {
        "calculate_per_token_loss": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "apply_rope_fusion": False,
        "no_persist_layer_norm": True,
        "masked_softmax_fusion": False,
        "create_attention_mask_in_dataloader": False,
        # Evaluation needs rollouts of its own, so it is asked for and not on by default.
        "eval_iters": 0,
        "eval_interval": 1000,
    }
    if "--tree-cpu" in argv:
        defaults["distributed_backend"] = "gloo"
    if "--tree-cpu" in argv or importlib.util.find_spec("transformer_engine") is None:
        defaults["transformer_impl"] = "local"  # Megatron's own default is Transformer Engine
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        # An Apex extension. Megatron's output layer asks for it with Transformer Engine too.
        defaults["gradient_accumulation_fusion"] = False
    return defaults


def requested_backend(argv: Sequence[str]) -> str:
    """The ``--context-parallel-backend`` of an argument list, before Megatron parses it."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--context-parallel-backend", default="te")
    return peek.parse_known_args(list(argv))[0].context_parallel_backend


def stock_options(argv: Sequence[str]) -> list[str]:
    """An argument list for Megatron's own parser, without the options of the entry point.

    Raises InputError for any other option of a tree run: nothing would read it.
    """
    entry = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    entry.add_argument("--context-parallel-backend")
    entry.add_argument("--tree-cpu", action="store_true")
    rest = entry.parse_known_args(list(argv))[1]
    tree = add_tree_arguments(argparse.ArgumentParser(add_help=False), argv=())
    for word in rest:
        if word.partition("=")[0] in tree._option_string_actions:
            raise InputError(f"{word} needs --context-parallel-backend tree: add it or drop {word}")
    return rest


def add_tree_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.ArgumentParser:
    """Add the tree options to Megatron's parser; an ``extra_args_provider``.

    With ``--context-parallel-backend tree`` in ``argv`` (default: the process's) it also gives
    Megatron's options the defaults of ``tree_defaults``; with ``te`` they stay as they are.
    """
    group = parser.add_argument_group("tree context parallelism")
    add = group.add_argument
    add(
        "--context-parallel-backend",
        choices=BACKENDS,
        default="te",
        help="te: Megatron's own context parallelism, untouched. tree: packed prefix trees.",
    )
    add(
        "--tree-config",
        metavar="FILE",
        help="YAML file of options, read before the command line; the command line wins.",
    )
    add(
        "--tree-cpu",
        action="store_true",
        help="Train on CPU ranks over gloo (demos and tests; read by the entry point).",
    )
    _add_data_arguments(add)
    _add_plan_arguments(add)
    add(
        "--tree-loss",
        choices=("token", "sequence", "group"),
        default="token",
        help="Mean over trained tokens, over trajectories, or over groups of trajectories.",
    )
    add(
        "--tree-statistics",
        choices=("stored", "logical"),
        default="stored",
        help="Count a token once in router statistics, or once a trajectory through it.",
    )
    add(
        "--tree-metrics-file",
        metavar="FILE",
        help="Full-precision metrics: one JSON object an iteration.",
    )
    argv = sys.argv[1:] if argv is None else argv
    if requested_backend(argv) == "tree":
        parser.set_defaults(**tree_defaults(argv))
    return parser


def _add_data_arguments(add: Any) -> None:
    add(
        "--tree-data",
        nargs="+",
        metavar="PATH",
        help="Rollouts to train on: JSON or JSONL of token ids or chat messages.",
    )
    add(
        "--tree-valid-data",
        nargs="+",
        metavar="PATH",
        help="Rollouts to evaluate on, with --eval-iters and --eval-interval.",
    )
    add(
        "--tree-messages-key",
        "--messages-key",
        dest="tree_messages_key",
        default="messages",
        metavar="KEY",
        help="Key of the message list in a chat record.",
    )
    add(
        "--tree-ignore-keys",
        nargs="+",
        default=[],
        metavar="KEY",
        help="Further keys of records and messages that may be there and are not read.",
    )
    add(
        "--tree-tokenizer",
        default="bytes",
        metavar="NAME",
        help="'bytes', FILE.json (Hugging Face tokenizers) or 'hf:DIR' (transformers).",
    )
    add(
        "--tree-max-tokens",
        type=_positive,
        metavar="N",
        action=_SequenceLength,
        help="Stored tokens of a row at most, over all ranks: another name of --seq-length.",
    )
    add(
        "--tree-min-shared",
        type=_positive,
        default=1,
        metavar="N",
        help="Shortest common prefix of diverging trajectories that is stored once.",
    )
    add(
        "--tree-overlong",
        choices=("error", "cut"),
        default="error",
        help="A trajectory longer than a row: an error, or cut and counted.",
    )
    add(
        "--tree-shuffle-seed",
        type=int,
        metavar="N",
        help="Seed of the order in which rows are visited (default: --seed).",
    )
    add("--no-tree-shuffle", action="store_true", help="Visit rows in packing order.")
    add(
        "--tree-allow-new-data",
        action="store_true",
        help="Go on from a checkpoint with other rows than its own, from their first one on.",
    )


def _add_plan_arguments(add: Any) -> None:
    add(
        "--tree-waves",
        type=_waves,
        default="auto",
        metavar="auto|N",
        help="Exchanges a layer is cut into: auto lets the plan choose, 0 is one fused call.",
    )
    add(
        "--tree-exchange",
        choices=EXCHANGES,
        default="group",
        help="How rows travel between CP ranks: the process group's all-to-all (NCCL), copies "
        "between GPUs of one host (peer), or whichever a short measurement finds faster (auto).",
    )
    add(
        "--tree-islands",
        choices=ISLANDS,
        default="off",
        help="A layout of their own for runs of layers between attention layers that hold Gated "
        "DeltaNet layers. auto: in rows where it is predicted to win; on: in every row.",
    )
    add(
        "--tree-attention-impl",
        choices=ATTENTION_IMPLS,
        default="auto",
        help="Attention kernels; auto picks the fastest that supports the case.",
    )
    add(
        "--tree-deterministic",
        action="store_true",
        help="Only kernels whose gradients are bitwise repeatable.",
    )
    add("--tree-profile", metavar="FILE", help="Cost profile of the planner (tree-cp calibrate).")
    add(
        "--tree-lookahead",
        type=_positive,
        default=4,
        metavar="N",
        help="Rows that workers pack and plan ahead of training.",
    )
    add(
        "--tree-planner-workers",
        type=_not_negative,
        default=1,
        metavar="N",
        help="Planner processes a rank; 0 plans in the training process.",
    )
    add(
        "--tree-planners",
        choices=("rank", "node"),
        default="rank",
        help="Who plans: every rank for itself, or one rank for all of its node that work on the "
        "same rows (of one pipeline stage and data-parallel replica), which then hold no rollouts.",
    )


class _SequenceLength(argparse.Action):
    """Store into ``tree_max_tokens`` and into Megatron's ``seq_length``."""

    def __call__(self, parser, namespace, values, option_string=None):
        given = getattr(namespace, "seq_length", None)
        if given is not None and given != values:
            parser.error(f"{option_string} {values} contradicts --seq-length {given}: give one")
        namespace.tree_max_tokens = namespace.seq_length = values


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _not_negative(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def _waves(text: str) -> str | int:
    return "auto" if text == "auto" else _not_negative(text)
