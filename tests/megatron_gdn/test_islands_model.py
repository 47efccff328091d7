"""A hybrid model whose runs of recurrent layers lie in a second layout, against one rank."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.distributed import run_ranks
from tests.megatron import models
from tests.megatron.test_model import trajectories
from tests.megatron_gdn.test_gdn_layer import sections

# Islands: experts inside one and at the start of another, attention at both ends of the second.
PATTERN = "GE*EG-*"
ISLANDS = 2
EXTRA = models.EXPERTS | {
    "num_layers": len(PATTERN),
    "is_hybrid_model": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.02,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
RECOMPUTE = {
    "kept": {},
    "every layer recomputed": FULL | {"recompute_num_layers": 1},
    "pairs of layers recomputed": FULL | {"recompute_num_layers": 2},
    "experts and MLPs recomputed": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe", "mlp"],
    },
}
TOPOLOGIES = [(1, 2), (2, 2), (1, 4)]
GRANULE = 32
"""Pads shards to one size, so that a mistake gives wrong numbers and not a wrong shape."""


def build(recompute):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.hybrid import HybridModelConfig

    from megatron_tree_cp.megatron.islands import install_islands
    from megatron_tree_cp.megatron.rope import install_tree_rope
    from megatron_tree_cp.megatron.specs import make_tree_hybrid_stack_spec

    config = HybridModelConfig(
        transformer=models.transformer_config(EXTRA | recompute),
        hybrid_layer_pattern=PATTERN,
        hybrid_stack_spec=make_tree_hybrid_stack_spec(),
        vocab_size=models.VOCABULARY,
        seq_length=128,
        position_embedding_type="rope",
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_model(groups)
    return install_islands(install_tree_rope([model]))[0]


def random_layout(tokens: int, cp: int, granule: int, seed: int):
    """Every rank owns tokens, and they lie in several ranges."""
    from megatron_tree_cp.plan import Layout

    rng = np.random.default_rng(seed)
    inner = rng.choice(np.arange(1, tokens), 5 * cp, replace=False)
    cuts = np.unique(np.concatenate([[0], inner, [tokens]]))
    owner = np.concatenate([np.arange(cp), rng.integers(0, cp, len(cuts) - 1 - cp)])
    return Layout.from_pieces(cuts, owner, cp, granule)


def batch_of(tp: int, cp: int, islands: bool, granule: int | None = None):
    """The trajectories as one planned row, with layouts that differ wherever they may."""
    from megatron.core import parallel_state

    from megatron_tree_cp import pack_trajectories, plan_row
    from megatron_tree_cp.megatron.batch import build_batch
    from megatron_tree_cp.megatron.model_shape import model_shape_from_config
    from megatron_tree_cp.megatron.rows import PlannedRow
    from megatron_tree_cp.plan.recurrence_tables import recurrent_row
    from megatron_tree_cp.tree.objective import target_counts

    (row,) = pack_trajectories(trajectories(), max_tokens=128)
    shape = model_shape_from_config(models.transformer_config(EXTRA), PATTERN)
    granule = 2 * tp if granule is None else granule
    main = random_layout(row.num_tokens, cp, granule, seed=1)
    plan = plan_row(row.tree, cp, shape, tp_size=tp, layout=main, granule=granule)
    if islands:
        second = random_layout(row.num_tokens, cp, granule, seed=2)
        plan = replace(plan, layouts={"main": main, "gdn": second})
    rank = parallel_state.get_context_parallel_rank()
    planned = PlannedRow(
        *(0, row, target_counts(row), plan, "", "", 0, 0.0), recurrence=recurrent_row(plan, rank)
    )
    groups = (
        parallel_state.get_context_parallel_group(),
        torch.device("cpu"),
        parallel_state.get_tensor_model_parallel_group(),
    )
    return build_batch(planned, *groups, router_statistics="logical")


def part_of(name: str, whole: torch.Tensor, parameter, tp: int, rank: int) -> torch.Tensor:
    if not models._is_split(name, parameter):
        return whole
    dim = parameter.partition_dim
    if (split := sections(name)) is not None:
        parts = [x.chunk(tp, dim)[rank] for x in whole.split(split, dim)]
        return torch.cat(parts, dim)
    return models._parts(name, whole, dim, tp)[rank]


def step(model, batch):
    """Loss, this rank's gradients summed over ranks with copies, and the token losses by row."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    nll = batch.forward(model)[0]
    loss = (nll * batch.weights).sum()
    loss.backward()
    rows, context = batch.context.row_indices, parallel_state.get_context_parallel_group()
    outputs = torch.zeros(batch.context.plan.tree.num_tokens)
    outputs[rows[rows >= 0]] = nll.detach()[rows >= 0]
    total = loss.detach().clone()
    for value in (total, outputs):
        dist.all_reduce(value, group=context)
    gradients = {name: grad for name, _, grad in models.summed_gradients(model)}
    return total, gradients, outputs


def errors(model, got, reference, tp: int) -> dict[str, float]:
    """Relative errors of the loss, the token losses and every parameter's gradient."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    (loss, gradients, outputs), (want_loss, want_gradients, want_outputs) = got, reference
    scale = torch.stack([g.norm() for g in want_gradients.values()]).norm()
    found = {
        "loss": float(abs(loss - want_loss) / want_loss),
        "outputs": float((outputs - want_outputs).norm() / want_outputs.norm()),
    }
    for name, parameter in model.named_parameters():
        want = part_of(name, want_gradients[name], parameter, tp, rank)
        bound = max(want.norm(), 1e-6 * scale)
        found[name] = float((gradients[name] - want).norm() / bound)
    return found


def load(model, weights, tp: int) -> None:
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part_of(name, weights[name], parameter, tp, rank))


def one_rank():
    """The step on one rank, where no layout can differ, and the weights."""
    models.start()
    model = build({})
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return step(model, batch_of(1, 1, islands=False)), weights


def compare(rank: int, world_size: int):
    """{(topology, islands, recompute): errors}, and exchanges of each step's two directions."""
    from megatron_tree_cp.comm.context import TreeContext
    from megatron_tree_cp.megatron import cpu

    cpu.enable()
    reference, weights = one_rank()
    found, moves = {}, {}
    for tp, cp in TOPOLOGIES:
        models.start(tp, cp)
        for recompute in RECOMPUTE:
            model = build(RECOMPUTE[recompute])
            load(model, weights, tp)
            for islands in (False, True):
                model.zero_grad()
                calls = []
                stock = TreeContext.exchange

                def counted(self, x, src, dst, stock=stock, calls=calls):
                    calls.append((src, dst, tuple(x.shape[1:])))
                    return stock(self, x, src, dst)

                with mock.patch.object(TreeContext, "exchange", counted):
                    got = step(model, batch_of(tp, cp, islands))
                case = f"tp{tp} cp{cp}, {'islands' if islands else 'one layout'}, {recompute}"
                found[case] = errors(model, got, reference, tp)
                moves[case] = calls
    return found, moves


@pytest.fixture(scope="module")
def compared():
    return run_ranks(4, compare, timeout=400)


@pytest.mark.timeout(500)
def test_a_second_layout_changes_no_number(compared):
    for found, _ in compared:
        assert len(found) == len(TOPOLOGIES) * len(RECOMPUTE) * 2
        for case, by_name in found.items():
            worst = max(by_name, key=lambda name: by_name[name])
            assert by_name[worst] < 1e-5, f"{case}: {worst} is off by {by_name[worst]:.1e}"


@pytest.mark.timeout(500)
def test_an_island_moves_the_stream_there_and_back(compared):
    there_and_back = [("main", "gdn"), ("gdn", "main")] * ISLANDS
    for _, moves in compared:
        for case, calls in moves.items():
            routes = [call[:2] for call in calls]
            if "one layout" in case:
                assert not routes
            elif "layer" in case:  # in backward once more
                assert routes[: 2 * ISLANDS] == there_and_back
                assert sorted(routes) == sorted(there_and_back * 2)
            else:
                assert routes == there_and_back
            # Each tensor-parallel rank moves its columns of every token.
            hidden = models.SIZES["hidden_size"]
            assert {call[2] for call in calls} <= {(hidden // 2,) if "tp2" in case else (1, hidden)}


# -- which layers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "islands"),
    [
        ("GE*EG-*", [range(2), range(3, 6)]),
        ("*-*E", []),
        ("-G-*-E-*G", [range(3), range(8, 9)]),
        (["G-", "GE", "*-", "G-"], [range(2), range(3, 4)]),
        ("", []),
    ],
)
def test_islands_are_maximal_runs_without_attention(kinds, islands):
    from megatron_tree_cp.megatron.islands import island_runs

    assert island_runs(kinds) == islands


@pytest.mark.parametrize(
    ("pattern", "change", "islands"),
    [
        ("G-G-*-G-", {}, 2),
        ("GG*G", {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, 1),
        ("GGG*", {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, 1),
        # An island ends with its chunk: G | G* | GG | *, two stages of two chunks.
        ("G|G*|GG|*", {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, 2),
        (None, {"linear_attention_freq": 4, "num_layers": 8}, 2),
        (
            None,
            {
                "linear_attention_freq": 4,
                "num_layers": 8,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "pipeline_dtype": torch.float32,
            },
            2,
        ),
        ("*-*-", {}, 0),
    ],
)
def test_what_the_planner_hears_of_islands(pattern, change, islands):
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_tree_cp.megatron.islands import islands_of_stage

    layers = {"num_layers": len(pattern.replace("|", ""))} if pattern else {}
    if pattern is None:
        layers |= {"experimental_attention_variant": "gated_delta_net"}
    config = TransformerConfig(**(models.SIZES | layers | change))
    assert islands_of_stage(config, pattern) == islands


def test_columns_must_divide():
    from types import SimpleNamespace

    from megatron_tree_cp.megatron.islands import install_islands

    config = SimpleNamespace(tensor_model_parallel_size=3, sequence_parallel=True, hidden_size=32)
    with pytest.raises(ValueError, match="--hidden-size 32 does not divide .* use --tree-islands"):
        install_islands([SimpleNamespace(config=config)])


# -- mistakes -----------------------------------------------------------------------------------


def _without(src: str):
    """A move that keeps the tokens where they are."""
    from megatron_tree_cp.megatron import islands

    stock = islands._move

    def move(hidden_states, layer, params, src_, dst):
        return hidden_states if src_ == src else stock(hidden_states, layer, params, src_, dst)

    return mock.patch.object(islands, "_move", move)


def _of_main(field: str):
    """Island layers get one of main's parameters."""
    from megatron_tree_cp.megatron import batch

    stock = batch._params

    def params(context, routing, island=None):
        made = stock(context, routing, island)
        if island is not None:
            setattr(island, field, getattr(made, field))
        return made

    return mock.patch.object(batch, "_params", params)


MUTATIONS = {
    "none": ExitStack,
    "tokens do not come back": lambda: _without("gdn"),
    "tokens do not leave": lambda: _without("main"),
    "router weights of main": lambda: _of_main("routing"),
}


def mutate(rank: int, world_size: int):
    from megatron_tree_cp.megatron import cpu

    cpu.enable()
    reference, weights = one_rank()
    models.start(1, 2)
    model = build({})
    load(model, weights, 1)
    found = {}
    for name, mutation in MUTATIONS.items():
        model.zero_grad()
        with mutation():
            got = step(model, batch_of(1, 2, islands=True, granule=GRANULE))
        found[name] = errors(model, got, reference, 1)
    return found


@pytest.mark.timeout(300)
def test_mistakes_are_caught():
    for found in run_ranks(2, mutate, timeout=200):
        worst = {name: max(by_name.values()) for name, by_name in found.items()}
        assert worst.pop("none") < 1e-5
        assert min(worst.values()) > 1e-3, worst
