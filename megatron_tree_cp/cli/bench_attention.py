"""Tree attention: times, rates beside a dense causal row, exposed exchanges."""

from __future__ import annotations

import argparse

from rich import box
from rich.console import Console
from rich.table import Table

from ..tree.errors import InputError
from .bench_ranks import add_common_arguments, command, identity, profile_of, ranks
from .heads import attention_heads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    add = parser.add_argument
    add("--heads", default="32/4/128", metavar="Q/KV/D", help="query heads, KV heads, head dim")
    add("--window", type=int, metavar="N", help="sliding window in positions")
    add("--sink", action="store_true", help="a learned sink per query head")
    add("--waves", type=int, metavar="N", help="force N waves, 0 for fused; default: by cost")
    add(
        "--exchange",
        choices=["group", "peer"],
        default="group",
        help="the process group's all-to-all (NCCL), or copies between peers on one host",
    )
    add("--exposed-trials", type=int, default=30, metavar="N", help="0 leaves exposure out")


def run(args: argparse.Namespace) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    from ..bench.attention import TOLERANCE, AttentionBench, Shape, dense_causal_tflops
    from ..bench.compilations import compilations
    from ..bench.evidence import Evidence, write_evidence
    from ..bench.kernel_times import kernel_lines
    from ..bench.presets import check_tree, preset_tree
    from ..bench.timing import summarise_rows
    from ..comm.transport import PeerTransport

    if args.exchange == "peer" and args.device == "cpu":
        raise InputError("--exchange peer copies between GPUs: give --device cuda")
    dtype = getattr(torch, args.dtype)
    shape = Shape(*attention_heads(args.heads), dtype, args.impl, args.window, args.sink)
    with ranks(args) as here:
        profile = profile_of(args, here)
        clocks = {cp: here.clock(cp, args.pause) for cp in here.groups if here.works(cp)}
        limits: dict[int, tuple[float, float] | None] = {}
        for cp, clock in clocks.items():  # the same cards have one limit
            same = limits[min(limits)] if here.fill and limits else None
            limits[cp] = same or dense_causal_tflops(shape, clock)
        transports = {
            cp: PeerTransport(group, here.device)
            for cp, group in here.groups.items()
            if args.exchange == "peer" and 1 < cp and here.works(cp)
        }
        evidence: list[Evidence] = []
        for preset in args.preset:
            for cp, group in here.groups.items():
                if here.works(cp):
                    options = (profile, args.waves, transports.get(cp))
                    bench = AttentionBench(shape, group, clocks[cp], *options)
                    # With all its branches, shrunk; and the beginning of a row, which may be one
                    # segment, for what only far tokens show.
                    small = check_tree(preset, cp, 0, args.tokens)
                    begins = preset_tree(preset, cp, 0, small.num_tokens)
                    # A maximum by numpy keeps NaN.
                    error = float(np.max([bench.check(tree) for tree in (small, begins)]))
                    allowed = TOLERANCE[shape.dtype]
                    if not error <= allowed:  # NaN fails as well
                        raise InputError(
                            f"{preset} CP{cp}: error {error:.1e} > {allowed:.1e}: not timed"
                        )
                    for row in range(args.warmup):
                        bench.measure(preset_tree(preset, cp, row, args.tokens), row, repeats=1)
                    compiled = compilations()
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
                        mean, half = bench.over_one_call_ms(tree, args.exposed_trials)
                        metrics["over_one_call_ms"] = {"median": mean, "half_width_95": half}
                    new = compilations() - compiled
                    metrics["new_compilations"] = {"median": new, "worst": new}
                    metrics["check_error"] = {"worst": error}
                    limit = limits[cp]
                    if limit:
                        slowest, fastest = limit
                        metrics["dense_causal_tflops"] = {"median": slowest, "best": fastest}
                    evidence.append(
                        Evidence(
                            what="attention",
                            preset=preset,
                            cp=cp,
                            variant=f"{shape.name} {shape.kernel(here.device)}"
                            + ("" if args.window is None else f" w{args.window}")
                            + (" sink" if args.sink else "")
                            + (" peer" if cp in transports else "")
                            + (" filled" if here.fill else "")
                            + (" paused" if args.pause else ""),
                            metrics=metrics,
                            command=_command(args),
                            rows=[vars(row) for row in rows],
                            **identity(args, here.device, ("flash-attn-4", "nvidia-cutlass-dsl")),
                        )
                    )
                    if args.kernels:
                        tree = preset_tree(preset, cp, args.warmup, args.tokens)
                        for line in kernel_lines(bench.kernels(tree), args.kernels):
                            here.say(f"{preset} CP{cp}: {line}")
                    if here.rank == 0 and args.evidence:  # what is measured stays measured
                        write_evidence(args.evidence, evidence)
                if here.world > 1:
                    dist.barrier()
        if here.rank == 0:
            Console(width=200).print(_table(evidence))


def _command(args: argparse.Namespace) -> str:
    options = [f"--heads {args.heads}"]
    for name in ("window", "waves"):
        if getattr(args, name) is not None:
            options.append(f"--{name} {getattr(args, name)}")
    options += ["--sink"] if args.sink else []
    options += ["--exchange peer"] if args.exchange == "peer" else []
    return command(args, "attention", options)


def _table(evidence) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="attention, medians over rows, slowest rank")
    heads = ["preset", "CP", "fwd ms", "bwd ms", "fwd+bwd ms", "p95", "TFLOP/s", "% of dense"]
    heads += [
        "predicted ms",
        "tiles",
        "exposed ms",
        "over one call",
        "plan ms",
        "upload ms",
        "tables ms",
        "MiB",
        "peak GiB",
        "predicted GiB",
        "compiled",
    ]
    for head in heads:
        table.add_column(head, justify="right")
    for record in evidence:
        metric = record.metrics

        def median(name: str, metric=metric) -> float:
            return metric[name]["median"]

        limit = metric.get("dense_causal_tflops", {}).get("median")
        exposed, over = (
            f"{metric[name]['median']:.2f}+-{metric[name]['half_width_95']:.2f}"
            if name in metric
            else ""
            for name in ("exposed_exchange_ms", "over_one_call_ms")
        )
        table.add_row(
            record.preset,
            str(record.cp),
            f"{median('forward_ms'):.2f}",
            f"{median('backward_ms'):.2f}",
            f"{median('fwd_bwd_ms'):.2f}",
            f"{metric['fwd_bwd_ms']['p95']:.2f}",
            f"{median('tflops'):.0f}",
            "" if limit is None else f"{100 * median('tflops') / limit:.1f}",
            f"{median('predicted_ms'):.2f}",
            f"{median('tiles_computed_per_visible'):.3f}",
            exposed,
            over,
            f"{median('plan_ms'):.1f}",
            f"{median('metadata_ms'):.1f}",
            f"{median('tables_ms'):.2f}",
            f"{median('tables_mib'):.1f}",
            f"{median('peak_gib'):.2f}",
            f"{median('predicted_peak_gib'):.2f}",
            f"{median('new_compilations'):.0f}",
        )
    return table
