"""The CPU shim: what Megatron asks of CUDA is answered, and nothing depends on the CP size."""

from __future__ import annotations

from tests.distributed import run_ranks


def shimmed(rank: int, world_size: int):
    import torch

    from megatron_tree_cp.megatron import cpu

    cpu.enable()
    zeros = torch.zeros
    cpu.enable()  # idempotent
    assert torch.zeros is zeros
    import megatron.training.initialize as initialize
    from megatron.core.datasets.utils import compile_helpers

    devices = {
        str(torch.zeros(2, device="cuda").device),
        str(torch.zeros(2, device=torch.device("cuda", 1)).device),
        str(torch.zeros(2).to("cuda:0").device),
        str(torch.zeros(2).cuda().pin_memory().device),
        str(next(torch.nn.Linear(2, 2).cuda().parameters()).device),
        str(torch.cuda.current_device()),
    }
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        stream.record_event().synchronize()
    before = torch.get_rng_state()
    initialize._warmup_jit_function()
    compile_helpers()
    return {
        "devices": devices,
        "type": torch.zeros(1).type(),
        "available": torch.cuda.is_available(),
        "rng untouched": torch.equal(before, torch.get_rng_state()),
        "repeatable": torch.cuda.device_count(),
    }


def test_cuda_requests_land_on_the_cpu():
    (seen,) = run_ranks(1, shimmed, timeout=90)
    assert seen["devices"] == {"cpu"}
    # Optimizers sort parameters by this string.
    assert seen["type"] == "torch.cuda.FloatTensor"
    assert not seen["available"]
    assert seen["rng untouched"]
    assert seen["repeatable"] == 1
