"""Token dispatchers of MoE layers: which can carry unequal shards, and what has been run.

A tree's shards hold different token counts on different ranks, so a dispatcher must take a count
of its own from every rank. The table says which of Megatron's do, what they need, and where they
were held to the gradients of trajectories alone.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Dispatcher:
    """One value of ``--moe-token-dispatcher-type``, with its backend for ``flex``."""

    name: str
    """``alltoall``, or ``flex/<backend>``."""
    package: str = ""
    """Python package it needs, '' for none."""
    attribute: str = ""
    """Name that the package must have."""
    install: str = ""
    """Where the package comes from."""
    needs: str = ""
    """Option without which it demands equal counts, '' for none."""
    verified: str = ""
    """Where its gradients were checked, '' for nowhere yet."""

    def installed(self) -> bool:
        """Can its package be imported, with all that it needs?"""
        if not self.package:
            return True
        try:
            return hasattr(importlib.import_module(self.package), self.attribute)
        except ImportError:
            return False


DISPATCHERS: dict[str, Dispatcher] = {
    one.name: one
    for one in (
        Dispatcher("alltoall", verified="CPU (gloo): EP2, TP2 x EP2, with CP2"),
        Dispatcher(
            "flex/deepep",
            package="deep_ep",
            attribute="Buffer",
            install="DeepEP (github.com/deepseek-ai/DeepEP)",
        ),
        Dispatcher(
            "flex/hybridep",
            package="deep_ep",
            attribute="HybridEPBuffer",
            install="DeepEP's hybrid-ep branch (github.com/deepseek-ai/DeepEP)",
            needs="--moe-hybridep-pad-uneven-dispatch-inputs",
        ),
    )
}
"""Dispatchers that take unequal counts. ``allgather`` and ``flex/ncclep`` do not."""


def dispatcher_name(args: Namespace) -> str:
    """The table's name of what the arguments ask for."""
    kind = args.moe_token_dispatcher_type
    if kind != "flex":
        return kind
    backend = "deepep" if args.moe_enable_deepep else args.moe_flex_dispatcher_backend
    return f"flex/{backend}"


def option(args: Namespace) -> str:
    """What the user would write for it."""
    kind, _, backend = dispatcher_name(args).partition("/")
    text = f"--moe-token-dispatcher-type {kind}"
    return f"{text} --moe-flex-dispatcher-backend {backend}" if backend else text


def unequal_refused(args: Namespace) -> str:
    """The option, where the dispatcher demands equal counts."""
    known = not args.num_experts or dispatcher_name(args) in DISPATCHERS
    return "" if known else option(args)


def missing(name: str, args: Namespace) -> str:
    """The option, where dispatcher ``name`` is asked for and its package is not installed."""
    asked = args.num_experts and dispatcher_name(args) == name
    return option(args) if asked and not DISPATCHERS[name].installed() else ""


def equalised(name: str, args: Namespace) -> str:
    """The option, where dispatcher ``name`` is asked for without the option that it needs."""
    needs = DISPATCHERS[name].needs
    asked = args.num_experts and needs and dispatcher_name(args) == name
    given = getattr(args, needs.lstrip("-").replace("-", "_"), True)
    return option(args) if asked and not given else ""
