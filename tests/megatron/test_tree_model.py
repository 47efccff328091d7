"""Model configs of Megatron with tree layers: what is set, and what is refused in one line."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_tree_cp.megatron.tree_model import (
    apply_tree,
    model_config_from_args,
    plan_recipe,
)
from megatron_tree_cp.tree.errors import InputError


def arguments(**changes) -> Namespace:
    values = {
        "tree_attention_impl": "tiled",
        "hybrid_layer_pattern": None,
        "rope_scaling_factor": 4.0,
        "tree_islands": "off",
    }
    return Namespace(**values | changes)


def gpt_config():
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.models.gpt import GPTModelConfig

    transformer = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    return GPTModelConfig(transformer=transformer, vocab_size=64, seq_length=32)


def test_a_gpt_config_gets_layers_positions_and_its_rope_scaling():
    from megatron_tree_cp.megatron.rope import install_tree_rope
    from megatron_tree_cp.megatron.specs import tree_gpt_layer_spec

    model = gpt_config()
    apply_tree(model, arguments())
    assert model.transformer_layer_spec.func is tree_gpt_layer_spec
    assert model.transformer_layer_spec.keywords == {"attention_impl": "tiled"}
    assert install_tree_rope in model.pre_wrap_hooks
    assert model.rope_scaling_factor == 4.0


@pytest.mark.parametrize(
    "make, changes, message",
    [
        (lambda: None, {}, "the script builds its model by a model provider"),
        (lambda: Namespace(), {}, "the script builds its model by Namespace"),
        (gpt_config, {"hybrid_layer_pattern": "*-"}, "use pretrain_hybrid.py"),
    ],
)
def test_other_models_are_refused(make, changes, message):
    with pytest.raises(InputError, match=message):
        apply_tree(make(), arguments(**changes))


def test_islands_are_planned_and_installed_where_asked():
    from megatron_tree_cp.megatron.islands import install_islands

    shape = {"tree_profile": None, "tree_waves": "auto", "distributed_backend": "gloo"}
    shape |= {"context_parallel_size": 2, "tensor_model_parallel_size": 1, "fp8": None}
    for mode in ("off", "auto", "on"):
        model = gpt_config()
        model.transformer.experimental_attention_variant = "gated_delta_net"
        model.transformer.linear_attention_freq = 2
        apply_tree(model, arguments(tree_islands=mode))
        assert (install_islands in model.pre_wrap_hooks) == (mode != "off")
        recipe = plan_recipe(arguments(tree_islands=mode, **shape), model)
        assert (recipe.islands, recipe.force_islands) == (int(mode != "off"), mode == "on")


def test_what_megatrons_config_refuses_is_one_line(monkeypatch):
    from megatron.training import argument_utils

    def refuses(args):
        raise ValueError("num_query_groups (3) must divide\n   the heads (4)")

    monkeypatch.setattr(argument_utils, "gpt_config_from_args", refuses)
    with pytest.raises(InputError) as error:
        model_config_from_args(arguments())
    assert str(error.value) == (
        "Megatron refuses the model: num_query_groups (3) must divide the heads (4)"
    )


def test_plans_use_the_given_profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"name": "here", "exchange_latency_ms": 0.5}')
    args = arguments(
        tree_profile=str(path),
        tree_waves="auto",
        context_parallel_size=2,
        tensor_model_parallel_size=1,
        fp8=None,
    )
    recipe = plan_recipe(args, gpt_config())
    assert recipe.profile.name == "here" and recipe.profile.exchange_latency_ms == 0.5
    with pytest.raises(InputError, match="cannot read"):
        args.tree_profile = str(tmp_path / "none.json")
        plan_recipe(args, gpt_config())
