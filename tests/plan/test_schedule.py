"""How a layout's keys travel: which directions are fused, in how many waves, and what it costs."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.plan import CostProfile, LayerClass, Layout, ModelShape, plan_row
from megatron_tree_cp.plan.timeline import layer_timelines

TREE = preset_tree("varied_5k", 2, num_tokens=16_384)
LAYOUT = Layout.from_pieces([0, 8_192, 16_384], [0, 1], 2)
MODEL = ModelShape(classes=(LayerClass("global", layers=3),))
BASE = CostProfile()

# A merge costs more than the wait that it saves; a fused return has nothing beside it.
DEAR_MERGE = replace(BASE, merge_launch_ms=2.0, exchange_latency_ms=1.0)
# Two backward calls cost more than a late return; a forward exchange hides behind its own keys.
DEAR_BACKWARD = replace(BASE, backward_launch_ms=2.0, exchange_latency_ms=0.3)
# A call costs more than an exchange, both ways; and the other way round.
DEAR_CALLS = replace(BASE, forward_launch_ms=2.0, backward_launch_ms=2.0)
DEAR_EXCHANGE = replace(BASE, exchange_latency_ms=0.5, assemble_launch_ms=5.0)


def planned(profile=BASE, waves=None):
    return plan_row(TREE, 2, MODEL, profile, waves=waves, layout=LAYOUT)


def combined(plan, forward_fused, backward_fused):
    """``plan`` with other directions fused; what it is predicted to cost stays."""
    changed = {"forward_fused": forward_fused, "backward_fused": backward_fused}
    return replace(
        plan, attention={name: replace(part, **changed) for name, part in plan.attention.items()}
    )


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        (DEAR_MERGE, "fused forward, 1 wave backward"),
        (DEAR_BACKWARD, "1 wave forward, fused backward"),
        (DEAR_CALLS, "fused"),
        (DEAR_EXCHANGE, "1 wave"),
    ],
)
def test_directions_are_chosen_apart(profile, text):
    plan = planned(profile)
    chosen = plan.attention_class(None)
    assert chosen.describe() == text and chosen.num_waves == 1
    ms = {c.name.removeprefix("window None: "): c.total_ms for c in plan.predicted.candidates}
    assert min(ms, key=ms.get) == text and plan.predicted.total_ms == ms[text]
    # The two mixed prices are the other halves of the two that are alike.
    mixed = ms["fused forward, 1 wave backward"] + ms["1 wave forward, fused backward"]
    assert mixed == pytest.approx(ms["fused"] + ms["1 wave"])
    assert len({ms["fused"], ms["1 wave"], ms["1 wave forward, fused backward"]}) == 3


@pytest.mark.parametrize("profile", [DEAR_MERGE, DEAR_BACKWARD])
def test_prediction_is_the_sum_of_the_two_directions(profile):
    plan, fused, staged = (planned(profile, waves) for waves in (None, 0, 1))
    part = plan.attention_class(None)
    ahead = fused if part.forward_fused else staged
    back = fused if part.backward_fused else staged
    assert ahead is not back
    (line,) = layer_timelines(ahead, profile)
    forward = line.layers * line.forward_ms
    (line,) = layer_timelines(back, profile)
    assert plan.predicted.total_ms == pytest.approx(forward + line.layers * line.backward_ms)
    assert np.array_equal(plan.predicted.forward_ms, ahead.predicted.forward_ms)
    assert np.array_equal(plan.predicted.backward_ms, back.predicted.backward_ms)
    assert plan.predicted.total_ms < min(p.predicted.total_ms for p in (fused, staged))


@pytest.mark.parametrize("waves", [0, 1, 2])
@pytest.mark.parametrize("profile", [DEAR_MERGE, DEAR_BACKWARD, DEAR_CALLS, DEAR_EXCHANGE])
def test_forced_waves_run_both_directions_alike(profile, waves):
    part = planned(profile, waves).attention_class(None)
    assert part.forward_fused == part.backward_fused == (waves == 0)
    assert part.num_waves == max(waves, 1)


def test_digest_tells_the_directions_apart():
    plan = planned(waves=1)
    plans = [combined(plan, f, b) for f in (False, True) for b in (False, True)]
    assert plans[0].digest == plan.digest and len({p.digest for p in plans}) == 4
    assert plans[3].digest == planned(waves=0).digest


def test_only_one_wave_can_be_fused():
    for fused in ((True, False), (False, True), (True, True)):
        for plan in (planned(waves=2), plan_row(TREE, 1, MODEL)):
            with pytest.raises(ValueError, match="exactly one wave, the plan has [02]"):
                combined(plan, *fused)
    assert plan_row(TREE, 1, MODEL).attention_class(None).describe() == "no exchange"
    assert planned(waves=2).attention_class(None).describe() == "2 waves"
