"""read_rollouts: formats, rendering, and the one line that bad files get."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_tree_cp.tree import InputError, load_tokenizer, pack_trajectories, read_rollouts

BYTES = load_tokenizer("bytes")
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "x1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "x2", "type": "function", "function": {"name": "g", "arguments": "not json"}},
        ],
        "refusal": None,
    },
    {"role": "tool", "tool_call_id": "x1", "name": "f", "content": "r"},
    {"role": "assistant", "content": "é"},
]
RENDERED = (
    "<|system|>s<|end|><|user|>uv<|end|><|assistant|>"
    '{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": "not json"}<|end|>'
    "<|tool|>f\nr<|end|><|assistant|>é<|end|>"
)


def write(path: Path, text: str | list) -> Path:
    path.write_text(text if isinstance(text, str) else "\n".join(map(json.dumps, text)))
    return path


def test_chat_is_rendered_and_only_assistant_bodies_are_trained(tmp_path):
    (trajectory,) = read_rollouts(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), BYTES)
    assert bytes(trajectory.tokens.tolist()).decode() == RENDERED
    trained = bytes(trajectory.tokens[trajectory.loss_mask].tolist()).decode()
    calls = RENDERED.split("<|assistant|>")[1].split("<|tool|>")[0]
    assert trained == calls + "é<|end|>"


def test_chat_fields_and_untrained_messages(tmp_path):
    chat = [*CHAT[:2], {"role": "assistant", "content": "a", "weight": 0}, CHAT[-1]]
    record = {"messages": chat, "weights": 0.5, "advantages": -2, "group": "g", "task_id": 3}
    (trajectory,) = read_rollouts(write(tmp_path / "a.jsonl", [record]), BYTES)
    assert trajectory.loss_mask.sum() == len("é<|end|>".encode())
    assert set(trajectory.weights) == {0.5} and set(trajectory.advantages) == {-2}
    assert trajectory.group == "g" and trajectory.source == f"{tmp_path / 'a.jsonl'}:1"


def test_token_records(tmp_path):
    record = {
        "tokens": [3, 1, 2],
        "loss_mask": [False, False, True],
        "weights": [0, 1, 2],
        "advantages": [None, None, 0.5],
        "old_logprobs": [None, None, -1],
        "group": 4,
    }
    path = write(tmp_path / "a.jsonl", [record, {"tokens": [1, 2]}])
    first, second = read_rollouts([path])  # no tokenizer needed
    assert first.tokens.tolist() == [3, 1, 2] and first.group == 4
    assert np.isnan(first.old_logprobs[0]) and first.trained().tolist() == [False, False, True]
    assert second.loss_mask is None


def test_json_list_json_lines_and_several_files_read_alike(tmp_path):
    records = [{"tokens": [i, i + 1]} for i in range(3)]
    as_list = write(tmp_path / "a.json", "\ufeff" + json.dumps(records, indent=1))
    as_lines = write(tmp_path / "b.jsonl", "\n\n" + "\n".join(map(json.dumps, records)) + "\n")
    seen = []
    both = read_rollouts([as_list, as_lines], progress=lambda *place: seen.append(place))
    assert [t.tokens.tolist() for t in both] == 2 * [r["tokens"] for r in records]
    lines = [int(t.source.rsplit(":", 1)[1]) for t in both]
    assert lines == [2, 8, 14, 3, 4, 5]
    assert seen[-1][0] <= seen[-1][1]


def test_ignored_keys_are_not_read(tmp_path):
    chat = [{"role": "assistant", "content": "a", "thought": "hm"}]
    path = write(tmp_path / "a.jsonl", [{"messages": chat, "tools": [{}], "extra": 1}])
    (trajectory,) = read_rollouts(path, BYTES, ignore_keys=["thought", "tools", "extra"])
    assert len(trajectory) == len("<|assistant|>a<|end|>")


TOKENS = {"tokens": [1, 2, 3]}
ASSISTANT = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a: has no records"),
        ("[]", "a: has no records"),
        ("{", "a:1: not JSON: Expecting property name"),
        ('{"tokens": [1, 2]}\nx', "a:2: not JSON: Expecting value"),
        ('[{"tokens": [1, 2]}\n {}]', "a:2: not JSON: expected a comma or the end of the list"),
        ('[{"tokens": [1, 2]},\n]', "a:2: not JSON: Expecting value"),
        ('[{"tokens": [1, 2]}', "a:1: not JSON: expected a comma or the end of the list"),
        ('[{"tokens": [1, 2]}]\n\n{}', "a:3: not JSON: something follows the list"),
        ("[" * 200_000, "a:1: not JSON: "),
        ('{"tokens": [%s]}' % ("9" * 5000), "a:1: not JSON: Exceeds the limit"),
        ("7", "a:1: record 0: expected an object, got int"),
        ([TOKENS, {"token": [1]}], "a:2: record 1: has neither 'tokens' nor 'messages'"),
        ([{"traj": [ASSISTANT]}], "with --messages-key; it has 'traj'"),
        ([{"messages": [ASSISTANT], "tokens": [1]}], "a:1: record 0: has both tokens and messages"),
        ([TOKENS | {"mask": [1, 1, 1]}], "record 0: mask: unknown key; misspelt, or --ignore-keys"),
        ([TOKENS | {"reward": 1}], "record 0: reward: unknown key"),
        ([{"tokens": 7}], "record 0: tokens: expected a list of integers, got int"),
        ([{"tokens": [1, 2.0]}], "record 0: tokens[1]: expected an integer, got 2.0"),
        ([{"tokens": [1, True]}], "record 0: tokens[1]: expected an integer, got true"),
        ([{"tokens": [1, [2, 3]]}], "record 0: tokens[1]: expected an integer, got [2, 3]"),
        ([{"tokens": [1, "2"]}], 'record 0: tokens[1]: expected an integer, got "2"'),
        ([{"tokens": [1, 2**63]}], "record 0: tokens[1]: 9223372036854775808 does not fit"),
        ([{"tokens": [1, -2]}], "record 0: tokens[1]: token ids are not negative, got -2"),
        ([{"tokens": []}], "record 0: tokens: a trajectory needs tokens"),
        ([TOKENS | {"loss_mask": [1, 1]}], "record 0: loss_mask: 2 values for 3 tokens"),
        ([TOKENS | {"loss_mask": [1, None, 1]}], "loss_mask[1]: expected a number, got null"),
        ([TOKENS | {"weights": [1, "x", 1]}], 'weights[1]: expected a number, got "x"'),
        ([TOKENS | {"weights": [1, float("nan"), 1]}], "weights[1]: must be finite, got nan"),
        ([TOKENS | {"weights": [1, 10**400, 1]}], "weights[1]: 1000"),
        ([TOKENS | {"weights": "1"}], "weights: expected a list of numbers, got str"),
        ([TOKENS | {"advantages": [0, None, 1]}], "advantages[1]: must be finite, got nan"),
        ([TOKENS | {"old_logprobs": [0, -1, float("-inf")]}], "old_logprobs[2]: must be finite"),
        ([TOKENS | {"group": [1]}], "group: expected an integer or a string"),
        ([{"messages": []}], "record 0: messages: has no messages"),
        ([{"messages": "hi"}], "record 0: messages: expected a list of messages, got text"),
        ([{"messages": ["hi"]}], "messages[0]: expected an object, got text"),
        ([{"messages": [{"content": "a"}]}], "messages[0].role: expected one of system"),
        ([{"messages": [{"role": "robot"}]}], "messages[0].role: expected one of system"),
        (
            [{"messages": [ASSISTANT | {"content": 3}]}],
            "messages[0].content: expected text or null",
        ),
        ([{"messages": [ASSISTANT | {"content": "\ud800"}]}], "content: character 0 is half a"),
        (
            [{"messages": [ASSISTANT | {"content": [{"type": "image_url"}]}]}],
            "messages[0].content[0]: only parts of type text",
        ),
        (
            [{"messages": [ASSISTANT | {"reasoning_content": "hm"}]}],
            "messages[0].reasoning_content: unknown key, which rendering would leave out; "
            "--ignore-keys reasoning_content does so",
        ),
        ([{"messages": [ASSISTANT | {"weight": 0.5}]}], "messages[0].weight: expected 0 or 1"),
        ([{"messages": [ASSISTANT | {"tool_calls": [{}]}]}], "messages[0].tool_calls[0]: expected"),
        (
            [{"messages": [{"role": "user", "tool_calls": [{}]}]}],
            "messages[0].tool_calls: only the assistant calls tools",
        ),
        ([{"messages": [ASSISTANT], "extra": 1}], "record 0: extra: unknown key"),
        ([{"messages": [ASSISTANT], "weights": [1]}], "weights: a chat takes one number"),
        (
            [{"messages": [ASSISTANT], "tools": [{}]}],
            "tools: only a tokenizer with a chat template",
        ),
    ],
)
def test_bad_files(content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("a"), content)
    with pytest.raises(InputError) as caught:
        read_rollouts("a", BYTES)
    assert message in str(caught.value) and str(caught.value).startswith("a:")
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path):
    (tmp_path / "latin").write_bytes(b"\n\xe9")
    for path, message in (
        (tmp_path / "missing", "missing: cannot read: No such file"),
        (tmp_path, ": cannot read: Is a directory"),
        (tmp_path / "latin", "latin:2: not UTF-8"),
    ):
        with pytest.raises(InputError, match=message):
            read_rollouts(path)
    with pytest.raises(InputError, match="no rollout files"):
        read_rollouts([])


def test_errors_after_reading_still_name_file_and_line(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"tokens": [1, 2]}, {"tokens": list(range(40))}])
    with pytest.raises(InputError, match=r"a.jsonl:2: trajectory 1: tokens\[30\]: 30 is outside"):
        read_rollouts(path, vocab_size=30)
    with pytest.raises(InputError, match=r"a.jsonl:2: trajectory 1: 39 stored tokens do not fit"):
        pack_trajectories(read_rollouts(path), 8)
    write(path, [{"tokens": [1]}])
    with pytest.raises(InputError, match=r"a.jsonl:1: trajectory 0: 1 token leaves nothing"):
        pack_trajectories(read_rollouts(path), 8)
    write(path, [{"messages": [ASSISTANT]}])
    with pytest.raises(InputError, match="chats need a tokenizer; give --tree-tokenizer"):
        read_rollouts(path)
