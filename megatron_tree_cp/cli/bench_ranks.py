"""What all benchmarks share on the command line: options, devices, ranks and how to name them."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..plan.profile import CostProfile, load_profile
from ..plan.shipped_profiles import profile_for
from ..tree.errors import InputError

if TYPE_CHECKING:
    from ..bench.timing import Clock

T = TypeVar("T")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every operator."""
    add = parser.add_argument
    add("--preset", nargs="+", required=True, metavar="NAME", help="workload presets")
    add("--cp", nargs="+", type=int, default=[1], metavar="N", help="context-parallel sizes")
    add("--impl", default="auto", metavar="NAME", help="kernel")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--warmup", type=int, default=16, metavar="N", help="rows that are not measured")
    add("--rows", type=int, default=16, metavar="N", help="rows that are")
    add(
        "--pause",
        type=float,
        default=0.0,
        metavar="MS",
        help="before each timed call: keeps a device below its power limit",
    )
    add("--kernels", type=int, default=0, metavar="N", help="print the N longest kernels of a row")
    add("--tokens", type=int, metavar="N", help="tokens a row, instead of the preset's")
    add("--profile", metavar="FILE", help="cost profile; default: the one for this device")
    add(
        "--fill",
        action="store_true",
        help="run as many groups at once as there are ranks for, the slowest counts: cards differ",
    )
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--commit", default="unknown", metavar="HASH", help="recorded in the evidence")
    add("--hardware", metavar="TEXT", help="recorded in the evidence; default: the device's name")
    add("--evidence", type=Path, metavar="FILE.json", help="write the evidence file")


@dataclass
class Ranks:
    """This process among those of the benchmark."""

    device: Any
    world: int
    rank: int
    groups: dict[int, Any]
    """Process group of N ranks by N, None for one rank: of the first N, where they fill of this
    rank's N."""

    fill: bool = False
    """Every rank works in a group of every size."""

    started: float = field(default_factory=time.perf_counter)

    def works(self, cp: int) -> bool:
        """This rank belongs to the group, or to one of the groups, of ``cp`` ranks."""
        return self.fill or self.rank < cp

    def clock(self, cp: int, pause_ms: float = 0.0) -> Clock:
        """The clock of all ranks that work in groups of ``cp``."""
        import torch.distributed as dist

        from ..bench.timing import Clock

        together = dist.group.WORLD if self.fill and self.world > 1 else self.groups[cp]
        return Clock(together, self.device, pause_ms)

    def of_first_rank(self, make: Callable[[], T]) -> T:
        """What the first rank makes, on every rank; its InputError is raised on all."""
        import torch.distributed as dist

        made: list[Any] = [None]
        if self.rank == 0:
            try:
                made = [make()]
            except InputError as error:
                made = [error]
        if self.world > 1:
            dist.broadcast_object_list(made, device=self.device)
        if isinstance(made[0], InputError):
            raise made[0]
        found: T = made[0]
        return found

    def say(self, text: str) -> None:
        """A line with the time, from the first rank, at once."""
        if self.rank == 0:
            elapsed = time.perf_counter() - self.started
            now = datetime.datetime.now().strftime("%H:%M:%S")
            print(f"[{now} +{elapsed:.1f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def ranks(args: argparse.Namespace) -> Iterator[Ranks]:
    """Join the processes that torchrun started; InputError when they are too few."""
    import torch.distributed as dist

    device = _device(args.device)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if max(args.cp) > world:
        raise InputError(f"--cp {max(args.cp)} needs as many processes: start them with torchrun")
    if world > 1:
        dist.init_process_group(
            "nccl" if args.device == "cuda" else "gloo",
            device_id=device if args.device == "cuda" else None,
        )
    options = None
    if args.device == "cuda" and world > 1:  # as in training: see megatron/validation.py
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    fill = getattr(args, "fill", False)
    groups: dict[int, Any] = {}
    for cp in sorted(set(args.cp)):
        if fill and world % cp:
            raise InputError(f"--fill: {world} ranks do not make groups of {cp}")
        groups[cp] = None
        for first in range(0, world if fill else cp, cp) if cp > 1 else ():
            group = dist.new_group(list(range(first, first + cp)), pg_options=options)
            if first <= rank < first + cp:
                groups[cp] = group
    yield Ranks(device, world, rank, groups, fill)
    if world > 1:
        dist.destroy_process_group()


def profile_of(args: argparse.Namespace, here: Ranks) -> CostProfile:
    """The cost profile that ``--profile`` names, or else the one for this device."""
    if args.profile:
        return load_profile(args.profile)
    profile, note = profile_for(_device_name(here.device))
    here.say(note)
    return profile


def identity(args: argparse.Namespace, device: Any, packages: Sequence[str]) -> dict[str, Any]:
    """Fields of an evidence record that say where and when it was measured."""
    software = {}
    for package in ("torch", "triton", *packages):
        try:
            software[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "hardware": args.hardware or _device_name(device),
        "software": software,
        "commit": args.commit,
        "date": datetime.date.today().isoformat(),
    }


def command(args: argparse.Namespace, operator: str, options: Sequence[str]) -> str:
    """The command line that repeats a measurement; ``options`` are those of the operator."""
    words = [f"torchrun --nproc-per-node {max(args.cp)} -m megatron_tree_cp.cli bench {operator}"]
    words += [f"--preset {' '.join(args.preset)}", f"--cp {' '.join(map(str, args.cp))}", *options]
    words += [f"--dtype {args.dtype} --impl {args.impl}"]
    words += [f"--warmup {args.warmup} --rows {args.rows}"]
    words += ["--fill"] if args.fill else []
    if args.pause:
        words.append(f"--pause {args.pause:g}")
    words += given(args, "tokens", "profile")
    return " ".join(words)


def given(args: argparse.Namespace, *names: str) -> list[str]:
    """The options that were given; of a profile its file's name, since folders are a machine's."""
    values = {name: getattr(args, name) for name in names}
    if values.get("profile"):
        values["profile"] = Path(values["profile"]).name
    return [f"--{name} {value}" for name, value in values.items() if value is not None]


def _device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _device(kind: str) -> Any:
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("no CUDA device: give --device cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())
