"""The Gated DeltaNet benchmark on CPU: it checks before it times, its bound, its baselines."""

import numpy as np
import pytest
import torch
import triton

from megatron_tree_cp.bench import gdn, gdn_baselines, gdn_bound
from megatron_tree_cp.bench.compilations import compilations
from megatron_tree_cp.bench.evidence import read_evidence
from megatron_tree_cp.bench.gdn import GdnBench
from megatron_tree_cp.bench.gdn_layer import GdnShape, draw_inputs, tree_operators
from megatron_tree_cp.bench.presets import check_tree, preset_tree
from megatron_tree_cp.bench.timing import Clock
from megatron_tree_cp.cli import main
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops import tree_causal_conv1d, tree_gated_delta_rule
from megatron_tree_cp.plan import plan_row
from megatron_tree_cp.plan.profile import CostProfile
from megatron_tree_cp.plan.runs import join_only_children
from megatron_tree_cp.tree.errors import InputError
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.distributed import run_ranks

SHAPE = GdnShape(1, 2, 8, 6, dtype=torch.float32)
CPU = torch.device("cpu")
COMMAND = "bench gdn --device cpu --dtype float32 --gdn-heads 1/2/8/6 --tokens 300 --preset short"


def sequences(offsets, device):
    """`conv` and `rule` on sequences end to end: roots without branches."""
    lengths = np.diff(offsets)
    tree = PackedTree(lengths, [-1] * len(lengths))
    return tree_operators(TreeContext(plan_row(tree, 1), None, device), SHAPE)


def test_writes_evidence(tmp_path, capsys):
    path = tmp_path / "gdn.json"
    options = [*COMMAND.split(), "--warmup", "1", "--rows", "2", "--evidence", str(path)]
    assert main(options) == 0
    (record,) = read_evidence(path)
    assert (record.what, record.preset, record.cp) == ("gdn", "short", 1)
    assert record.variant == "1/2/8/6 tiled" and "--gdn-heads 1/2/8/6" in record.command
    assert [row["row"] for row in record.rows] == [1, 2]
    for row in record.rows:
        assert row["fwd_bwd_ms"] > 0 and row["conv_ms"] > 0 and row["rule_ms"] > 0
        assert row["tokens"] == 300 and row["chained_runs"] == 0
        assert row["runs"] == len(
            join_only_children(preset_tree("short", 1, row["row"], 300)).start
        )
        assert row["byte_bound_percent"] == pytest.approx(
            100 * row["byte_bound_ms"] / row["fwd_bwd_ms"]
        )
    percent = record.metrics["byte_bound_percent"]
    assert percent["worst"] == min(row["byte_bound_percent"] for row in record.rows)
    assert record.metrics["new_compilations"]["worst"] == 0
    shown = capsys.readouterr()
    assert "warm-up row 0" in shown.err and "runs chained" in shown.err and "short" in shown.out


def _on_ranks(rank, world_size):
    import torch.distributed as dist

    bench = GdnBench(SHAPE, dist.group.WORLD, Clock(dist.group.WORLD, CPU), CostProfile())
    error = bench.check(check_tree("deep", world_size, 0, 1200))
    return error, vars(bench.measure(preset_tree("one_chain", world_size, 0, 300), 0, repeats=1))


def test_measures_on_two_ranks():
    (error, first), (_, second) = run_ranks(2, _on_ranks, timeout=100)
    assert 0 < error < 2e-5  # not 0: chains cross ranks, where one rank alone sums in blocks
    assert first["runs"] == 2 and first["chained_runs"] == 1
    for name in ("forward_ms", "backward_ms", "conv_ms", "rule_ms", "plan_ms"):
        assert first[name] == second[name] > 0, name  # the slowest rank's, on both


def _leaky(context, shape):
    """Branches forgotten: every token follows the token before it."""
    chain = PackedTree([context.plan.tree.num_tokens], [-1])
    return tree_operators(TreeContext(plan_row(chain, 1), None, context.device), shape)


def _loud(context, shape):
    conv, rule = tree_operators(context, shape)
    return conv, lambda *inputs: 1.001 * rule(*inputs)


@pytest.mark.parametrize("operators", [_leaky, _loud])
def test_what_fails_its_check_is_not_timed(operators, tmp_path, monkeypatch, capsys):
    path = tmp_path / "gdn.json"
    monkeypatch.setattr(gdn, "tree_operators", operators)
    monkeypatch.setattr(GdnBench, "measure", lambda *args, **kwargs: pytest.fail("timed"))
    assert main([*COMMAND.split(), "--evidence", str(path)]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "our layer at CP1 is off by out" in message and "not timed" in message
    assert not path.exists()


def test_nan_fails_the_check():
    bench = GdnBench(SHAPE, None, Clock(None, CPU), CostProfile())
    with pytest.raises(InputError, match="out nan"):
        bench.hold({"out": torch.tensor([torch.nan])}, {"out": torch.ones(1)}, None, "it")


def test_check_rows_keep_the_branches_of_their_preset():
    for name, segments in (("varied_5k", 17), ("deep", 15), ("one_tree", 13), ("one_chain", 1)):
        tree, whole = check_tree(name, 2, 0, None), preset_tree(name, 2, 0)
        assert tree.num_tokens <= 4096 and tree.num_segments >= segments
        assert tree.parents.tolist() == whole.parents[: tree.num_segments].tolist()


def test_byte_bound_by_hand():
    """One token, Hk 1, Hv 2, Dk 4, Dv 6, bf16: 20 channels, 12 outputs, 2 heads."""
    shape = GdnShape(1, 2, 4, 6)
    x, y, head, log = 20 * 2, 12 * 2, 2 * 2, 2 * 4
    conv = (x + x) + (x + x + x)
    gates = (head + head + log + head) + (head + head + log + head + head + head)
    rule = (x + log + head + y) + (x + log + head + y + x + log + head)
    assert gdn_bound.bytes_per_token(shape) == {"conv": conv, "gates": gates, "rule": rule}
    inputs = draw_inputs(shape, 1, CPU)
    assert (inputs.x.nbytes, inputs.alpha.nbytes, inputs.dout.nbytes) == (x, head, y)
    moved = 1e6 * (conv + gates + rule)
    assert gdn_bound.bound_ms(shape, 10**6, tb_per_s=2.0) == pytest.approx(moved / 2e12 * 1e3)
    # The published shape, 40,960 tokens at 4.8 TB/s.
    assert gdn_bound.bound_ms(GdnShape(), 40_960) == pytest.approx(1.2698, abs=1e-4)


def test_flattened_baseline_on_passes():
    bench, tree = (
        GdnBench(SHAPE, None, Clock(None, CPU), CostProfile()),
        preset_tree("short", 1, 0, 300),
    )
    ours = bench.measure(tree, 0, repeats=1)
    parts = gdn_baselines.flattened(bench, tree, sequences, limit=200)
    paths = gdn_baselines.trajectories(tree)
    assert len(parts) > 2 and all(len(part.rows) <= 200 for part in parts)
    assert np.concatenate([part.rows for part in parts]).tolist() == np.concatenate(paths).tolist()
    for path in paths:
        assert tree.positions[path].tolist() == list(range(len(path)))
        assert tree.is_visible(path[-1], path[0])

    def build(bench, tree):
        return gdn_baselines.flattened(bench, tree, sequences)

    result = gdn_baselines.compare("flattened", build, bench, tree, tree, ours, repeats=1)
    assert result.tokens == sum(map(len, paths)) > 300
    assert result.token_saving == result.tokens / 300
    assert result.speed_up == pytest.approx(result.fwd_bwd_ms / ours.fwd_bwd_ms)
    assert result.check_error < 2e-5

    def joined(bench, tree):
        return gdn_baselines.flattened(bench, tree, lambda o, d: sequences(o[[0, -1]], d))

    with pytest.raises(InputError, match="joined at CP1 is off by out"):
        gdn_baselines.compare("joined", joined, bench, tree, tree, ours)


def test_tree_recurrence_baseline(monkeypatch):
    """Its plan and forks over our operators in the place of flash-linear-attention's."""
    pytest.importorskip("tree_recurrence", reason="needs the extra baselines")
    norms = []

    def operators(x, cu_seqlens):
        lengths = np.diff([0, x.shape[1]] if cu_seqlens is None else cu_seqlens)
        return TreeContext(plan_row(PackedTree(lengths, [-1] * len(lengths)), 1), None, CPU)

    def conv(x, weight, bias, activation, cu_seqlens):
        ctx = operators(x, cu_seqlens)
        return tree_causal_conv1d(x[0], weight, bias, ctx, activation)[None], None

    def rule(q, k, v, g, beta, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, **_):
        norms.append(use_qk_l2norm_in_kernel)
        inputs = (x[0] for x in (q, k, v, g, beta))
        y, states = tree_gated_delta_rule(
            *inputs,
            operators(q, cu_seqlens),
            initial_state=initial_state,
            return_final_state=True,
        )
        return y[None], states

    monkeypatch.setattr(gdn_baselines, "fla_kernels", lambda: (conv, rule))
    bench = GdnBench(SHAPE, None, Clock(None, CPU), CostProfile())
    for name in ("short", "varied_5k"):
        tree = check_tree(name, 1, 0, 300)
        ours = bench.measure(tree, 0, repeats=1)
        build = gdn_baselines.tree_recurrence
        result = gdn_baselines.compare("tree", build, bench, tree, tree, ours, repeats=1)
        assert result.token_saving == 1 and result.check_error < 2e-5
    assert all(norms) and len(norms) > 4


def test_one_sequence_needs_one():
    bench = GdnBench(SHAPE, None, Clock(None, CPU), CostProfile())
    assert gdn_baselines.is_one_sequence(PackedTree([3, 2], [-1, 0]))
    for tree in (PackedTree([3, 2], [-1, -1]), PackedTree([3], [-1])):
        with pytest.raises(InputError, match="one sequence, on several ranks"):
            gdn_baselines.one_sequence(bench, tree)


def test_every_triton_kernel_counts():
    @triton.jit
    def kernel(x):
        pass

    before = compilations()
    kernel.device_caches[0] = ({"one": object(), "two": object()}, None)
    assert compilations() == before + 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gdn-heads", "16/32/128"], "write it as K/V/DK/DV"),
        (["--baselines"], "needs a GPU"),
        (["--cp", "2"], "start them with torchrun"),
    ],
)
def test_bad_flags_are_one_line(flags, message, capsys):
    assert main([*COMMAND.split(), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_operators_are_listed(capsys):
    assert main(["bench", "attention", "--preset", "short", "--gdn-heads", "1/1/8/8"]) == 2
    assert "--gdn-heads" in capsys.readouterr().err
