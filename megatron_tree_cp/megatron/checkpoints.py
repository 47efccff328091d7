"""What a checkpoint remembers of the rows it was trained on, and what a run goes on from.

Megatron writes its arguments into every checkpoint; ``args.tree_packing`` travels there. A resumed
run counts on from ``consumed_train_samples``: with other rows, or the same in another order, some
trajectories would be trained twice and others never.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..tree.errors import InputError

_FLAGS = {
    "max_tokens": "--tree-max-tokens",
    "min_shared": "--tree-min-shared",
    "overlong": "--tree-overlong",
    "objective": "--tree-loss",
    "seed": "--tree-shuffle-seed",
}
_GO_ON = "or --tree-allow-new-data to go on with other rows"


@dataclass(frozen=True)
class PackingState:
    """Which rows a run visits, and in which order."""

    max_tokens: int
    min_shared: int
    overlong: str
    objective: str
    shuffle: bool
    seed: int
    """Of the shuffle."""
    fingerprint: str = ""
    """Of the packed rows; empty until they are known."""
    first_sample: int = 0
    """``consumed_train_samples`` when the run first met these rows: their sample 0."""

    @classmethod
    def of_run(cls, args: Namespace) -> PackingState:
        """What the arguments ask for."""
        return cls(
            max_tokens=args.tree_max_tokens,
            min_shared=args.tree_min_shared,
            overlong=args.tree_overlong,
            objective=args.tree_loss,
            shuffle=not args.no_tree_shuffle,
            seed=args.tree_shuffle_seed,
        )

    def option_difference(self, saved: PackingState) -> str:
        """The first option in which a checkpoint's state differs, as a sentence; '' for none."""
        if self.shuffle != saved.shuffle:
            having, lacking = ("checkpoint", "run") if self.shuffle else ("run", "checkpoint")
            return f"this {having} has --no-tree-shuffle, the {lacking} does not"
        for name, flag in _FLAGS.items():
            ours, theirs = getattr(self, name), getattr(saved, name)
            if ours != theirs and (name != "seed" or self.shuffle):
                return f"this run has {flag} {ours}, its checkpoint {flag} {theirs}"
        return ""


class PackingLedger:
    """Ties the rows of one run to the checkpoint it loads and to those it writes."""

    def __init__(self, args: Namespace):
        self.args = args
        self.state = PackingState.of_run(args)
        self._resumed = False
        self._saved: PackingState | None = None

    def checkpoint_loaded(self, checkpoint_args: Any) -> None:
        """Compare with the arguments of the checkpoint that training goes on from.

        Raises InputError, on every rank alike, for one that this run cannot continue.
        """
        _check_expert_parallel(self.args, checkpoint_args)
        saved = getattr(checkpoint_args, "tree_packing", None)
        self._resumed, self._saved = True, None if saved is None else PackingState(**saved)
        if self._saved is not None:
            self.state = replace(self.state, first_sample=self._saved.first_sample)
        if self.args.tree_allow_new_data:
            return
        if self._saved is None:
            raise InputError(
                "the checkpoint comes from a run without packed rows: give --finetune to start "
                f"from its weights, {_GO_ON}"
            )
        difference = self.state.option_difference(self._saved)
        if difference:
            raise InputError(f"{difference}: give what the checkpoint has, {_GO_ON}")

    def first_sample(self, fingerprint: Callable[[], str], consumed: int) -> int:
        """``consumed_train_samples`` at which the rows of this run begin.

        ``fingerprint`` packs the rows in this process; it is called only where the user allows
        other rows than the checkpoint's, to learn whether they are.
        """
        if self._resumed and self.args.tree_allow_new_data:
            ours = replace(self.state, fingerprint=fingerprint())
            same = self._saved is not None and not ours.option_difference(self._saved)
            if not same or ours.fingerprint != self._saved.fingerprint:
                self.state = replace(self.state, first_sample=consumed)
                self._saved = None
        return self.state.first_sample

    def rows_known(self, fingerprint: str) -> None:
        """The first row has arrived: refuse other rows than the checkpoint's; save with these."""
        saved = self._saved
        if saved is not None and saved.fingerprint != fingerprint:
            raise InputError(
                f"the rows are not the checkpoint's (packing fingerprint {fingerprint[:12]}, "
                f"checkpoint {saved.fingerprint[:12]}): give its --tree-data and --tree-tokenizer, "
                f"{_GO_ON}"
            )
        self.state = replace(self.state, fingerprint=fingerprint)
        self.args.tree_packing = asdict(self.state)


def _check_expert_parallel(args: Namespace, checkpoint_args: Any) -> None:
    """Without the distributed optimizer, a parameter's state is found by its number on the rank."""
    saved = getattr(checkpoint_args, "expert_model_parallel_size", None) or 1
    ours = args.expert_model_parallel_size
    numbered = not (args.use_distributed_optimizer or args.no_load_optim)
    if args.num_experts and numbered and saved != ours:
        raise InputError(
            f"--expert-model-parallel-size {ours}, checkpoint {saved}: Megatron resumes other "
            "sizes from --use-distributed-optimizer alone: keep the size or add --no-load-optim"
        )
