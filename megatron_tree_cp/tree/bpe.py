"""Train a small byte-level BPE on rollouts, for examples, tests and models from scratch."""

from __future__ import annotations

from collections.abc import Iterable

from .chat import END, ROLES, marker
from .errors import InputError


def train_bpe(bodies: Iterable[str], vocab_size: int) -> str:
    """A `tokenizers` file (JSON text) of `vocab_size` words learnt from message bodies.

    The markers `<|role|>` and `<|end|>` are special tokens; all bytes are in the alphabet, so any
    text can be encoded. Equal input gives an equal file.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise InputError(
            "training a tokenizer needs `tokenizers`; pip install megatron-tree-cp[data]"
        ) from error
    markers = [*map(marker, ROLES), END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(markers) + len(alphabet)
    if vocab_size < least:
        raise InputError(f"vocab_size: {vocab_size} is less than the {least} markers and bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=markers,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(bodies, trainer)
    return str(tokenizer.to_str(pretty=False))
