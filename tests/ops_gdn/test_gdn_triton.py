"""The Triton kernels of the convolution and the state passes, interpreted on CPU.

The FLA functions around the state passes are replaced by what we expect of them (`fla_in_torch`);
`test_gdn_gpu` runs the real ones.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.ops_gdn.cases import Case, check_case, make_row

CASES = [
    Case((70, 9, 1, 7, 5), (-1, 0, 1, 0, -1), pieces=5, seed=3, key_dim=16, value_dim=16),
    Case(
        (9, 5, 1, 7, 3, 6, 2),
        (-1, 0, 1, 0, 3, -1, 5),
        granule=4,
        pieces=20,
        seed=5,
        width=8,
        split=(2, 3),
        bias=False,
    ),
    Case((1, 3), (-1, -1), granule=4, owners=1, pieces=2, seed=1, initial=False, final=False),
    Case((12, 6), (-1, 0), pieces=5, key_heads=2, value_heads=4, width=1, activation=None, seed=2),
]


def _interpreted(rank, world_size, batch):
    from megatron_tree_cp.ops.gdn import convolution, fla_kernels, operator
    from tests.ops_gdn.fla_in_torch import FLA
    from tests.ops_gdn.interpreter import accept_numpy

    accept_numpy()

    def triton_only(case, impl, table):
        return next(entry for entry in table if entry.name == "triton")

    convolution.select = operator.select = triton_only
    fla_kernels._fla = lambda: FLA
    group = dist.group.WORLD if world_size > 1 else None
    return [check_case(case, group, world_size, row) for case, row in batch]


def _rows_of_new_lengths(rank, world_size, batch):
    from tests.specialisations import Specialisations

    watch = Specialisations()
    first = _interpreted(rank, world_size, batch[:FIRST]) and watch.counts()
    _interpreted(rank, world_size, batch[FIRST:])
    return first, watch.counts()


FIRST = 4


def test_new_lengths_compile_nothing():
    generator = torch.Generator().manual_seed(0)
    batch = []
    for seed in range(12):
        lengths = torch.randint(1, 40, (5,), generator=generator).tolist()
        parents = (-1, 0, 1, 0, -1) if seed % 2 else (-1, 0, -1, 2, 3)
        case = Case(tuple(lengths), parents, pieces=6, seed=seed, key_dim=16, value_dim=16)
        batch.append(replace(case, dtype=torch.float32))
    rows = [(case, make_row(case)) for case in batch]
    for ranks in (1, 2):
        env = {"TRITON_INTERPRET": "1"}
        for first, last in run_ranks(ranks, _rows_of_new_lengths, rows, timeout=200, env=env):
            assert len(first) > 6 and last == first


def test_kernels_match_the_reference():
    batch = [replace(case, dtype=torch.float32) for case in CASES]
    rows = [(case, make_row(case)) for case in batch]
    for ranks in (1, 2):
        run_ranks(ranks, _interpreted, rows, timeout=200, env={"TRITON_INTERPRET": "1"})
