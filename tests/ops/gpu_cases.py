"""Rows, inputs and runs that the GPU tests of all attention kernels share."""

import torch

from megatron_tree_cp import ops
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.plan import LayerClass, ModelShape, plan_row
from megatron_tree_cp.tree.packed_tree import PackedTree

WINDOW = 96
MODEL = ModelShape(classes=(LayerClass("global"), LayerClass("near", window=WINDOW)))
# (query heads, KV heads, head dim, value dim)
SHAPES = [(8, 2, 64, 64), (4, 1, 128, 128), (4, 2, 256, 256), (4, 4, 128, 64)]


def context(lengths, parents) -> TreeContext:
    return TreeContext(plan_row(PackedTree(lengths, parents), 1, MODEL, granule=8), None, "cuda")


def run(ctx, tensors, impl, window, dtype):
    inputs = [x.to(dtype).requires_grad_() for x in tensors[:4]]
    q, k, v, sink = inputs
    out, lse = ops.tree_attention(
        q, k, v, ctx, window=window, sink=sink, return_lse=True, impl=impl
    )
    upstream = [tensors[4].to(dtype), tensors[5].to(lse.dtype)]
    return [out, lse, *torch.autograd.grad([out, lse], inputs, upstream)]


def random_tensors(ctx, shape, seed):
    heads, kv_heads, dim, value_dim = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim), (heads,)]
    q, k, v, dout, dlse = (
        torch.randn(ctx.num_tokens, *size, device="cuda", generator=generator) for size in sizes
    )
    for x in (q, k, v, dout, dlse):
        x[ctx.num_real :] = float("nan")
    sink = torch.randn(heads, device="cuda", generator=generator)
    # What bf16 rounds is rounded for both implementations.
    return [x.bfloat16().float() for x in (q, k, v, sink, dout, dlse)]
