"""The compiled kernels keep their matrix products in flight.

A compiler that cannot prove a product's registers untouched waits after each one, says nothing, and
the kernel is right and slower: words of bits in the mask of head dim 64 did that.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.kernel_script import run_script

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

COMPILE = """
import os, pathlib, torch
from megatron_tree_cp.ops.attention import flash
from megatron_tree_cp.ops.attention.interval_mask import IntervalMask
heads, kv_heads, dim, value_dim = {shape}
rows = 256
def normal(heads, width):
    return torch.randn(rows, heads, width, device="cuda", dtype=torch.bfloat16)
q, k, v = normal(heads, dim), normal(kv_heads, dim), normal(kv_heads, value_dim)
place = torch.arange(rows, device="cuda", dtype=torch.int32)
for own in (True, False):
    for window in ((), (place, place, 100)):
        mask = IntervalMask(place, torch.full_like(place, rows), rows, *window, diagonal=own)
        out, lse = flash.forward(q, k, v, mask, 0.1)
        layer = flash.BackwardPass(torch.randn_like(out), q, out, lse, None, 0.1)
        layer.stage(slice(0, rows), k, v, mask)
        # Kernels of all kinds of mask are written to the same two files.
        for written in pathlib.Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob("*.cubin"):
            if "Interval" in written.name:
                written.rename(written.with_suffix(f".{{own}}-{{bool(window)}}"))
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    "shape", [(8, 1, 64, 64), (8, 1, 128, 128), (8, 1, 256, 256), (4, 4, 192, 128)]
)
def test_products_overlap(shape, tmp_path, monkeypatch):
    pytest.importorskip("flash_attn.cute", reason="needs the extra gpu")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels are Hopper's")
    import triton

    monkeypatch.setenv("CUTE_DSL_KEEP_CUBIN", "1")
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    run_script(COMPILE.format(shape=shape), "cuda")
    disassemble = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    products = {}
    for cubin in tmp_path.glob("*-*"):
        sass = subprocess.run([disassemble, "-sass", cubin], capture_output=True, text=True).stdout
        begun, all_of_them = (len(re.findall(x, sass)) for x in ("WARPGROUP.ARRIVE", "HGMMA"))
        if all_of_them:
            products[cubin.name] = (begun, all_of_them)
    assert len(products) == 8, list(tmp_path.iterdir())
    for name, (begun, all_of_them) in products.items():
        assert begun <= all_of_them / 3, (name, begun, all_of_them)
