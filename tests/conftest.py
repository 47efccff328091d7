"""What every test shares: one thread a process, the slow and gpu tiers."""

import os

# Before torch is imported anywhere: the tests are many small processes on few cores, and a fixed
# thread count also fixes the order of fp32 sums.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "repo",
    deadline=None,  # a shared machine makes single examples slow at random
    derandomize=True,  # a red run must be red again
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        slow = pytest.mark.skip(reason="slow tier: runs with --all")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(slow)
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if on_gpu:
        import torch  # only now: collecting the numpy rooms should not cost a torch import

        if not torch.cuda.is_available():
            no_gpu = pytest.mark.skip(reason="no CUDA device")
            for item in on_gpu:
                item.add_marker(no_gpu)
