"""Options that a tree run cannot honour, one entry each: when, why, and what to do instead."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .dispatchers import DISPATCHERS, equalised, missing, unequal_refused

_PATTERN_SYMBOLS = set("*G-E|")
_POSITIONS = ("rope", "yarn", "learned_absolute", "none")


@dataclass(frozen=True)
class Refusal:
    """One refused option."""

    given: Callable[[Namespace], str]
    """The offending option as the user would write it, or '' where the arguments are fine."""

    reason: str
    """Why a tree run cannot do it."""

    fix: str
    """What to give instead."""


def _set(flag: str, *allowed: Any) -> Callable[[Namespace], str]:
    """Offends when the option is set to anything but the allowed values (or None, False, '')."""
    name = _attribute(flag)

    def given(args: Namespace) -> str:
        value = getattr(args, name, None)
        if not value or value in allowed:
            return ""
        return flag if value is True else f"{flag} {_text(value)}"

    return given


def _attribute(flag: str) -> str:
    renamed = {"--fp8-format": "fp8", "--fp4-format": "fp4", "--enable-cuda-graph": None}
    return renamed.get(flag) or flag.lstrip("-").replace("-", "_")


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(getattr(item, "name", item)) for item in value)
    return str(getattr(value, "name", value))


def _peer_on_gloo(args: Namespace) -> str:
    on_gloo = args.tree_exchange == "peer" and args.distributed_backend == "gloo"
    return "--tree-exchange peer" if on_gloo else ""


def _cp_comm_type(args: Namespace) -> str:
    kinds = set(args.cp_comm_type if isinstance(args.cp_comm_type, list) else [args.cp_comm_type])
    return "" if kinds <= {"p2p", "tree"} else f"--cp-comm-type {_text(args.cp_comm_type)}"


def _attention_backend(args: Namespace) -> str:
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    return "" if backend == "auto" else f"--attention-backend {backend}"


def _missing_te(args: Namespace) -> str:
    missing = importlib.util.find_spec("transformer_engine") is None
    asked = args.transformer_impl == "transformer_engine" and missing
    return "--transformer-impl transformer_engine" if asked else ""


def _discarding_recompute(args: Namespace) -> str:
    """Modules whose output is discarded: Megatron's code for it calls Transformer Engine."""
    if args.recompute_granularity != "selective" or importlib.util.find_spec("transformer_engine"):
        return ""
    asked = sorted({"layernorm", "moe_act"} & set(args.recompute_modules or ()))
    return f"--recompute-modules {' '.join(asked)}" if asked else ""


def _window(args: Namespace) -> str:
    if args.window_size and args.window_size[1] not in (0, -1):
        return f"--window-size {args.window_size[0]},{args.window_size[1]}"
    return ""


def _pattern(args: Namespace) -> str:
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern or ""
    unknown = sorted(set(pattern) - _PATTERN_SYMBOLS - {"/"})
    return f"--hybrid-layer-pattern with {', '.join(unknown)}" if unknown else ""


def _pattern_mtp(args: Namespace) -> str:
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern or ""
    return "--hybrid-layer-pattern with '/'" if "/" in pattern else ""


def _pattern_without_attention(args: Namespace) -> str:
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern
    return f"--hybrid-layer-pattern {pattern}" if pattern and "*" not in pattern else ""


def _islands(args: Namespace) -> str:
    """Asked for without layers of both kinds."""
    if args.tree_islands == "off" or _has_both_mixers(args):
        return ""
    return f"--tree-islands {args.tree_islands}"


def _has_both_mixers(args: Namespace) -> bool:
    """Whether the model has Gated DeltaNet and attention layers."""
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern
    if pattern:
        return "G" in pattern and "*" in pattern
    recurrent = args.linear_attention_freq or 0
    if isinstance(recurrent, int):
        numbers = range(1, (args.num_layers or 0) + 1)
        recurrent = [recurrent and number % recurrent for number in numbers]
    variant = args.experimental_attention_variant == "gated_delta_net"
    return variant and any(recurrent) and not all(recurrent)


def _hybrid_rope_scaling(args: Namespace) -> str:
    return "--use-rope-scaling" if args.use_rope_scaling and args.hybrid_layer_pattern else ""


def _gloo_expert_tensor_parallel(args: Namespace) -> str:
    size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if args.num_experts and size > 1 and args.distributed_backend == "gloo":
        return f"--expert-tensor-parallel-size {size} on gloo"
    return ""


def _routing(args: Namespace) -> str:
    kinds = args.moe_router_load_balancing_type
    kinds = kinds if isinstance(kinds, list) else [kinds]
    wrong = [kind for kind in kinds if kind in ("sinkhorn", "quantile_balancing")]
    if args.num_experts and wrong:
        return f"--moe-router-load-balancing-type {' '.join(wrong)}"
    return ""


def _sequence_loss(args: Namespace) -> str:
    kinds = args.moe_router_load_balancing_type
    kinds = kinds if isinstance(kinds, list) else [kinds]
    asked = args.num_experts and "seq_aux_loss" in kinds and args.tree_statistics != "logical"
    return "--moe-router-load-balancing-type seq_aux_loss" if asked else ""


def _chunked_experts(args: Namespace) -> str:
    return _set("--mlp-chunks-for-training", 1)(args) if args.num_experts else ""


def _with_experts(flag: str) -> Callable[[Namespace], str]:
    given = _set(flag)
    return lambda args: given(args) if args.num_experts else ""


def _sgd_torch_dist(args: Namespace) -> str:
    saves = args.save is not None and not args.no_save_optim
    if saves and args.optimizer == "sgd" and args.ckpt_format == "torch_dist":
        return "--optimizer sgd with --ckpt-format torch_dist"
    return ""


_SCHEDULE = "it fixes tensor shapes, and a tree's shards change with every row"
_WHOLE_ROWS = "a microbatch is one packed row"
_OWN_DATA = "rows are packed from --tree-data"
_SEQUENCES = "it works on equal shares of separate sequences"
_PER_RANK = "its result depends on how tokens are spread over ranks"
_NO_LAYER = "there are no tree layers for it"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda args: "" if args.tree_data else "no --tree-data",
        "there is nothing to train on",
        "give JSON or JSONL rollouts",
    ),
    Refusal(
        lambda args: "--eval-iters" if args.eval_iters and not args.tree_valid_data else "",
        "there is nothing to evaluate on",
        "give --tree-valid-data",
    ),
    Refusal(
        lambda args: "--tree-valid-data" if args.tree_valid_data and not args.eval_iters else "",
        "nothing says how many rows to evaluate on",
        "give --eval-iters",
    ),
    Refusal(
        lambda args: (
            "--tree-attention-impl flash with --tree-deterministic"
            if args.tree_deterministic and args.tree_attention_impl == "flash"
            else ""
        ),
        "its gradients are summed in an order that changes",
        "drop one of the two",
    ),
    # Rows and data.
    Refusal(_set("--micro-batch-size", 1), _WHOLE_ROWS, "use --micro-batch-size 1"),
    Refusal(_set("--eval-micro-batch-size", 1), _WHOLE_ROWS, "use --eval-micro-batch-size 1"),
    Refusal(_set("--dataloader-type", "external"), _OWN_DATA, "drop it"),
    Refusal(_set("--data-path"), _OWN_DATA, "drop it"),
    Refusal(_set("--data-args-path"), _OWN_DATA, "drop it"),
    Refusal(_set("--train-data-path"), _OWN_DATA, "drop it"),
    Refusal(_set("--valid-data-path"), _OWN_DATA, "use --tree-valid-data"),
    Refusal(_set("--mock-data"), _OWN_DATA, "drop it"),
    Refusal(_set("--sft"), _OWN_DATA, "drop it (messages are rendered and masked by our reader)"),
    Refusal(_set("--full-validation"), "rows are a stream", "use --eval-iters"),
    Refusal(_set("--reset-position-ids"), "positions come from the tree", "drop it"),
    Refusal(_set("--reset-attention-mask"), "the mask comes from the tree", "drop it"),
    Refusal(_set("--eod-mask-loss"), "the loss mask comes from the rollouts", "drop it"),
    Refusal(_set("--dataloader-inter-document-masking"), "the tree masks already", "drop it"),
    Refusal(_set("--perform-rl-step"), "Megatron's RL loop makes its own rows", "drop it"),
    # Randomness that a shared token would draw once for all its trajectories.
    Refusal(
        _set("--attention-dropout"), "a shared token has one mask", "use --attention-dropout 0"
    ),
    Refusal(_set("--hidden-dropout"), "a shared token has one mask", "use --hidden-dropout 0"),
    Refusal(_with_experts("--moe-input-jitter-eps"), "a shared token has one noise", "drop it"),
    # Context parallelism of Megatron's own.
    Refusal(_set("--hybrid-context-parallel"), _SEQUENCES, "drop it"),
    Refusal(_set("--hierarchical-context-parallel-sizes"), _SEQUENCES, "drop it"),
    Refusal(_cp_comm_type, "the tree plans its own exchanges", "drop it"),
    Refusal(_attention_backend, "it picks Megatron's kernels", "use --tree-attention-impl"),
    # Layers.
    Refusal(
        _set("--transformer-impl", "local", "transformer_engine"),
        _NO_LAYER,
        "use --transformer-impl transformer_engine or local",
    ),
    Refusal(
        _missing_te,
        "transformer_engine is not installed",
        "install the [te] extra or use --transformer-impl local",
    ),
    Refusal(_set("--spec"), "a tree run brings its own layers", "drop it"),
    Refusal(_set("--multi-latent-attention"), _NO_LAYER, "drop it"),
    Refusal(
        _set("--experimental-attention-variant", "gated_delta_net"),
        _NO_LAYER,
        "use gated_delta_net or drop it",
    ),
    Refusal(_set("--heterogeneous-layers-config-path"), _NO_LAYER, "drop it"),
    Refusal(_set("--heterogeneous-layers-config-encoded-json"), _NO_LAYER, "drop it"),
    Refusal(_pattern, _NO_LAYER, "use '*', 'G', '-' and 'E'"),
    Refusal(_pattern_without_attention, "there is no attention to plan", "add a '*'"),
    Refusal(
        _islands,
        "the model does not have both Gated DeltaNet and attention layers",
        "drop it, or give both by --hybrid-layer-pattern or --linear-attention-freq",
    ),
    Refusal(
        _set("--position-embedding-type", *_POSITIONS),
        "no explicit positions for it",
        f"use {', '.join(_POSITIONS[:-1])} or {_POSITIONS[-1]}",
    ),
    Refusal(
        _hybrid_rope_scaling,
        "HybridModel ignores it",
        "drop it, or use --position-embedding-type yarn",
    ),
    Refusal(_window, "attention over a tree is causal", "let the second number be 0"),
    Refusal(_set("--mtp-num-layers"), "MTP takes the next row index for the next token", "drop it"),
    Refusal(_pattern_mtp, "MTP takes the next row index for the next token", "drop the MTP part"),
    Refusal(_set("--fused-residual-rmsnorm"), "it needs Transformer Engine", "drop it"),
    Refusal(_set("--qk-clip"), "it reads logits that tree attention never holds", "drop it"),
    Refusal(_set("--log-max-attention-logit"), "tree attention never holds the logits", "drop it"),
    Refusal(
        lambda args: _set("--fp8-format")(args) if args.transformer_impl == "local" else "",
        "it needs Transformer Engine",
        "use --transformer-impl transformer_engine or drop it",
    ),
    Refusal(_set("--fp4-format"), "it was not built for tree runs", "drop it and use --bf16"),
    # Execution.
    Refusal(
        _discarding_recompute,
        "Megatron discards and recomputes their output through Transformer Engine",
        "drop it or install the [te] extra",
    ),
    Refusal(_set("--cuda-graph-impl", "none"), _SCHEDULE, "use --cuda-graph-impl none"),
    Refusal(_set("--enable-cuda-graph"), _SCHEDULE, "drop it"),
    Refusal(_set("--external-cuda-graph"), _SCHEDULE, "drop it"),
    Refusal(_set("--tp-comm-overlap"), _SCHEDULE, "drop it"),
    Refusal(
        _set("--overlap-moe-expert-parallel-comm"),
        "its schedule does not hand the row's plan to the layers",
        "drop it",
    ),
    Refusal(_peer_on_gloo, "it copies between GPUs", "use --tree-exchange group or auto"),
    Refusal(_set("--use-torch-fsdp2"), "it was not built for tree runs", "drop it"),
    Refusal(_set("--use-megatron-fsdp"), "it was not built for tree runs", "drop it"),
    Refusal(_set("--flash-decode"), "a tree run is training only", "drop it"),
    Refusal(
        _sgd_torch_dist,
        "Megatron fails when it resumes from that",
        "use --ckpt-format torch or --no-save-optim",
    ),
    # Mixture of experts.
    Refusal(
        unequal_refused,
        "it needs equal token counts on all ranks",
        "use --moe-token-dispatcher-type alltoall",
    ),
    *(
        Refusal(
            partial(missing, one.name),
            f"{one.package}.{one.attribute} cannot be imported",
            f"install {one.install} or use alltoall",
        )
        for one in DISPATCHERS.values()
    ),
    *(
        Refusal(partial(equalised, one.name), "it needs equal token counts", f"add {one.needs}")
        for one in DISPATCHERS.values()
        if one.needs
    ),
    Refusal(
        _with_experts("--moe-expert-capacity-factor"),
        "dropped tokens would depend on the packing",
        "drop it",
    ),
    Refusal(
        _with_experts("--moe-pad-expert-input-to-capacity"),
        "it needs a capacity factor",
        "drop it",
    ),
    Refusal(_routing, _PER_RANK, "use --moe-router-load-balancing-type aux_loss or none"),
    Refusal(
        _sequence_loss,
        "a stored token belongs to no single sequence",
        "use --tree-statistics logical, or aux_loss",
    ),
    Refusal(_chunked_experts, "a chunk does not know its tokens' weights", "drop it"),
    Refusal(
        _gloo_expert_tensor_parallel,
        "gloo cannot gather unequal token counts",
        "use --expert-tensor-parallel-size 1",
    ),
)
"""Checked in this order; the first that applies is reported."""
