"""How many trajectories of one shape, prompt + completion, fit a row flat and as a tree."""

from __future__ import annotations

import argparse

from ..tree.summary import capacity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", type=int, required=True, metavar="N", help="tokens that all share")
    add("--completion", type=int, required=True, metavar="N", help="tokens of each alone")
    add("--max-tokens", type=int, nargs="+", required=True, metavar="N", help="sizes of a row")


def run(args: argparse.Namespace) -> None:
    for counted in [capacity(args.prompt, args.completion, size) for size in args.max_tokens]:
        print(counted.format())
