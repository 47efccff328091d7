"""The option set is frozen: a change here is a change for users and needs a changelog line."""

from __future__ import annotations

import argparse

import pytest

from megatron_tree_cp.megatron.arguments import (
    ATTENTION_IMPLS,
    add_tree_arguments,
    requested_backend,
    tree_defaults,
)

OPTIONS = {
    "--context-parallel-backend": "te",
    "--tree-config": None,
    "--tree-cpu": False,
    "--tree-data": None,
    "--tree-valid-data": None,
    "--tree-messages-key --messages-key": "messages",
    "--tree-ignore-keys": [],
    "--tree-tokenizer": "bytes",
    "--tree-max-tokens": None,
    "--tree-min-shared": 1,
    "--tree-overlong": "error",
    "--tree-shuffle-seed": None,
    "--no-tree-shuffle": False,
    "--tree-allow-new-data": False,
    "--tree-waves": "auto",
    "--tree-exchange": "group",
    "--tree-islands": "off",
    "--tree-attention-impl": "auto",
    "--tree-deterministic": False,
    "--tree-profile": None,
    "--tree-lookahead": 4,
    "--tree-planner-workers": 1,
    "--tree-planners": "rank",
    "--tree-loss": "token",
    "--tree-statistics": "stored",
    "--tree-metrics-file": None,
}


def parser(argv: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    bare = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    bare.add_argument("--seq-length", type=int)
    bare.add_argument("--hidden-dropout", type=float, default=0.1)
    return add_tree_arguments(bare, argv)


def test_names_and_defaults_are_frozen():
    tree_group = parser()._action_groups[-1]
    found = {" ".join(a.option_strings): a.default for a in tree_group._group_actions}
    assert found == OPTIONS


def test_every_option_says_what_it_is():
    assert all(action.help for action in parser()._action_groups[-1]._group_actions)


def test_attention_choices_are_those_of_the_registry():
    from megatron_tree_cp.ops.attention.registry import AUTOMATIC, IMPLEMENTATIONS

    assert set(ATTENTION_IMPLS) == {*AUTOMATIC, *(i.name for i in IMPLEMENTATIONS)}


def test_megatron_defaults_change_for_tree_runs_only():
    tree = ("--context-parallel-backend=tree",)
    assert parser().parse_args([]).hidden_dropout == 0.1
    assert parser(tree).parse_args([]).hidden_dropout == 0.0
    assert parser(tree).parse_args(["--hidden-dropout", "0.2"]).hidden_dropout == 0.2
    assert requested_backend(["--x", "--context-parallel-backend", "tree"]) == "tree"
    assert requested_backend(["--x"]) == "te"
    assert tree_defaults()["calculate_per_token_loss"] is True


def test_max_tokens_is_the_sequence_length():
    args = parser().parse_args(["--tree-max-tokens", "64"])
    assert args.seq_length == args.tree_max_tokens == 64
    assert parser().parse_args(["--seq-length", "64"]).tree_max_tokens is None


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--seq-length", "32", "--tree-max-tokens", "64"], "contradicts --seq-length 32"),
        (["--tree-waves", "-1"], "must be at least 0"),
        (["--tree-waves", "many"], "'many' is not an integer"),
        (["--tree-lookahead", "0"], "must be at least 1"),
        (["--tree-overlong", "drop"], "invalid choice"),
        (["--tree-max-token", "64"], "unrecognized arguments"),
    ],
)
def test_bad_values_name_the_option(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parser().parse_args(argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "installed", "impl", "fused"),
    [
        ((), (), "local", False),
        ((), ("fused_weight_gradient_mlp_cuda",), "local", None),
        ((), ("transformer_engine",), None, False),
        ((), ("transformer_engine", "fused_weight_gradient_mlp_cuda"), None, None),
        (("--tree-cpu",), ("transformer_engine",), "local", False),
    ],
)
def test_fused_weight_gradients_need_apex(monkeypatch, argv, installed, impl, fused):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name in installed else None
    )
    defaults = tree_defaults(argv)
    assert defaults.get("transformer_impl") == impl
    assert defaults.get("gradient_accumulation_fusion") is fused
