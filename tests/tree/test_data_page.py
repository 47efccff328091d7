"""docs/data.md: its records can be read, its Python says what its comments say."""

import json
import re
from pathlib import Path

import pytest

from megatron_tree_cp.cli import main
from megatron_tree_cp.tree import load_tokenizer, read_rollouts

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_records_and_rendering(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(json.dumps(json.loads(block)) for block in blocks("json")))
    tokens, chat = read_rollouts(path, load_tokenizer("bytes"))
    assert tokens.trained().sum() == 2 and chat.group == 7
    rendered = next(block for block in blocks("text") if block.startswith("<|system|>"))
    expected = rendered.strip().replace("<|end|>\n", "<|end|>")
    assert bytes(chat.tokens.tolist()).decode() == expected


def test_python():
    (code,) = blocks("python")
    scope: dict = {}
    exec(code, scope)
    checked = 0
    for line in code.splitlines():
        if line.startswith("row."):
            expression, comment = line.split("#")
            value = eval(expression, scope)
            value = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            assert comment.strip().startswith(value.replace(".", "").replace("  ", " ")), line
            checked += 1
    assert checked == 8


def plain(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize("number", [0, 1])
def test_console(number, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    if not Path("examples/rollouts.jsonl").exists():
        pytest.skip("not in this checkout")
    command, *printed = plain(blocks("console")[number])
    assert main(command.removeprefix("$ tree-cp ").split()) == 0
    output = plain(capsys.readouterr().out)
    assert [line for line in printed if line != "..."] == output[
        : len(printed) - ("..." in printed)
    ]
