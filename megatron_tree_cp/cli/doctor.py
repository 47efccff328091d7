"""Say what is installed here, which kernels that gives, and what to change."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

from rich.console import Console
from rich.markup import escape

State = Literal["ok", "note", "problem"]

PACKAGES = (
    ("torch", "torch", "the base"),
    ("triton", "triton", "GPU kernels; comes with torch on Linux"),
    ("transformer-engine", "transformer_engine", "TE layers and fp8: scripts/install_gpu.sh"),
    ("flash-attn-4", "flash_attn", "`flash` kernels on Hopper: megatron-tree-cp[gpu]"),
    ("flash-linear-attention", "fla", "Gated DeltaNet on GPUs: megatron-tree-cp[gpu]"),
    ("tokenizers", "tokenizers", "FILE.json tokenizers: megatron-tree-cp[data]"),
    ("transformers", "transformers", "hf:DIR tokenizers: megatron-tree-cp[data]"),
    ("scipy", "scipy", "tree-cp calibrate: megatron-tree-cp[bench]"),
)
"""(distribution, module, what it is for and where it comes from)."""

EXTENSIONS = (
    ("fused_weight_gradient_mlp_cuda", "Apex's fused weight gradients; off without"),
    ("deep_ep", "DeepEP dispatchers of MoE layers; all-to-all without"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    state: State
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="findings as JSON")


def run(args: argparse.Namespace) -> None:
    found = [*_versions(), *_devices(), *_kernels(), *_environment()]
    if args.json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    else:
        console = Console(width=120, soft_wrap=True)
        colours = {"ok": "green", "note": "yellow", "problem": "red"}
        for finding in found:
            state = f"[{colours[finding.state]}]{finding.state:<8}[/]"
            console.print(f"{state}{finding.topic:<32}{escape(finding.text)}", highlight=False)
    if any(finding.state == "problem" for finding in found):
        sys.exit(1)


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))
    yield _megatron()
    for name, module, purpose in PACKAGES:
        version = _version(name, module)
        if version is None:
            missing: State = "problem" if name == "torch" else "note"
            yield Finding(name, missing, f"not installed ({purpose})")
        else:
            yield Finding(name, "ok", version)
    for module, purpose in EXTENSIONS:
        there = importlib.util.find_spec(module) is not None
        yield Finding(module, "ok" if there else "note", purpose if there else f"none: {purpose}")


def _megatron() -> Finding:
    from ..megatron.release import SUPPORTED, supported

    version = _version("megatron-core", "megatron.core")
    if version is None:
        return Finding("megatron-core", "problem", f"not installed: pip install {SUPPORTED}")
    if not supported(version):
        return Finding("megatron-core", "problem", f"{version}: install {SUPPORTED}")
    return Finding("megatron-core", "ok", version)


def _version(distribution: str, module: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        pass
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a parent package is missing
        found = None
    return None if found is None else "found, version unknown"


def _devices() -> Iterator[Finding]:
    import torch

    from ..plan.shipped_profiles import profile_for

    if not torch.cuda.is_available():
        yield Finding("devices", "note", "no CUDA device: training needs --tree-cpu")
        return
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        text = f"{properties.name}, capability {properties.major}.{properties.minor}"
        yield Finding(f"device {index}", "ok", f"{text}, {memory:.0f} GiB")
    apart = [
        f"{one}-{other}"
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if count > 1:
        text = f"no access between {', '.join(apart)}" if apart else "all devices reach each other"
        yield Finding("peer access", "note" if apart else "ok", text)
    yield Finding("planner costs", "ok", profile_for(torch.cuda.get_device_name())[1])


def _kernels() -> Iterator[Finding]:
    import torch

    from ..ops.attention.registry import AttentionCase
    from ..ops.attention.registry import describe_choice as attention
    from ..ops.gdn.registry import CONVOLUTIONS, RULES, GdnCase
    from ..ops.gdn.registry import describe_choice as recurrence

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    for heads, kv_heads, dim in ((32, 4, 128), (64, 8, 64), (16, 2, 256)):
        case = AttentionCase(kind, torch.bfloat16, heads, kv_heads, dim, dim)
        yield Finding(f"attention {heads}/{kv_heads}/{dim}", "ok", attention(case))
    case = AttentionCase(kind, torch.bfloat16, 32, 4, 128, 128)
    yield Finding("attention, repeatable", "ok", attention(case, "repeatable"))
    layer = GdnCase(kind, torch.bfloat16, 128, 128, width=4)
    yield Finding("Gated DeltaNet", "ok", recurrence(layer, "auto", RULES))
    yield Finding("its convolution", "ok", recurrence(layer, "auto", CONVOLUTIONS))


def _environment() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 10:
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        if os.environ.get(name) == "1":
            yield Finding(name, "ok", "1")
        else:
            yield Finding(name, "note", "Megatron wants 1 here when TP or CP is above 1: export it")
