"""Train a small byte-level BPE on the rendered bodies of chats: a FILE.json for --tokenizer."""

from __future__ import annotations

import argparse

from ..tree.bpe import train_bpe
from ..tree.readers import iterate_bodies
from ..tree.row_files import write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="JSON or JSONL rollouts of chat messages")
    add("--vocab-size", type=int, default=4096, metavar="N", help="words (default %(default)s)")
    add("--messages-key", default="messages", metavar="KEY", help="key of the message list")
    add("--ignore-keys", nargs="+", default=[], metavar="KEY", help="unknown keys to skip")
    add("--output", required=True, metavar="FILE.json", help="where it is written")


def run(args: argparse.Namespace) -> None:
    # All bodies first: an error in the last record must surface as itself, not inside the trainer.
    bodies = list(iterate_bodies(args.paths, args.messages_key, args.ignore_keys))
    write_atomically(args.output, train_bpe(bodies, args.vocab_size).encode())
    print(f"{args.output}: {args.vocab_size} words from {len(bodies):,} messages")
