"""Pack rollouts and print what sharing saves: tokens, visible pairs, rows, fill."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..tree.errors import InputError
from ..tree.fingerprint import packing_fingerprint
from ..tree.row_files import save_rows, write_atomically
from ..tree.summary import PackingSummary, summarise
from .rollouts import add_rollout_arguments, pack_rollouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rollout_arguments(parser)
    add = parser.add_argument
    add("--output", metavar="FILE.npz", help="write the packed rows")
    add("--summary", metavar="FILE.json", help="write the summary as JSON")


def run(args: argparse.Namespace) -> None:
    if args.output and not args.output.endswith(".npz"):
        raise InputError(f"--output {args.output}: expected a name that ends in .npz")
    for path in (args.output, args.summary):  # before any work, and so that none is written alone
        if path and not Path(path).parent.is_dir():
            raise InputError(f"{path}: cannot write: its directory does not exist")
    packed = pack_rollouts(args)
    summary = summarise(packed.trajectories, packed.rows, args.max_tokens)
    fingerprint = packing_fingerprint(packed.rows)
    if args.output:
        save_rows(args.output, packed.rows)
    if args.summary:
        content = summary.to_json() | {"fingerprint": fingerprint}
        write_atomically(args.summary, (json.dumps(content, indent=2) + "\n").encode())
    _print(summary, fingerprint)


def _print(summary: PackingSummary, fingerprint: str) -> None:
    console = Console(highlight=False)
    figures = Table(show_header=False, box=None, pad_edge=False)
    for what, value in (*summary.lines(), ("fingerprint", fingerprint[:16])):
        figures.add_row(what, value)
    depths = Table(title="saving by depth", title_justify="left", box=None, pad_edge=False)
    for column in ("positions", "logical", "stored", "saving"):
        depths.add_column(column, justify="right")
    for depth in summary.by_depth:
        depths.add_row(
            f"{depth.begin:,} - {depth.end - 1:,}",
            f"{depth.logical:,}",
            f"{depth.stored:,}",
            f"{depth.logical / depth.stored:.2f}x",
        )
    console.print(figures)
    console.print()
    console.print(depths)
