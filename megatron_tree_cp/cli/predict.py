"""Hold the planner's predicted times and memory against measured plans of preset rows."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..tree.errors import InputError
from .bench_ranks import given, identity, profile_of, ranks
from .calibrate import PACKAGES, add_device_arguments, heat_ms
from .heads import attention_heads, gdn_heads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--operator", choices=["attention", "gdn"], default="attention", help="what is timed")
    add("--preset", nargs="+", required=True, metavar="NAME", help="workload presets")
    add("--profile", metavar="FILE", help="cost profile; default: the one for this device")
    add("--rows", type=int, default=2, metavar="N", help="rows of every preset, from 16")
    add("--tokens", type=int, metavar="N", help="tokens a row, instead of the preset's")
    add("--repeats", type=int, default=5, metavar="N", help="calls per plan; the median counts")
    add("--window", type=int, metavar="N", help="of attention: sliding window in positions")
    add("--gdn-heads", default="16/32/128/128", metavar="K/V/DK/DV", help="of gdn")
    add("--evidence", type=Path, metavar="FILE.json", help="write the evidence file")
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from ..bench.attention import Shape
    from ..bench.evidence import Evidence, write_evidence
    from ..bench.gdn_layer import GdnShape
    from ..bench.gdn_prediction import GdnPredictionBench
    from ..bench.prediction import PredictionBench, summarise
    from ..bench.presets import MEASURED_ROWS, preset_tree

    if args.rows < 1 or args.repeats < 1:
        raise InputError("--rows and --repeats must be at least 1")
    dtype, gdn = getattr(torch, args.dtype), args.operator == "gdn"
    if gdn and args.window is not None:
        raise InputError("--window is of attention: leave it out with --operator gdn")
    shape = Shape(*attention_heads(args.heads), dtype, args.impl, args.window)
    recurrent = GdnShape(*gdn_heads(args.gdn_heads), dtype=dtype, impl=args.impl)
    evidence: list[Evidence] = []
    with ranks(args) as here:
        origin = identity(args, here.device, PACKAGES)
        profile = profile_of(args, here)
        for preset in args.preset:
            for cp, group in here.groups.items():
                if here.rank < cp:
                    where = (cp, group, here.device, profile, args.repeats, heat_ms(args))
                    bench = (
                        GdnPredictionBench(recurrent, *where)
                        if gdn
                        else PredictionBench(shape, *where)
                    )
                    numbers = range(MEASURED_ROWS.start, MEASURED_ROWS.start + args.rows)
                    rows = [
                        bench.measure(preset_tree(preset, cp, row, args.tokens), row)
                        for row in numbers
                    ]
                    here.say(f"{preset} CP{cp}: {sum(len(row.plans) for row in rows)} plans")
                    evidence.append(
                        Evidence(
                            what="planner",
                            preset=preset,
                            cp=cp,
                            variant=f"{f'gdn {recurrent.name}, ' * gdn}predicted against measured, "
                            f"profile {profile.name}",
                            metrics=summarise(rows),
                            command=_command(args),
                            rows=[asdict(row) for row in rows],
                            **origin,
                        )
                    )
                if here.world > 1:
                    dist.barrier()
        if here.rank:
            return
    Console(width=150).print(_table(evidence))
    if args.evidence:
        write_evidence(args.evidence, evidence)


def _command(args: argparse.Namespace) -> str:
    words = [f"torchrun --nproc-per-node {max(args.cp)} -m megatron_tree_cp.cli predict"]
    if args.operator == "gdn":
        words.append(f"--operator gdn --gdn-heads {args.gdn_heads}")
    words += [f"--preset {' '.join(args.preset)} --cp {' '.join(map(str, args.cp))}"]
    words += [f"--device {args.device} --heads {args.heads} --dtype {args.dtype}"]
    words += [f"--impl {args.impl} --rows {args.rows} --repeats {args.repeats}"]
    words += [f"--heat {args.heat:g}"]
    return " ".join(words + given(args, "profile", "tokens", "window"))


def _table(evidence) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="predicted against measured, in %; order of plans whose times differ clearly",
    )
    heads = ("preset", "CP", "plans", "time error", "p95", "order right", "regret", "worst")
    for head in (*heads, "gain over contiguous", "memory error", "p95"):
        table.add_column(head, justify="right")
    for record in evidence:

        def shown(name: str, key: str = "median", metrics=record.metrics) -> str:
            return f"{metrics[name][key]:.2f}" if name in metrics else ""

        table.add_row(
            record.preset,
            str(record.cp),
            str(sum(len(row["plans"]) for row in record.rows)),
            shown("time_error_percent"),
            shown("time_error_percent", "p95"),
            shown("clear_order_right_percent"),
            shown("regret_percent"),
            shown("regret_percent", "worst"),
            shown("gain_over_contiguous_percent"),
            shown("memory_error_percent"),
            shown("memory_error_percent", "p95"),
        )
    return table
