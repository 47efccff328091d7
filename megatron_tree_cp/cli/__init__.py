"""`tree-cp`: look at rollouts, packing and plans without training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..tree.errors import InputError
from . import bench, calibrate, capacity, doctor, inspect, pack, plan, predict, tokenizer


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, like every other bad input, where argparse prints the usage before it."""
        raise InputError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = _Parser(prog="tree-cp", description=__doc__)
    parser.add_argument("--version", action="version", version=f"tree-cp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (doctor, pack, plan, inspect, capacity, tokenizer, calibrate, predict, bench):
        name = module.__name__.rsplit(".", 1)[1]
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input prints one line and returns 2."""
    try:
        args = build_parser().parse_args(argv)
        args.run(args)
    except (InputError, ValueError) as error:
        print(f"tree-cp: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `tree-cp ... | head`
        sys.stderr.close()
        return 0
    return 0
