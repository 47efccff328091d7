"""`tree-cp pack`, `capacity` and `tokenizer`: files written whole, or not at all."""

import json
from pathlib import Path

import pytest

from megatron_tree_cp.cli import main
from megatron_tree_cp.tree import load_rows, load_tokenizer

RECORDS = [{"tokens": [1, 2, 3, tail]} for tail in (4, 5)]
CHAT = {"talk": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tokens.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    Path("chats.jsonl").write_text(json.dumps(CHAT))
    return tmp_path


def test_pack_writes_rows_and_summary(here, capsys):
    files = ["--output", "rows.npz", "--summary", "summary.json"]
    assert main(["pack", "tokens.jsonl", "--tree-max-tokens", "8", *files]) == 0
    (row,) = load_rows("rows.npz")
    assert row.num_tokens == 4
    summary = json.loads(Path("summary.json").read_text())
    assert summary["stored_tokens"] == 4 and len(summary["fingerprint"]) == 64
    assert "4 in rows" in capsys.readouterr().out


def test_pack_chats_and_keep_last(here, capsys):
    options = ["--messages-key", "talk", "--tree-tokenizer", "bytes", "--keep-last"]
    assert main(["pack", "chats.jsonl", "--max-tokens", "64", *options]) == 0
    assert "logical tokens  37" in capsys.readouterr().out


def test_capacity(capsys):
    sizes = ["--max-tokens", "40960", "81920"]
    assert main(["capacity", "--prompt", "5000", "--completion", "100", *sizes]) == 0
    assert capsys.readouterr().out.count("as a tree") == 2


def test_tokenizer(here, capsys):
    pytest.importorskip("tokenizers")
    options = ["--messages-key", "talk", "--vocab-size", "270", "--output", "bpe.json"]
    assert main(["tokenizer", "chats.jsonl", *options]) == 0
    assert load_tokenizer("bpe.json").encode("ab")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["unpack"], "invalid choice: 'unpack'"),
        (["pack"], "required: PATH, --max-tokens"),
        (["pack", "tokens.jsonl", "--max-tokens", "x"], "invalid int value: 'x'"),
        (["pack", "tokens.jsonl", "--max-tokens", "8", "--output", "rows"], "ends in .npz"),
        (["pack", "tokens.jsonl", "--max-tokens", "8", "--output", "no/a.npz"], "no/a.npz: cannot"),
        (["pack", "tokens.jsonl", "--max-tokens", "8", "--vocab-size", "5"],
         "tokens.jsonl:2: trajectory 1: tokens[3]: 5 is outside the vocabulary of 5"),
        (["pack", "tokens.jsonl", "--max-tokens", "2"], "tokens.jsonl:1: trajectory 0: 3 stored"),
        (["pack", "chats.jsonl", "--max-tokens", "64"], "with --messages-key; it has 'talk'"),
        (["capacity", "--prompt", "0", "--completion", "1", "--max-tokens", "8"], "prompt: "),
        (["tokenizer", "tokens.jsonl", "--output", "bpe.json"], "record 0: has no 'messages'"),
        (["tokenizer", "chats.jsonl", "--messages-key", "talk", "--vocab-size", "9",
          "--output", "bpe.json"], "vocab_size: 9 is less than"),
    ],
)  # fmt: skip
def test_bad_input_writes_nothing(arguments, message, here, capsys):
    pytest.importorskip("tokenizers")
    before = sorted(here.iterdir())
    files = ["--summary", "summary.json"] if arguments[:1] == ["pack"] else []
    assert main([*arguments, *files]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert sorted(here.iterdir()) == before
