"""Chat messages rendered to tokens: header `<|role|>`, body, `<|end|>`.

Trained are the bodies of assistant messages and their `<|end|>`, not the headers. Each piece is
encoded on its own, so equal messages have equal tokens wherever they stand and prefixes share.
A tokenizer that has a chat template of its own renders instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import InputError
from .tokenizers import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
END = "<|end|>"
_MESSAGE_KEYS = {"role", "content", "tool_calls", "name", "tool_call_id", "weight"}


def marker(role: str) -> str:
    """The header of a message."""
    return f"<|{role}|>"


@dataclass
class ChatRenderer:
    """Renders conversations with one tokenizer; remembers encoded bodies, which repeat a lot."""

    tokenizer: Tokenizer
    ignore_keys: frozenset[str] = frozenset()
    _encoded: dict[str, list[int]] = field(default_factory=dict, repr=False)

    def render(
        self, messages: object, tools: object = None, name: str = "messages"
    ) -> tuple[list[int], list[int]]:
        """Token ids and loss mask of a list of messages.

        Args:
            messages: `{role, content, tool_calls?, name?, tool_call_id?, weight?}` each; weight 0
                leaves an assistant message untrained.
            tools: tool descriptions; only chat templates render them.
            name: what the list is called in error messages.
        """
        checked = check_messages(messages, name, self.ignore_keys)
        if getattr(self.tokenizer, "has_chat_template", False):
            return self._by_template(checked, tools, name)
        if tools:
            raise InputError(
                "tools: only a tokenizer with a chat template renders tool descriptions; put them "
                "into the system message, or --ignore-keys tools"
            )
        tokens: list[int] = []
        mask: list[int] = []
        end = self.tokenizer.encode_marker(END)
        for message in checked:
            header = self.tokenizer.encode_marker(marker(message["role"]))
            body = self._encode(message_body(message))
            trained = int(message["role"] == "assistant" and message.get("weight", 1) != 0)
            tokens += [*header, *body, *end]
            mask += [0] * len(header) + [trained] * (len(body) + len(end))
        return tokens, mask

    def _encode(self, body: str) -> list[int]:
        if body not in self._encoded:
            self._encoded[body] = self.tokenizer.encode(body)
        return self._encoded[body]

    def _by_template(
        self, messages: list[dict[str, Any]], tools: Any, name: str
    ) -> tuple[list[int], list[int]]:
        for index, message in enumerate(messages):
            if message.pop("weight", 1) != 1:
                raise InputError(
                    f"{name}[{index}].weight: a chat template trains every assistant turn; leave "
                    "it out, or give records of token ids with a loss_mask"
                )
        tokens, mask = self.tokenizer.apply_chat_template(messages, tools)  # type: ignore[attr-defined]
        if not any(mask) and any(message["role"] == "assistant" for message in messages):
            raise InputError(f"{name}: the chat template marks no assistant token of it")
        return tokens, mask


def message_body(message: Mapping[str, Any]) -> str:
    """The text of one checked message between header and `<|end|>`.

    Content, then one line `{"name": ..., "arguments": ...}` a tool call; the result of a tool has
    the tool's name on a line before it. Ids of calls differ between equal rollouts: left out.
    """
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls", ())
    ]
    lines = [message["content"]] if message["content"] else []
    lines += [json.dumps(call, ensure_ascii=False) for call in calls]
    if message["role"] == "tool" and message.get("name"):
        lines.insert(0, message["name"])
    return "\n".join(lines)


def check_messages(
    messages: object, name: str, ignore_keys: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Fresh, normal messages: content is text, arguments of tool calls are parsed, no nulls."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InputError(f"{name}: expected a list of messages, got {_kind(messages)}")
    if not messages:
        raise InputError(f"{name}: has no messages")
    return [
        _check_message(message, f"{name}[{index}]", ignore_keys)
        for index, message in enumerate(messages)
    ]


def _check_message(message: object, name: str, ignore_keys: frozenset[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{name}: expected an object, got {_kind(message)}")
    for key, value in message.items():
        if key not in _MESSAGE_KEYS and key not in ignore_keys and value not in (None, [], {}, ""):
            raise InputError(
                f"{name}.{key}: unknown key, which rendering would leave out; "
                f"--ignore-keys {key} does so"
            )
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"{name}.role: expected one of {', '.join(ROLES)}, got {role!r}")
    checked: dict[str, Any] = {
        "role": role,
        "content": _text(message.get("content"), f"{name}.content"),
    }
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            checked[key] = _text(message[key], f"{name}.{key}")
    if message.get("tool_calls"):
        if role != "assistant":
            raise InputError(f"{name}.tool_calls: only the assistant calls tools, not {role}")
        checked["tool_calls"] = _tool_calls(message["tool_calls"], f"{name}.tool_calls")
    weight = message.get("weight")
    if weight is not None:
        if weight not in (0, 1):
            raise InputError(f"{name}.weight: expected 0 or 1, got {weight!r}")
        checked["weight"] = int(weight)
    return checked


def _text(value: object, name: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list):  # content parts
        for index, part in enumerate(value):
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise InputError(f"{name}[{index}]: only parts of type text are supported")
        return "".join(
            _text(part.get("text"), f"{name}[{index}].text") for index, part in enumerate(value)
        )
    if not isinstance(value, str):
        raise InputError(f"{name}: expected text or null, got {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: character {error.start} is half a surrogate pair") from error
    return value


def _tool_calls(calls: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InputError(f"{name}: expected a list, got {_kind(calls)}")
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(f"{name}[{index}]: expected {{function: {{name, arguments}}}}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):  # the usual wire format: JSON inside a string
            _text(arguments, f"{name}[{index}].function.arguments")
            try:
                arguments = json.loads(arguments)
            except ValueError:
                pass  # a model may have said something else: keep its words
        kept = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        checked.append({"type": "function", "function": kept})
    return checked


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(
        type(value), "a number" if isinstance(value, int | float) else "something else"
    )
