"""Gated DeltaNet: times beside the byte bound, chained runs, baselines.

One layer without its projections: the convolution over q, k and v with SiLU, gates, the norm of q
and k, the recurrence, forward and backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..tree.errors import InputError
from .bench_ranks import Ranks, add_common_arguments, command, identity, profile_of, ranks
from .heads import gdn_heads

if TYPE_CHECKING:
    from ..bench.evidence import Evidence
    from ..bench.gdn import GdnBench, RowResult

PACKAGES = ("flash-linear-attention", "fla-core", "tilelang", "tree-recurrence")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    add = parser.add_argument
    add(
        "--gdn-heads",
        default="16/32/128/128",
        metavar="K/V/DK/DV",
        help="key heads, value heads, key head dim, value head dim",
    )
    add("--conv-width", type=int, default=4, metavar="N", help="taps of the convolution")
    add(
        "--baselines",
        action="store_true",
        help="also time flash-linear-attention on flattened trajectories and tree-recurrence at "
        "CP1, fla.ops.cp on one_chain above",
    )
    add(
        "--bandwidth",
        type=float,
        default=4.8,
        metavar="TB/s",
        help="of the device's memory, for the byte bound (default: an H200's)",
    )


def run(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from ..bench.evidence import write_evidence
    from ..bench.gdn import GdnBench
    from ..bench.gdn_baselines import fla_kernels
    from ..bench.gdn_layer import GdnShape
    from ..bench.kernel_times import kernel_lines
    from ..bench.presets import preset_tree

    dtype = getattr(torch, args.dtype)
    shape = GdnShape(*gdn_heads(args.gdn_heads), args.conv_width, dtype, args.impl)
    if args.baselines and args.device == "cpu":
        raise InputError("--baselines needs a GPU: flash-linear-attention has no CPU kernels")
    if args.baselines:
        fla_kernels()  # missing packages are told before anything is timed
    evidence: list[Evidence] = []
    with ranks(args) as here:
        profile = profile_of(args, here)

        def keep() -> None:
            if here.rank == 0 and args.evidence:  # what is measured stays measured
                write_evidence(args.evidence, evidence)

        for preset in args.preset:
            for cp, group in here.groups.items():
                if here.works(cp):
                    say = _say(here, preset, cp)
                    clock = here.clock(cp, args.pause)
                    bench = GdnBench(shape, group, clock, profile, say, args.bandwidth)
                    evidence.append(_record(args, bench, preset))
                    keep()
                    if args.kernels:
                        tree = preset_tree(preset, cp, args.warmup, args.tokens)
                        for line in kernel_lines(bench.kernels(tree), args.kernels):
                            say(line)
                    if args.baselines:
                        evidence[-1].metrics.update(_baselines(args, bench, evidence[-1]))
                        keep()
                if here.world > 1:
                    dist.barrier()
        if here.rank == 0:
            Console(width=200).print(_table(evidence))


def _say(here: Ranks, preset: str, cp: int) -> Callable[[str], None]:
    return lambda text: here.say(f"{preset} CP{cp}: {text}")


def _record(args: argparse.Namespace, bench: GdnBench, preset: str) -> Evidence:
    """Check, warm up and measure one preset; every rank of the bench calls this."""
    from ..bench.evidence import Evidence
    from ..bench.presets import check_tree, preset_tree
    from ..bench.timing import summarise_rows

    small = check_tree(preset, bench.cp, 0, args.tokens)
    error = bench.check(small)
    bench.say(f"check: {small.num_tokens} tokens, worst error {error:.1e}")
    for row in range(args.warmup):
        bench.say(f"warm-up row {row}")
        bench.measure(preset_tree(preset, bench.cp, row, args.tokens), row, repeats=1)
    rows = []
    for row in range(args.warmup, args.warmup + args.rows):
        rows.append(bench.measure(preset_tree(preset, bench.cp, row, args.tokens), row))
        bench.say(_line(rows[-1]))
    metrics = summarise_rows(rows, higher_is_better=("byte_bound_percent",))
    new = sum(row.compilations for row in rows)
    metrics["new_compilations"] = {"median": new, "worst": new}
    metrics["check_error"] = {"worst": error}
    options = [f"--gdn-heads {args.gdn_heads} --conv-width {args.conv_width}"]
    options += ["--baselines"] if args.baselines else []
    return Evidence(
        what="gdn",
        preset=preset,
        cp=bench.cp,
        variant=f"{bench.shape.name} {bench.shape.kernel(bench.device, bench.cp)}"
        + " filled" * args.fill
        + " paused" * bool(args.pause),
        metrics=metrics,
        command=command(args, "gdn", options),
        rows=[vars(row) for row in rows],
        **identity(args, bench.device, PACKAGES),
    )


def _baselines(
    args: argparse.Namespace, bench: GdnBench, record: Evidence
) -> dict[str, dict[str, float]]:
    """Metrics of what can be compared with the first measured row: see `bench.gdn_baselines`."""
    from importlib.util import find_spec

    import torch

    from ..bench import gdn_baselines as baselines
    from ..bench.gdn import RowResult
    from ..bench.presets import check_tree, preset_tree

    ours = RowResult(**record.rows[0])
    tree = preset_tree(record.preset, bench.cp, ours.row, args.tokens)
    small = check_tree(record.preset, bench.cp, 0, args.tokens)
    chosen: dict[str, baselines.Build] = {}
    if bench.cp == 1:
        chosen["fla flattened"] = baselines.flattened
        if find_spec("tree_recurrence"):
            chosen["tree-recurrence"] = baselines.tree_recurrence
        else:
            hint = "pip install 'megatron-tree-cp[baselines]'"
            bench.say(f"tree-recurrence: not installed ({hint})")
    elif baselines.is_one_sequence(tree):
        chosen["fla.ops.cp"] = baselines.one_sequence
    metrics: dict[str, dict[str, float]] = {}
    for name, build in chosen.items():
        try:
            result = baselines.compare(name, build, bench, small, tree, ours)
        except InputError as error:  # the same on every rank
            bench.say(str(error))
            continue
        except torch.OutOfMemoryError:
            if bench.cp > 1:
                raise  # other ranks wait in a collective
            torch.cuda.empty_cache()
            bench.say(f"{name}: row {ours.row} does not fit into memory")
            continue
        metrics |= baseline_metrics(vars(result))
        bench.say(
            f"{name}: {result.fwd_bwd_ms:.2f} ms for {result.tokens} tokens, ours "
            f"{ours.fwd_bwd_ms:.2f}: {result.speed_up:.2f}x, {result.speed_up_per_saving:.2f} of "
            f"the token saving {result.token_saving:.2f}x"
        )
    return metrics


def baseline_metrics(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Metrics of a `BaselineResult`'s fields, by ``<baseline> <field>``."""
    measured = {name: value for name, value in result.items() if name not in ("name", "row")}
    return {f"{result['name']} {name}": {"median": value} for name, value in measured.items()}


def _line(row: RowResult) -> str:
    """One measured row in words."""
    return (
        f"row {row.row}: {row.tokens} tokens, forward {row.forward_ms:.2f} backward "
        f"{row.backward_ms:.2f} both {row.fwd_bwd_ms:.2f} ms (predicted {row.predicted_ms:.2f}, "
        f"conv {row.conv_ms:.2f}, rule {row.rule_ms:.2f}), byte bound {row.byte_bound_ms:.2f} ms = "
        f"{row.byte_bound_percent:.1f} %, {row.chained_runs} of {row.runs} runs chained, plan "
        f"{row.plan_ms:.1f} upload {row.metadata_ms:.1f} ms, {row.peak_gib:.2f} GiB, "
        f"{row.compilations} compiled"
    )


def _table(evidence: list[Evidence]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Gated DeltaNet, medians over rows, slowest rank")
    heads = ["preset", "CP", "fwd ms", "bwd ms", "fwd+bwd ms", "p95", "worst", "predicted"]
    heads += ["conv ms"]
    heads += ["rule ms", "bound", "% of it", "chained", "local", "plan ms", "upload ms", "GiB"]
    for head in [*heads, "compiled"]:
        table.add_column(head, justify="right")
    for record in evidence:
        metric = record.metrics

        def median(name: str, digits: int = 2, metric: Any = metric) -> str:
            return f"{metric[name]['median']:.{digits}f}"

        table.add_row(
            record.preset,
            str(record.cp),
            median("forward_ms"),
            median("backward_ms"),
            median("fwd_bwd_ms"),
            f"{metric['fwd_bwd_ms']['p95']:.2f}",
            f"{metric['fwd_bwd_ms']['worst']:.2f}",
            median("predicted_ms"),
            median("conv_ms"),
            median("rule_ms"),
            median("byte_bound_ms"),
            median("byte_bound_percent", 1),
            median("chained_runs", 0),
            f"{metric['runs']['median'] - metric['chained_runs']['median']:.0f}",
            median("plan_ms", 1),
            median("metadata_ms", 1),
            median("peak_gib"),
            median("new_compilations", 0),
        )
    return table
