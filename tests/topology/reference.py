"""The reference side: stock layers, stock attention, no shared token, one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.oracle.alone import AloneTrainer

from .probe import Probe
from .stock_gdn import stock_gdn, token_recurrence


class TogetherTrainer(AloneTrainer):
    """All trajectories of a row in one forward, each attending to itself only.

    Rotary angles count along the whole input; only their differences inside a trajectory matter.
    """

    def forward_step(self, data_iterator: Any, model: Any) -> Any:
        planned = next(data_iterator)
        chosen = [self.trajectories[index] for index in planned.row.trajectories]
        self.count = sum(self.trained[index] for index in planned.row.trajectories)
        tokens = [torch.as_tensor(np.asarray(t.tokens, np.int64)) for t in chosen]
        lengths = torch.tensor([len(t) - 1 for t in tokens])
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        place = torch.arange(len(owner))
        hidden = (owner[:, None] != owner[None]) | (place[:, None] < place[None])
        output = model(
            torch.cat([t[:-1] for t in tokens])[None],
            place[None],
            hidden[None, None],
            labels=torch.cat([t[1:] for t in tokens])[None],
        ).reshape(-1)
        masks = [np.ones(len(t.tokens)) if t.loss_mask is None else t.loss_mask for t in chosen]
        weight = torch.as_tensor(np.concatenate([np.asarray(m, np.float32)[1:] for m in masks]))
        total = torch.tensor(self.count, dtype=torch.int32)

        def loss_function(values: torch.Tensor) -> Any:
            loss_sum = (values.float() * weight).sum()
            self.recorder.add_loss(loss_sum, total)
            report = torch.cat([loss_sum.detach().view(1), total.float().view(1)])
            return loss_sum, total, {"lm loss": report}

        return output, loss_function


def _stock_parts(stack: Any) -> Any:
    """The hybrid stack with stock attention and experts: Megatron has no local one of its own."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    layers = stack.submodules
    layers.attention_layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    layers.moe_layer.module = MoETransformerLayer
    layers.gdn_layer.submodules.self_attention = stock_gdn(layers.gdn_layer)
    layers.moe_layer.submodules.mlp = get_moe_module_spec_for_backend(
        LocalSpecProvider(), num_experts=1
    )
    return stack


def _stock_gpt_layers(config: Any, vp_stage: int | None = None) -> Any:
    """A GPTModel's layers with stock attention of both kinds: no local spec of Megatron has GDN."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_tree_cp.megatron.gdn import TreeGatedDeltaNet
    from megatron_tree_cp.megatron.specs import tree_gpt_layer_spec

    block = tree_gpt_layer_spec(config, vp_stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is TreeGatedDeltaNet:
            layer.submodules.self_attention = stock_gdn(layer)
        elif hasattr(attention.submodules, "core_attention"):
            attention.submodules.core_attention = DotProductAttention
    return block


def run_reference(argv: list[str], kind: str, probe: Probe) -> None:
    """``pretrain()`` with Megatron's own local layers; ``kind`` is a Family's ``reference``."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import pretrain  # the stock one: parsing installs the tree's
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        hybrid_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from megatron_tree_cp.megatron.install import install_log
    from megatron_tree_cp.megatron.run import parse
    from megatron_tree_cp.megatron.specs import make_tree_hybrid_stack_spec
    from megatron_tree_cp.megatron.tree_model import plan_recipe

    pretrain = getattr(pretrain, "__wrapped__", pretrain)
    args = parse(argv)
    if args.hybrid_layer_pattern:
        model = hybrid_config_from_args(args)
        model.hybrid_stack_spec = _stock_parts(make_tree_hybrid_stack_spec())
        model.transformer.deterministic_mode = True  # the stock layer's kernels without FLA
    elif args.experimental_attention_variant:
        model = gpt_config_from_args(args)
        model.transformer_layer_spec = _stock_gpt_layers
        model.transformer.deterministic_mode = True
    else:
        model = gpt_config_from_args(args)
        model.transformer_layer_spec = get_gpt_layer_local_spec(
            num_experts=args.num_experts,
            moe_grouped_gemm=False,
            qk_layernorm=args.qk_layernorm,
            normalization=args.normalization,
        )
    kinds = {"alone": AloneTrainer, "together": TogetherTrainer}
    trainer = kinds[kind](args, plan_recipe(args, model))
    install_log(trainer)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        planned = next(data_iterator)
        paths = list(planned.row.paths)
        batches = iter(paths if kind == "alone" else [np.concatenate(paths)])

        def forward(*inputs: Any, **kwargs: Any) -> Any:
            probe.path = planned.sample, next(batches)
            return model(*inputs, **kwargs)

        return trainer.forward_step(iter([planned]), forward)

    with token_recurrence():
        pretrain(
            pretrain_cfg_container_from_args(args, model),
            trainer,
            ModelType.encoder_or_decoder,
            forward_step,
        )
