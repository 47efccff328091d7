"""Islands: runs of layers without attention that lie in a layout of their own.

A row's plan may give recurrent layers a second layout (`plan.islands`). An *island* is a maximal
run of layers of one model chunk that holds recurrent layers and no attention. Where the plan of a
microbatch has the second layout, the residual stream moves there before the island's first layer
and back to "main" after its last one, and all layers between, whatever they are, get the island's
tree context, positions and router statistics. Elsewhere nothing changes.

Both moves belong to layers, so recomputation runs them again where it runs the layers again, and a
chunk hands on the residual stream in layout "main".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel import all_to_all_hp2sp, all_to_all_sp2hp
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config, make_viewless_tensor
from torch import Tensor, nn

from ..plan.row_plan import ISLAND
from .model_shape import layer_symbols
from .params import TreePackedSeqParams


def island_runs(kinds: Sequence[str]) -> list[range]:
    """The islands among one chunk's layers, each as the range of its layers.

    ``kinds``: per layer, the pattern symbols of what it holds.
    """
    found, first = [], 0
    for number, symbols in enumerate([*kinds, Symbols.ATTENTION]):
        if Symbols.ATTENTION in symbols:
            if any(Symbols.GDN in kind for kind in kinds[first:number]):
                found.append(range(first, number))
            first = number + 1
    return found


def islands_of_stage(config: TransformerConfig, hybrid_layer_pattern: str | None) -> int:
    """Islands of a pipeline stage, the mean over stages rounded up, as `model_shape` counts layers.

    0 for a model without recurrent layers.
    """
    chunks = _chunks(config, hybrid_layer_pattern)
    total = sum(len(island_runs(kinds)) for kinds in chunks)
    return -(-total // config.pipeline_model_parallel_size)


def _chunks(config: TransformerConfig, hybrid_layer_pattern: str | None) -> list[list[str]]:
    """Layer symbols of every model chunk, in the order of the layers."""
    main = parse_hybrid_pattern(hybrid_layer_pattern).main_pattern or ""
    if Symbols.PIPE in main:
        return [list(segment) for segment in main.split(Symbols.PIPE)]
    symbols = layer_symbols(config, hybrid_layer_pattern)
    layout = config.pipeline_model_parallel_layout
    chunks = []
    for vp_stage in range(config.virtual_pipeline_model_parallel_size or 1):
        for pp_rank in range(config.pipeline_model_parallel_size):
            if layout is not None:
                count = layout.layout[pp_rank][vp_stage].count(LayerType.decoder)
            else:
                count = get_num_layers_to_build(config, vp_stage, pp_rank)
            chunks.append(symbols[:count])
            symbols = symbols[count:]
    return chunks


def install_islands[ModelT: nn.Module](model_chunks: Sequence[ModelT]) -> list[ModelT]:
    """Let the islands of GPT or hybrid model chunks follow the plans; a ``pre_wrap_hook``.

    Layers get forward hooks; parameters, names and checkpoint keys stay as they are. Raises
    ValueError for a hidden size that sequence parallelism cannot divide.
    """
    config = get_model_config(model_chunks[0])
    tp_size = config.tensor_model_parallel_size
    if config.sequence_parallel and config.hidden_size % tp_size:
        raise ValueError(
            f"--tree-islands: --hidden-size {config.hidden_size} does not divide by "
            f"--tensor-model-parallel-size {tp_size}: use --tree-islands off"
        )
    for chunk in model_chunks:
        layers: Any = chunk.get_submodule("decoder.layers")
        for run in island_runs([_kind(layer) for layer in layers]):
            for number in run:
                enter = partial(_enter, first=number == run[0])
                layers[number].register_forward_pre_hook(enter, with_kwargs=True)
            layers[run[-1]].register_forward_hook(_leave, with_kwargs=True)
    return list(model_chunks)


def _kind(layer: TransformerLayer) -> str:
    """The pattern symbol of a layer's mixer, "" where it has none."""
    if isinstance(layer.self_attention, IdentityOp):
        return ""
    recurrent = isinstance(layer.self_attention, GatedDeltaNet)
    return Symbols.GDN if recurrent else Symbols.ATTENTION


def _enter(
    layer: TransformerLayer, args: tuple, kwargs: dict[str, Any], *, first: bool
) -> tuple[tuple, dict[str, Any]] | None:
    """Before a layer of an island: hand it the island's parameters, the first one its tokens."""
    params = kwargs.get("packed_seq_params")
    if not isinstance(params, TreePackedSeqParams) or params.island is None:
        return None
    changed: dict[str, Any] = {"packed_seq_params": params.island}
    if first:
        changed["hidden_states"] = _move(kwargs["hidden_states"], layer, params, "main", ISLAND)
    return args, kwargs | changed


def _leave(
    layer: TransformerLayer, args: tuple, kwargs: dict[str, Any], output: tuple[Tensor, Any]
) -> tuple[Tensor, Any] | None:
    """After the last layer of an island: bring its tokens back."""
    params = kwargs.get("packed_seq_params")
    if not isinstance(params, TreePackedSeqParams) or params.tree.layout_name != ISLAND:
        return None
    hidden_states, context = output
    return _move(hidden_states, layer, params, ISLAND, "main"), context


def _move(
    hidden_states: Tensor, layer: TransformerLayer, params: TreePackedSeqParams, src: str, dst: str
) -> Tensor:
    """[T of src, 1, H] -> [T of dst, 1, H], of both T a tensor-parallel share where those are.

    With sequence parallelism the tensor-parallel ranks turn their shares of tokens into shares of
    columns and back: each moves a part of every token, and none moves one twice.
    """
    exchange = partial(params.tree.exchange, src=src, dst=dst)
    if layer.config.sequence_parallel and layer.tp_group.size() > 1:
        columns = exchange(all_to_all_sp2hp(hidden_states, layer.tp_group))
        moved = all_to_all_hp2sp(columns, layer.tp_group).unsqueeze(1)
    else:
        moved = exchange(hidden_states)
    # Checkpointing and pipeline schedules refuse views.
    return make_viewless_tensor(moved, requires_grad=moved.requires_grad, keep_graph=True)
