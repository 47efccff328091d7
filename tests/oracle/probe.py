"""Test-side probe of a training run: writes gradients and weights at chosen iterations.

Installed by the entries of this folder around `setup_model_and_optimizer`; the package itself
has no switch for it.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.distributed as dist


def canonical(name: str) -> str:
    """A parameter's name without wrapper prefixes."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def record_losses(folder: Path) -> None:
    """Write every logged loss of rank 0, exactly, to ``<folder>/losses.txt``, one a line."""
    from megatron.training import training

    stock = training.training_log
    folder.mkdir(parents=True, exist_ok=True)

    def training_log(loss_dict, *args, **kwargs):
        if dist.get_rank() == 0:
            with (folder / "losses.txt").open("a") as out:
                out.write(f"{float(loss_dict['lm loss']).hex()}\n")
        return stock(loss_dict, *args, **kwargs)

    training.training_log = functools.wraps(stock)(training_log)


class Probe:
    """Writes ``<folder>/<what>_<iteration>_rank<r>.pt`` with {canonical name: tensor}."""

    def __init__(self, folder: Path, gradients_at: set[int], weights_at: set[int]):
        self.folder, self.gradients_at, self.weights_at = folder, gradients_at, weights_at
        self.iteration = 0
        folder.mkdir(parents=True, exist_ok=True)

    def install(self) -> None:
        """Wrap the optimizer of the next model that Megatron sets up."""
        from megatron.training import training

        stock = training.setup_model_and_optimizer

        def setup(*args, **kwargs):
            model, optimizer, scheduler = stock(*args, **kwargs)
            self._save("weights", 0, model, self.weights_at, lambda p: p.data)
            stock_step = optimizer.step

            def step():
                self.iteration += 1
                self._save(
                    "gradients", self.iteration, model, self.gradients_at, lambda p: p.main_grad
                )
                result = stock_step()
                self._save("weights", self.iteration, model, self.weights_at, lambda p: p.data)
                return result

            optimizer.step = step
            return model, optimizer, scheduler

        training.setup_model_and_optimizer = setup

    def _save(self, what, iteration, model, wanted, value) -> None:
        if iteration not in wanted:
            return
        tensors = {
            canonical(name): value(parameter).detach().clone()
            for chunk in model
            for name, parameter in chunk.named_parameters()
        }
        torch.save(tensors, self.folder / f"{what}_{iteration}_rank{dist.get_rank()}.pt")
