"""What Triton would compile kernels for, recorded while its interpreter runs them on CPU.

A launch is specialised on the dtypes and alignment of its pointers, on its constants, and on the
integers that a kernel does not exempt (1, or a multiple of 16). A kernel whose set of these grows
with every new length compiles in the middle of a training run.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


class Specialisations:
    """Kernel name -> what it was launched for, of every launch in this process.

    Make it with TRITON_INTERPRET=1 set.
    """

    def __init__(self) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self.seen: dict[str, set[tuple]] = defaultdict(set)
        stock = InterpretedFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
            exempt = kernel.kwargs.get("do_not_specialize") or ()
            given = [*zip(kernel.arg_names, args, strict=False), *sorted(constants.items())]
            key = tuple((name, _kind(x, name in exempt)) for name, x in given)
            self.seen[f"{kernel.fn.__module__}.{kernel.fn.__name__}"].add(key)
            return stock(kernel, *args, grid=grid, warmup=warmup, **constants)

        InterpretedFunction.run = run

    def counts(self) -> dict[str, int]:
        """How often each kernel would have been compiled so far."""
        return {name: len(keys) for name, keys in self.seen.items()}


def _kind(value: Any, exempt: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "int" if exempt else ("int", value == 1, value % 16 == 0)
    return value if isinstance(value, str | bool) or value is None else type(value).__name__
