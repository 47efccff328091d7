"""Tokenizers: what they encode, what they never turn into special tokens, what they refuse."""

import json
import sys
from types import ModuleType

import pytest

from megatron_tree_cp.tree import InputError, load_tokenizer, read_rollouts
from megatron_tree_cp.tree.bpe import train_bpe

MARKERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory):
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("bpe") / "bpe.json"
    path.write_text(train_bpe(["the cat sat on the mat"] * 3, 280))
    return path


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("é<") == [0xC3, 0xA9, ord("<")]
    assert bytes(tokenizer.encode_marker("<|end|>")) == b"<|end|>"
    assert tokenizer.vocab_size == 256


def test_trained_bpe_round_trips_and_is_repeatable(bpe_file):
    tokenizer = load_tokenizer(str(bpe_file))
    assert 262 < tokenizer.vocab_size <= 280
    assert len(tokenizer.encode("the cat")) < len("the cat")
    assert tokenizer._backend.decode(tokenizer.encode("the ☃\n")) == "the ☃\n"
    assert train_bpe(["the cat sat on the mat"] * 3, 280) == bpe_file.read_text()


def test_markers_are_one_token_and_text_never_is(bpe_file):
    tokenizer = load_tokenizer(str(bpe_file))
    special = {tuple(tokenizer.encode_marker(marker)) for marker in MARKERS}
    assert len(special) == len(MARKERS) and all(len(ids) == 1 for ids in special)
    quoted = tokenizer.encode("a <|end|> b")
    assert not {(token,) for token in quoted} & special and len(quoted) > 5


def test_fingerprints_differ(bpe_file, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(train_bpe(["entirely different words"], 280))
    names = ("bytes", str(bpe_file), str(other))
    assert len({load_tokenizer(name).fingerprint for name in names}) == 3


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("words", "tokenizer 'words': expected bytes, FILE.json or hf:DIR"),
        ("missing.json", "missing.json: cannot read: No such file"),
        ("bad.json", "bad.json: not a tokenizers file"),
    ],
)
def test_bad_names(name, match, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=match) as caught:
        load_tokenizer(name)
    assert "\n" not in str(caught.value)


def test_too_few_words():
    pytest.importorskip("tokenizers")
    with pytest.raises(InputError, match="vocab_size: 100 is less than"):
        train_bpe(["a"], 100)


class FakeBackend:
    """As much of a `transformers` tokenizer as we use; words are tokens."""

    def __init__(self, template):
        self.chat_template = template
        self.calls = []

    def __len__(self):
        return 50

    def encode(self, text, add_special_tokens, split_special_tokens):
        assert not add_special_tokens and split_special_tokens
        return [len(word) for word in text.split()]

    def get_vocab(self):
        return {"<|end|>": 49}

    def apply_chat_template(self, messages, **options):
        self.calls.append((messages, options))
        if "raise" in self.chat_template:
            raise RuntimeError("roles must\nalternate")
        mask = [int(message["role"] == "assistant") for message in messages]
        return {"input_ids": list(range(len(mask))), "assistant_masks": mask}


@pytest.fixture
def fake_transformers(monkeypatch, tmp_path):
    """`load_tokenizer("hf:...")` with a backend whose chat template the test sets."""
    backend = FakeBackend(None)
    module = ModuleType("transformers")

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(path, local_files_only, trust_remote_code):
            assert local_files_only is True and trust_remote_code is False
            return backend

    module.AutoTokenizer = AutoTokenizer
    monkeypatch.setitem(sys.modules, "transformers", module)
    (tmp_path / "tokenizer.json").write_text("{}")
    rollouts = tmp_path / "rollouts.jsonl"
    chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": None}]
    rollouts.write_text(json.dumps({"messages": chat, "tools": [{"name": "f"}]}))
    return backend, f"hf:{tmp_path}", rollouts


def test_a_chat_template_replaces_our_rendering(fake_transformers):
    backend, name, rollouts = fake_transformers
    backend.chat_template = "{%- generation %}{{ x }}{% endgeneration %}"
    (trajectory,) = read_rollouts(rollouts, load_tokenizer(name))
    assert trajectory.tokens.tolist() == [0, 1] and trajectory.trained().tolist() == [False, True]
    ((messages, options),) = backend.calls
    assert messages[1]["content"] == "" and options["tools"] == [{"name": "f"}]
    assert options["return_assistant_tokens_mask"] is True


def test_without_a_template_we_render(fake_transformers):
    _, name, rollouts = fake_transformers
    rollouts.write_text(json.dumps({"messages": [{"role": "user", "content": "hi there"}]}))
    (trajectory,) = read_rollouts(rollouts, load_tokenizer(name))
    assert trajectory.tokens.tolist() == [len("<|user|>"), 2, 5, 49]


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ messages }}", "does not mark what the assistant said; put {% generation %}"),
        ("{% generation %}raise", "its chat template fails: roles must alternate"),
    ],
)
def test_templates_that_cannot_serve(template, match, fake_transformers):
    backend, name, rollouts = fake_transformers
    backend.chat_template = template
    with pytest.raises(InputError) as caught:
        read_rollouts(rollouts, load_tokenizer(name))
    assert match in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{rollouts}:1: record 0: ")


def test_missing_directory(fake_transformers):
    with pytest.raises(InputError, match="hf:nowhere: not a directory"):
        load_tokenizer("hf:nowhere")


def test_real_chat_template(tmp_path):
    """With `transformers` itself, where it is installed: template, mask, sandbox."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer.from_str(train_bpe(["user assistant hello"], 280))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    fast.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}"
        "{% endif %}{% endfor %}"
    )
    fast.save_pretrained(tmp_path)
    path = tmp_path / "rollouts.jsonl"
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello!"}]
    path.write_text(json.dumps({"messages": chat}))
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    (trajectory,) = read_rollouts(path, tokenizer)
    assert backend.decode(trajectory.tokens.tolist()) == "[user]hello[assistant]hello!"
    assert backend.decode(trajectory.tokens[trajectory.loss_mask].tolist()) == "hello!"
    special = tokenizer.encode_marker("<|end|>")
    assert len(special) == 1 and special[0] not in tokenizer.encode("a <|end|> b")
