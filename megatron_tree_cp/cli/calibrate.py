"""Measure what this device and its links cost, and write a cost profile for the planner."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..plan.profile import load_document
from ..tree.errors import InputError
from ..tree.row_files import write_atomically
from .bench_ranks import identity, ranks
from .heads import attention_heads

QUICK_SCALE = 16
"""Divides the lengths of all measured rows under --quick."""

GDN_AHEAD = 8
"""Matrix products that hide the host's part of a layer's calls, which launch more than others."""

PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "flash-linear-attention", "tilelang", "scipy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE.json", help="the profile")
    add("--samples", type=Path, metavar="FILE.json", help="write every measurement too")
    add("--resume", action="store_true", help="keep what --samples holds, measure what it lacks")
    add("--from-samples", type=Path, metavar="FILE.json", help="fit these, with the same options")
    add("--base", type=Path, metavar="FILE.json", help="profile with what is not measured now")
    add("--name", metavar="TEXT", help="of the profile; default: the device's name")
    add("--hidden-size", type=int, default=4096, metavar="N", help="of the token-local work")
    add("--ffn-size", type=int, default=10_880, metavar="N", help="of its gated MLP")
    add("--repeats", type=int, default=5, metavar="N", help="calls per sample; the median counts")
    add("--gdn", action="store_true", help="also the Gated DeltaNet operators")
    add("--quick", action="store_true", help="tiny work, to try the command: no useful profile")
    add_device_arguments(parser)


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured where."""
    add = parser.add_argument
    add("--cp", nargs="+", type=int, default=[1], metavar="N", help="context-parallel sizes")
    add("--heads", default="32/4/128", metavar="Q/KV/D", help="query heads, KV heads, head dim")
    add("--impl", default="auto", metavar="NAME", help="attention kernel")
    add("--heat", type=float, default=60.0, metavar="MS", help="of a call before it is timed")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--commit", default="unknown", metavar="HASH", help="recorded")
    add("--hardware", metavar="TEXT", help="recorded; default: the device's name")


def heat_ms(args: argparse.Namespace) -> float:
    """ms of its own calls before a case is timed: a CPU has no power limit that shows."""
    if args.heat < 0:
        raise InputError("--heat must be at least 0")
    return float(args.heat) if args.device == "cuda" else 0.0


def run(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from ..bench.calibration.component import Component, Sample, collect
    from ..bench.calibration.fit import fit_profile
    from ..bench.calibration.head_dims import head_dim_component
    from ..bench.calibration.links import link_components
    from ..bench.calibration.measure import Workload, device_components, processors_of
    from ..bench.calibration.recurrence import chained_components, recurrent_components
    from ..bench.calibration.report import (
        fit_table,
        profile_document,
        read_samples,
        samples_text,
    )
    from ..bench.calibration.watch import DeviceWatch

    for name in ("hidden_size", "ffn_size", "repeats"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1")
    if args.from_samples and max(args.cp) > 1:
        raise InputError("--from-samples takes the CP sizes of its samples: leave --cp out")
    if args.resume and (args.from_samples or not args.samples):
        raise InputError("--resume goes with --samples FILE, and not with --from-samples")
    base = load_document(args.base) if args.base else None
    scale = QUICK_SCALE if args.quick else 1
    dtype = getattr(torch, args.dtype)
    sizes = (args.hidden_size, args.ffn_size, scale)
    work = Workload(*attention_heads(args.heads), dtype, args.impl, *sizes)
    with ranks(args) as here:
        components = [
            *device_components(work, here.device),
            head_dim_component(work, here.device),
        ]
        gdn = recurrent_components(dtype, scale, here.device) if args.gdn else []
        samples: dict[str, list[Sample]] = {}
        origin = identity(args, here.device, PACKAGES)
        conditions = {**_conditions(args, origin), "processors": processors_of(here.device)}
        if args.resume:
            samples = here.of_first_rank(
                lambda: read_samples(args.samples, conditions)[0] if args.samples.exists() else {}
            )

        def keep() -> None:
            if args.samples and here.rank == 0:
                text = samples_text(samples, conditions)
                write_atomically(args.samples, text.encode())

        def measure(parts: list[Component], group: Any, ahead: int = 2) -> None:
            watch = DeviceWatch(here.device, group, args.repeats, ahead, heat_ms(args))
            missing = [part for part in parts if part.name not in samples]
            collect(missing, watch, here.say, samples, keep)

        if here.rank == 0 and not args.from_samples:
            measure(components, None)
            if gdn:
                measure(gdn, None, GDN_AHEAD)
        components += gdn
        if args.from_samples:
            samples, conditions = read_samples(args.from_samples)
            if args.gdn and "gdn_pass" not in samples:
                raise InputError(f"{args.from_samples}: no gdn_pass samples; measure with --gdn")
            for name in samples:
                kind, _, cp_size = name.partition("_cp")
                if kind == "exchange":
                    components += link_components(work, here.device, int(cp_size), None)
                elif kind == "gdn_chained" and args.gdn:
                    components += chained_components(dtype, scale, here.device, int(cp_size), None)
        for cp, group in here.groups.items():
            if here.world > 1:
                dist.barrier()
            if cp > 1 and here.rank < cp:
                links = link_components(work, here.device, cp, group)
                measure(links, group)
                components += links
                if args.gdn:
                    chained = chained_components(dtype, scale, here.device, cp, group)
                    measure(chained, group, GDN_AHEAD)
                    components += chained
        if here.world > 1:
            dist.barrier()
        if here.rank:
            return
        keep()
        coefficients, fits = fit_profile(components, samples)
        coefficients["processors"] = conditions.get("processors")
        origin["device"] = origin.pop("hardware")
        name = args.name or origin["device"] + ", quick" * args.quick
        origin["command"] = _command(args)
        document = profile_document(name, coefficients, fits, origin, base)
    write_atomically(args.out, (document.to_json() + "\n").encode())
    console = Console(width=150)
    console.print(fit_table(fits))
    kept = ", ".join(document.unmeasured) or "nothing"
    console.print(f"{args.out}: profile {name!r}; not measured, defaults kept: {kept}")


def _conditions(args: argparse.Namespace, origin: Mapping[str, Any]) -> dict[str, Any]:
    """What samples must share to enter one fit."""
    names = ("heads", "dtype", "impl", "hidden_size", "ffn_size", "repeats", "heat", "quick")
    options = {name: getattr(args, name) for name in names}
    return {**options, **{k: origin[k] for k in ("hardware", "software", "commit")}}


def _command(args: argparse.Namespace) -> str:
    words = [f"torchrun --nproc-per-node {max(args.cp)} -m megatron_tree_cp.cli calibrate"]
    words += [f"--cp {' '.join(map(str, args.cp))} --device {args.device} --heads {args.heads}"]
    words += [f"--dtype {args.dtype} --impl {args.impl} --hidden-size {args.hidden_size}"]
    words += [f"--ffn-size {args.ffn_size} --repeats {args.repeats} --heat {args.heat:g}"]
    words += [f"--base {args.base.name}"] if args.base else []
    return " ".join(words + ["--gdn"] * args.gdn + ["--quick"] * args.quick)
