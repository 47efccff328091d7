"""The gloo harness: results by rank, the cause of a failure, and no hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankFailure, run_ranks


def _sum(rank, world_size, value):
    total = torch.tensor([value + rank])
    dist.all_reduce(total)
    return total


def test_results_come_by_rank():
    assert [int(x) for x in run_ranks(3, _sum, 10, timeout=30)] == [33, 33, 33]


def _fail_on(rank, world_size, failing):
    if rank == failing:
        raise ValueError(f"broken on {rank}")
    dist.barrier()


def test_failure_names_the_rank_and_shows_its_traceback():
    with pytest.raises(
        RankFailure, match=r"rank 1 of 2 failed:\n(.|\n)*_fail_on(.|\n)*broken on 1"
    ):
        run_ranks(2, _fail_on, 1, timeout=30)


def _die(rank, world_size):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_death_of_a_rank():
    with pytest.raises(RankFailure, match="rank 1 of 2 failed:\ndied with exit code 7"):
        run_ranks(2, _die, timeout=30)


def _hang(rank, world_size):
    if rank == 1:
        time.sleep(60)


def test_hang_ends_at_the_timeout_and_shows_where():
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 of 2 unfinished after 2 s(.|\n)*in _hang"):
        run_ranks(2, _hang, timeout=2)
    assert time.monotonic() - begin < 20
