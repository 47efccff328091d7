"""What a tree run sets and what it refuses, through Megatron's own parser."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from megatron_tree_cp.megatron.arguments import add_tree_arguments
from megatron_tree_cp.megatron.validation import (
    prepare_tree_args,
    validate_args_of_tree_run,
    validate_tree_args,
)
from megatron_tree_cp.tree.errors import InputError

BASE = (
    *("--context-parallel-backend", "tree", "--tree-data", "r.jsonl", "--tree-max-tokens", "64"),
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
)
EXPERTS = ("--num-experts", "4")
GDN_VARIANT = ("--experimental-attention-variant", "gated_delta_net")


def parse(*argv: str) -> argparse.Namespace:
    from megatron.training.arguments import add_megatron_arguments

    words = (*BASE, *argv)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    args = add_tree_arguments(add_megatron_arguments(parser), words).parse_args(words)
    args.rank = 0
    return args


def test_defaults_pass_and_are_settled(capsys):
    args = parse("--seed", "7")
    prepare_tree_args(args)
    assert args.max_position_embeddings == 64
    args.variable_seq_lengths = False  # as Megatron's validate_args leaves it
    validate_tree_args(args)
    assert args.variable_seq_lengths and args.calculate_per_token_loss
    assert (args.hidden_dropout, args.attention_dropout) == (0.0, 0.0)
    assert args.moe_token_dispatcher_type == "alltoall" and args.transformer_impl == "local"
    assert args.tree_shuffle_seed == 7
    assert "tree run sets variable_seq_lengths=True" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "groups"),
    [
        (("--context-parallel-size", "2"), ["cp"]),
        (
            ("--context-parallel-size", "2", "--high-priority-stream-groups", "dp_cp"),
            ["dp_cp", "cp"],
        ),
        (("--context-parallel-size", "2", "--distributed-backend", "gloo"), []),
        ((), []),
    ],
)
def test_exchanges_go_before_the_calls_that_hide_them(argv, groups):
    args = parse(*argv)
    prepare_tree_args(args)
    args.variable_seq_lengths = True  # set by Megatron's validate_args
    validate_tree_args(args)
    assert list(args.high_priority_stream_groups) == groups


@pytest.mark.parametrize(
    "argv",
    [
        ("--hybrid-layer-pattern", "G*"),
        (*GDN_VARIANT, "--linear-attention-freq", "2"),
        (*GDN_VARIANT, "--linear-attention-freq", "[0,1]"),
    ],
)
def test_islands_want_both_kinds_of_layers(argv):
    prepare_tree_args(parse("--tree-islands", "on", *argv))


def test_sequence_length_alone_sets_max_tokens():
    args = parse("--seq-length", "64")
    args.tree_max_tokens = None
    prepare_tree_args(args)
    assert args.tree_max_tokens == 64


REFUSED = {
    "no data": (("--tree-data", ""), "no --tree-data"),
    "micro batch": (("--micro-batch-size", "2"), "--micro-batch-size 2: a microbatch is one"),
    "attention dropout": (("--attention-dropout", "0.1"), "use --attention-dropout 0"),
    "hidden dropout": (("--hidden-dropout", "0.1"), "use --hidden-dropout 0"),
    "dataloader": (("--dataloader-type", "cyclic"), "--dataloader-type cyclic"),
    "megatron data": (("--data-path", "x"), "rows are packed from --tree-data"),
    "mock data": (("--mock-data",), "--mock-data:"),
    "sft": (("--sft",), "--sft:"),
    "mtp": (("--mtp-num-layers", "1"), "--mtp-num-layers 1: MTP takes"),
    "mtp pattern": (("--hybrid-layer-pattern", "*-/*-"), "drop the MTP part"),
    "pattern": (("--hybrid-layer-pattern", "M*G-"), "--hybrid-layer-pattern with M"),
    "no attention": (("--hybrid-layer-pattern=----",), "add a '*'"),
    "islands of none": (("--tree-islands", "auto"), "--tree-islands auto: the model does not have"),
    "islands in a pattern": (
        ("--tree-islands", "on", "--hybrid-layer-pattern", "*-"),
        "drop it, or give both by --hybrid-layer-pattern",
    ),
    "islands alone": (
        ("--tree-islands", "on", *GDN_VARIANT, "--linear-attention-freq", "[1,1]"),
        "both Gated DeltaNet and attention layers",
    ),
    "islands in attention": (
        ("--tree-islands", "on", *GDN_VARIANT, "--linear-attention-freq", "1"),
        "both Gated DeltaNet and attention layers",
    ),
    "cuda graphs": (("--cuda-graph-impl", "local"), "--cuda-graph-impl local"),
    "old cuda graphs": (("--enable-cuda-graph",), "--enable-cuda-graph: it fixes"),
    "inference": (("--transformer-impl", "inference_optimized"), "use --transformer-impl trans"),
    "latent attention": (("--multi-latent-attention",), "no tree layers"),
    "variant": (("--experimental-attention-variant", "dsa"), "no tree layers"),
    "spec": (("--spec", "a", "b"), "--spec a b: a tree run brings its own layers"),
    "backend": (("--attention-backend", "flash"), "use --tree-attention-impl"),
    "local backend": (("--attention-backend", "local"), "--attention-backend local"),
    "look-ahead window": (("--window-size", "8,8"), "--window-size 8,8"),
    "relative positions": (("--position-embedding-type", "relative"), "use rope, yarn"),
    "mrope": (("--position-embedding-type", "mrope"), "no explicit positions"),
    "rope scaling": (("--use-rope-scaling", "--hybrid-layer-pattern", "*-"), "HybridModel ignores"),
    "hybrid cp": (("--hybrid-context-parallel",), "--hybrid-context-parallel"),
    "a2a": (("--cp-comm-type", "a2a"), "--cp-comm-type a2a"),
    "fp8": (("--fp8-format", "hybrid"), "--fp8-format hybrid: it needs Transformer Engine"),
    "fp4": (("--fp4-format", "e2m1"), "--fp4-format e2m1"),
    "fsdp": (("--use-megatron-fsdp",), "--use-megatron-fsdp"),
    "tp overlap": (("--tp-comm-overlap",), "--tp-comm-overlap"),
    "qk clip": (("--qk-clip",), "--qk-clip"),
    "rl": (("--perform-rl-step",), "--perform-rl-step"),
    "sgd resume": (("--optimizer", "sgd", "--save", "x"), "use --ckpt-format torch"),
    "dispatcher": ((*EXPERTS, "--moe-token-dispatcher-type", "allgather"), "-type alltoall"),
    "discarding recompute": (
        (*"--recompute-granularity selective --recompute-modules core_attn layernorm".split(),),
        "--recompute-modules layernorm: Megatron discards",
    ),
    "deepep": ((*EXPERTS, "--moe-token-dispatcher-type", "flex"), "install DeepEP"),
    "ncclep": (
        (
            *EXPERTS,
            *"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep".split(),
        ),
        "backend ncclep: it needs equal token counts",
    ),
    "stored sequences": (
        (*EXPERTS, "--moe-router-load-balancing-type", "seq_aux_loss"),
        "use --tree-statistics logical",
    ),
    "chunked experts": (
        (*EXPERTS, "--mlp-chunks-for-training", "2"),
        "--mlp-chunks-for-training 2",
    ),
    "capacity": ((*EXPERTS, "--moe-expert-capacity-factor", "1.5"), "--moe-expert-capacity-factor"),
    "jitter": ((*EXPERTS, "--moe-input-jitter-eps", "0.1"), "--moe-input-jitter-eps 0.1"),
    "sinkhorn": ((*EXPERTS, "--moe-router-load-balancing-type", "sinkhorn"), "sinkhorn"),
    "overlap": ((*EXPERTS, "--overlap-moe-expert-parallel-comm"), "does not hand the row's plan"),
    "peer copies on gloo": (
        ("--tree-exchange", "peer", "--distributed-backend", "gloo"),
        "use --tree-exchange group or auto",
    ),
    "gloo experts": (
        (*EXPERTS, "--distributed-backend", "gloo", "--tensor-model-parallel-size", "2"),
        "use --expert-tensor-parallel-size 1",
    ),
}


@pytest.mark.parametrize("argv, message", REFUSED.values(), ids=REFUSED.keys())
def test_refusals_name_option_reason_and_fix(argv, message):
    args = parse(*argv)
    if argv == ("--tree-data", ""):
        args.tree_data = None
    for check in (prepare_tree_args, validate_tree_args):
        with pytest.raises(InputError) as error:
            check(args)
        assert message in str(error.value)
        assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_layers_that_are_not_installed():
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("Transformer Engine is installed")
    with pytest.raises(InputError, match=r"is not installed: install the \[te\] extra or use"):
        prepare_tree_args(parse("--transformer-impl", "transformer_engine"))


def test_row_length_fits_megatrons_rule():
    args = parse("--context-parallel-size", "3")
    with pytest.raises(InputError, match=r"multiple of 2 x .* \(6\).*: use 66"):
        prepare_tree_args(args)


def test_no_row_length():
    args = parse()
    args.seq_length = args.tree_max_tokens = None
    with pytest.raises(InputError, match="give --tree-max-tokens"):
        prepare_tree_args(args)


def test_optimizer_state_that_cannot_be_loaded(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    resume = ("--use-distributed-optimizer", "--load", str(tmp_path))
    with pytest.raises(InputError, match="add --no-load-optim"):
        prepare_tree_args(parse(*resume))
    prepare_tree_args(parse(*resume, "--no-load-optim"))


@pytest.mark.parametrize(
    "layers, stage",
    [
        (("--moe-layer-freq", "[1,0]"), 2),
        (("--moe-layer-freq", "[0,1]"), 1),
        (("--hybrid-layer-pattern", "*E|*-"), 2),
        (("--moe-layer-freq", "1"), None),
        (("--hybrid-layer-pattern", "*E|*E"), None),
        (("--moe-layer-freq", "[1,0,1,0]", "--num-layers", "4"), None),
    ],
)
def test_optimizer_state_that_cannot_be_saved(layers, stage):
    """A pipeline stage without experts has an empty expert optimizer."""
    options = ("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", "--save", "x")
    args = parse(*EXPERTS, *options, *layers)
    if stage is None:
        return prepare_tree_args(args)
    with pytest.raises(InputError, match=f"no experts on pipeline stage {stage}: Megatron cannot"):
        prepare_tree_args(args)


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--hidden-size", "33"), "Megatron refuses the arguments"),
        (("--train-iters", "2", "--train-samples", "2"), "expected iteration-based training"),
        (("--attention-backend", "local"), "use --tree-attention-impl"),
        (("--save", "x"), "Megatron refuses the arguments: assert args.save_interval is not None"),
    ],
)
def test_megatrons_own_assertions_become_one_line(argv, message):
    from megatron.training.arguments import parse_args, validate_args

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pretrain", *BASE, *argv])
        args = parse_args(add_tree_arguments)
    with pytest.raises(InputError) as error:
        validate_args_of_tree_run(validate_args, args, {})
    assert message in str(error.value) and "\n" not in str(error.value)
