"""The releases of Megatron-Core whose names this package hooks."""

from __future__ import annotations

SUPPORTED = "megatron-core==0.19.2"
"""What the tests run with, as pip writes it."""


def supported(version: str) -> bool:
    """Whether the hooks of a tree run are made for this release."""
    return version.startswith("0.19.")
