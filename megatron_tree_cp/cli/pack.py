"""Pack rollouts and print what sharing saves: tokens, visible pairs, rows, fill."""

from __future__ import annotations

import argparse

from ..tree.summary import summarise
from .rollouts import add_rollout_arguments, pack_rollouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rollout_arguments(parser)


def run(args: argparse.Namespace) -> None:
    packed = pack_rollouts(args)
    print(summarise(packed.trajectories, packed.rows).format())
