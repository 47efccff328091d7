"""Mixture of experts on tree rows: routers whose statistics count tokens right.

Megatron's router takes the number of tokens of a microbatch for its own count times the number of
ranks, counts padding, and knows no token that several trajectories share. Here tokens carry
weights (``RoutingStatistics``). A loss on a row of W = sum of weights adds

    aux_loss         E c / (k W) * sum_e  P_e C_e          P_e, C_e: weighted sums over the row of
    seq_aux_loss     sum_j E c / (k T_j) * sum_e P_je C_je    scores, and of choices, of expert e
    global_aux_loss  W / V of aux_loss, with the choices of all replicas' rows of the step so far
                     (V: weights of the replicas' rows at hand; 1 / DP, as Megatron has it)
    z loss           c * sum_t w_t logsumexp(logits_t)^2

to the loss sum that ``--calculate-per-token-loss`` divides by its count: Megatron's own scale for a
microbatch of W tokens, and for one microbatch per trajectory j of T_j tokens in ``seq_aux_loss``.
With weights 1, one rank and no padding these are Megatron's values.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from megatron.core.utils import get_model_config
from torch import Tensor

from .params import TreePackedSeqParams
from .routing_statistics import RoutingStatistics, Sequences


class TreeTopKRouter(TopKRouter):
    """TopKRouter whose losses and counts weigh tokens; same parameters, buffers and keys.

    Which experts a token goes to is Megatron's choice, untouched.
    """

    _statistics: RoutingStatistics | None = None

    def routing(
        self, logits: Tensor, padding_mask: RoutingStatistics | None = None
    ) -> tuple[Tensor, Tensor]:
        """[T, 1, E] -> probabilities and routing map [T, E], as Megatron's.

        The microbatch's statistics come in the place of Megatron's padding mask: it is the one
        argument that its layers hand down to the router, through recomputation too.
        """
        if padding_mask is None and self._needs_statistics():
            raise ValueError(
                "router losses and expert bias need the row's token weights: "
                "pass TreePackedSeqParams(routing=routing_statistics(...))"
            )
        # Held for this call alone; a recomputed call brings its own microbatch's.
        self._statistics = padding_mask
        try:
            return super().routing(logits)
        finally:
            self._statistics = None

    def _needs_statistics(self) -> bool:
        losses = self.is_aux_loss_enabled() or self.config.moe_z_loss_coeff is not None
        return self.training and (losses or self.enable_expert_bias)

    def _weights(self) -> Tensor:
        """int64 [tokens of this call, 1]."""
        weights = self._statistics.weights
        if self.config.sequence_parallel:
            weights = weights.chunk(self.tp_group.size())[self.tp_group.rank()]
        return weights[:, None]

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the z loss to the logits [T, E]."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.training or not torch.is_grad_enabled():
            return logits
        z_loss = (torch.logsumexp(logits, dim=-1).square() * self._weights()[:, 0]).sum()
        # Each rank adds its tokens' part, and gradients add up over ranks: no count is needed.
        logits = MoEAuxLossAutoScaler.apply(logits, z_loss * coefficient)
        get_moe_metrics_tracker().record(
            "z_loss",
            z_loss / self._statistics.total,
            self.layer_number,
            self.config.num_layers,
            reduce_group=self.tp_cp_group,
        )
        return logits

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, **_: Any
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        weights = self._weights()
        loss = self._balancing_loss(
            scores_for_aux_loss * weights,
            _sum_over((routing_map * weights).sum(dim=0), self.tp_cp_group),
            self._statistics.total,
            coefficient,
        )
        return self._attach(probs, loss, coefficient, "load_balancing_loss", self.tp_cp_group)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, **_: Any
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        weights = self._weights()
        chosen = (routing_map * weights).sum(dim=0)
        counts = _sum_over(torch.cat([chosen, weights.sum()[None]]), self.tp_dp_cp_group)
        # Rows differ in length, so tokens are what the sum over microbatches is divided by;
        # Megatron counts microbatches there, and resets both buffers at the end of a step.
        self.global_tokens_per_expert += counts[:-1]
        self.ga_steps += counts[-1]
        loss = self._balancing_loss(
            scores_for_aux_loss * weights,
            self.global_tokens_per_expert * (counts[-1] / self.ga_steps),
            counts[-1],
            coefficient,
        )
        name, group = "global_load_balancing_loss", self.tp_dp_cp_group
        return self._attach(probs, loss, coefficient, name, group, needs_dp_avg=False)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        **_: Any,
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        sequences = self._statistics.sequences
        if sequences is None:
            raise ValueError(
                "seq_aux_loss needs to know the row's trajectories: "
                "use --tree-statistics logical (routing_statistics(..., per_sequence=True))"
            )
        piece = sequences.piece
        if self.config.sequence_parallel:
            piece = piece.chunk(self.tp_group.size())[self.tp_group.rank()]
        real = self._weights() > 0
        chosen = _sum_by_piece(routing_map * real, piece, sequences.num_pieces)
        shares = _shares_by_piece(_sum_over(chosen, self.tp_cp_group), sequences)
        loss = (scores_for_aux_loss * real * shares[piece]).sum() * (
            self.config.num_moe_experts * coefficient / (self.topk * self._statistics.total)
        )
        return self._attach(probs, loss, coefficient, "seq_load_balancing_loss", self.tp_cp_group)

    def _balancing_loss(
        self, scores: Tensor, tokens_per_expert: Tensor, total: Any, coefficient: float
    ) -> Tensor:
        return switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=total,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
            # The fused kernel takes a host count; over replicas it is known on the device only.
            fused=self.config.moe_router_fusion and isinstance(total, int),
        )

    def _attach(
        self, probs: Tensor, loss: Tensor, coefficient: float, name: str, group: Any, **kwargs: Any
    ) -> Tensor:
        return self.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            loss,
            name,
            group,
            # Megatron multiplies this count by the number of ranks, taking them for equal.
            valid_token_count=self._statistics.total / self.tp_cp_group.size(),
            **kwargs,
        )

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # Grad mode is off in evaluation and in the first pass of recomputation: count once.
        if self.enable_expert_bias and self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.local_tokens_per_expert += (routing_map * self._weights()).sum(dim=0)

    def _maintain_float32_expert_bias(self) -> None:
        super()._maintain_float32_expert_bias()
        # bf16 cannot count past 256, and Float16Module turns these buffers to bf16 too.
        for name in ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"):
            buffer = getattr(self, name)
            if buffer is not None and buffer.dtype != torch.float32:
                buffer.data = buffer.data.to(torch.float32)


def _sum_over(counts: Tensor, group: Any) -> Tensor:
    return reduce_from_tensor_model_parallel_region(counts, group)


def _sum_by_piece(values: Tensor, piece: Tensor, num_pieces: int) -> Tensor:
    """[T, E] -> int64 [pieces, E]."""
    total = torch.zeros(num_pieces, values.shape[1], dtype=torch.int64, device=values.device)
    return total.index_add_(0, piece, values.to(torch.int64))


def _shares_by_piece(chosen: Tensor, sequences: Sequences) -> Tensor:
    """sum_j C_je / T_j over the trajectories j that pass a piece: float32 [pieces, E]."""
    piece, trajectory = sequences.pairs
    shape = (len(sequences.lengths), chosen.shape[1])
    of_trajectory = chosen.new_zeros(shape).index_add_(0, trajectory, chosen[piece])
    share = of_trajectory / sequences.lengths[:, None]
    return share.new_zeros(chosen.shape).index_add_(0, piece, share[trajectory])


class TreeMoELayer(MoELayer):
    """MoELayer that hands a microbatch's statistics to its router; same parameters and keys."""

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        padding_mask: RoutingStatistics | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] -> [T, 1, H] and no bias; ``padding_mask``: see ``TreeTopKRouter.routing``."""
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError("experts with tensor parallelism need --sequence-parallel")
        # Bound here and not kept on the module: recomputation runs after later microbatches.
        run = partial(self._route_and_compute, statistics=padding_mask)
        if not (self.moe_layer_recompute and self.training):
            return run(hidden_states)
        if self.config.fp8 or self.config.fp4:
            from megatron.core.extensions.transformer_engine import te_checkpoint

            tracker = tensor_parallel.random.get_cuda_rng_tracker
            return te_checkpoint(run, False, tracker, self.tp_group, hidden_states)
        return tensor_parallel.checkpoint(run, False, hidden_states)

    def _route_and_compute(
        self, hidden_states: Tensor, statistics: RoutingStatistics | None
    ) -> tuple[Tensor, Tensor | None]:
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.route(hidden_states, statistics)
        hidden_states, probs = self.preprocess(hidden_states, probs, routing_map)
        dispatched, probs = self.dispatch(hidden_states, probs)
        output, bias = self.routed_experts_compute(dispatched, probs)
        return self.postprocess(self.combine(output), shared), bias


class TreeMoETransformerLayer(MoETransformerLayer):
    """Transformer layer that hands the microbatch's statistics to its experts' router."""

    def _forward_mlp(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        padding_mask: Tensor | None = None,
        packed_seq_params: TreePackedSeqParams | None = None,
    ) -> Tensor:
        statistics = getattr(packed_seq_params, "routing", None)
        return super()._forward_mlp(
            hidden_states,
            inference_context,
            padding_mask=statistics,
            packed_seq_params=packed_seq_params,
        )


def size_router_log(chunks: list[Any]) -> list[Any]:
    """A pre_wrap_hook: entries of Megatron's router log, one value a layer, on every stage.

    A pipeline stage without experts makes its entries when they are first logged. In a HybridModel
    it then counts layers with experts, other stages count all layers, and their sum never ends.
    """
    config = get_model_config(chunks[0])
    if config.num_moe_experts is not None:
        for name in ("load_balancing", "seq_load_balancing", "global_load_balancing", "z"):
            get_moe_metrics_tracker().ensure_initialized(f"{name}_loss", config.num_layers)
    return chunks


def tree_moe(stock: partial) -> partial:
    """A stock MoE module spec (a partial of MoELayer, any backend) with the tree's router."""
    submodules = dataclasses.replace(stock.keywords["submodules"], router=TreeTopKRouter)
    return partial(TreeMoELayer, *stock.args, **{**stock.keywords, "submodules": submodules})
