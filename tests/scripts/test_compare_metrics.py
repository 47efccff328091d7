"""scripts/compare_metrics.py: what passes, what fails, and what is not a metrics file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compare_metrics.py"
RECORDS = [
    {"iteration": i, "loss": 4.0 - 0.1 * i, "count": 100 + i, "grad_norm": 1.0} for i in range(1, 5)
]


def compare(tmp_path: Path, second: list[dict], *flags: str) -> subprocess.CompletedProcess:
    files = []
    for name, records in (("a", RECORDS), ("b", second)):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(record) + "\n" for record in records))
    return subprocess.run(
        [sys.executable, SCRIPT, *files, *flags], capture_output=True, text=True, timeout=60
    )


def changed(**values) -> list[dict]:
    return [*RECORDS[:-1], {**RECORDS[-1], **values}]


def test_equal_runs_pass(tmp_path):
    result = compare(tmp_path, RECORDS, "--falling", "--iterations", "4", "--labels", "CP1", "CP2")
    assert result.returncode == 0, result.stderr
    assert "loss CP1" in result.stdout and "3.60000000" in result.stdout


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (changed(loss=3.6 * (1 + 2e-5)), "losses differ"),
        (changed(loss=float("nan")), "losses differ"),
        (changed(count=99), "counts"),
        (changed(grad_norm=1.1), "grad norms differ"),
        (RECORDS[:-1], "iterations differ"),
    ],
)
def test_a_difference_fails(tmp_path, second, message):
    result = compare(tmp_path, second)
    assert result.returncode == 1
    assert message in result.stderr


def test_a_negative_loss_is_compared(tmp_path):
    result = compare(tmp_path, changed(loss=-3.6))
    assert result.returncode == 1


def test_a_loss_that_rises_fails_on_request(tmp_path):
    rising = [{**record, "loss": 1.0 + record["iteration"]} for record in RECORDS]
    first = tmp_path / "rising.jsonl"
    first.write_text("\n".join(map(json.dumps, rising)))
    result = subprocess.run(
        [sys.executable, SCRIPT, first, first, "--falling"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 1 and "does not fall" in result.stderr


@pytest.mark.parametrize("record", [{"iteration": 1}, {"loss": 1.0}, ["x"], "text"])
def test_bad_files_exit_with_2(tmp_path, record):
    result = compare(tmp_path, [record])
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "b.jsonl:1" in result.stderr
