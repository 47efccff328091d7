"""scripts/measure.sh on CPU ranks: what it writes, what it skips, what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure.sh"


def measure(out: Path, *steps: str, limit: str = "100") -> subprocess.CompletedProcess:
    env = {**os.environ, "CPU": "1", "GPUS": "1", "PYTHON": sys.executable, "LIMIT": limit}
    return subprocess.run(
        ["bash", SCRIPT, out, *steps], env=env, capture_output=True, text=True, timeout=300
    )


@pytest.mark.timeout(320)
def test_a_step_is_measured_once(tmp_path):
    done = measure(tmp_path, "windows")
    assert done.returncode == 0, done.stderr
    (record,) = json.loads((tmp_path / "windows.json").read_text())
    assert record["preset"] == "long_chain" and record["variant"].endswith("w1024")
    again = measure(tmp_path, "windows")
    assert again.returncode == 0 and again.stdout == "windows: there\n"


def test_an_unknown_step_measures_nothing(tmp_path):
    done = measure(tmp_path / "out", "windows", "gnd")
    assert done.returncode == 2 and "no step gnd; there are calibrate" in done.stderr
    assert not list((tmp_path / "out").iterdir())


def test_a_step_that_fails_says_so_and_leaves_no_file(tmp_path):
    done = measure(tmp_path, "windows", limit="0.1")
    assert done.returncode == 1 and "failed" in done.stderr
    assert not (tmp_path / "windows.json").exists()


def test_every_step_is_a_function():
    text = SCRIPT.read_text()
    steps = text.split("STEPS=(")[1].split(")")[0].split()
    assert steps and all(f"\n{step}() {{" in text for step in steps)
