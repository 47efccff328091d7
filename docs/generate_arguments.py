"""Write docs/arguments.md from the parser.

    python docs/generate_arguments.py

`tests/test_documents.py` holds the page to the parser, so that the option set cannot change unseen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_tree_cp.megatron.arguments import add_tree_arguments

PAGE = Path(__file__).parent / "arguments.md"
HEAD = """\
# Arguments

Written by `docs/generate_arguments.py` from the parser.

These stand beside Megatron's own flags (`python -m megatron_tree_cp.pretrain --help` lists both).
Dashes in flags become underscores in `args`. In a `--tree-config` file the same names are flat
keys, with dashes or underscores: `true` gives a bare flag, a list gives several values, and the
command line wins.

| Flag | Values | Default | Meaning |
|---|---|---|---|
"""


def describe(action: argparse.Action) -> str:
    """One row of the table."""
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    if action.nargs == 0:
        values = "flag"
    elif action.choices:
        values = " \\| ".join(f"`{choice}`" for choice in action.choices)
    else:
        name = str(action.metavar or "value").replace("|", " \\| ")
        values = f"{name} …" if action.nargs in ("+", "*") else name
    default = "" if action.default in (None, False) else f"`{action.default}`"
    meaning = (action.help or "").replace("|", "\\|")
    return f"| {flags} | {values} | {default} | {meaning} |"


def page() -> str:
    """The whole document."""
    parser = argparse.ArgumentParser(add_help=False)
    add_tree_arguments(parser, argv=[])
    return HEAD + "\n".join(describe(action) for action in parser._actions) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
