"""Core attention over packed prefix trees, in the place of Megatron's ``DotProductAttention``."""

from __future__ import annotations

import math

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from .params import TreePackedSeqParams
from .windows import tree_window


class TreeDotProductAttention(MegatronModule):
    """Attention of each token to its own path, over the shards of one context-parallel group.

    Takes the place of Megatron's ``DotProductAttention`` and ``TEDotProductAttention``: same
    constructor, same parameter (``softmax_offset``, one value a query head, split over tensor
    parallelism, only for ``--softmax-type learnable``) and same checkpoint key.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,  # Megatron's own context parallelism; not used
        pg_collection: ProcessGroupCollection | None = None,
        *,
        impl: str = "auto",
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(
                f"tree attention is self attention, got {attention_type!r}: "
                "use the stock backend for encoder-decoder models"
            )
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError("tree attention has no dropout: use --attention-dropout 0")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = pg_collection.tp
        self.layer_number = max(1, layer_number)
        self.impl = impl
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.window = tree_window(config, self.layer_number)
        self._make_softmax_offset(config)

    def _make_softmax_offset(self, config: TransformerConfig) -> None:
        heads = config.num_attention_heads // self.tp_group.size()
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
        elif config.softmax_type == "off-by-one":
            # Not persistent: a constant is no part of a checkpoint.
            zeros = torch.zeros(heads, dtype=config.params_dtype)
            self.register_buffer("softmax_offset", zeros, persistent=False)
        elif config.softmax_type == "learnable":
            # Initialised for all heads and sliced, so that the values do not depend on the TP size.
            offsets = torch.zeros(config.num_attention_heads, dtype=config.params_dtype)
            if config.perform_initialization:
                config.init_method(offsets)
            own = offsets[heads * self.tp_group.rank() :][:heads].clone()
            self.softmax_offset = torch.nn.Parameter(own)
            # Without the mark the gradient norm would count the heads of TP rank 0 only.
            set_tensor_model_parallel_attributes(
                self.softmax_offset, is_parallel=True, dim=0, stride=1
            )
        else:
            raise ValueError(
                f"unknown softmax_type {config.softmax_type!r}: "
                "use --softmax-type vanilla, off-by-one or learnable"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[T, 1, Hq, D], [T, 1, Hkv, D], [T, 1, Hkv, Dv] -> [T, 1, Hq * Dv].

        T counts all tokens of the context-parallel rank's shard. The tree decides what is visible:
        ``attention_mask`` and ``attn_mask_type`` are not read. Raises ValueError without a tree.
        """
        from .. import ops  # kernels load when the first layer runs

        if not isinstance(packed_seq_params, TreePackedSeqParams) or packed_seq_params.tree is None:
            raise ValueError(
                "tree attention needs the row's tree: pass TreePackedSeqParams(tree=..., "
                "positions=...) as packed_seq_params to the model's forward"
            )
        if attention_bias is not None:
            raise ValueError("tree attention takes no attention_bias: drop it")
        context = packed_seq_params.tree
        tokens, batch = query.shape[:2]
        if batch != 1 or tokens != context.num_tokens:
            raise ValueError(
                f"query is [{tokens}, {batch}, ...], the shard holds {context.num_tokens} tokens: "
                "use --micro-batch-size 1 and feed the shard's tokens in layout order"
            )
        out = ops.tree_attention(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            context,
            scale=self.softmax_scale,
            window=self.window,
            sink=self.softmax_offset,
            impl=self.impl,
        )
        return out.reshape(tokens, 1, -1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> ShardedStateDict:
        """Sharded state of ``softmax_offset`` under Megatron's key, TP axis 0."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
