"""FlexAttention stages on CPU, where torch allows: block masks, forward, and backward's algebra.

torch has no compiled FlexAttention with LSE and no backward on CPU. The unfused operator computes
both, once its refusal of CPU tensors that need gradients is out of the way; the Triton kernels are
checked in test_flex_gpu.py.
"""

import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from megatron_tree_cp.ops.attention import flex, tiled
from tests.ops.test_interval_mask import random_mask

SIZES = [(61, 53), (300, 700), (256, 384)]


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_block_mask(queries, keys, window):
    mask = random_mask(5, queries, keys, window)
    blocks = flex.block_mask(mask)
    visible = torch.zeros(blocks.shape[-2:], dtype=torch.bool)
    visible[:queries, :keys] = mask.dense()
    q_index, k_index = torch.arange(visible.shape[0])[:, None], torch.arange(visible.shape[1])
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(blocks.mask_mod(zero, zero, q_index, k_index), visible)
    # Blocks that the mask skips hold nothing visible; whole blocks hold nothing hidden.
    for row in range(blocks.kv_num_blocks.shape[2]):
        partial = _listed(blocks.kv_num_blocks, blocks.kv_indices, row)
        full = _listed(blocks.full_kv_num_blocks, blocks.full_kv_indices, row)
        assert not partial & full
        rows = slice(row * flex.BLOCK, (row + 1) * flex.BLOCK)
        for column in range(blocks.kv_indices.shape[3]):
            tile = visible[rows, column * flex.BLOCK : (column + 1) * flex.BLOCK]
            if column in full:
                assert tile.all() and tile.shape == (flex.BLOCK, flex.BLOCK)
            elif column not in partial:
                assert not tile.any()


def _listed(counts, indices, row):
    return set(indices[0, 0, row, : int(counts[0, 0, row])].tolist())


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_stage_matches_tiled(monkeypatch, queries, keys, window):
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    mask = random_mask(7, queries, keys, window)
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    q, k, v = normal(queries, 4, 16), normal(keys, 2, 16), normal(keys, 2, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the unfused operator is slow
        out, lse = flex.forward(q, k, v, mask, 0.3)
        want_out, want_lse = tiled.forward(q, k, v, mask, 0.3)
        torch.testing.assert_close(out, want_out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
        # Other stages' keys add to the global LSE; rows without a key here keep a finite one.
        global_lse = torch.logaddexp(lse, normal(*lse.shape) + 2)
        args = (normal(*out.shape), q, k, v, out, global_lse, normal(*lse.shape), mask, 0.3)
        got, want = flex.backward(*args), tiled.backward(*args)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_one_graph_for_all_lengths(monkeypatch):
    """Dynamo's guards alone, without Triton: forward and backward graphs serve every length."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    compiled = torch.compile(flex._call, dynamic=True, fullgraph=True, backend="aot_eager")

    def attend(q, k, v, mask, scale):
        blocks = mask.cached("flex", lambda: flex.block_mask(mask))
        return compiled(q, k, v, blocks, scale)

    monkeypatch.setattr(flex, "_attend", attend)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for grad in (False, True):
        flex._prime_once(torch.device("cpu"), torch.float32, (2, 1, 16, 16), 0.3, False, grad)
    assert graphs["unique_graphs"] == before + 2
    for queries, keys in [(300, 300), (300, 700), (5, 9), (128, 128), (513, 257), (129, 640)]:
        mask = random_mask(1, queries, keys, None)
        packed = torch.randn(keys, 32)  # K and V arrive as columns of one buffer
        k, v = packed[:, :16].unflatten(1, (1, 16)), packed[:, 16:].unflatten(1, (1, 16))
        q = torch.randn(queries + 7, 2, 16)[3 : queries + 3]
        out, lse = flex.forward(q, k, v, mask, 0.3)
        flex.backward(out, q, k, v, out, lse, lse * 0, mask, 0.3)
        assert graphs["unique_graphs"] == before + 2, (queries, keys)
