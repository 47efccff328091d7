"""The places where a tree run hooks into an unmodified `megatron.training`."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ..tree.errors import InputError
from .arguments import add_tree_arguments, requested_backend
from .checkpoint_keys import follow_stored_keys, has_such_keys
from .release import supported
from .run_config import expand_tree_config
from .trainer import TreeTrainer
from .tree_model import apply_tree, plan_recipe
from .validation import validate_args_of_tree_run
from .wheel import allow_wheel_install


@dataclass(frozen=True)
class Installed:
    """What ``install`` put in the place of Megatron's own."""

    pretrain: Callable[..., Any]
    """In the place of ``megatron.training.pretrain``; takes the same arguments, trains on trees."""

    replaced: tuple[str, ...]
    """Dotted names in Megatron that now lead through this package."""


def install(exit_on_bad_input: bool = True) -> Installed:
    """Give this process's Megatron the tree options, and the tree where they ask for it.

    Call it before arguments are parsed; a script that has imported ``pretrain`` already takes it
    from the result. ``--tree-config`` in ``sys.argv`` is replaced by the file's options. With
    ``--context-parallel-backend te`` the options are there and everything else is Megatron's.
    Bad input ends the process with one line and exit code 2, or raises InputError where
    ``exit_on_bad_input`` is False. Idempotent.
    """
    import megatron.training
    from megatron.training import arguments, training

    done = getattr(training.pretrain, "tree_installed", None)
    if done is not None:
        return done
    ending = _exits_on_bad_input if exit_on_bad_input else _passes_bad_input_on
    with ending():
        _require_version()
        sys.argv[1:] = expand_tree_config(sys.argv[1:])
    if requested_backend(sys.argv[1:]) == "tree":
        allow_wheel_install()

    stock_add, stock_validate, stock_pretrain = (
        arguments.add_megatron_arguments,
        arguments.validate_args,
        training.pretrain,
    )

    @functools.wraps(stock_add)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_tree_arguments(stock_add(parser))

    @functools.wraps(stock_validate)
    def validate_args(args: Namespace, defaults: dict[str, Any] | None = None) -> Namespace:
        if args.context_parallel_backend != "tree":
            return stock_validate(args, defaults or {})
        with ending():
            return validate_args_of_tree_run(stock_validate, args, defaults or {})

    @functools.wraps(stock_pretrain)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        if get_args().context_parallel_backend != "tree":
            return stock_pretrain(*args, **kwargs)
        with ending():
            return _tree_pretrain(stock_pretrain, get_args(), args, kwargs)

    installed = Installed(
        pretrain,
        (
            "megatron.training.arguments.add_megatron_arguments",
            "megatron.training.arguments.validate_args",
            "megatron.training.pretrain",
            "megatron.training.training.pretrain",
        ),
    )
    pretrain.tree_installed = installed
    arguments.add_megatron_arguments = add_megatron_arguments
    arguments.validate_args = validate_args
    training.pretrain = megatron.training.pretrain = pretrain
    return installed


def _require_version() -> None:
    from megatron.core.package_info import __version__

    if not supported(__version__):
        raise InputError(
            f"megatron-core {__version__}: the hooks of a tree run are made for 0.19: install "
            "0.19.2 or check out branch core_r0.19.0"
        )


def _tree_pretrain(stock: Callable[..., Any], args: Namespace, given: tuple, more: dict) -> Any:
    """Megatron's ``pretrain`` with the tree's model, data, forward step and log."""
    call = inspect.signature(stock).bind(*given, **more)
    model = call.arguments["cfg_container"].model
    apply_tree(model, args)
    trainer = TreeTrainer(args, plan_recipe(args, model))
    install_log(trainer)
    install_checkpoint_check(trainer)
    install_planned_shapes()
    call.arguments["train_valid_test_dataset_provider"] = trainer
    call.arguments["forward_step_func"] = trainer.forward_step
    with _empty_main_module():
        result = stock(*call.args, **call.kwargs)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


@contextmanager
def _empty_main_module() -> Iterator[None]:
    """Spare data workers the import of the script that runs, which imports Megatron.

    Every worker imports the main module of its parent. They get our dataset alone, and nothing of
    the script is pickled.
    """
    script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def install_planned_shapes() -> None:
    """Give Megatron's schedules a communicator that knows shapes from the plan."""
    from megatron.training import training

    from .pipeline import with_planned_shapes

    stock = training.get_forward_backward_func

    @functools.wraps(stock)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return with_planned_shapes(stock(*args, **kwargs))

    training.get_forward_backward_func = get_forward_backward_func


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


def install_checkpoint_check(trainer: TreeTrainer) -> None:
    """Show ``trainer.ledger`` the arguments in the checkpoint that the run goes on from.

    Megatron reads them before it asks for weights and optimizer states: a checkpoint that cannot
    be resumed is refused in one line rather than inside the load. What it then asks for gets the
    names that the checkpoint has.
    """
    from megatron.core.dist_checkpointing import load_tensors_metadata
    from megatron.training import checkpointing

    stock = checkpointing._load_base_checkpoint
    signature = inspect.signature(stock)
    opened: dict[str, str] = {}

    @functools.wraps(stock)
    def load_base_checkpoint(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        asked, folder = given.get("sharded_state_dict"), given["load_dir"]
        if asked is not None and folder in opened and has_such_keys(asked):
            follow_stored_keys(asked, load_tensors_metadata(opened[folder]))
        state_dict, opened[folder], *more = stock(*args, **kwargs)
        if state_dict and state_dict.get("args") and not given["args"].finetune:
            trainer.ledger.checkpoint_loaded(state_dict["args"])
        return state_dict, opened[folder], *more

    checkpointing._load_base_checkpoint = load_base_checkpoint


@contextmanager
def _exits_on_bad_input() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        print(f"megatron_tree_cp: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


@contextmanager
def _passes_bad_input_on() -> Iterator[None]:
    yield
