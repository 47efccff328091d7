"""Options of commands that look at rows: a workload preset, packed rows, or rollouts to pack."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..bench.presets import MEASURED_ROWS, PRESETS
from ..plan.islands import plan_row_with_islands
from ..plan.model import LayerClass, ModelShape
from ..plan.planner import plan_row
from ..plan.profile import load_profile
from ..plan.row_plan import RowPlan
from ..plan.shipped_profiles import profile_for
from ..tree.errors import InputError
from ..tree.packed_tree import PackedTree
from ..tree.packing import PackedRow
from ..tree.row_files import load_rows
from .heads import attention_heads, gdn_heads
from .rollouts import add_rollout_arguments, pack_rollouts


@dataclass(frozen=True)
class NamedRow:
    """A row to look at: its name in reports, and what was packed into it (None for a preset)."""

    name: str
    tree: PackedTree
    packed: PackedRow | None = None


def add_row_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `named_rows`."""
    add_rollout_arguments(parser, required=False)
    add = parser.add_argument
    add("--preset", metavar="NAME", help=f"instead of PATH: {', '.join(PRESETS)}")
    add("--tokens", type=int, metavar="N", help="tokens of a preset's row; default: its own size")
    add("--row", type=int, metavar="N", help="this row only; a preset's first measured row is 16")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what a row is planned for."""
    add = parser.add_argument
    add("--cp", "--cp-size", dest="cp_size", type=int, required=True, metavar="N", help="CP ranks")
    add("--tp-size", "--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    add("--waves", type=int, metavar="N", help="force N waves, 0 for fused; default: by cost")
    add("--windows", type=int, nargs="+", default=[], metavar="W", help="windowed layers beside")
    add("--layers", type=int, default=1, metavar="N", help="layers of every class")
    add("--heads", default="32/4/128", metavar="Q/KV/D", help="query heads, KV heads, head dim")
    add("--hidden-size", type=int, default=4096, metavar="N", help="of the token-local work")
    add("--token-flops", type=float, metavar="X", help="of that work; 0 plans attention alone")
    add("--device", default="H200", metavar="NAME", help="plan for this device's shipped costs")
    add("--profile", metavar="FILE", help="cost profile (JSON) in their place")
    add("--gdn-layers", type=int, default=0, metavar="N", help="Gated DeltaNet layers beside")
    add("--gdn-heads", default="16/32/128/128", metavar="K/V/DK/DV", help="their heads and dims")
    add(
        "--islands",
        type=int,
        default=0,
        metavar="N",
        help="runs of them without attention between: weigh a second layout for these",
    )


def named_rows(args: argparse.Namespace) -> Iterator[NamedRow]:
    """The rows that the options ask for. Raises InputError before the first is made."""
    if bool(args.paths) == bool(args.preset):
        raise InputError("give either rollouts (PATH ...) or --preset NAME")
    if args.preset:
        return iter([_preset_row(args)])
    if args.tokens is not None:
        raise InputError("--tokens goes with --preset; rollouts take --max-tokens")
    rows = _packed_rows(args)
    if args.row is not None and not 0 <= args.row < len(rows):
        raise InputError(f"--row {args.row}: there are {len(rows)} rows, from 0")
    numbers = range(len(rows)) if args.row is None else [args.row]
    return (NamedRow(f"row {n}", rows[n].tree, rows[n]) for n in numbers)


def _preset_row(args: argparse.Namespace) -> NamedRow:
    if args.preset not in PRESETS:
        raise InputError(f"--preset {args.preset}: known are {', '.join(PRESETS)}")
    if args.cp_size < 1 or (args.tokens is not None and args.tokens < 1):
        raise InputError("--cp and --tokens must be at least 1")
    row = MEASURED_ROWS.start if args.row is None else args.row
    tree = PRESETS[args.preset].tree(args.cp_size, row, args.tokens)
    return NamedRow(f"{args.preset} row {row}", tree)


def _packed_rows(args: argparse.Namespace) -> list[PackedRow]:
    packed = [path for path in args.paths if path.endswith(".npz")]
    if packed and len(packed) < len(args.paths):
        raise InputError(f"{packed[0]}: packed rows and rollouts cannot be mixed")
    if packed:
        return [row for path in packed for row in load_rows(path)]
    if args.max_tokens is None:
        raise InputError("rollouts need --max-tokens N: the stored tokens of a row at most")
    return pack_rollouts(args).rows


class RowPlanner:
    """Plans rows for what the plan options describe, and takes the time of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = _model(args)
        self.profile = load_profile(args.profile) if args.profile else profile_for(args.device)[0]
        self._parallel = {"tp_size": args.tp_size, "waves": args.waves}
        self._cp_size, self._islands = args.cp_size, args.islands
        # The planner lives in long-lived workers: what numpy loads at first use is no planning.
        plan_row(PackedTree([300, 200, 100], [-1, 0, 0]), 2)

    def plan(self, row: NamedRow) -> tuple[RowPlan, float]:
        """The plan of a row, and the wall ms from its tree to the plan and its digest."""
        begin = time.perf_counter()
        where = (self._cp_size, self._islands, self.model, self.profile)
        try:
            plan = plan_row_with_islands(row.tree, *where, **self._parallel)
        except ValueError as error:
            if not self._islands:
                raise
            raise InputError(f"--islands {self._islands}: {error}") from error
        _ = plan.digest  # a plan without one cannot be used
        return plan, (time.perf_counter() - begin) * 1e3


def _recurrent(args: argparse.Namespace) -> tuple[LayerClass, ...]:
    if not args.gdn_layers:
        return ()
    key_heads, value_heads, key_dim, value_dim = gdn_heads(args.gdn_heads)
    return (
        LayerClass(
            "gdn",
            kind="gdn",
            layers=args.gdn_layers,
            query_heads=key_heads,
            kv_heads=value_heads,
            head_dim=key_dim,
            value_dim=value_dim,
        ),
    )


def _model(args: argparse.Namespace) -> ModelShape:
    query_heads, kv_heads, head_dim = attention_heads(args.heads)
    windows = dict.fromkeys([None, *args.windows])
    return ModelShape(
        classes=_recurrent(args)
        + tuple(
            LayerClass(
                "global" if window is None else f"w{window}",
                window=window,
                layers=args.layers,
                query_heads=query_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
            )
            for window in windows
        ),
        hidden_size=args.hidden_size,
        token_flops=args.token_flops,
    )
