"""Triton and FLA kernels against `tiled` in fp32, on one GPU and on the GPUs of one host."""

from dataclasses import replace

import pytest
import torch

from megatron_tree_cp import ops
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.plan import plan_row
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.ops_gdn.cases import Case, build_plan, make_row, run_rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LENGTHS, PARENTS = (700, 130, 1, 333, 90, 415), (-1, 0, 0, 0, 3, -1)
ROW = Case(LENGTHS, PARENTS, granule=8, key_heads=2, value_heads=4, key_dim=64, value_dim=64)
# Key and value dims, key and value heads; many heads at 128 take the wide tiles of the state pass.
SHAPES = [
    (64, 64, 2, 4),
    (128, 128, 2, 4),
    (128, 128, 16, 32),
    (256, 256, 2, 4),
    (128, 64, 2, 2),
    (96, 80, 2, 4),
]


def _run(case, ctx, row, impl, dtype):
    """Every output and gradient on CPU; what bf16 rounds is rounded for every dtype alike."""
    rounded = {k: None if x is None else x.bfloat16().to(dtype) for k, x in row.inputs.items()}
    rounded["g"] = row.inputs["g"].float()
    upstream = {name: x.bfloat16() for name, x in row.upstream.items()}
    return run_rank(replace(case, impl=impl), replace(row, inputs=rounded, upstream=upstream), ctx)


def _worst(got, want, rows):
    """Largest error over the size of the whole tensor; padding must be exactly 0."""
    found = {}
    for name, value in got.items():
        if value.shape[0] == len(rows):
            assert (value[rows < 0] == 0).all(), f"{name}: padding is not 0"
        assert torch.isfinite(value).all(), name
        error = (value.float() - want[name].float()).norm()
        found[name] = float(error / want[name].float().norm().clamp(min=1e-20))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_tiled(shape):
    pytest.importorskip("fla")
    names = ("key_dim", "value_dim", "key_heads", "value_heads")
    case = replace(ROW, **dict(zip(names, shape, strict=True)), dtype=torch.float32)
    row = make_row(case, oracle=False)
    ctx = TreeContext(build_plan(case, 1), None, "cuda")
    got = _run(case, ctx, row, "triton", torch.bfloat16)
    want = _run(case, ctx, row, "tiled", torch.float32)
    rows = ctx.row_indices.cpu()
    for name, error in _worst(got, want, rows).items():
        # One rounding of a bf16 result is 1.1e-3 RMS; operands of the dots are rounded as well.
        assert error <= 1e-2, f"{name}: {error:.2e}"
    for name in ("y", "dx"):
        assert _worst(got, want, rows)[name] <= 2.5e-3, name


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_convolution_in_fp32(width):
    case = replace(ROW, width=width, dtype=torch.float32)
    ctx = TreeContext(build_plan(case, 1), None, "cuda")
    row = make_row(case, oracle=False)

    def run(impl):
        x, weight, bias = (
            row.inputs[name].cuda().requires_grad_() for name in ("x", "weight", "bias")
        )
        wide = torch.cat([x, x], dim=1)  # a slice of wider rows, as in a layer
        padded = torch.nn.functional.pad(wide, (0, 0, 0, ctx.num_tokens - len(x)))
        y = ops.tree_causal_conv1d(
            padded[:, : x.shape[1]], weight, bias, ctx, impl=impl, split=(2, x.shape[1] - 2)
        )
        y = torch.cat(y, dim=1)
        return [y, *torch.autograd.grad(y.square().sum(), [x, weight, bias])]

    for a, b in zip(run("triton"), run("tiled"), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_backward_is_bitwise_repeatable():
    pytest.importorskip("fla")
    case = replace(ROW, dtype=torch.float32)
    row = make_row(case, oracle=False)
    ctx = TreeContext(build_plan(case, 1), None, "cuda")
    first, second = (_run(case, ctx, row, "triton", torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_compilation_when_lengths_change():
    pytest.importorskip("fla")
    from megatron_tree_cp.ops.gdn import (
        conv_triton,
        norm_triton,
        state_pass,
        token_gradients_triton,
    )

    kernels = [
        kernel
        for module in (conv_triton, norm_triton, state_pass, token_gradients_triton)
        for kernel in vars(module).values()
        if hasattr(kernel, "device_caches")
    ]

    def compiled():
        return sum(len(cache[0]) for k in kernels for cache in k.device_caches.values())

    def one_row(seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 400, (6,), generator=generator).tolist()
        if seed % 4 == 0:
            lengths = [5, 1, 3, 2, 1, 4]
        case = replace(ROW, lengths=tuple(lengths), parents=(-1, 0, 0, -1, 3, 3), seed=seed)
        if seed < 2:  # one run has other tiles of the state pass than many, and no heads of runs
            case = replace(case, lengths=(sum(lengths),), parents=(-1,))
        case = replace(case, key_dim=128, value_dim=128, key_heads=8, value_heads=16)
        case = replace(case, dtype=torch.float32)
        ctx = TreeContext(build_plan(case, 1), None, "cuda")
        _run(case, ctx, make_row(case, oracle=False), "triton", torch.bfloat16)

    for seed in range(4):
        one_row(seed)
    before = compiled()
    assert before
    for seed in range(4, 20):
        one_row(seed)
    assert compiled() == before


def test_long_slow_row_keeps_its_precision():
    """40 chunks of slow decay: errors of the states may not pile up."""
    pytest.importorskip("fla")
    plan = plan_row(PackedTree((2048, 300, 212), (-1, 0, 0)), 1)
    ctx = TreeContext(plan, None, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k, v = normal(2560, 2, 128), normal(2560, 2, 128), normal(2560, 4, 128)
    g, beta = -normal(2560, 4).abs() * 1e-3, normal(2560, 4).sigmoid()
    q, k, v, beta = (x.bfloat16() for x in (q, k, v, beta))
    got = ops.tree_gated_delta_rule(q, k, v, g, beta, ctx, impl="triton").float()
    want = ops.tree_gated_delta_rule(
        q.float(), k.float(), v.float(), g, beta.float(), ctx, impl="tiled"
    )
    for part in (slice(0, 640), slice(1920, 2560)):
        assert (got[part] - want[part]).norm() <= 1e-2 * want[part].norm()


def _on_gpus(rank, world_size, port, case, row, queue):
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    ctx = TreeContext(build_plan(case, world_size), dist.group.WORLD, f"cuda:{rank}")
    got = _run(case, ctx, row, "triton", torch.bfloat16)
    want = _run(case, ctx, row, "tiled", torch.float32)
    queue.put((rank, _worst(got, want, ctx.row_indices.cpu())))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_matches_tiled_across_gpus():
    """Chains and forks across ranks: (M, E), halos and their returns through NCCL."""
    pytest.importorskip("fla")
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = min(4, torch.cuda.device_count())
    case = replace(ROW, pieces=9, key_dim=128, value_dim=128, dtype=torch.float32)
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    args = (ranks, port, case, make_row(case, oracle=False), queue)
    mp.spawn(_on_gpus, args=args, nprocs=ranks)
    for _ in range(ranks):
        rank, errors = queue.get()
        for name, error in errors.items():
            assert error <= 1e-2, f"rank {rank}, {name}: {error:.2e}"
