"""Layer families and topologies of the matrix: a new family joins by one entry here."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = """
--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --vocab-size 64
--make-vocab-size-divisible-by 16 --transformer-impl local --use-cpu-initialization
--distributed-backend gloo --init-method-std 0.15 --tree-max-tokens 96 --tree-planner-workers 0
--tree-cpu --context-parallel-backend tree --weight-decay 0 --clip-grad 1e6 --lr 0.5
--lr-decay-style constant --log-interval 1 --train-iters 2 --global-batch-size 4
--micro-batch-size 1 --no-tree-shuffle --tree-statistics logical
""".split()
SGD = "--optimizer sgd --sgd-momentum 0".split()
# A large epsilon keeps Adam's update smooth in the gradient, where a gradient is nearly zero too.
ADAM = "--optimizer adam --adam-eps 1".split()

_EXPERTS = """
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-router-dtype fp32
--untie-embeddings-and-output-weights --expert-tensor-parallel-size 1 --moe-z-loss-coeff 0.02
""".split()

# Steps of 0.5 would amplify rounding: decays are exponential in the weights.
_GDN = """
--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8
--linear-value-head-dim 6 --linear-conv-kernel-dim 4 --lr 0.1
""".split()

_ISLANDS = "--tree-islands on".split()


@dataclass(frozen=True)
class Family:
    """A model, and how its trajectories are run on the reference side."""

    flags: list[str]
    reference: str = "alone"
    """``alone``: a forward a trajectory; ``together``: one forward over all of a row's, each
    attending to itself only (a balancing loss is over all tokens of a microbatch)."""


@dataclass(frozen=True)
class Topology:
    """A parallel shape, and what else differs from the reference."""

    ranks: int
    flags: list[str]
    optimizer: tuple[str, ...] = tuple(SGD)
    families: tuple[str, ...] = ()
    """Families that it applies to; () for all."""
    tolerance: float = 1e-5
    fast: tuple[str, ...] = ()
    """Families for which it runs in the fast tier."""


FAMILIES: dict[str, Family] = {
    # Tied embeddings: the output layer's gradient travels between pipeline stages.
    "dense": Family("--qk-layernorm --softmax-type learnable".split()),
    "moe": Family(
        [
            *_EXPERTS,
            *"--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1".split(),
            *"--moe-shared-expert-intermediate-size 24".split(),
        ],
        reference="together",
    ),
    "moe, sequence loss and expert bias": Family(
        [
            *_EXPERTS,
            *"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1".split(),
            *"--moe-router-score-function sigmoid --moe-router-enable-expert-bias".split(),
        ]
    ),
    # HybridModel: attention, MLP and experts as layers of their own.
    "hybrid": Family(
        [
            *_EXPERTS,
            *"--hybrid-layer-pattern *-*E --qk-layernorm".split(),
            *"--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1".split(),
        ],
        reference="together",
    ),
    # The reference walks the recurrence of every trajectory token by token.
    "gated delta net": Family([*_GDN, *"--hybrid-layer-pattern G*-G".split()]),
    "gated delta net, GPT": Family(
        [
            *_GDN,
            *"--experimental-attention-variant gated_delta_net --linear-attention-freq 2".split(),
            # On a GPT model Megatron wants at least as many heads as TP x CP ranks.
            *"--linear-num-key-heads 4".split(),
        ]
    ),
    # Recurrent layers, and the experts between them, in a second layout of every row. Weights are
    # small: rounding grows through two recurrent layers, in one layout as in two.
    "islands": Family(
        [
            *(_GDN + _EXPERTS + _ISLANDS),
            *"--hybrid-layer-pattern *GEG --moe-router-enable-expert-bias".split(),
            *"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1".split(),
            *"--moe-router-score-function sigmoid --init-method-std 0.08 --lr 0.3".split(),
        ]
    ),
    "islands, GPT": Family(
        [
            *(_GDN + _ISLANDS),
            *"--experimental-attention-variant gated_delta_net --linear-attention-freq 4".split(),
            *"--linear-num-key-heads 4".split(),
        ]
    ),
}

_CP2 = "--context-parallel-size 2".split()
_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel".split()
_PP2 = "--pipeline-model-parallel-size 2".split()
_EP2 = "--expert-model-parallel-size 2".split()
_VPP2 = "--num-layers-per-virtual-pipeline-stage 1".split()
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
_SHARDED = "--use-distributed-optimizer --overlap-grad-reduce".split()
_MOE = ("moe", "moe, sequence loss and expert bias")
_ALL_EXPERTS = (*_MOE, "hybrid", "islands")

TOPOLOGIES: dict[str, Topology] = {
    "CP1": Topology(1, []),
    "CP2": Topology(2, _CP2, fast=("dense",)),
    "EP2 x CP2": Topology(2, _EP2 + _CP2, families=_ALL_EXPERTS, fast=("moe",)),
    "TP2 x SP x CP2": Topology(4, _TP2 + _CP2, fast=("dense", "gated delta net")),
    "TP2 x EP2 x CP2": Topology(4, _TP2 + _EP2 + _CP2, families=_ALL_EXPERTS, fast=_MOE),
    "PP2 x CP2": Topology(4, _PP2 + _CP2, fast=("dense", "moe", "islands")),
    # A hybrid pattern would have to name the stages of its own.
    "PP2 x VPP2 x CP2": Topology(
        4, _PP2 + _VPP2 + _CP2, families=("dense", *_MOE, "gated delta net, GPT", "islands, GPT")
    ),
    "DP2 x CP2, distributed optimizer, overlapped reduction": Topology(
        4, _CP2 + _SHARDED, optimizer=tuple(ADAM), fast=("dense",)
    ),
    "CP2, full recompute": Topology(2, _CP2 + _FULL),
    "TP2 x CP2, selective recompute": Topology(
        4,
        _TP2 + _CP2 + "--recompute-granularity selective --recompute-modules core_attn".split(),
        families=("dense",),
    ),
    "EP2 x PP2, experts recomputed": Topology(
        4,
        _PP2 + _EP2 + "--recompute-granularity selective --recompute-modules moe".split(),
        families=_MOE,
    ),
    "PP2 x CP2, full recompute": Topology(4, _PP2 + _CP2 + _FULL),
    # bf16 changes which experts are chosen, so only the dense family is comparable.
    "CP2, bf16": Topology(2, [*_CP2, "--bf16"], families=("dense",), tolerance=0.1),
}


def matrix(fast: bool) -> list[tuple[str, str]]:
    """(family, topology) of a tier."""
    return [
        (family, name)
        for family in FAMILIES
        for name, topology in TOPOLOGIES.items()
        if (not topology.families or family in topology.families)
        and (family in topology.fast) == fast
    ]
