"""tree-cp doctor: what it finds, what it calls a problem, and its exit code."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata

import pytest

from megatron_tree_cp.cli import doctor, main


def findings(capsys, code: int = 0) -> dict[str, dict]:
    try:
        assert main(["doctor", "--json"]) == 0
        ended = 0
    except SystemExit as end:
        ended = end.code
    assert ended == code
    return {found["topic"]: found for found in json.loads(capsys.readouterr().out)}


def test_versions_and_kernels_of_this_machine(capsys):
    found = findings(capsys)
    assert found["torch"]["text"] == metadata.version("torch")
    assert found["megatron-core"] == {
        "topic": "megatron-core", "state": "ok", "text": metadata.version("megatron-core"),
    }  # fmt: skip
    if importlib.util.find_spec("transformer_engine") is None:
        assert found["transformer-engine"]["state"] == "note"
        assert "scripts/install_gpu.sh" in found["transformer-engine"]["text"]
    import torch

    if not torch.cuda.is_available():
        assert found["attention 32/4/128"]["text"].startswith("tiled (auto; flash needs a CUDA")
        assert found["Gated DeltaNet"]["text"].startswith("tiled (auto; triton needs a CUDA")
        assert "--tree-cpu" in found["devices"]["text"]


@pytest.mark.parametrize(
    ("version", "text"),
    [(None, "not installed: pip install megatron-core==0.19.2"), ("0.20.1", "0.20.1: install meg")],
)
def test_another_megatron_is_a_problem(monkeypatch, capsys, version, text):
    known = doctor._version

    def without(name, module):
        return version if name == "megatron-core" else known(name, module)

    monkeypatch.setattr(doctor, "_version", without)
    found = findings(capsys, code=1)
    assert found["megatron-core"]["state"] == "problem"
    assert found["megatron-core"]["text"].startswith(text)


def test_the_report_for_people_has_a_line_a_finding(capsys):
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok      python") and all(line.strip() for line in lines)
    assert any(line.startswith("note    fused_weight_gradient") for line in lines)
