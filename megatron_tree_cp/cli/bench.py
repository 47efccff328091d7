"""Measure operators on workload presets: under torchrun, one process a device."""

from __future__ import annotations

import argparse

from . import bench_attention, bench_gdn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operators = parser.add_subparsers(dest="operator", required=True, metavar="OPERATOR")
    for module in (bench_attention, bench_gdn):
        name = module.__name__.rsplit("bench_", 1)[1]
        summary = (module.__doc__ or "").splitlines()[0]
        operator = operators.add_parser(name, help=summary, description=summary)
        module.add_arguments(operator)
        operator.set_defaults(measure=module.run)


def run(args: argparse.Namespace) -> None:
    args.measure(args)
