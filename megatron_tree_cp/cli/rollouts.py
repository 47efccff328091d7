"""Options by which commands take rollouts, and the reading and packing they ask for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..tree.packing import PackedRow, pack_trajectories
from ..tree.readers import read_rollouts
from ..tree.tokenizers import load_tokenizer
from ..tree.trajectory import Trajectory


@dataclass(frozen=True)
class PackedRollouts:
    """What was read and what became of it."""

    trajectories: list[Trajectory]
    rows: list[PackedRow]


def add_rollout_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The options of `pack_rollouts`; they mean what the `--tree-*` flags of training mean.

    Where a command has other sources of rows too (``required`` False), it checks them itself.
    """
    add = parser.add_argument
    if required:
        add("paths", nargs="+", metavar="PATH", help="JSON or JSONL rollouts")
    else:
        add("paths", nargs="*", metavar="PATH", help="JSON or JSONL rollouts, or packed rows .npz")
    add(
        "--tokenizer",
        "--tree-tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, FILE.json or hf:DIR",
    )
    add(
        "--max-tokens",
        "--tree-max-tokens",
        type=int,
        required=required,
        metavar="N",
        help="stored tokens of a row at most",
    )
    add("--messages-key", default="messages", metavar="KEY", help="key of the message list")
    add("--ignore-keys", nargs="+", default=[], metavar="KEY", help="unknown keys to skip")
    add("--min-shared", type=int, default=1, metavar="N", help="shortest prefix stored once")
    add("--overlong", choices=("error", "cut"), default="error", help="longer than a row")
    add("--keep-last", action="store_true", help="store final tokens too, without a label")
    add("--vocab-size", type=int, metavar="N", help="refuse token ids from N on")


def pack_rollouts(args: argparse.Namespace) -> PackedRollouts:
    """Read and pack, with a progress bar on a terminal. Raises InputError."""
    tokenizer = load_tokenizer(args.tokenizer)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:

        def reporter(title: str):
            task = progress.add_task(title, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        trajectories = read_rollouts(
            args.paths,
            tokenizer,
            messages_key=args.messages_key,
            ignore_keys=args.ignore_keys,
            vocab_size=args.vocab_size,
            progress=reporter("reading"),
        )
        rows = pack_trajectories(
            trajectories,
            args.max_tokens,
            min_shared=args.min_shared,
            keep_last=args.keep_last,
            overlong=args.overlong,
            progress=reporter("packing"),
        )
    return PackedRollouts(trajectories, rows)
