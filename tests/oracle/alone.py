"""The oracle's side: every trajectory alone, stock layer spec, stock attention, Megatron's loop.

A microbatch is the set of trajectories of one packed row, so that both sides take the same
optimizer steps; within it each trajectory runs through the model by itself.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_tree_cp.megatron.run import parse
from megatron_tree_cp.megatron.trainer import TreeTrainer
from megatron_tree_cp.megatron.tree_model import plan_recipe
from megatron_tree_cp.tree.objective import trained_tokens, weigh_trajectories
from megatron_tree_cp.tree.readers import read_rollouts
from megatron_tree_cp.tree.tokenizers import load_tokenizer


class AloneTrainer(TreeTrainer):
    """Same rows and order as the tree run; nothing of the packed row enters the computation."""

    def __init__(self, args, plan):
        super().__init__(args, plan)
        raw = read_rollouts(
            list(args.tree_data),
            load_tokenizer(args.tree_tokenizer),
            messages_key=args.tree_messages_key,
        )
        self.trained = [trained_tokens(t) for t in raw]
        self.trajectories = weigh_trajectories(raw, args.tree_loss)

    def _stream(self, paths, consumed, shuffle, log):
        stream = super()._stream(paths, consumed, shuffle, log)
        stream._upload = lambda planned: planned
        return stream

    def forward_step(self, data_iterator, model):
        planned = next(data_iterator)
        losses, weights, count = [], [], 0
        for index in planned.row.trajectories:
            trajectory = self.trajectories[index]
            tokens = torch.as_tensor(np.asarray(trajectory.tokens, dtype=np.int64))
            length = len(tokens)
            mask = np.ones(length) if trajectory.loss_mask is None else trajectory.loss_mask
            weight = np.ones(length) if trajectory.weights is None else trajectory.weights
            target = np.where(np.asarray(mask) != 0, np.asarray(weight, np.float64), 0.0)[1:]
            losses.append(
                model(
                    tokens[None, :-1],
                    torch.arange(length - 1)[None],
                    None,
                    labels=tokens[None, 1:],
                ).reshape(-1)
            )
            weights.append(torch.from_numpy(target).float())
            count += self.trained[index] if self.args.tree_loss == "token" else 1
        output = torch.cat(losses)
        weight = torch.cat(weights)
        total = torch.tensor(count, dtype=torch.int32)

        def loss_function(values):
            loss_sum = (values.float() * weight).sum()
            self.recorder.add_loss(loss_sum, total)
            return (
                loss_sum,
                total,
                {"lm loss": torch.cat([loss_sum.detach().view(1), total.float().view(1)])},
            )

        return output, loss_function


def run_alone(argv: list[str]) -> None:
    """`pretrain()` with the stock local spec at CP1, one process."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import pretrain  # the stock one: parsing installs the tree's
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from megatron_tree_cp.megatron.install import install_log

    args = parse(argv)
    model = gpt_config_from_args(args)
    model.transformer_layer_spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts, moe_grouped_gemm=False, normalization=args.normalization
    )
    trainer = AloneTrainer(args, plan_recipe(args, model))
    install_log(trainer)
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        trainer,
        ModelType.encoder_or_decoder,
        trainer.forward_step,
    )
