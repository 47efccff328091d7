"""Kernels and graphs compiled so far in this process, whoever compiled them."""

from __future__ import annotations

import gc
import sys


def compilations() -> int:
    """Graphs of torch.compile, FlashAttention's kernels, and every Triton and TileLang kernel.

    A Triton kernel counts once per device and specialisation, candidates of its autotuner
    included: whoever changes a length and compiles nothing leaves the count as it was.
    """
    # What was never imported has compiled nothing, and importing it takes seconds.
    dynamo = sys.modules.get("torch._dynamo.utils")
    count = 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
    flash = sys.modules.get("megatron_tree_cp.ops.attention.flash_kernels")
    if flash is not None:
        count += flash.compilations()
    # Walked by hand: compilers offer hooks, but one at a time, and others may have taken them.
    # Classes are compared by name, since isinstance() wakes lazy proxies.
    for item in gc.get_objects():
        kind = type(item)
        if kind.__name__ == "JITFunction" and kind.__module__.startswith("triton."):
            count += sum(len(cache[0]) for cache in item.device_caches.values())
        elif kind.__name__ == "JITImpl" and kind.__module__.startswith("tilelang."):
            count += len(item._kernel_cache)
    return count
