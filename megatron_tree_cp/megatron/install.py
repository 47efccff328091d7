"""The places where a tree run hooks into an unmodified `megatron.training`."""

from __future__ import annotations

import functools
import inspect

from .trainer import TreeTrainer


def install_log(trainer: TreeTrainer) -> None:
    """Call ``trainer.after_iteration`` after each of Megatron's own log calls."""
    from megatron.training import training

    stock = training.training_log
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def training_log(*args, **kwargs):
        result = stock(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        names = ("iteration", "learning_rate", "skipped_iter", "grad_norm")
        trainer.after_iteration(**{name: given[name] for name in names})
        return result

    training.training_log = training_log
