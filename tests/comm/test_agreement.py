"""Digests and errors over a gloo group: the same error on every rank, one microbatch ahead."""

import pytest
import torch.distributed as dist

from megatron_tree_cp.comm import Agreement, AgreementError
from tests.distributed import run_ranks


def _outcome(pending):
    try:
        pending.finish()
    except AgreementError as error:
        return str(error)
    return None


def _agree(rank, world_size):
    agreement = Agreement(dist.group.WORLD)
    same = agreement.begin("a" * 64)
    # Started before the first one is finished: the caller runs one microbatch ahead.
    failed = agreement.begin("b" * 64, "rollouts.jsonl line 7: é" * 100 if rank == 2 else None)
    different = agreement.begin("c" * 64 if rank == 1 else "d" * 64)
    both = agreement.begin("e", f"broken {rank}" if rank != 1 else None)
    return [_outcome(pending) for pending in (same, failed, different, both)]


def test_every_rank_raises_the_same_error():
    outcomes = run_ranks(3, _agree, timeout=30)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    same, failed, different, both = outcomes[0]
    assert same is None
    assert failed.startswith("rank 2: rollouts.jsonl line 7: é") and len(failed.encode()) < 1000
    assert "dddddddddddd on rank 0, 2; cccccccccccc on rank 1" in different
    assert both == "rank 0: broken 0; rank 2: broken 2"


def _subgroup(rank, world_size):
    group = dist.new_group([1, 2], backend="gloo")
    if rank == 0:
        return None
    return _outcome(Agreement(group).begin("x", "bad plan" if rank == 2 else None))


def test_subgroup_names_global_ranks():
    assert run_ranks(3, _subgroup, timeout=30) == [None, "rank 2: bad plan", "rank 2: bad plan"]


def test_one_rank_alone():
    Agreement(None).begin("x").finish()
    with pytest.raises(AgreementError, match="rank 0: no such file"):
        Agreement(None).begin("x", "no such file").finish()
    with pytest.raises(ValueError, match="at most 128 fit"):
        Agreement(None).begin("x" * 129)
