"""FlashAttention-4 driven directly, against `tiled` in fp32, on one Hopper GPU."""

import pytest
import torch

from megatron_tree_cp.ops.attention import tiled
from megatron_tree_cp.ops.attention.interval_mask import IntervalMask
from megatron_tree_cp.ops.attention.registry import AttentionCase, select

from .gpu_cases import WINDOW, context, random_tensors, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHAPES = [(32, 4, 128, 128), (8, 1, 64, 64), (16, 2, 256, 256), (4, 4, 192, 128)]
TREE = ([700, 130, 1, 333, 90, 415], [-1, 0, 0, 0, 3, -1])


@pytest.fixture(autouse=True)
def flash():
    """The kernel module; skips with the registry's own reason where it cannot run."""
    try:
        return select(AttentionCase("cuda", torch.bfloat16, 4, 4, 128, 128), "flash").load()
    except ValueError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_tiled(shape, window):
    ctx = context(*TREE)
    tensors = random_tensors(ctx, shape, 0)
    got = run(ctx, tensors, "flash", window, torch.bfloat16)
    want = run(ctx, tensors, "tiled", window, torch.float32)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dsink"), got, want, strict=True):
        if name != "dsink":
            assert (a[ctx.num_real :] == 0).all(), name
        error = float((a.float() - b).norm() / b.norm())
        assert error <= 4 * torch.finfo(torch.bfloat16).eps, f"{name}: {error:.2e}"


@pytest.mark.parametrize("window", [None, WINDOW])
def test_stages_share_one_accumulator(flash, window):
    """Two stages over disjoint keys, the second from a later query on, equal one."""
    generator = torch.Generator("cuda").manual_seed(1)
    queries, keys, cut, begin = 1029, 1300, 700, 256

    def normal(*size):
        return torch.randn(*size, device="cuda", generator=generator).bfloat16()

    lo = torch.randint(begin, queries, (keys,), device="cuda", generator=generator)
    lo[: queries // 2] = 0  # every query sees some key of the first stage
    hi = torch.full_like(lo, queries)
    q_positions, k_positions = (
        torch.arange(n, device="cuda", dtype=torch.int32) for n in (queries, keys)
    )

    def mask(part: slice, first: int) -> IntervalMask:
        extra = () if window is None else (q_positions[first:], k_positions[part], 10_000)
        bounds = ((x[part] - first).clamp(min=0).int() for x in (lo, hi))
        return IntervalMask(*bounds, queries - first, *extra)

    q, k, v, dout = normal(queries, 8, 64), normal(keys, 2, 64), normal(keys, 2, 64), None
    out, lse = flash.forward(q, k, v, mask(slice(0, keys), 0), 0.125)
    dout = normal(*out.shape)
    delta = (dout.float() * out.float()).sum(2)
    want = tiled.backward(dout, q, k, v, out, lse, delta, mask(slice(0, keys), 0), 0.125)
    layer = flash.BackwardPass(dout, q, out, lse, None, 0.125)
    first = layer.stage(slice(0, queries), k[:cut], v[:cut], mask(slice(0, cut), 0))
    late = slice(begin, queries)
    second = layer.stage(late, k[cut:], v[cut:], mask(slice(cut, keys), begin))
    got = (layer.dq(), *(torch.cat(pair) for pair in zip(first, second, strict=True)))
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b).norm() <= 4 * torch.finfo(torch.bfloat16).eps * b.norm()


def test_no_compilation_when_lengths_change():
    from megatron_tree_cp.bench.compilations import compilations

    def one_row(seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 400, (6,), generator=generator).tolist()
        ctx = context(lengths, [-1, 0, 0, -1, 3, 3])
        for window in (None, WINDOW):
            run(ctx, random_tensors(ctx, (8, 1, 64, 64), seed), "flash", window, torch.bfloat16)

    one_row(1)
    compiled = compilations()
    for seed in range(2, 18):
        one_row(seed)
    assert compilations() == compiled
