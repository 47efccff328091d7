"""Log-probs of packed rows against every trajectory alone through stock attention."""

from __future__ import annotations

import numpy as np
import torch

from tests.distributed import run_ranks
from tests.megatron import models
from tests.megatron.test_model import CASES, trajectories

CASE = CASES["gpt rope, windows, learnable sink, qk norm"]


def alone(rank_model: torch.nn.Module) -> list[np.ndarray]:
    """Log-probs of each trajectory's targets, one forward pass a trajectory."""
    expected = []
    for trajectory in trajectories():
        ids = torch.as_tensor(trajectory.tokens)[None]
        count = ids.shape[1] - 1
        mask = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1)
        nll = rank_model(
            ids[:, :-1], torch.arange(count)[None], mask, labels=ids[:, 1:].contiguous()
        )
        expected.append(-nll[0].detach().numpy())
    return expected


def body(rank: int, world_size: int) -> list[tuple[list, list, int]]:
    """(ours, expected, number of rows) for rows of two sizes."""
    from megatron_tree_cp.megatron import cpu

    cpu.enable()
    from megatron_tree_cp import pack_trajectories, tree_logprobs

    models.start()
    stock = models.build_model(**CASE, stock_attention=True)
    weights = {name: p.detach().clone() for name, p in stock.named_parameters()}
    expected = alone(stock)
    models.start(cp=2)
    model = models.build_model(**CASE)
    models.load_weights(model, weights)
    model.train()
    results = []
    for max_tokens in (128, 24):
        rows = pack_trajectories(trajectories(), max_tokens)
        results.append((tree_logprobs(model, rows), expected, len(rows)))
        assert model.training
    return results


def test_logprobs_equal_those_of_trajectories_alone():
    for results in run_ranks(2, body, timeout=200):
        assert results[0][2] == 1 and results[1][2] > 1
        for ours, expected, _ in results:
            assert len(ours) == len(expected)
            for a, b in zip(ours, expected, strict=True):
                np.testing.assert_allclose(a, b, atol=2e-5)


def granule_in_fp8(rank: int, world_size: int) -> list[int]:
    """What the shards of a row's log-probs are padded to, without and with fp8 linear layers."""
    from megatron_tree_cp.megatron import cpu

    cpu.enable()
    from megatron.core.utils import get_model_config

    from megatron_tree_cp import pack_trajectories
    from megatron_tree_cp.megatron.logprobs import _planned

    models.start()
    model = models.build_model(**CASE)
    config = get_model_config(model)
    (row,) = pack_trajectories(trajectories(), 128)
    granules = []
    for fp8, recipe in ((None, "delayed"), ("hybrid", "delayed"), ("hybrid", "mxfp8")):
        config.fp8, config.fp8_recipe = fp8, recipe
        granules.append(_planned(row, model).plan.layouts["main"].granule)
    return granules


def test_shards_hold_whole_fp8_blocks():
    assert run_ranks(1, granule_in_fp8, timeout=120) == [[1, 16, 32]]
