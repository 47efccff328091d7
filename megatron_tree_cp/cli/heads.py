"""Heads and dims as the command line writes them."""

from __future__ import annotations

from ..tree.errors import InputError


def attention_heads(text: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim of ``Q/KV/D``."""
    query_heads, kv_heads, head_dim = _numbers(text, "--heads", "Q/KV/D", "32/4/128")
    return query_heads, kv_heads, head_dim


def gdn_heads(text: str) -> tuple[int, int, int, int]:
    """Key heads, value heads, key dim and value dim of ``K/V/DK/DV``."""
    form, example = "K/V/DK/DV", "16/32/128/128"
    key_heads, value_heads, key_dim, value_dim = _numbers(text, "--gdn-heads", form, example)
    return key_heads, value_heads, key_dim, value_dim


def _numbers(text: str, option: str, form: str, example: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split("/"))
    except ValueError:
        found = ()
    if len(found) != form.count("/") + 1 or min(found, default=0) < 1:
        raise InputError(f"{option} {text}: write it as {form}, like {example}")
    return found
