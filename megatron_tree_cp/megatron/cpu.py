"""Opt-in: run Megatron's real training loop on CPU ranks over gloo.

For the quickstart, tests and CI. Nothing in the package calls it on its own; an entry point calls
``enable()`` before anything imports Megatron. It replaces names of ``torch.cuda`` and a handful of
Megatron's functions for the whole process: never use it in a process that should train on a GPU.
Held to the names of megatron-core 0.19.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .wheel import allow_wheel_install

_CPU = torch.device("cpu")
_enabled = False


def enable() -> None:
    """Make this process a CPU rank; idempotent. Call it before Megatron is imported.

    Expects ``--distributed-backend gloo --use-cpu-initialization --transformer-impl local``.
    Raises RuntimeError when CUDA was already in use, since half a process cannot move.
    """
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA is already in use: call cpu.enable() at the start of the process")
    # torch.compile takes tens of seconds a function here and has no use on tiny models; Megatron
    # reads the variable through torch at its first @jit_fuser.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # validate_args demands it below Blackwell with TP or CP, and the fake device claims Hopper.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _replace_torch_cuda()
    _CudaToCpu().__enter__()
    # Module.cuda() goes through Tensor.cuda(), which the mode covers only for plain tensors.
    torch.nn.Module.cuda = lambda self, *_, **__: self
    _replace_megatron_functions()
    _enabled = True


def is_enabled() -> bool:
    """Is this process a CPU rank?"""
    return _enabled


class _Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    priority = 0
    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> _Event:
        return _Event()


class _Event:
    """An event that has already been recorded."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextlib.contextmanager
def _on_stream(_: Any) -> Iterator[None]:
    yield


def _returning(value: Any) -> Callable[..., Any]:
    """A new function a name: torch._dynamo refuses a function found under two names."""
    return lambda *_, **__: value


def _replace_torch_cuda() -> None:
    """One CPU "device" of Hopper capability with no memory statistics and no-op streams."""
    stream = _Stream()
    properties = SimpleNamespace(
        major=9, minor=0, name="cpu", multi_processor_count=1, total_memory=1 << 34
    )
    replacements: dict[str, Any] = {
        # Also on a machine with a GPU: the run must not touch it.
        "is_available": _returning(False),
        # 1, not 0: Megatron skips model-parallel initialisation and seeding without a device.
        "device_count": _returning(1),
        "current_device": _returning(_CPU),
        "get_device_properties": _returning(properties),
        "get_device_capability": _returning((properties.major, properties.minor)),
        "get_device_name": _returning(properties.name),
        "is_current_stream_capturing": _returning(False),
        "Stream": _Stream,
        "Event": _Event,
        "stream": _on_stream,
        "current_stream": _returning(stream),
        "default_stream": _returning(stream),
        # The "CUDA" generator of dropout and weight initialisation is the CPU's.
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.random.default_generator.manual_seed(seed),
        "mem_get_info": _returning((1 << 33, 1 << 34)),
        "memory_stats": lambda *_, **__: collections.defaultdict(int),
    }
    nothing = "set_device set_stream synchronize empty_cache ipc_collect manual_seed_all"
    for name in [*nothing.split(), "reset_peak_memory_stats"]:
        replacements[name] = _returning(None)
    for name in ("memory_allocated", "memory_reserved"):
        replacements |= {name: _returning(0), f"max_{name}": _returning(0)}
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state


class _CudaToCpu(TorchFunctionMode):
    """Read every request for CUDA or pinned memory in a torch call as a request for the CPU.

    Megatron writes ``device='cuda'`` as a literal in many places. Modes are per thread; autograd
    runs CPU backward passes on the caller's thread, so they are covered.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "type" and len(args) == 1 and not kwargs:
            # Optimizers group parameters by comparing type strings with 'torch.cuda.FloatTensor'.
            kind = func(*args)
            if isinstance(kind, str) and not kind.startswith("torch.cuda"):
                kind = kind.replace("torch.", "torch.cuda.", 1)
            return kind
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name == "to" and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)  # a bare CUDA ordinal


def _replace_megatron_functions() -> None:
    """The places in Megatron that no substitute for ``torch.cuda`` reaches."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.training.initialize as initialize
    import megatron.training.training as training

    # These call torch._C's CUDA generator directly.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # "CPU RNG state changed within GPU RNG context": true here at every fork, and harmless.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    # The original converts all-to-all split sizes to numpy only when they come from a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_host_value
    # pretrain() asserts a CUDA device and does not pass this switch on.
    training.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )
    # Its random inputs have seq / CP rows and come from the generator that initialises the
    # weights: with them, a run's initial weights would depend on the CP size.
    initialize._warmup_jit_function = _returning(None)
    allow_wheel_install()


def _as_host_value(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
