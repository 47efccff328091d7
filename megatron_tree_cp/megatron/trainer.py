"""What Megatron's training loop asks of a tree run: data, forward step, loss, log."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm.agreement import Agreement
from ..comm.transport import PeerTransport, Transport, fastest_transport
from ..plan.recurrence_tables import recurrent_row
from .batch import TreeBatch, build_batch
from .checkpoints import PackingLedger
from .flops import report_row
from .loss import weighted_loss
from .metrics import IterationRecorder
from .rows import PlannedRow, PlannedRows, PlanRecipe, RowFailure, RowRecipe
from .shared_rows import SharedRows
from .startup import implementation_table
from .stream import Preparation, RowStream, SampleOrder, device_of_rank, planned_row_loader


def stage_group(dp_rank: int, pp_rank: int, node: int = 0) -> dist.ProcessGroup:
    """CPU (gloo) group of the ranks that work on the same rows in the same pipeline stage.

    Not all stages together: a later stage asks for its row only once the first stage has sent it
    activations, so the first must not wait for it. Ranks may give their ``node``: then those of
    one node are a group.
    """
    own = (node << 40) + (dp_rank << 16) + pp_rank
    mine = torch.tensor([own])
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    cpu_world = dist.new_group(backend="gloo")
    dist.all_gather(everyone, mine, group=cpu_world)
    replicas = [int(r) for r in everyone]
    groups = {
        replica: dist.new_group(
            [rank for rank, r in enumerate(replicas) if r == replica], backend="gloo"
        )
        for replica in sorted(set(replicas))
    }
    return groups[own]


def row_recipe(args: Namespace, paths: list[str], shuffle: bool) -> RowRecipe:
    """The packing part of the arguments."""
    return RowRecipe(
        paths=tuple(paths),
        tokenizer=args.tree_tokenizer,
        max_tokens=args.tree_max_tokens,
        vocab_size=args.vocab_size,
        max_positions=args.max_position_embeddings,
        messages_key=args.tree_messages_key,
        ignore_keys=tuple(args.tree_ignore_keys),
        min_shared=args.tree_min_shared,
        overlong=args.tree_overlong,
        objective=args.tree_loss,
        shuffle=shuffle,
        seed=args.tree_shuffle_seed,
    )


class TreeTrainer:
    """Holds one run's streams and records; its methods are Megatron's callbacks."""

    is_distributed = True
    """Megatron's marker: build the data on every rank, not on TP rank 0 only."""

    def __init__(self, args: Namespace, plan: PlanRecipe):
        self.args, self.plan = args, plan
        path = Path(args.tree_metrics_file) if args.tree_metrics_file else None
        self.ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
        nodes = max(1, args.world_size // self.ranks_of_node)
        self.recorder = IterationRecorder(path, nodes=nodes)
        self.chunks = args.virtual_pipeline_model_parallel_size or 1
        self.ledger = PackingLedger(args)
        self._train: RowStream | None = None
        self._valid: RowStream | None = None
        self._exchange: Transport | None = None

    # -- data -----------------------------------------------------------------------------------

    def __call__(self, num_samples, vp_stage: int | None = None):
        """Megatron's dataset provider: (train, valid, test) iterators for one model chunk."""
        args = self.args
        if self._train is None:
            shuffle = not args.no_tree_shuffle
            rows = PlannedRows(row_recipe(args, args.tree_data, shuffle), self.plan)
            consumed = args.consumed_train_samples
            first = self.ledger.first_sample(lambda: rows.packed().fingerprint, consumed)
            self._train = self._stream(args.tree_data, consumed - first, shuffle, log=True)
        valid = None
        if args.tree_valid_data:
            if self._valid is None:
                self._valid = self._stream(
                    args.tree_valid_data, args.consumed_valid_samples, False, log=False
                )
            valid = self._valid.consumer()
        return self._train.consumer(), valid, None

    def _stream(self, paths: list[str], consumed: int, shuffle: bool, log: bool) -> RowStream:
        from megatron.core import parallel_state as mpu

        args = self.args
        dp_rank, cp_rank = mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank()
        # Of this stream alone: ranks do not begin on train and validation rows in one order.
        stage = dp_rank, mpu.get_pipeline_model_parallel_rank()
        agreement = Agreement(stage_group(*stage))
        recipe = row_recipe(args, paths, shuffle)
        order = SampleOrder(consumed, dp_rank, mpu.get_data_parallel_world_size())

        def planners(rank: int | None) -> Iterator[PlannedRow | RowFailure]:
            rows = PlannedRows(recipe, replace(self.plan, cp_rank=rank))
            return planned_row_loader(rows, order, args.tree_planner_workers, args.tree_lookahead)

        if args.tree_planners == "node":
            group = stage_group(*stage, node=dist.get_rank() // self.ranks_of_node)
            loader: Iterator[PlannedRow | RowFailure] = SharedRows(
                planners(None) if dist.get_rank(group) == 0 else None, group
            )
        else:
            loader = planners(cp_rank)
        upload = partial(
            build_batch,
            cp_group=mpu.get_context_parallel_group(),
            device=device_of_rank(),
            tp_group=mpu.get_tensor_model_parallel_group(),
            router_statistics=args.tree_statistics if args.num_experts else None,
            per_sequence="seq_aux_loss" in args.moe_router_load_balancing_type,
            transport=self._transport(),
        )

        def build(planned: PlannedRow) -> TreeBatch:
            if planned.recurrence is None:
                planned = replace(planned, recurrence=recurrent_row(planned.plan, cp_rank))
            return upload(planned)

        return RowStream(
            loader, agreement, build, self._first_row if log else None, device_of_rank()
        )

    def _transport(self) -> Transport | None:
        """How rows travel between CP ranks, one for all streams; None for the group's own way."""
        from megatron.core import parallel_state as mpu

        group = mpu.get_context_parallel_group()
        if self._exchange is None and dist.get_world_size(group) > 1:
            device = device_of_rank()
            if self.args.tree_exchange == "peer":
                self._exchange = PeerTransport(group, device)
            elif self.args.tree_exchange == "auto":
                self._exchange = fastest_transport(group, device)
                if dist.get_rank() == 0:
                    print(f"exchanges between CP ranks: {self._exchange.name} (auto)", flush=True)
        return self._exchange

    def _first_row(self, planned: PlannedRow) -> None:
        self.ledger.rows_known(planned.fingerprint)
        if dist.get_rank() == 0:
            print(implementation_table(self.plan.model, self.args, device_of_rank()), flush=True)
            profile = self.plan.profile
            if profile is not None:
                print(f"planner costs   {profile.name}", flush=True)
            print(planned.summary, flush=True)
            print(f"packing fingerprint {planned.fingerprint}", flush=True)

    # -- forward and loss -----------------------------------------------------------------------

    def forward_step(self, data_iterator, model):
        """One microbatch through the model; returns (output, loss function) as Megatron asks."""
        from megatron.training import get_timers

        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        batch = next(data_iterator)
        timers("batch-generator").stop()
        if model.training:
            self.recorder.add_row(batch.statistics)
            report_row(batch.statistics, batch.tokens.device)
        output = batch.forward(model)

        def loss_function(losses: torch.Tensor):
            loss_sum, count = weighted_loss(batch, losses)
            if model.training:
                self.recorder.add_loss(loss_sum, count)
            report = torch.cat([loss_sum.detach().view(1), count.float().view(1)])
            return loss_sum, count, {"lm loss": report}

        return output, loss_function

    # -- log ------------------------------------------------------------------------------------

    def after_iteration(self, iteration: int, learning_rate, skipped_iter: int, grad_norm) -> None:
        """Reduce, print, and hand this iteration to the metrics file, TensorBoard and W&B."""
        from megatron.core import parallel_state as mpu
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        args = self.args
        record = self.recorder.finish(
            iteration=iteration,
            consumed_samples=args.consumed_train_samples,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            skipped=skipped_iter,
            preparation=self._train.take_preparation() if self._train else Preparation(),
            chunks=self.chunks,
            group=mpu.get_data_parallel_group(with_context_parallel=True),
            cp_size=mpu.get_context_parallel_world_size(),
            device=device_of_rank(),
        )
        if dist.get_rank() != dist.get_world_size() - 1:
            return  # the last rank holds the loss, and Megatron's writers live there
        self.recorder.write(record)
        if iteration % args.log_interval == 0:
            print(record.line(), flush=True)
            writer, wandb = get_tensorboard_writer(), get_wandb_writer()
            for name, value in {**record.rates(), "loss sum": record.loss_sum}.items():
                if writer:
                    writer.add_scalar(f"tree/{name}", value, iteration)
                if wandb:
                    wandb.log({f"tree/{name}": value}, iteration)
        if iteration == args.train_iters:
            print(self.recorder.summary(), flush=True)
