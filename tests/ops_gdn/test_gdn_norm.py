"""The Triton l2norm of q and k, interpreted on CPU, against autograd of the reference."""

import torch

from megatron_tree_cp.ops.gdn.reference import NORM_EPS, l2norm
from tests.distributed import run_ranks

# tokens, padding rows, heads, head dim: one token, odd counts, a dim that is no power of 2
SIZES = [(1, 0, 1, 64), (37, 3, 3, 128), (33, 1, 2, 256), (130, 0, 1, 96), (0, 4, 2, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _case(tokens, padding, heads, dim, dtype):
    """(found, wanted) pairs: y, the inverse length, dx from one and two parts, and by groups."""
    from megatron_tree_cp.ops.gdn import norm_triton

    generator = torch.Generator().manual_seed(tokens + dim)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    # A slice of wider rows, as q and k are; padding poisons what reads it.
    wide = normal(tokens + padding, heads * dim + 48).to(dtype)
    wide[tokens:] = float("nan")
    wide[:1] *= 1e-3  # eps shows
    x = wide[:, 16 : 16 + heads * dim].unflatten(1, (heads, dim))
    y, inverse = norm_triton.forward(x, tokens)
    leaf = x[:tokens].double().requires_grad_()
    want = l2norm(leaf)
    length = (leaf.detach().square().sum(-1) + NORM_EPS).sqrt()
    pairs = [(y, want.detach()), (inverse, 1 / length)]
    assert y.dtype == dtype and inverse.dtype == torch.float32
    for count, group in ((1, 1), (2, 1), (1, 3), (2, 2)):
        parts = [normal(tokens, group * heads, dim).to(dtype) for _ in range(2)]
        dy = sum(part.double().unflatten(1, (heads, group)).sum(2) for part in parts[:count])
        (dx,) = torch.autograd.grad(want, leaf, dy, retain_graph=True)
        found = norm_triton.backward(y, inverse, tuple(parts[:count]), tokens + padding)
        assert found.dtype == dtype and found.shape == x.shape
        assert (found[tokens:] == 0).all()
        pairs.append((found[:tokens], dx))
    return pairs


def _interpreted(rank, world_size):
    from tests.ops_gdn.interpreter import accept_numpy

    accept_numpy()
    for dtype in DTYPES:
        # y is rounded once; backward reads the rounded y.
        bound = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
        for size in SIZES:
            for at, (found, want) in enumerate(_case(*size, dtype)):
                error = (found.double() - want).norm()
                assert error <= bound * want.norm(), (dtype, size, at, float(error))


def test_norm_and_its_gradient_match_the_reference():
    run_ranks(1, _interpreted, timeout=100, env={"TRITON_INTERPRET": "1"})
