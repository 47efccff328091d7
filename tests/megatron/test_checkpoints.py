"""Which checkpoints a run goes on from: the rows behind them, and the optimizer's format."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_tree_cp.megatron.checkpoints import PackingLedger
from megatron_tree_cp.tree.errors import InputError

ROWS, OTHER_ROWS = "a" * 64, "b" * 64


def arguments(**changes) -> Namespace:
    values = {
        "tree_max_tokens": 64,
        "tree_min_shared": 1,
        "tree_overlong": "error",
        "tree_loss": "token",
        "no_tree_shuffle": False,
        "tree_shuffle_seed": 7,
        "tree_allow_new_data": False,
        "expert_model_parallel_size": 1,
        "num_experts": None,
        "use_distributed_optimizer": False,
        "no_load_optim": False,
    }
    return Namespace(**values | changes)


def trained(rows: str = ROWS, **changes) -> Namespace:
    """The arguments that a checkpoint of such a run holds."""
    args = arguments(**changes)
    PackingLedger(args).rows_known(rows)
    return args


def never() -> str:
    raise AssertionError("rows are packed in the training process for nothing")


def test_same_rows_go_on_without_packing_twice():
    ledger = PackingLedger(arguments())
    ledger.checkpoint_loaded(trained())
    assert ledger.first_sample(never, consumed=12) == 0
    ledger.rows_known(ROWS)
    assert ledger.args.tree_packing == trained().tree_packing


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tree_max_tokens": 32}, "this run has --tree-max-tokens 32, its checkpoint --tree-max-"),
        ({"tree_min_shared": 4}, "--tree-min-shared 4"),
        ({"tree_overlong": "cut"}, "--tree-overlong cut"),
        ({"tree_loss": "group"}, "--tree-loss group"),
        ({"tree_shuffle_seed": 8}, "--tree-shuffle-seed 8, its checkpoint --tree-shuffle-seed 7"),
        ({"no_tree_shuffle": True}, "this run has --no-tree-shuffle, the checkpoint does not"),
    ],
)
def test_other_options_are_refused_by_name(changes, message):
    with pytest.raises(InputError) as error:
        PackingLedger(arguments(**changes)).checkpoint_loaded(trained())
    assert message in str(error.value) and "--tree-allow-new-data" in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_a_checkpoint_without_shuffle_names_it():
    with pytest.raises(InputError, match="this checkpoint has --no-tree-shuffle, the run does not"):
        PackingLedger(arguments()).checkpoint_loaded(trained(no_tree_shuffle=True))


def test_the_seed_of_no_shuffle_does_not_matter():
    ledger = PackingLedger(arguments(no_tree_shuffle=True, tree_shuffle_seed=8))
    ledger.checkpoint_loaded(trained(no_tree_shuffle=True))


def test_other_rows_are_refused_when_they_arrive():
    ledger = PackingLedger(arguments())
    ledger.checkpoint_loaded(trained())
    with pytest.raises(InputError, match=r"fingerprint bbbbbbbbbbbb, checkpoint aaaaaaaaaaaa\)"):
        ledger.rows_known(OTHER_ROWS)


def test_a_stock_checkpoint_needs_finetune():
    with pytest.raises(InputError, match="give --finetune to start from its weights"):
        PackingLedger(arguments()).checkpoint_loaded(Namespace())


def test_allowed_new_rows_begin_at_their_first_and_stay_in_place_later():
    ledger = PackingLedger(arguments(tree_allow_new_data=True))
    ledger.checkpoint_loaded(trained())
    assert ledger.first_sample(lambda: OTHER_ROWS, consumed=12) == 12
    ledger.rows_known(OTHER_ROWS)
    for allow in (False, True):
        later = PackingLedger(arguments(tree_allow_new_data=allow))
        later.checkpoint_loaded(ledger.args)
        assert later.first_sample(lambda: OTHER_ROWS, consumed=20) == 12
        later.rows_known(OTHER_ROWS)
        assert later.state == ledger.state


def test_allowing_new_rows_changes_nothing_for_the_same():
    ledger = PackingLedger(arguments(tree_allow_new_data=True))
    ledger.checkpoint_loaded(trained())
    assert ledger.first_sample(lambda: ROWS, consumed=12) == 0


def test_plain_optimizer_keeps_its_expert_parallel_size():
    experts = {"num_experts": 4, "expert_model_parallel_size": 2}
    with pytest.raises(InputError, match="--expert-model-parallel-size 2, checkpoint 1: Megatron"):
        PackingLedger(arguments(**experts)).checkpoint_loaded(trained())
    for changes in ({"use_distributed_optimizer": True}, {"no_load_optim": True}):
        PackingLedger(arguments(**experts, **changes)).checkpoint_loaded(trained())


def test_keys_of_the_local_moe_spec_are_found():
    from megatron_tree_cp.megatron.checkpoint_keys import follow_stored_keys, has_such_keys

    norm, local = "decoder.layers.pre_mlp_layernorm.weight", "decoder.layers.mlp.linear_fc1."
    asked = {
        "model": {"a": Namespace(key=norm), "b": Namespace(key="decoder.final_layernorm.weight")},
        "optimizer": [Namespace(key=f"optimizer.state.exp_avg.{norm}"), 3.0],
    }
    stored = {f"{local}layer_norm_weight", f"optimizer.state.exp_avg.{local}layer_norm_weight"}
    assert has_such_keys(asked) and not has_such_keys({"b": asked["model"]["b"]})
    assert follow_stored_keys(asked, {norm, *stored}) == 1  # the model's own name is there
    assert asked["model"]["a"].key == norm
    assert follow_stored_keys(asked, stored) == 1
    assert {asked["model"]["a"].key, asked["optimizer"][0].key} == stored
