"""A hybrid model with Gated DeltaNet layers: tree rows against trajectories alone, stock layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.distributed import run_ranks
from tests.megatron import models
from tests.megatron.test_model import trajectories
from tests.topology.stock_gdn import stock_gdn, token_recurrence

PATTERN = "G*-G"
EXTRA = {
    "num_layers": len(PATTERN),
    "is_hybrid_model": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "deterministic_mode": True,  # the stock layer's torch kernels; ours are the same in either mode
}


def build(stock: bool):
    """The HybridModel with our layers, or with Megatron's own attention and Gated DeltaNet."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.training.models.hybrid import HybridModelConfig

    from megatron_tree_cp.megatron.gdn import gdn_layer_spec
    from megatron_tree_cp.megatron.rope import install_tree_rope
    from megatron_tree_cp.megatron.specs import make_tree_hybrid_stack_spec

    spec = make_tree_hybrid_stack_spec()
    spec.submodules.gdn_layer = gdn_layer_spec()
    if stock:
        attention = spec.submodules.attention_layer.submodules.self_attention
        attention.submodules.core_attention = DotProductAttention
        layer = spec.submodules.gdn_layer
        layer.submodules.self_attention = stock_gdn(layer)
    config = HybridModelConfig(
        transformer=models.transformer_config(EXTRA),
        hybrid_layer_pattern=PATTERN,
        hybrid_stack_spec=spec,
        vocab_size=models.VOCABULARY,
        seq_length=128,
        position_embedding_type="rope",
    )
    model = config.get_builder_cls()(config).build_model(
        ProcessGroupCollection.use_mpu_process_groups()
    )
    return model if stock else install_tree_rope([model])[0]


def alone():
    """Loss, gradients and weights of the trajectories one by one through stock layers."""
    models.start()
    with token_recurrence():
        model = build(stock=True)
        loss = torch.zeros(())
        for trajectory in trajectories():
            ids = torch.as_tensor(trajectory.tokens)[None]
            count = ids.shape[1] - 1
            mask = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1)
            labels = ids[:, 1:].contiguous()
            nll = model(ids[:, :-1], torch.arange(count)[None], mask, labels=labels)
            weight = torch.as_tensor(trajectory.loss_mask, dtype=torch.float32)[1:]
            loss = loss + (nll[0] * weight).sum()
        loss.backward()
    parameters = dict(model.named_parameters())
    keys = sorted(model.sharded_state_dict())
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return loss.detach(), {name: p.grad for name, p in parameters.items()}, weights, keys


def sections(name: str):
    """Parts of a projection or convolution that tensor parallelism splits one by one."""
    qk, v, heads = 16, 32, 4
    if name.endswith("in_proj.weight"):
        return [qk, qk, v, v, heads, heads]
    return [qk, qk, v] if name.endswith("conv1d.weight") else None


def part_of(name: str, whole: torch.Tensor, parameter, tp: int, rank: int) -> torch.Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim = parameter.partition_dim
    if (split := sections(name)) is not None:
        parts = [x.chunk(tp, dim)[rank] for x in whole.split(split, dim)]
        return torch.cat(parts, dim)
    return models._parts(name, whole, dim, tp)[rank]


def packed(weights: dict, tp: int, cp: int):
    """Loss, and this rank's gradients summed over the groups that hold copies, and keys."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_tree_cp import TreeContext, pack_trajectories, plan_row
    from megatron_tree_cp.megatron.params import TreePackedSeqParams

    models.start(tp, cp)
    model = build(stock=False)
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part_of(name, weights[name], parameter, tp, rank))
    (row,) = pack_trajectories(trajectories(), max_tokens=128)
    group = parallel_state.get_context_parallel_group()
    context = TreeContext(plan_row(row.tree, cp, tp_size=tp), group, "cpu")
    real = context.row_indices >= 0
    index = context.row_indices.clamp(min=0)

    def shard(values, fill):
        return torch.where(real, torch.as_tensor(values.copy())[index], fill)

    nll = model(
        shard(row.tokens, 0)[None],
        context.positions[None],
        None,
        labels=shard(row.labels, 0).clamp(min=0)[None],
        packed_seq_params=TreePackedSeqParams(tree=context, positions=context.positions),
    )
    loss = torch.where(real, nll[0] * shard(row.weights, 0.0), 0.0).sum()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(grad, group=group)
        if tp > 1 and (getattr(parameter, "sequence_parallel", False) or "_layernorm" in name):
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        gradients[name] = (grad, parameter)
    return total, gradients, sorted(model.sharded_state_dict()), rank


def compare(rank: int, world_size: int, topologies: tuple[tuple[int, int], ...]):
    """Relative errors of every parameter's gradient on every topology (one start: imports cost)."""
    from megatron_tree_cp.megatron import cpu

    cpu.enable()
    loss, gradients, weights, keys = alone()
    scale = max(g.norm() for g in gradients.values())
    errors = {}
    for tp, cp in topologies:
        tree_loss, tree_gradients, tree_keys, tp_rank = packed(weights, tp, cp)
        assert tree_keys == keys, set(tree_keys) ^ set(keys)
        of_case = {"loss": float(abs(tree_loss - loss) / loss)}
        for name, (grad, parameter) in tree_gradients.items():
            want = part_of(name, gradients[name], parameter, tp, tp_rank)
            of_case[name] = float((grad - want).norm() / max(want.norm(), 1e-6 * scale))
        errors[f"tp{tp} cp{cp}"] = of_case
    return errors


def test_tree_rows_give_the_gradients_of_trajectories_alone():
    for errors in run_ranks(4, compare, ((1, 1), (2, 2), (1, 4)), timeout=250):
        for case, by_name in errors.items():
            worst = max(by_name, key=lambda name: by_name[name])
            assert by_name[worst] < 1e-5, f"{case}: {worst} is off by {by_name[worst]:.1e}"


# -- one layer at a time ------------------------------------------------------------------------


def config(**change):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(**(models.SIZES | EXTRA | change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"linear_num_key_heads": 3, "linear_num_value_heads": 6}, "use a divisor"),
        ({"linear_num_value_heads": 6, "linear_num_key_heads": 4}, "is not a multiple of"),
        ({"activation_func": torch.nn.functional.gelu}, "use --swiglu"),
        ({"sequence_parallel": False}, "needs --sequence-parallel"),
    ],
)
def test_layer_says_what_does_not_fit(change, message):
    from megatron_tree_cp.megatron.gdn import TreeGatedDeltaNet

    given = {"tensor_model_parallel_size": 2, "sequence_parallel": True} | change
    with pytest.raises(ValueError, match=message):
        TreeGatedDeltaNet(config(**given), SimpleNamespace())


def test_what_the_planner_knows_of_a_layer():
    from megatron_tree_cp.megatron.model_shape import model_shape_from_config

    shape = model_shape_from_config(config(), "G*-G")
    attention, recurrent = shape.classes
    assert attention.kind == "attention" and shape.recurrent_classes == (recurrent,)
    heads = (recurrent.query_heads, recurrent.kv_heads, recurrent.head_dim, recurrent.value_dim)
    assert heads == (2, 4, 8, 8) and (recurrent.layers, recurrent.conv_width) == (2, 4)
    # Projections of two recurrent layers, attention (4 query heads over 2 of width 8), the MLP.
    projections = 2 * 32 * (2 * 16 + 2 * 32 + 2 * 4 + 32)
    mlp = 2 * 32 * 3 * config().ffn_hidden_size
    heads = 2 * 32 * (2 * 4 + 2 * 2) * 8
    assert shape.token_flops == 2 * projections + heads + mlp


def test_linear_layers_of_a_gpt_model():
    from megatron_tree_cp.megatron.gdn import gdn_layers

    assert gdn_layers(config()) == [False] * 4
    variant = {"experimental_attention_variant": "gated_delta_net"}
    assert gdn_layers(config(**variant, linear_attention_freq=4)) == [True, True, True, False]
    assert gdn_layers(config(**variant, linear_attention_freq=[1, 0, 0, 1])) == [
        True,
        False,
        False,
        True,
    ]


def test_stock_layer_spec_with_our_class():
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    from megatron_tree_cp.megatron.gdn import TreeGatedDeltaNet, with_tree_gdn

    stock = hybrid_stack_spec.submodules.gdn_layer
    ours = with_tree_gdn(stock, "tiled").submodules.self_attention
    assert (ours.module, ours.params) == (TreeGatedDeltaNet, {"impl": "tiled"})
    assert ours.submodules is stock.submodules.self_attention.submodules
    assert stock.submodules.self_attention.module is GatedDeltaNet
