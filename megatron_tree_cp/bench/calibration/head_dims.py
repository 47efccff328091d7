"""Compare attention at several head dims with attention at the heads that are calibrated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .coefficients import needed_cost
from .component import Case, Component
from .measure import DeviceBench, Workload
from .samples import chain_case

HEAD_DIMS = (64, 128, 256)
"""Key and value head dims that are measured beside the workload's."""

CHAINS = (14_000, 18_000, 22_000)
"""Lengths of the chains that they are compared on, each long enough to fill a device."""

WAYS = ("forward", "backward")


def head_dim_component(work: Workload, device: torch.device) -> Component:
    """Time of a FLOP of pairs at every head dim."""
    dims = sorted({work.head_dim, *HEAD_DIMS})
    return Component(
        "head_dims",
        partial(_cases, work, device, dims),
        [tuple(f"{way}_{dim}" for dim in dims for way in WAYS)],
        partial(_fields, work.head_dim),
    )


def _cases(work: Workload, device: torch.device, dims: list[int]) -> Iterator[Case]:
    """Heads keep the FLOPs where they can; head dims that the kernel does not take are left out."""
    for dim in dims:
        kv_heads = max(work.kv_heads * work.head_dim // dim, 1)
        heads = kv_heads * (work.query_heads // work.kv_heads)
        bench = DeviceBench(
            replace(work, query_heads=heads, kv_heads=kv_heads, head_dim=dim), device
        )
        try:
            bench.kernel(None)
        except ValueError:
            continue
        for way in WAYS:
            for length in CHAINS:  # innermost: of every three samples the longest is held out
                stage = chain_case(max(length // work.scale, 4))
                yield Case(
                    f"{stage.label}, head dim {dim}, {way}",
                    {f"{way}_{dim}": bench.work.layer().pair_flops * stage.pairs},
                    partial(bench.stage_call, stage, way == "backward"),
                )


def _fields(
    calibrated: int, c: Mapping[str, float], _: float | None, __: Mapping[str, Any]
) -> dict[str, Any]:
    """What a FLOP costs at a head dim over what it costs at the one that is calibrated."""
    own = {way: needed_cost(c, f"{way}_{calibrated}", "head_dims") for way in WAYS}
    dims = sorted({int(name.partition("_")[2]) for name, cost in c.items() if cost > 0})
    rows = [[dim, *(c[f"{way}_{dim}"] / own[way] for way in WAYS)] for dim in dims]
    return {"head_dim_factors": rows}
