"""What a data worker does: read rollouts, pack them into rows, plan each row.

This module imports neither torch nor Megatron: worker processes start fast and own no device.
Everything here is deterministic in (recipe, sample number), so that every rank that needs a row
can make it on its own, and a resumed run meets the same rows again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from ..plan.islands import plan_row_with_islands
from ..plan.model import ModelShape
from ..plan.profile import CostProfile
from ..plan.recurrence_tables import RecurrentRow, recurrent_row
from ..plan.row_plan import RowPlan
from ..tree.errors import InputError
from ..tree.fingerprint import packing_fingerprint
from ..tree.objective import target_counts, weigh_trajectories
from ..tree.packed_tree import PackedTree
from ..tree.packing import PackedRow, pack_trajectories
from ..tree.readers import read_rollouts
from ..tree.row_files import load_rows
from ..tree.summary import summarise
from ..tree.tokenizers import load_tokenizer


@dataclass(frozen=True)
class RowRecipe:
    """How rollout files become packed rows and in which order they are visited."""

    paths: tuple[str, ...]
    tokenizer: str
    max_tokens: int
    vocab_size: int
    """Token ids must lie below this."""
    max_positions: int
    """Longest logical context that the model's position tables hold."""
    messages_key: str = "messages"
    ignore_keys: tuple[str, ...] = ()
    min_shared: int = 1
    overlong: str = "error"
    objective: str = "token"
    shuffle: bool = True
    seed: int = 1234


@dataclass(frozen=True)
class PlanRecipe:
    """The parallel shape and model that rows are planned for."""

    cp_size: int
    tp_size: int
    granule: int
    model: ModelShape
    waves: int | None = None
    profile: CostProfile | None = None
    islands: int = 0
    """Runs of recurrent layers on a pipeline stage that may get a layout of their own; 0 plans one
    layout for all layers."""
    force_islands: bool = False
    """Give them one whatever it costs."""
    cp_rank: int | None = 0
    """The rank whose recurrent layers the rows are for; plans are the same for all ranks. None
    leaves these to whoever takes the row."""

    def plan_row(self, tree: PackedTree) -> RowPlan:
        """The plan of one row; ValueError as of ``plan.plan_row``."""
        shape = self.model, self.profile, self.tp_size, self.waves, self.granule
        return plan_row_with_islands(
            tree, self.cp_size, self.islands, *shape, force=self.force_islands
        )


@dataclass(frozen=True)
class PlannedRow:
    """One microbatch as it leaves a worker: numpy only, picklable."""

    sample: int
    """Number of this row in the run's global order (``consumed_train_samples`` counts these)."""
    row: PackedRow
    counts: np.ndarray
    plan: RowPlan
    fingerprint: str
    summary: str
    rows_per_epoch: int
    planning_cpu_ms: float
    """Processor time that its process spent on it; with the first row, on packing all of them."""
    recurrence: RecurrentRow | None = None
    """What this rank's recurrent layers need; None without such layers, or to make it later."""


@dataclass(frozen=True)
class RowFailure:
    """A worker's error as a value, so that every rank can be told before it raises."""

    sample: int
    message: str
    bad_input: bool = False
    """The user's data or options are at fault, rather than the program."""


class PackedRows:
    """All rows of a recipe: rollouts read and packed, or packed rows read, once per process."""

    def __init__(self, recipe: RowRecipe):
        self.recipe = recipe
        packed = [path for path in recipe.paths if path.endswith(".npz")]
        if packed and len(packed) < len(recipe.paths):
            raise InputError(f"{packed[0]} holds packed rows: give rollouts or packed rows alone")
        self.rows, self.summary = _load(recipe) if packed else _pack(recipe)
        for number, row in enumerate(self.rows):
            _check_row(number, row, recipe)
        self.fingerprint = packing_fingerprint(self.rows, objective=recipe.objective)
        self._epoch = -1
        self._order = np.arange(len(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def row_of_sample(self, sample: int) -> int:
        """Row visited as the ``sample``-th of the run; each epoch visits every row once."""
        epoch, place = divmod(sample, len(self.rows))
        if not self.recipe.shuffle:
            return place
        if epoch != self._epoch:
            rng = np.random.default_rng((self.recipe.seed, epoch))
            self._order, self._epoch = rng.permutation(len(self.rows)), epoch
        return int(self._order[place])


def _pack(recipe: RowRecipe) -> tuple[list[PackedRow], str]:
    trajectories = read_rollouts(
        recipe.paths,
        load_tokenizer(recipe.tokenizer),
        messages_key=recipe.messages_key,
        ignore_keys=recipe.ignore_keys,
        vocab_size=recipe.vocab_size,
    )
    rows = pack_trajectories(
        weigh_trajectories(trajectories, recipe.objective),
        recipe.max_tokens,
        min_shared=recipe.min_shared,
        overlong=recipe.overlong,
    )
    return rows, summarise(trajectories, rows, recipe.max_tokens).format()


def _load(recipe: RowRecipe) -> tuple[list[PackedRow], str]:
    if recipe.objective != "token":
        raise InputError(
            f"--tree-loss {recipe.objective} divides weights before packing: give rollouts, "
            "not packed rows"
        )
    rows = [row for path in recipe.paths for row in load_rows(path)]
    stored = sum(row.num_tokens for row in rows)
    return rows, f"{len(rows)} packed rows of {stored:,} stored tokens"


def _check_row(number: int, row: PackedRow, recipe: RowRecipe) -> None:
    if row.num_tokens > recipe.max_tokens:
        raise InputError(
            f"row {number} holds {row.num_tokens} tokens, more than --tree-max-tokens "
            f"{recipe.max_tokens}: raise it or pack again"
        )
    if max(row.tokens.max(), row.labels.max()) >= recipe.vocab_size:
        raise InputError(
            f"row {number} holds token ids outside the vocabulary of {recipe.vocab_size}"
        )
    longest = int(row.tree.positions.max()) + 1
    if longest > recipe.max_positions:
        raise InputError(
            f"row {number}: a trajectory of {longest} tokens exceeds --max-position-embeddings "
            f"{recipe.max_positions}; raise it"
        )


@dataclass
class PlannedRows:
    """Map-style dataset: sample number -> :class:`PlannedRow` (or :class:`RowFailure`)."""

    rows: RowRecipe
    plan: PlanRecipe
    _packed: PackedRows | None = field(default=None, repr=False)

    def packed(self) -> PackedRows:
        """The packed rows, read on first use in the process that needs them."""
        if self._packed is None:
            self._packed = PackedRows(self.rows)
        return self._packed

    def __getitem__(self, sample: int) -> PlannedRow | RowFailure:
        started = time.thread_time()
        try:
            packed = self.packed()
            row = packed.rows[packed.row_of_sample(sample)]
            plan = self.plan.plan_row(row.tree)
            rank = self.plan.cp_rank
            recurrence = None if rank is None else recurrent_row(plan, rank)
        except InputError as error:
            return RowFailure(sample, str(error), bad_input=True)
        except (ValueError, OSError) as error:
            return RowFailure(sample, f"{type(error).__name__}: {error}")
        return PlannedRow(
            sample=sample,
            row=row,
            counts=target_counts(row, self.rows.objective),
            plan=plan,
            fingerprint=packed.fingerprint,
            summary=packed.summary,
            rows_per_epoch=len(packed),
            planning_cpu_ms=(time.thread_time() - started) * 1e3,
            recurrence=recurrence,
        )
