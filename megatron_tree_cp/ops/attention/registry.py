"""Implementations of the local attention kernel, what each can do, and the choice between them.

A kernel module has two functions, with natural-log LSE and -inf where a query sees no key:

    forward(q, k, v, mask, scale) -> (out, lse)
        [Tq, Hq, D], [K, Hkv, D], [K, Hkv, Dv], IntervalMask -> [Tq, Hq, Dv], fp32 [Tq, Hq]
    backward(dout, q, k, v, out, lse, delta, mask, scale) -> (dq, dk, dv)
        with the GLOBAL out, lse and delta = rowsum(dout * out) - dlse of the queries

Gradients come in fp32, or fp64 for fp64 inputs, where lse is fp64 as well.

A third function is optional: `prepare(mask, head_dim, value_dim) -> bytes` builds ahead of time
what the first call of a row would build, and says how much device memory that holds.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class AttentionCase:
    """What decides whether an implementation can serve a layer class."""

    device_type: str
    """`cpu` or `cuda`."""

    dtype: torch.dtype
    """Of q, k and v."""

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    sink: bool = False


@dataclass(frozen=True)
class Implementation:
    """One kernel: its name, its module, and why it cannot do a case (None when it can)."""

    name: str
    module: str
    supports: Callable[[AttentionCase], str | None]
    in_auto: bool = True
    repeatable: bool = True
    """Gradients are bitwise repeatable (forward always is)."""

    def load(self) -> ModuleType:
        """Import the kernel module; deferred, since some need a GPU's packages."""
        return importlib.import_module(f"megatron_tree_cp.ops.attention.{self.module}")


def _any_float(case: AttentionCase) -> str | None:
    if case.dtype in (*_FLOATS, torch.float64):
        return None
    return f"needs a float dtype, got {case.dtype}"


def _flex(case: AttentionCase) -> str | None:
    if case.device_type != "cuda":
        return "needs a CUDA device (compiled FlexAttention has no CPU backward)"
    if case.dtype not in _FLOATS:
        return f"takes fp16, bf16 or fp32, got {case.dtype}"
    for name, dim in (("head_dim", case.head_dim), ("value_dim", case.value_dim)):
        if dim < 16 or dim > 256:
            return f"takes a {name} from 16 to 256, got {dim}"
    return None


FLASH_VERSIONS = ("4.0.0b5",)
"""Releases of flash-attn-4 whose kernels flash.py drives; others move what it calls."""

_FLASH_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


@functools.cache
def _installed(package: str) -> str | None:
    """Version of an installed package: looked up once, since every layer's call asks."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _capability() -> tuple[int, int] | None:
    """Compute capability of the current device, None without one; asked by every layer's call."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _flash(case: AttentionCase) -> str | None:
    capability = _capability()
    if case.device_type != "cuda" or capability is None:
        return "needs a CUDA device"
    if capability != (9, 0):
        major, minor = capability
        return f"is built for Hopper (capability 9.0), this device has {major}.{minor}"
    version = _installed("flash-attn-4")
    if version is None:
        return "needs flash-attn-4: install megatron-tree-cp[gpu]"
    if version not in FLASH_VERSIONS:
        return f"drives flash-attn-4 {', '.join(FLASH_VERSIONS)}, found {version}"
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, got {case.dtype}"
    dims = (case.head_dim, case.value_dim)
    if dims not in _FLASH_DIMS:
        known = ", ".join(f"{a}/{b}" for a, b in _FLASH_DIMS)
        return f"has head dims {known}, got {dims[0]}/{dims[1]}"
    if dims[0] != dims[1] and case.query_heads != case.kv_heads:
        return f"needs equal heads for head dims {dims[0]}/{dims[1]}"
    return None


# Fastest first: `auto` takes the first that supports the case.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation("flash", "flash", _flash, repeatable=False),
    Implementation("flex", "flex", _flex),
    Implementation("tiled", "tiled", _any_float),
    Implementation("reference", "reference", _any_float, in_auto=False),
)


AUTOMATIC = ("auto", "repeatable")
"""Not names of kernels: the fastest that supports the case, of all or of the repeatable ones."""


def select(case: AttentionCase, impl: str = "auto") -> Implementation:
    """Return the implementation `impl`, or the fastest that supports the case.

    `auto` takes the fastest, `repeatable` the fastest whose gradients are bitwise repeatable.

    Raises:
        ValueError: `impl` is unknown, or cannot do the case (reason and alternatives named).
    """
    if impl in AUTOMATIC:
        passed = []
        for candidate in _candidates():
            reason = _passed_over(candidate, case, impl)
            if reason is None:
                return candidate
            passed.append(f"{candidate.name} {reason}")
        raise ValueError(f"no attention implementation supports this case: {'; '.join(passed)}")
    for candidate in IMPLEMENTATIONS:
        if candidate.name == impl:
            reason = candidate.supports(case)
            if reason is None:
                return candidate
            able = [c.name for c in IMPLEMENTATIONS if c.supports(case) is None]
            raise ValueError(
                f"attention implementation {impl!r} {reason}; "
                f"use one of: auto, {', '.join(able) or 'none supports this case'}"
            )
    known = ", ".join((*AUTOMATIC, *(c.name for c in IMPLEMENTATIONS)))
    raise ValueError(f"unknown attention implementation {impl!r}; use one of: {known}")


def _candidates() -> list[Implementation]:
    return [candidate for candidate in IMPLEMENTATIONS if candidate.in_auto]


def _passed_over(candidate: Implementation, case: AttentionCase, impl: str) -> str | None:
    if impl == "repeatable" and not candidate.repeatable:
        return "sums gradients in an order that changes"
    return candidate.supports(case)


def describe_choice(case: AttentionCase, impl: str = "auto") -> str:
    """One line for the start-up table: the choice and why faster candidates were passed over."""
    chosen = select(case, impl)
    if impl not in AUTOMATIC:
        return f"{chosen.name} (requested)"
    passed = []
    for candidate in _candidates():
        if candidate is chosen:
            break
        passed.append(f"{candidate.name} {_passed_over(candidate, case, impl)}")
    return f"{chosen.name} ({'; '.join([impl, *passed])})"
