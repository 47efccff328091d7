"""Run a script that holds a kernel to its torch form: on a GPU, or by Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined, hence a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(source: str, device: str) -> str:
    """What ``source`` prints with ``device`` (``cpu`` or ``cuda``) as its argument."""
    interpret = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    done = subprocess.run(
        [sys.executable, "-c", source, device],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **interpret},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
