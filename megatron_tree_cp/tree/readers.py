"""Rollout files into trajectories: a JSON list or JSON Lines, of token ids or chat messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from .chat import ChatRenderer
from .errors import InputError
from .tokenizers import Tokenizer
from .trajectory import Trajectory, check_vocabulary

Progress = Callable[[int, int], None]

TOKEN_KEYS = ("tokens", "loss_mask", "weights", "advantages", "old_logprobs", "group")
CHAT_KEYS = ("tools", "weights", "advantages", "group")
METADATA_KEYS = ("id", "task_id", "trial", "reward", "info", "metadata")
"""Keys that chat records may have and that are not read."""


def read_rollouts(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    tokenizer: Tokenizer | None = None,
    messages_key: str = "messages",
    ignore_keys: Iterable[str] = (),
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """All trajectories of some files, in the order of the files and of their records.

    A record with `tokens` is one of token ids (`TOKEN_KEYS`); one with `messages_key` is a chat,
    rendered with `tokenizer`, and may have one number `weights`, `advantages` and a `group`.

    Args:
        paths: files; each is a JSON list of records or has one record a line.
        tokenizer: needed for chats only.
        messages_key: where chats keep their messages.
        ignore_keys: further keys, of records and of messages, that may be there and are not read.
        vocab_size: refuse token ids that are not below it.
        progress: called with (characters read, characters in all) of each file.

    Raises:
        InputError: one line with file, line, record and field.
    """
    if isinstance(paths, str | PathLike):
        paths = [paths]
    if not paths:
        raise InputError("no rollout files given")
    ignored = frozenset(ignore_keys)
    renderer = None if tokenizer is None else ChatRenderer(tokenizer, ignored)
    trajectories: list[Trajectory] = []
    for path in map(Path, paths):
        count = len(trajectories)
        for where, record in _records(path, progress):
            try:
                trajectory = _trajectory(record, renderer, messages_key, ignored, where)
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
            trajectories.append(trajectory)
        if len(trajectories) == count:
            raise InputError(f"{path}: has no records")
    if vocab_size is not None:
        check_vocabulary(trajectories, vocab_size)
    return trajectories


def iterate_bodies(
    paths: Sequence[str | PathLike[str]], messages_key: str, ignore_keys: Iterable[str] = ()
) -> Iterator[str]:
    """Every rendered message body of chat files, for training a tokenizer."""
    from .chat import check_messages, message_body

    ignored = frozenset(ignore_keys)
    for path in map(Path, paths):
        for where, record in _records(path, None):
            try:
                if not isinstance(record, Mapping) or messages_key not in record:
                    raise InputError(f"has no {messages_key!r}; name it with --messages-key")
                for message in check_messages(record[messages_key], messages_key, ignored):
                    yield message_body(message)
            except InputError as error:
                raise InputError(f"{where}: {error}") from error


def _records(path: Path, progress: Progress | None) -> Iterator[tuple[str, Any]]:
    """("FILE:LINE: record N", record) of each record; LINE is where the record begins."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8") from error
    number = 0
    for line, end, record in (_list_items if text.lstrip()[:1] == "[" else _lines)(path, text):
        yield f"{path}:{line}: record {number}", record
        number += 1
        if progress is not None:
            progress(end, len(text))


def _lines(path: Path, text: str) -> Iterator[tuple[int, int, Any]]:
    end = 0
    for number, line in enumerate(text.split("\n"), 1):
        end = min(end + len(line) + 1, len(text))
        if line.strip():
            try:
                yield number, end, json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{path}:{number}: not JSON: {error.msg} at column {error.colno}; expected a "
                    "JSON list, or one JSON object a line"
                ) from error
            except (ValueError, RecursionError) as error:  # a number too long, nested too deeply
                raise InputError(f"{path}:{number}: not JSON: {error}") from error


def _list_items(path: Path, text: str) -> Iterator[tuple[int, int, Any]]:
    """Items of a JSON list one by one, which keeps the line that each begins at."""
    decoder = json.JSONDecoder()
    line, counted = 1, 0

    def skip_space(place: int) -> int:
        while place < len(text) and text[place] in " \t\r\n":
            place += 1
        return place

    def malformed(place: int, what: str) -> InputError:
        return InputError(f"{path}:{text.count(chr(10), 0, place) + 1}: not JSON: {what}")

    place = skip_space(skip_space(0) + 1)
    expect_item = text[place : place + 1] != "]"
    while expect_item:
        line += text.count("\n", counted, place)
        counted = place
        try:
            record, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise malformed(error.pos, error.msg) from error
        except (ValueError, RecursionError) as error:  # a number too long, nested too deeply
            raise malformed(place, str(error)) from error
        yield line, place, record
        place = skip_space(place)
        expect_item = text[place : place + 1] == ","
        if expect_item:
            place = skip_space(place + 1)
    if text[place : place + 1] != "]":
        raise malformed(place, "expected a comma or the end of the list")
    place = skip_space(place + 1)
    if place < len(text):
        raise malformed(place, "something follows the list")


def _trajectory(
    record: object,
    renderer: ChatRenderer | None,
    messages_key: str,
    ignored: frozenset[str],
    where: str,
) -> Trajectory:
    source = where.rsplit(": record", 1)[0]
    if not isinstance(record, Mapping):
        raise InputError(f"expected an object, got {type(record).__name__}")
    if "tokens" in record and messages_key in record:
        raise InputError(f"has both tokens and {messages_key}; leave one out")
    if "tokens" in record:
        _refuse_unknown(record, {*TOKEN_KEYS, *ignored})
        return Trajectory(
            _integers(record["tokens"], "tokens"),
            _numbers(record.get("loss_mask"), "loss_mask"),
            _numbers(record.get("weights"), "weights"),
            _numbers(record.get("advantages"), "advantages", nulls=True),
            _numbers(record.get("old_logprobs"), "old_logprobs", nulls=True),
            record.get("group"),
            source,
        )
    if messages_key not in record:
        lists = [key for key, value in record.items() if isinstance(value, list)]
        hint = f"; it has {', '.join(map(repr, lists))}" if lists else ""
        raise InputError(
            f"has neither 'tokens' nor {messages_key!r}; name the list of messages with "
            f"--messages-key{hint}"
        )
    if renderer is None:
        raise InputError(f"{messages_key}: chats need a tokenizer; give --tree-tokenizer")
    _refuse_unknown(record, {messages_key, *CHAT_KEYS, *METADATA_KEYS, *ignored})
    for key in ("weights", "advantages"):
        value = record.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"{key}: a chat takes one number for all its tokens")
    tools = None if "tools" in ignored else record.get("tools")
    tokens, mask = renderer.render(record[messages_key], tools, messages_key)
    return Trajectory(
        tokens,
        mask,
        record.get("weights"),
        record.get("advantages"),
        group=record.get("group"),
        source=source,
    )


def _refuse_unknown(record: Mapping[str, Any], known: set[str]) -> None:
    for key in record:
        if key not in known:
            raise InputError(f"{key}: unknown key; misspelt, or --ignore-keys {key}")


def _integers(values: object, name: str) -> list[int]:
    if not isinstance(values, list):
        raise InputError(f"{name}: expected a list of integers, got {type(values).__name__}")
    for index, value in enumerate(values):
        if type(value) is not int:  # a boolean is an int to isinstance
            raise InputError(f"{name}[{index}]: expected an integer, got {_short(value)}")
        if value >= 2**63:
            raise InputError(f"{name}[{index}]: {value} does not fit a signed 64-bit integer")
    return values


def _numbers(values: object, name: str, nulls: bool = False) -> Any:
    """A list of numbers (or one number, or None); null becomes NaN where `nulls`."""
    if not isinstance(values, list):
        if values is None or (isinstance(values, int | float) and not isinstance(values, bool)):
            return values
        raise InputError(f"{name}: expected a list of numbers, got {type(values).__name__}")
    numbers = []
    for index, value in enumerate(values):
        if value is None and nulls:
            value = float("nan")
        elif not isinstance(value, int | float):
            raise InputError(f"{name}[{index}]: expected a number, got {_short(value)}")
        try:
            numbers.append(float(value))
        except OverflowError as error:
            raise InputError(f"{name}[{index}]: {_short(value)} is too large") from error
    return numbers


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
