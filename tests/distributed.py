"""Run a function on several gloo ranks, with a hard timeout and the failing rank's traceback.

    def body(rank, world_size, value):
        ...
        return result            # anything picklable; tensors travel by value

    results = run_ranks(2, body, value, timeout=60)

`body` is a module-level function of an importable test module. Every rank starts with the default
gloo process group, one thread, and `TEST_RANK` set. Children come from a fork server that has
imported torch once, so a run costs a fraction of a second, not an import of torch per rank.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

# What every rank would import for itself; autograd's first backward imports symbolic_shapes.
_PRELOAD = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes"]
_PRELOAD += ["hypothesis", "pytest"]
# A peer of a dead rank hangs or fails with a follow-up error; the first report is the cause.
_DIED = "died with exit code"
_GRACE_SECONDS = 1.0


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time; the message holds the rank and its traceback."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on `world_size` gloo ranks; return results by rank.

    Args:
        timeout: seconds after which all ranks are killed and `RankFailure` names those unfinished.
        env: environment variables set in the ranks beside the caller's.

    Raises:
        RankFailure: with the traceback of the rank that failed first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    environment = {**os.environ, **(env or {})}
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_child,
                    args=(rank, world_size, folder, payload, sender, environment, timeout),
                    daemon=True,
                )
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            return _collect(processes, pipes, timeout, folder)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(5)


def _collect(
    processes: list[Any], pipes: list[Connection], timeout: float, folder: str
) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) + len(failures) < len(pipes):
        pending = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        pending = {pipe: rank for pipe, rank in pending.items() if rank not in failures}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pending[pipe]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(1)
                ok, value = False, f"{_DIED} {processes[rank].exitcode}"
            if ok:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        # A rank that died is the cause, whoever noticed a closed connection before we saw it.
        dead = (rank for rank, text in failures.items() if text.startswith(_DIED))
        first = next(dead, next(iter(failures)))
        others = "".join(
            f"\n(rank {rank} followed: {text.strip().splitlines()[-1]})"
            for rank, text in failures.items()
            if rank != first
        )
        raise RankFailure(f"rank {first} of {len(pipes)} failed:\n{failures[first]}{others}")
    unfinished = [rank for rank in range(len(pipes)) if rank not in results]
    if unfinished:
        stacks = _stacks(processes, unfinished, folder)
        raise RankFailure(
            f"rank {', '.join(map(str, unfinished))} of {len(pipes)} unfinished after "
            f"{timeout:g} s{stacks}"
        )
    return [results[rank] for rank in range(len(pipes))]


def _stacks(processes: list[Any], unfinished: list[int], folder: str) -> str:
    for rank in unfinished:
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    text = ""
    for rank in unfinished:
        path = os.path.join(folder, f"stack-{rank}")
        if os.path.exists(path):
            with open(path) as file:
                text += f"\nrank {rank} stood at:\n{file.read()}"
    return text


def _child(
    rank: int,
    world_size: int,
    folder: str,
    payload: bytes,
    sender: Connection,
    environment: dict[str, str],
    timeout: float,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.environ["TEST_RANK"] = str(rank)
    with open(os.path.join(folder, f"stack-{rank}"), "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        try:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            fn, args = pickle.loads(payload)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            message = pickle.dumps((True, fn(rank, world_size, *args)))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        sender.send_bytes(message)
        sender.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Stay until the parent has every report and kills us: sockets closed by a rank that is
        # done would fail a peer that is still reading, and gloo's shutdown waits for failed peers.
        time.sleep(timeout)
    os._exit(0)
