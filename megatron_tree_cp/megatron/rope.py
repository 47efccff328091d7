"""Rotary embeddings at explicit positions, for rows whose tokens lie in any order.

Megatron derives rotary angles from a sequence length and cuts them into equal zigzag chunks, which
gives silently wrong positions on any other layout. Every caller in Megatron runs
``n = rope.get_rotary_seq_len(..., packed_seq_params)`` and then ``rope(n)``; the classes here hand
the positions of the shard through that pair. Angles are computed from the positions themselves, so
there is no table, no largest position and no host synchronisation.

Learned absolute embeddings read ``position_ids`` and need nothing; neither does ``none``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor, nn

from .params import TreePackedSeqParams


class _ExplicitPositions:
    """Over a rotary module: ``get_rotary_seq_len`` returns positions, ``forward`` their angles."""

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        if not isinstance(packed_seq_params, TreePackedSeqParams):
            raise ValueError(
                "rotary embeddings of a tree model need TreePackedSeqParams with positions: "
                "pass packed_seq_params to the model's forward"
            )
        if packed_seq_params.positions is None:
            raise ValueError(
                "TreePackedSeqParams.positions is None: set it to the shard's positions"
            )
        return packed_seq_params.positions

    def forward(
        self,
        positions: Tensor,
        offset: int = 0,
        packed_seq: bool = False,
        cp_group: Any = None,
    ) -> Tensor | tuple[Tensor, float]:
        # get_emb computes angles for arange(length) + offset: with length 1 the offset may be a
        # tensor, and Megatron's own arithmetic (interpolation, Llama scaling, YaRN ramps) is kept.
        return self.get_emb(1, offset + positions)


class TreeRotaryEmbedding(_ExplicitPositions, RotaryEmbedding):
    """RotaryEmbedding at explicit positions: int64 [T] -> fp32 angles [T, 1, 1, dim]."""


class TreeYarnRotaryEmbedding(_ExplicitPositions, YarnRotaryEmbedding):
    """YarnRotaryEmbedding at explicit positions: int64 [T] -> (fp32 [T, 1, 1, dim], mscale)."""


_TREE_CLASSES: dict[type, type] = {
    RotaryEmbedding: TreeRotaryEmbedding,
    YarnRotaryEmbedding: TreeYarnRotaryEmbedding,
}


def install_tree_rope[ModelT: nn.Module](model_chunks: Sequence[ModelT]) -> list[ModelT]:
    """Give every rotary module of the model chunks explicit positions; a ``pre_wrap_hook``.

    The class of each instance is replaced, so parameters, buffers and names stay as they were.
    Idempotent. Raises ValueError for a rotary module it does not know (such as multimodal RoPE).
    """
    for chunk in model_chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, _ExplicitPositions):
                continue
            if type(module) in _TREE_CLASSES:
                module.__class__ = _TREE_CLASSES[type(module)]
            elif name.rpartition(".")[2] == "rotary_pos_emb":
                raise ValueError(
                    f"no explicit positions for {type(module).__name__} ({name}): "
                    "use --position-embedding-type rope, yarn, learned_absolute or none"
                )
    return list(model_chunks)
