"""Whole Megatron models on tree rows against trajectories alone through stock attention."""

from __future__ import annotations

import random

import torch

from tests.distributed import run_ranks
from tests.megatron import models

CASES = {
    "gpt rope, windows, learnable sink, qk norm": {
        "extra": {
            "window_size": (5, 0),
            "window_attn_skip_freq": 2,
            "softmax_type": "learnable",
            "qk_layernorm": True,
        },
    },
    "gpt learned positions, layer norm with bias, off-by-one sink": {
        "extra": {
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "softmax_type": "off-by-one",
            "num_layers": 2,
        },
        "positions": "learned_absolute",
    },
    "hybrid yarn, experts, qk norm": {
        "extra": models.EXPERTS | models.YARN | {"qk_layernorm": True},
        "positions": "yarn",
        "pattern": "*-*E",
    },
}


def trajectories():
    """Shared trained turns, a fork inside a turn, an end inside another one and a duplicate."""
    from megatron_tree_cp import Trajectory

    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(models.VOCABULARY) for _ in range(count)]

    prompt, turn = tokens(9), tokens(7)
    paths = [prompt + turn + tokens(6), prompt + turn + tokens(4), prompt + tokens(5)]
    paths += [paths[0][:18], list(paths[1]), tokens(8)]
    return [
        Trajectory(path, loss_mask=[int(i % 5 != 0) for i in range(len(path))]) for path in paths
    ]


def alone(case: dict):
    """Loss, gradients and weights of the trajectories one by one through stock attention."""
    models.start()
    model = models.build_model(**case, stock_attention=True)
    loss = torch.zeros(())
    for trajectory in trajectories():
        ids = torch.as_tensor(trajectory.tokens)[None]
        count = ids.shape[1] - 1
        mask = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1)
        position_ids = torch.arange(count)[None]
        nll = model(ids[:, :-1], position_ids, mask, labels=ids[:, 1:].contiguous())
        weight = torch.as_tensor(trajectory.loss_mask, dtype=torch.float32)[1:]
        loss = loss + (nll[0] * weight).sum()
    loss.backward()
    parameters = dict(model.named_parameters())
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return loss.detach(), {name: p.grad for name, p in parameters.items()}, weights


def packed(case: dict, weights: dict, tp: int, cp: int, ep: int):
    """Loss and gradients of the same trajectories as one packed row over cp x tp ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_tree_cp import TreeContext, pack_trajectories, plan_row
    from megatron_tree_cp.megatron.model_shape import model_shape_from_config
    from megatron_tree_cp.megatron.params import TreePackedSeqParams

    models.start(tp, cp, ep)
    model = models.build_model(**case)
    models.load_weights(model, weights)
    (row,) = pack_trajectories(trajectories(), max_tokens=128)
    shape = model_shape_from_config(model.config, case.get("pattern"))
    plan = plan_row(row.tree, cp, model=shape, tp_size=tp)
    group = parallel_state.get_context_parallel_group()
    context = TreeContext(plan, group, "cpu")
    real = context.row_indices >= 0
    index = context.row_indices.clamp(min=0)

    def shard(values, fill):
        return torch.where(real, torch.as_tensor(values.copy())[index], fill)

    params = TreePackedSeqParams(tree=context, positions=context.positions)
    nll = model(
        shard(row.tokens, 0)[None],
        context.positions[None],
        None,
        labels=shard(row.labels, 0).clamp(min=0)[None],
        packed_seq_params=params,
    )
    loss = torch.where(real, nll[0] * shard(row.weights, 0.0), 0.0).sum()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total, models.whole_gradients(model)


def compare(rank: int, world_size: int, topologies: tuple[tuple[int, int, int], ...]):
    """Relative errors of every case on every topology of four ranks (one start: imports cost)."""
    from megatron_tree_cp.megatron import cpu

    cpu.enable()
    errors = {}
    for name, case in CASES.items():
        loss, gradients, weights = alone(case)
        scale = max(g.norm() for g in gradients.values())
        for tp, cp, ep in topologies:
            experts = ep if "num_moe_experts" in case["extra"] else 1
            tree_loss, tree_gradients = packed(case, weights, tp, cp, experts)
            of_case = {"loss": float(abs(tree_loss - loss) / loss)}
            for parameter, gradient in tree_gradients.items():
                error = (gradient - gradients[parameter]).norm()
                reference = max(gradients[parameter].norm(), 1e-6 * scale)
                of_case[parameter] = float(error / reference)
            errors[f"{name} at tp{tp} cp{cp} ep{ep}"] = of_case
    return errors


def test_tree_rows_give_the_gradients_of_trajectories_alone():
    for errors in run_ranks(4, compare, ((1, 1, 1), (2, 2, 2)), timeout=200):
        for case, by_name in errors.items():
            worst = max(by_name, key=lambda name: by_name[name])
            assert by_name[worst] < 5e-6, f"{case}: {worst} is off by {by_name[worst]:.1e}"
