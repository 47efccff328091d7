"""YAML run configs: ``--tree-config FILE`` as command-line options.

A file is a flat mapping of option names (dashes or underscores, no leading dashes) to values:

    tree-data: [rollouts/a.jsonl, rollouts/b.jsonl]   # a list is an option with several values
    tree-max-tokens: 16384
    bf16: true                                        # true gives the flag
    rope-fusion: false                                # --no-rope-fusion

Options on the command line win. Paths are relative to the working directory, as they are there.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..tree.errors import InputError

_FLAG = "--tree-config"
_ONE_OPTION = {"tree_max_tokens": "seq_length"}
"""Options that write the same value: giving one on the command line overrides the other."""


def expand_tree_config(
    argv: Sequence[str], parser: argparse.ArgumentParser | None = None
) -> list[str]:
    """Replace ``--tree-config FILE`` in an argument list by the options of the file.

    ``parser`` knows the legal options; by default it is Megatron's with the tree options, which
    imports Megatron. Without ``--tree-config`` the list is returned as it is. Raises InputError
    with file and line for a file that cannot be read or an option that does not exist.
    """
    rest, paths = _split(argv)
    if not paths:
        return rest
    if len(paths) > 1:
        raise InputError(f"{_FLAG} is given {len(paths)} times: give one file")
    parser = parser or _full_parser()
    given = {_destination(action) for action in _actions(parser, rest)}
    options: list[str] = []
    for entry in read_run_config(Path(paths[0])):
        action, words = _option(parser, entry)
        if _destination(action) not in given:
            options += words
    return [*options, *rest]


def requests_cpu(argv: Sequence[str]) -> bool:
    """Is ``--tree-cpu`` on the command line or in its run config?

    An entry point asks before it expands the config, since that imports Megatron and the CPU shim
    has to come first. Raises InputError for a config that cannot be read.
    """
    rest, paths = _split(argv)
    entries = (entry for path in paths for entry in read_run_config(Path(path)))
    return "--tree-cpu" in rest or any(e.key == "tree-cpu" and bool(e.flag) for e in entries)


@dataclass(frozen=True)
class ConfigEntry:
    """One line of a run config; values are kept as the text that stands in the file."""

    key: str
    values: tuple[str, ...]
    is_list: bool
    flag: bool | None
    """True or False where the value is a plain boolean, else None."""
    place: str
    """file:line"""


def read_run_config(path: Path) -> list[ConfigEntry]:
    """Entries of a YAML run config in order. Raises InputError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the run config: {error}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise InputError(_yaml_message(path, error)) from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"{path}:1: a run config is a mapping: write 'option: value' lines")
    entries: list[ConfigEntry] = []
    seen: dict[str, str] = {}
    for key_node, value_node in root.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError(f"{place}: a key is one option name: write 'option: value'")
        key = key_node.value.replace("_", "-")
        if key in seen:
            raise InputError(f"{place}: {key} stands at {seen[key]} already: keep one")
        seen[key] = place
        entries.append(_entry(key, value_node, place))
    return entries


def _yaml_message(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}" if mark else str(path)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"{place}: not YAML ({problem}): quote values that hold * - : # & or brackets"


def _entry(key: str, node: yaml.Node, place: str) -> ConfigEntry:
    if isinstance(node, yaml.MappingNode):
        raise InputError(f"{place}: {key} holds a mapping: options are not nested, write it flat")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if not isinstance(item, yaml.ScalarNode) or item.tag.endswith(":null"):
                raise InputError(f"{place}: {key} takes a flat list of values")
        return ConfigEntry(key, tuple(item.value for item in node.value), True, None, place)
    if node.tag.endswith(":null"):
        raise InputError(f"{place}: {key} has no value: give one or drop the line")
    flag = None
    if node.tag.endswith(":bool") and node.style is None:
        flag = node.value.lower() in ("true", "yes", "on")
    return ConfigEntry(key, (node.value,), False, flag, place)


def _option(
    parser: argparse.ArgumentParser, entry: ConfigEntry
) -> tuple[argparse.Action, list[str]]:
    """The action that an entry means and its words on a command line."""
    known = parser._option_string_actions
    name = next((n for n in _spellings(entry.key) if n in known), None)
    negative = next((n for n in _spellings(f"no-{entry.key}") if n in known), None)
    if name is None and negative is None:
        raise InputError(
            f"{entry.place}: unknown option {entry.key}: {_suggestion(entry.key, known)}"
        )
    if name is None or known[name].nargs == 0 or _is_boolean_pair(known[name]):
        return _flag_words(known, entry, name, negative)
    action = known[name]
    several = action.nargs in ("+", "*") or isinstance(action.nargs, int)
    if entry.is_list and not several:
        raise InputError(f"{entry.place}: {entry.key} takes one value: drop the brackets")
    if several:
        return action, [name, *entry.values]
    if entry.flag is not None:
        raise InputError(f"{entry.place}: {entry.key} takes a value, not {entry.values[0]}")
    return action, [f"{name}={entry.values[0]}"]


def _flag_words(known, entry, name, negative) -> tuple[argparse.Action, list[str]]:
    if entry.flag is None:
        raise InputError(f"{entry.place}: {entry.key} is a flag: write true or false")
    chosen = name if entry.flag else negative
    action = known[chosen or name or negative]
    return action, [chosen] if chosen else []


def _spellings(key: str) -> tuple[str, str]:
    return f"--{key}", f"--{key.replace('-', '_')}"  # a few of Megatron's options have underscores


def _is_boolean_pair(action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction)


def _suggestion(key: str, known: dict[str, argparse.Action]) -> str:
    close = difflib.get_close_matches(f"--{key}", known, n=1, cutoff=0.75)
    return f"did you mean {close[0].lstrip('-')}?" if close else "see --help"


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Argument list without ``--tree-config``, and the files that it named."""
    rest: list[str] = []
    paths: list[str] = []
    words = iter(argv)
    for word in words:
        if word == _FLAG:
            path = next(words, None)
            if path is None:
                raise InputError(f"{_FLAG} needs a file")
            paths.append(path)
        elif word.startswith(f"{_FLAG}="):
            paths.append(word.partition("=")[2])
        else:
            rest.append(word)
    return rest, paths


def _actions(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[argparse.Action]:
    known = parser._option_string_actions
    names = (word.partition("=")[0] for word in argv)
    return [known[name] for name in names if name in known]


def _destination(action: argparse.Action) -> str:
    return _ONE_OPTION.get(action.dest, action.dest)


def _full_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    from .arguments import add_tree_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_tree_arguments(add_megatron_arguments(parser), argv=())
