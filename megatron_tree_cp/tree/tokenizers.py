"""Tokenizers that readers take: bytes, a `tokenizers` file, a Hugging Face directory.

Text never turns into a special token here: a rollout that quotes `<|end|>` must not end a turn.
Only `encode_marker` looks special tokens up.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .errors import InputError


class Tokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    vocab_size: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens."""
        ...

    def encode_marker(self, marker: str) -> list[int]:
        """Token ids of `<|role|>` or `<|end|>`: one special token where the vocabulary has it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text to look at."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `bytes`, `FILE.json` (library `tokenizers`) or `hf:DIR` (`transformers`).

    Raises:
        InputError: no such file, not a tokenizer, or the library is not installed.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("hf:"):
        return HuggingFaceTokenizer(Path(name[3:]))
    if name.endswith(".json"):
        return FileTokenizer(Path(name))
    raise InputError(f"tokenizer {name!r}: expected bytes, FILE.json or hf:DIR")


class ByteTokenizer:
    """UTF-8 bytes, 256 ids; markers are bytes too, so nothing is to be trained or downloaded."""

    vocab_size = 256
    fingerprint = "bytes-1"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    encode_marker = encode

    def decode(self, ids: Sequence[int]) -> str:
        """Text to look at: what is no text becomes a replacement character."""
        return bytes(i if 0 <= i < 256 else 63 for i in ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A JSON file of the `tokenizers` library, such as `tree-cp tokenizer` writes."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise InputError(
                f"{path}: reading it needs `tokenizers`; pip install megatron-tree-cp[data]"
            ) from error
        content = _read(path)
        try:
            self._backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise InputError(
                f"{path}: not a tokenizers file: {' '.join(str(error).split())}"
            ) from error
        self._backend.encode_special_tokens = True  # means: special tokens in text are plain text
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.fingerprint = "file-" + hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text to look at, special tokens included."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def encode_marker(self, marker: str) -> list[int]:
        token = self._backend.token_to_id(marker)
        return self.encode(marker) if token is None else [token]


class HuggingFaceTokenizer:
    """A local Hugging Face directory; its chat template replaces our rendering.

    Templates run in the sandbox of `transformers`; code of the directory never runs.
    """

    _FILES = ("*.json", "*.txt", "*.model", "*.jinja")

    def __init__(self, path: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise InputError(
                f"hf:{path}: reading it needs `transformers`; pip install megatron-tree-cp[data]"
            ) from error
        if not path.is_dir():
            raise InputError(
                f"hf:{path}: not a directory; download the tokenizer and name its folder"
            )
        try:
            self._backend = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever the files make of it
            raise InputError(f"hf:{path}: {' '.join(str(error).split())}") from error
        self._path = path
        self.vocab_size = len(self._backend)
        digest = hashlib.sha256()
        for file in sorted({file for glob in self._FILES for file in path.glob(glob)}):
            digest.update(f"{file.name}\0".encode() + hashlib.sha256(_read(file)).digest())
        self.fingerprint = "hf-" + digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        encoded = self._backend.encode(text, add_special_tokens=False, split_special_tokens=True)
        return [int(token) for token in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Text to look at, special tokens included."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def encode_marker(self, marker: str) -> list[int]:
        token = self._backend.get_vocab().get(marker)
        return self.encode(marker) if token is None else [int(token)]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Token ids and assistant mask of a conversation, by the directory's own template."""
        template = self._backend.chat_template
        if isinstance(template, Mapping):
            template = template.get(
                "tool_use" if tools and "tool_use" in template else "default", ""
            )
        if not re.search(r"\{%-?\s*generation\b", template):
            raise InputError(
                f"hf:{self._path}: its chat template does not mark what the assistant said; put "
                "{% generation %} and {% endgeneration %} around assistant turns in the template, "
                "or give records of token ids with a loss_mask"
            )
        try:
            encoded = self._backend.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            return list(encoded["input_ids"]), list(encoded["assistant_masks"])
        except Exception as error:  # jinja's own errors and those that a template raises
            raise InputError(
                f"hf:{self._path}: its chat template fails: {' '.join(str(error).split())}"
            ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
