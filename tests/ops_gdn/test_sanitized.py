"""What scripts/sanitize.sh runs still runs: through Triton's interpreter where no GPU is."""

import pytest

from tests.kernel_script import run_script

SMALL = """
from tests import sanitized
sanitized.small_kernels("cpu")
"""

STEPS = """
import sys
from tests import sanitized
for step in ("own", "flash"):
    sys.argv[1:] = [step]
    sanitized.main()
"""


def test_small_kernels_interpreted():
    out = run_script(SMALL, "cpu")
    assert out.split() == ["expanded", "equal", "merged", "added"]


@pytest.mark.gpu
def test_on_gpu():
    assert "flash: done" in run_script(STEPS, "cuda")
