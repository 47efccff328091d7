"""Draw one row's plan: tree, owners, bytes, timeline, costs and what the search tried."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ..tree.errors import InputError
from ..tree.packing import PackedRow
from ..tree.row_files import write_atomically
from ..tree.tokenizers import load_tokenizer
from .picture import picture
from .picture_html import html_page
from .row_source import (
    NamedRow,
    RowPlanner,
    add_plan_arguments,
    add_row_arguments,
    named_rows,
)

TEXT_LENGTH = 160
"""Characters of a segment that --show-text shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_row_arguments(parser)
    add_plan_arguments(parser)
    add = parser.add_argument
    add("--html", metavar="FILE.html", help="one self-contained page; default: plan.html")
    add("--png", metavar="FILE.png", help="the same as a picture (needs matplotlib)")
    add("--show-text", action="store_true", help="beginnings of segments, by --tokenizer")


def run(args: argparse.Namespace) -> None:
    html = args.html or (None if args.png else "plan.html")
    for path, suffix in ((html, ".html"), (args.png, ".png")):
        if path and not path.endswith(suffix):
            raise InputError(f"{path}: expected a name that ends in {suffix}")
        if path and not Path(path).parent.is_dir():
            raise InputError(f"{path}: cannot write: its directory does not exist")
    if args.png:
        require_matplotlib()
    if args.row is None and not args.preset:
        args.row = 0
    (row,) = named_rows(args)
    planner = RowPlanner(args)
    text_of = _text_of(row, args.tokenizer) if args.show_text else None
    plan, planning_ms = planner.plan(row)
    title = f"{row.name}: {row.tree.num_tokens:,} tokens at CP {args.cp_size}"
    drawn = picture(title, plan, planner.profile, planning_ms, text_of)
    written = []
    if html:
        write_atomically(html, html_page(drawn).encode())
        written.append(html)
    if args.png:
        from .picture_png import png_image

        write_atomically(args.png, png_image(drawn))
        written.append(args.png)
    Console(highlight=False).print(f"wrote {' and '.join(written)}", markup=False)


def require_matplotlib() -> None:
    """Raises InputError that names the extra when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(
            "--png needs matplotlib: pip install megatron-tree-cp[docs], or write --html"
        ) from error


def _text_of(row: NamedRow, tokenizer: str) -> Callable[[int], str]:
    if row.packed is None:
        raise InputError("--show-text: a preset has no text")
    packed: PackedRow = row.packed
    decode = load_tokenizer(tokenizer).decode

    def text_of(segment: int) -> str:
        start = int(row.tree.segment_starts[segment])
        count = min(int(row.tree.lengths[segment]), TEXT_LENGTH)
        text = decode(packed.tokens[start : start + count].tolist())[:TEXT_LENGTH]
        # Control characters have no place in a page, escaped or not.
        return "".join(c if c.isprintable() else " " for c in text)

    return text_of
