"""Router losses and counts on weighted, unequally spread tokens against Megatron's own router."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.megatron import models

EXPERTS, TOPK, HIDDEN = 4, 2, 32
SHARES = (0.6, 0.4)
"""Shares of the row's tokens on the two context-parallel ranks."""

BASE = models.EXPERTS | {"moe_router_load_balancing_type": "none", "moe_router_dtype": "fp32"}
CASES = {
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
    "z loss": {"moe_z_loss_coeff": 0.2},
    "global_aux_loss": {
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.3,
    },
    "seq_aux_loss, sigmoid, expert bias": {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "two losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.3, 0.2],
        "moe_z_loss_coeff": 0.1,
    },
}


def row():
    """Trajectories with a shared prompt, a duplicate and an end inside another one's turn."""
    from megatron_tree_cp import Trajectory, pack_trajectories

    paths = [[*range(9), 20, 21, 22, 23], [*range(9), 30, 31], [*range(6)], [*range(9), 30, 31]]
    paths.append([*range(40, 47)])
    (packed,) = pack_trajectories([Trajectory(tokens) for tokens in paths], max_tokens=128)
    return packed


def hidden_states(tokens: int) -> torch.Tensor:
    """[tokens, 1, HIDDEN], equal on every rank."""
    return torch.randn(tokens, 1, HIDDEN, generator=torch.Generator().manual_seed(3))


def make_router(kind: type, extra: dict, groups) -> torch.nn.Module:
    torch.manual_seed(1)
    return kind(config=models.transformer_config(BASE | extra), pg_collection=groups)


def alone_groups() -> SimpleNamespace:
    """A process-group collection of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]
    return SimpleNamespace(tp=own, cp=own, tp_cp=own, tp_dp_cp=own)


def backward(probs: torch.Tensor, weights: torch.Tensor) -> None:
    """Some loss on the probabilities, so that gradients of routing itself are there too."""
    slope = torch.linspace(-1, 1, EXPERTS)
    (probs * slope * weights[:, None]).sum().backward()


def result(router: torch.nn.Module, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {"input": gradient, "weight": router.weight.grad.clone()}
    if router.local_tokens_per_expert is not None:
        found["counts"] = router.local_tokens_per_expert.clone()
    return found


def stock_alone(extra: dict, groups, packed, per_sequence: bool) -> dict[str, torch.Tensor]:
    """Megatron's router over the trajectories, one by one or all in one microbatch, twice."""
    from megatron.core.transformer.moe.router import TopKRouter

    router = make_router(TopKRouter, extra, groups)
    whole = hidden_states(packed.num_tokens).requires_grad_()
    batches = list(packed.paths) if per_sequence else [np.concatenate(packed.paths)]
    for _ in range(2):  # two microbatches of a step: what accumulates must do so
        for path in batches:
            probs, _ = router(whole[torch.as_tensor(path)])
            backward(probs, torch.ones(len(path)))
    return result(router, whole.grad)


def tree_sharded(extra: dict, groups, packed, statistics: str, mutation: str = ""):
    """The tree's router over the row, spread unequally over CP and evenly over TP."""
    from megatron_tree_cp.megatron.moe import TreeTopKRouter
    from megatron_tree_cp.megatron.routing_statistics import routing_statistics

    tp, cp = groups.tp.size(), groups.cp.size()
    router = make_router(TreeTopKRouter, extra, groups)
    indices = shard(packed.num_tokens, groups.cp.rank(), cp, tp)
    sequences = statistics == "logical"
    routing = routing_statistics(packed, indices, torch.device("cpu"), statistics, sequences)
    routing = mutate(routing, indices, mutation)
    local = np.split(indices, tp)[groups.tp.rank()]
    states = hidden_states(packed.num_tokens)[torch.as_tensor(np.maximum(local, 0))]
    states = states.requires_grad_()
    real = torch.as_tensor(local >= 0)
    multiplicity = torch.as_tensor(packed.multiplicity.astype(np.float32))[np.maximum(local, 0)]
    for _ in range(2):
        probs, _ = router(states, routing)
        weights = multiplicity if statistics == "logical" else torch.ones(len(local))
        backward(probs, weights * real)
    gradient = torch.zeros(packed.num_tokens, 1, HIDDEN)
    gradient[local[local >= 0]] = states.grad[real]
    assert mutation or not states.grad[~real].any(), "padding has a gradient"
    found = result(router, gradient)
    for value in found.values():
        dist.all_reduce(value, group=groups.tp_cp)
    return found


def shard(tokens: int, rank: int, cp: int, tp: int) -> np.ndarray:
    """Row indices of a context-parallel rank, padded to a multiple of ``tp`` and then once more."""
    if cp == 1:
        return np.arange(tokens)
    cut = round(tokens * SHARES[0])
    own = np.arange(cut) if rank == 0 else np.arange(cut, tokens)
    padding = -len(own) % tp + tp
    return np.concatenate([own, np.full(padding, -1)])


def mutate(routing, indices: np.ndarray, mutation: str):
    import dataclasses

    if mutation == "padding counted":
        counted = torch.where(torch.as_tensor(indices < 0), 1, routing.weights)
        return dataclasses.replace(routing, weights=counted)
    if mutation == "normalised per rank":
        return dataclasses.replace(routing, total=int(routing.weights.sum()) * 2)
    return routing


def worst(reference: dict, other: dict) -> float:
    assert reference.keys() == other.keys()
    return max(
        float((other[name] - value).norm() / value.norm()) for name, value in reference.items()
    )


def compare(rank: int, world_size: int) -> dict[str, float]:
    """Deviations of all cases and mutations at TP2 x CP2, and on one rank."""
    from megatron_tree_cp.megatron import cpu

    cpu.enable()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_tree_cp.megatron.moe import TreeTopKRouter
    from megatron_tree_cp.megatron.routing_statistics import RoutingStatistics

    packed = row()
    alone = alone_groups()
    found = {}
    for name, extra in CASES.items():
        models.start(tp=1, cp=1)
        states = hidden_states(packed.num_tokens)
        ones = torch.ones(packed.num_tokens, dtype=torch.int64)
        plain = []
        for kind in (TopKRouter, TreeTopKRouter):
            if "seq" in str(extra):
                break
            router = make_router(kind, extra, alone)
            leaf = states.clone().requires_grad_()
            given = () if kind is TopKRouter else (RoutingStatistics(ones, packed.num_tokens),)
            for _ in range(2):
                backward(router(leaf, *given)[0], torch.ones(packed.num_tokens))
            plain.append(result(router, leaf.grad))
        if plain:
            found[f"{name}: stored, one rank"] = worst(*plain)
        if name == "two losses":
            continue  # stock has no one microbatch that means both
        reference = stock_alone(extra, alone, packed, per_sequence="seq_aux_loss" in name)
        models.start(tp=2, cp=2)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        for mutation in ("", "padding counted", "normalised per rank"):
            other = tree_sharded(extra, groups, packed, "logical", mutation)
            found[f"{name}: logical {mutation}".strip()] = worst(reference, other)
    return found


@pytest.mark.timeout(200)
def test_statistics_equal_megatron_routers():
    """Exact on one rank; equal to trajectories alone when sharded; mutations are seen."""
    for deviations in run_ranks(4, compare, timeout=180):
        for case, deviation in deviations.items():
            kind = case.partition(": ")[2]
            if kind == "stored, one rank":
                assert deviation < 1e-6, (case, deviation)
            elif kind == "logical":
                assert deviation < 1e-6, (case, deviation)
        mutated = {c: d for c, d in deviations.items() if "padding" in c or "per rank" in c}
        for mutation in ("padding counted", "normalised per rank"):
            seen = [c for c, d in mutated.items() if mutation in c and d > 1e-3]
            assert len(seen) >= 2, (mutation, mutated)
        print(deviations)


def test_pieces_cover_each_trajectory():
    from megatron_tree_cp.megatron.routing_statistics import routing_statistics

    packed = row()
    every = np.arange(packed.num_tokens)
    made = routing_statistics(packed, every, torch.device("cpu"), "logical", per_sequence=True)
    passed = [set() for _ in packed.paths]
    for piece, trajectory in made.sequences.pairs.T.tolist():
        passed[trajectory].update(every[made.sequences.piece.numpy() == piece].tolist())
    assert passed == [set(path.tolist()) for path in packed.paths]
    assert made.total == sum(len(path) for path in packed.paths)


@pytest.mark.parametrize(("kind", "sequences"), [("tokens", False), ("stored", True)])
def test_refuses_unknown_statistics(kind, sequences):
    from megatron_tree_cp.megatron.routing_statistics import routing_statistics

    with pytest.raises(ValueError, match="statistics"):
        routing_statistics(row(), np.arange(4), torch.device("cpu"), kind, sequences)
