"""Triton's interpreter with numpy 2.5, which no longer turns one-element arrays into integers."""

from __future__ import annotations


def accept_numpy() -> None:
    """Let scalars of interpreted kernels count loops; call with TRITON_INTERPRET=1 set."""
    from triton.runtime import interpreter

    stock = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
