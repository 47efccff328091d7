"""Measure an operator on workload presets, under torchrun for more than one device."""

from __future__ import annotations

import argparse
import datetime
import os
from importlib import metadata
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..tree.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("operator", choices=["attention"], help="what to measure")
    add("--preset", nargs="+", required=True, metavar="NAME", help="workload presets")
    add("--cp", nargs="+", type=int, default=[1], metavar="N", help="context-parallel sizes")
    add("--heads", default="32/4/128", metavar="Q/KV/D", help="query heads, KV heads, head dim")
    add("--window", type=int, metavar="N", help="sliding window in positions")
    add("--impl", default="auto", metavar="NAME", help="attention kernel")
    add("--waves", type=int, metavar="N", help="force N waves, 0 for fused; default: by cost")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--warmup", type=int, default=16, metavar="N", help="rows that are not measured")
    add("--rows", type=int, default=16, metavar="N", help="rows that are")
    add("--tokens", type=int, metavar="N", help="tokens a row, instead of the preset's")
    add("--exposed-trials", type=int, default=30, metavar="N", help="0 leaves exposure out")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--commit", default="unknown", metavar="HASH", help="recorded in the evidence")
    add("--hardware", metavar="TEXT", help="recorded in the evidence; default: the device's name")
    add("--evidence", type=Path, metavar="FILE.json", help="write the evidence file")


def run(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from ..bench.attention import AttentionBench, Shape, dense_causal_tflops, summarise_rows
    from ..bench.evidence import Evidence, write_evidence
    from ..bench.presets import preset_tree

    device = _device(args.device)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if max(args.cp) > world:
        raise InputError(f"--cp {max(args.cp)} needs as many processes: start them with torchrun")
    if world > 1:
        dist.init_process_group(
            "nccl" if args.device == "cuda" else "gloo",
            device_id=device if args.device == "cuda" else None,
        )
    groups = {
        cp: dist.new_group(list(range(cp))) if cp > 1 else None for cp in sorted(set(args.cp))
    }
    try:
        query_heads, kv_heads, head_dim = (int(part) for part in args.heads.split("/"))
        dtype = getattr(torch, args.dtype)
        shape = Shape(query_heads, kv_heads, head_dim, dtype, args.impl, args.window)
    except ValueError:
        raise InputError(f"--heads {args.heads}: write it as Q/KV/D, like 32/4/128") from None
    limit = dense_causal_tflops(shape, device) if rank == 0 else None
    evidence: list[Evidence] = []
    for preset in args.preset:
        for cp, group in groups.items():
            if rank < cp:
                bench = AttentionBench(shape, group, device, args.waves)
                error = bench.check(preset_tree(preset, cp, 0, 2048 * cp))
                allowed = 4 * torch.finfo(shape.dtype).eps
                if error > allowed:
                    raise InputError(
                        f"{preset} CP{cp}: error {error:.1e} > {allowed:.1e}: not timed"
                    )
                for row in range(args.warmup):
                    bench.measure(preset_tree(preset, cp, row, args.tokens), row, repeats=1)
                compiled = _compilations()
                measured = range(args.warmup, args.warmup + args.rows)
                rows = [
                    bench.measure(preset_tree(preset, cp, row, args.tokens), row)
                    for row in measured
                ]
                metrics = summarise_rows(rows)
                if args.exposed_trials and cp > 1:
                    tree = preset_tree(preset, cp, args.warmup, args.tokens)
                    mean, half = bench.exposed_ms(tree, args.exposed_trials)
                    metrics["exposed_exchange_ms"] = {"median": mean, "half_width_95": half}
                new = _compilations() - compiled
                metrics["new_compilations"] = {"median": new, "worst": new}
                metrics["check_error"] = {"worst": error}
                if limit:
                    metrics["dense_causal_tflops"] = {"median": limit}
                evidence.append(
                    Evidence(
                        what="attention",
                        preset=preset,
                        cp=cp,
                        variant=f"{shape.name} {shape.kernel(device)}"
                        + ("" if args.window is None else f" w{args.window}"),
                        metrics=metrics,
                        hardware=args.hardware or _name(device),
                        software=_software(),
                        commit=args.commit,
                        command=_command(args),
                        date=datetime.date.today().isoformat(),
                        rows=[vars(row) for row in rows],
                    )
                )
            if world > 1:
                dist.barrier()
    if rank == 0:
        Console(width=150).print(_table(evidence))
        if args.evidence:
            write_evidence(args.evidence, evidence)
    if world > 1:
        dist.destroy_process_group()


def _device(kind: str):
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("no CUDA device: give --device cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def _name(device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _compilations() -> int:
    """Kernels and graphs compiled so far in this process."""
    import sys

    import torch

    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    flash = sys.modules.get("megatron_tree_cp.ops.attention.flash")
    return count if flash is None else count + flash.compilations()


def _software() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _command(args: argparse.Namespace) -> str:
    words = [f"torchrun --nproc-per-node {max(args.cp)} -m megatron_tree_cp.cli bench attention"]
    words += [f"--preset {' '.join(args.preset)}", f"--cp {' '.join(map(str, args.cp))}"]
    words += [f"--heads {args.heads} --dtype {args.dtype} --impl {args.impl}"]
    words += [f"--warmup {args.warmup} --rows {args.rows}"]
    for name in ("window", "waves", "tokens"):
        if getattr(args, name) is not None:
            words.append(f"--{name} {getattr(args, name)}")
    return " ".join(words)


def _table(evidence) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="attention, medians over rows, slowest rank")
    heads = ["preset", "CP", "fwd ms", "bwd ms", "fwd+bwd ms", "p95", "TFLOP/s", "% of dense"]
    heads += ["tiles", "exposed ms", "plan ms", "upload ms", "peak GiB", "compiled"]
    for head in heads:
        table.add_column(head, justify="right")
    for record in evidence:
        metric = record.metrics

        def median(name: str, metric=metric) -> float:
            return metric[name]["median"]

        limit = metric.get("dense_causal_tflops", {}).get("median")
        exposed = metric.get("exposed_exchange_ms")
        table.add_row(
            record.preset,
            str(record.cp),
            f"{median('forward_ms'):.2f}",
            f"{median('backward_ms'):.2f}",
            f"{median('fwd_bwd_ms'):.2f}",
            f"{metric['fwd_bwd_ms']['p95']:.2f}",
            f"{median('tflops'):.0f}",
            "" if limit is None else f"{100 * median('tflops') / limit:.1f}",
            f"{median('tiles_computed_per_visible'):.3f}",
            "" if exposed is None else f"{exposed['median']:.2f}+-{exposed['half_width_95']:.2f}",
            f"{median('plan_ms'):.1f}",
            f"{median('metadata_ms'):.1f}",
            f"{median('peak_gib'):.2f}",
            f"{median('new_compilations'):.0f}",
        )
    return table
