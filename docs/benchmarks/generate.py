"""Write docs/benchmarks/index.md and the README's table from the evidence files.

    python docs/benchmarks/generate.py

`tests/test_documents.py` holds both to the evidence, so that no figure is typed.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_tree_cp.bench.evidence import Evidence, read_evidence
from megatron_tree_cp.bench.presets import PRESETS

FOLDER = Path(__file__).parent
PAGE = FOLDER / "index.md"
README = FOLDER.parents[1] / "README.md"
PUBLISHED = FOLDER / "published.json"
README_VARIANT = "32/4/128 flash"
BEGIN, END = "<!-- benchmarks: generated -->", "<!-- benchmarks: end -->"
HEAD = """\
# Benchmarks

Written by `docs/benchmarks/generate.py` from the files in `evidence/`, which also hold the series
of every row and the full commands. Times are medians; the slowest rank counts. To measure the same
on your machine's GPUs, step by step: `scripts/measure.sh OUT`.
"""


def records() -> list[Evidence]:
    """All evidence, by file name."""
    return [r for path in sorted((FOLDER / "evidence").glob("*.json")) for r in read_evidence(path)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join([_row(heads), _row(["---"] * len(heads)), *map(_row, rows)])


def attention_table(evidence: list[Evidence]) -> str:
    """One line per preset, CP size and variant."""
    rows = []
    for record in (r for r in evidence if r.what == "attention"):
        metrics = record.metrics
        rate, limit = metrics["tflops"]["median"], metrics.get("dense_causal_tflops")
        exposed = metrics.get("exposed_exchange_ms")
        rows.append(
            [
                record.preset,
                str(record.cp),
                record.variant,
                f"{metrics['forward_ms']['median']:.2f}",
                f"{metrics['backward_ms']['median']:.2f}",
                f"**{metrics['fwd_bwd_ms']['median']:.2f}**",
                f"{metrics['fwd_bwd_ms']['p95']:.2f}",
                f"{rate:.0f}",
                f"{100 * rate / limit['median']:.0f} %" if limit else "",
                f"{exposed['median']:.2f} ± {exposed['half_width_95']:.2f}" if exposed else "",
                f"{metrics['plan_ms']['median']:.0f}",
                f"{metrics['new_compilations']['worst']:.0f}",
                record.hardware,
                record.date,
                record.commit,
            ]
        )
    heads = ["preset", "CP", "heads, kernel", "fwd ms", "bwd ms", "fwd+bwd ms", "p95"]
    heads += ["TFLOP/s", "of dense causal", "exposed ms", "plan ms", "compiled"]
    return _table([*heads, "hardware", "date", "commit"], rows) if rows else ""


def gdn_table(evidence: list[Evidence]) -> str:
    """One line per preset, CP size and variant."""
    rows = []
    for record in (r for r in evidence if r.what == "gdn"):
        metrics = record.metrics
        local = metrics["runs"]["median"] - metrics["chained_runs"]["median"]
        rows.append(
            [
                record.preset,
                str(record.cp),
                record.variant,
                f"{metrics['forward_ms']['median']:.2f}",
                f"{metrics['backward_ms']['median']:.2f}",
                f"**{metrics['fwd_bwd_ms']['median']:.2f}**",
                f"{metrics['fwd_bwd_ms']['p95']:.2f}",
                f"{metrics['conv_ms']['median']:.2f}",
                f"{metrics['rule_ms']['median']:.2f}",
                f"{metrics['byte_bound_ms']['median']:.2f}",
                f"{metrics['byte_bound_percent']['median']:.0f} %",
                f"{metrics['chained_runs']['median']:.0f} / {local:.0f}",
                f"{metrics['plan_ms']['median'] + metrics['metadata_ms']['median']:.0f}",
                f"{metrics['peak_gib']['median']:.1f}",
                f"{metrics['new_compilations']['worst']:.0f}",
                record.hardware,
                record.date,
                record.commit,
            ]
        )
    heads = ["preset", "CP", "heads, kernel", "fwd ms", "bwd ms", "fwd+bwd ms", "p95", "conv ms"]
    heads += ["recurrence ms", "byte bound ms", "of it", "runs chained / local", "plan + upload ms"]
    heads += ["peak GiB", "compiled", "hardware", "date", "commit"]
    return _table(heads, rows) if rows else ""


def gdn_baseline_table(evidence: list[Evidence]) -> str:
    """One line per baseline beside our layer on the same row."""
    rows = []
    for record in (r for r in evidence if r.what == "gdn"):
        metrics = record.metrics
        for name in (key.removesuffix(" speed_up") for key in metrics if key.endswith(" speed_up")):
            theirs = {
                key.removeprefix(f"{name} "): metric["median"]
                for key, metric in metrics.items()
                if key.startswith(f"{name} ")
            }
            rows.append(
                [
                    record.preset,
                    str(record.cp),
                    name,
                    f"{theirs['fwd_bwd_ms']:.2f}",
                    f"{theirs['fwd_bwd_ms'] / theirs['speed_up']:.2f}",
                    f"**{theirs['speed_up']:.2f}x**",
                    f"{theirs['token_saving']:.2f}x",
                    f"{theirs['speed_up_per_saving']:.2f}",
                    record.hardware,
                    record.date,
                    record.commit,
                ]
            )
    heads = ["preset", "CP", "baseline", "its fwd+bwd ms", "ours", "speed-up", "token saving"]
    return _table([*heads, "speed-up / saving", "hardware", "date", "commit"], rows) if rows else ""


def published_table(evidence: list[Evidence]) -> str:
    """The published figures of another system beside ours, where the work is the same."""
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    rows = []
    for figure in published["figures"]:
        for record in evidence:
            variant = record.variant.removesuffix(" filled")
            key = {"what": record.what, "variant": variant, "preset": record.preset}
            if {**figure, **key, "cp": record.cp} != figure:
                continue
            ours = record.metrics["fwd_bwd_ms"]["median"]
            rows.append(
                [
                    {"attention": "attention", "gdn": "Gated DeltaNet layer"}[record.what],
                    record.preset,
                    str(record.cp),
                    f"{figure['fwd_bwd_ms']:.2f}",
                    f"**{ours:.2f}**",
                    f"{figure['fwd_bwd_ms'] / ours:.2f}x",
                    record.date,
                    record.commit,
                ]
            )
    heads = ["operator", "preset", "CP", f"{published['system']}, fwd+bwd ms", "ours", "faster"]
    return _table([*heads, "date", "commit"], rows) if rows else ""


def training_table(evidence: list[Evidence]) -> str:
    """One line per run."""
    rows = [
        [
            record.preset,
            str(record.cp),
            record.variant,
            f"{record.metrics['stored_tokens_per_s']['median']:,.0f}",
            f"{record.metrics['iteration_ms']['median']:.0f}",
            f"{record.metrics['exposed_preparation_ms']['median']:.1f}",
            _peak(record),
            _agreeing(record),
            _off(record, "loss"),
            _off(record, "grad_norm"),
            record.hardware,
            record.date,
            record.commit,
        ]
        for record in evidence
        if record.what == "train"
    ]
    heads = [
        "model, rollouts",
        "CP",
        "layers",
        "stored tokens/s",
        "ms/iteration",
        "waited for rows, ms",
    ]
    heads += [
        "peak GiB",
        "worst loss off CP1",
        "worst gradient norm off CP1",
        "hardware",
        "date",
        "commit",
    ]
    return _table(heads, rows) if rows else ""


def _peak(record: Evidence) -> str:
    """Peak memory of a training run; older files have none."""
    peak = record.metrics.get("peak_memory_gib")
    return "" if peak is None else f"{peak['worst']:.1f}"


def _agreeing(record: Evidence) -> str:
    """How many first steps agree with the reference's."""
    steps = record.metrics.get("agreeing_steps")
    return "" if steps is None else f"{steps['median']:.0f} of {len(record.rows)}"


def _off(record: Evidence, name: str) -> str:
    """Worst deviation from the first run; nothing where a run has other initial weights."""
    off = record.metrics.get(f"{name}_relative_difference")
    return "" if off is None else f"{100 * off['worst']:.3f} %"


def prediction_table(evidence: list[Evidence]) -> str:
    """Predicted against measured times of distinct plans, one line per preset and CP size."""
    rows = []
    for record in evidence:
        metrics = record.metrics
        if record.what != "planner" or "time_error_percent" not in metrics:
            continue
        memory = metrics.get("memory_error_percent")
        order = metrics.get("clear_order_right_percent")
        rows.append(
            [
                record.preset,
                record.variant,
                str(record.cp),
                f"{metrics['plans_per_row']['median']:.0f}",
                f"**{metrics['time_error_percent']['median']:.1f} %**",
                f"{metrics['time_error_percent']['p95']:.1f} %",
                "" if order is None else f"{order['median']:.0f} %",
                f"{metrics['regret_percent']['median']:.1f} %",
                f"{metrics['gain_over_contiguous_percent']['median']:.1f} %",
                "" if memory is None else f"{memory['median']:.1f} %",
                record.hardware,
                record.date,
                record.commit,
            ]
        )
    heads = [
        "preset",
        "operator",
        "CP",
        "plans a row",
        "time error",
        "p95",
        "order right (1 % apart)",
    ]
    heads += ["chosen above best", "faster than contiguous", "memory error"]
    return _table([*heads, "hardware", "date", "commit"], rows) if rows else ""


def planner_table(evidence: list[Evidence]) -> str:
    """One line per preset and size."""
    rows = [
        [
            record.preset,
            record.variant,
            str(record.cp),
            f"{record.metrics['planning_cpu_ms']['median']:.1f}",
            f"{record.metrics['planning_cpu_ms']['p95']:.1f}",
            f"{record.metrics['planning_wall_ms']['median']:.1f}",
            f"{record.metrics['predicted_gain_percent']['median']:.2f} %",
            record.hardware,
            record.date,
            record.commit,
        ]
        for record in evidence
        if record.what == "planner" and "planning_cpu_ms" in record.metrics
    ]
    heads = ["preset", "row", "CP", "CPU ms", "p95", "wall ms", "predicted below contiguous"]
    return _table([*heads, "hardware", "date", "commit"], rows) if rows else ""


def readme_table(evidence: list[Evidence]) -> str:
    """Attention rates beside their limit, in per cent, the last measured of every row."""
    rows = []
    latest = {
        (record.preset, record.cp): record
        for record in evidence
        if record.what == "attention"
        and record.variant.removesuffix(" filled") == README_VARIANT
        and "dense_causal_tflops" in record.metrics
    }
    order = list(PRESETS)
    for preset, cp in sorted(latest, key=lambda key: (order.index(key[0]), key[1])):
        record = latest[preset, cp]
        rate = record.metrics["tflops"]["median"]
        limit = record.metrics["dense_causal_tflops"]["median"]
        rows.append(
            [
                preset,
                str(cp),
                f"{record.metrics['fwd_bwd_ms']['median']:.2f}",
                f"{rate:.0f}",
                f"{100 * rate / limit:.0f} %",
                record.hardware,
                record.date,
            ]
        )
    heads = ["preset", "CP", "fwd+bwd ms", "TFLOP/s a GPU", "of dense causal FA4"]
    return _table([*heads, "hardware", "date"], rows) if rows else ""


def page(evidence: list[Evidence]) -> str:
    """The whole page."""
    parts = [HEAD]
    attention, training = attention_table(evidence), training_table(evidence)
    if attention:
        parts.append(
            "## Attention\n\nRates count visible pairs; the limit is a dense causal row of the "
            "same kernel in the same run, on the slowest card of those that ran at once. Up to "
            "commit 339bd8c the first limit of a run was taken on cards not yet as hot as its "
            "rows, and cooler cards run it faster (594 against 552 TFLOP/s of the same two): per "
            "cent are comparable within some points only. `peer` exchanges by copies between "
            "GPUs; `filled` rows ran on all cards at once at every CP size, the slowest counts; "
            "`paused` rows rested 50 ms before every call, which keeps a card below its power "
            "limit. flex is what `--tree-deterministic` takes: its time beside flash's is the "
            "cost of gradients that repeat bitwise. Rows of 3086eaf and 3646f32 ran one after the "
            "other on one card: before and after kernels masked tiles by intervals and windows "
            "skipped tiles where branches meet.\n\n" + attention + "\n"
        )
    gdn, baselines = gdn_table(evidence), gdn_baseline_table(evidence)
    if gdn:
        parts.append(
            "## Gated DeltaNet\n\nOne layer without its projections. The byte bound is what its "
            "operators must read and write, at 4.8 TB/s; `bench/gdn_bound.py` counts it.\n\n" + gdn
        )
        parts[-1] += "\n"
    if baselines:
        parts.append(
            "Beside it, on the first measured row of the same run: flash-linear-attention on every "
            "trajectory by itself (the token saving counts the tokens that it repeats), its own "
            "context parallelism on one sequence, and tree-recurrence.\n\n" + baselines + "\n"
        )
    published = published_table(evidence)
    if published:
        parts.append(
            "## Beside published figures\n\nOn H200, where rows and shapes are known to be the "
            "same ([source](published.json)).\n\n" + published + "\n"
        )
    if training:
        parts.append(
            "## Training\n\n20 iterations each, compared with the first run of the same model and "
            "initial weights; a 300M-class model where none is named. Steps agree while the loss "
            "is within 0.5 % and the gradient norm within 1 %. `equal weights` runs load the same "
            "weights in every shape and learn at 1e-5. The other MoE runs start from random "
            "weights at a learning rate at which gradients jump, so that roundings grow: plain "
            "data parallelism (DP2), which exchanges nothing of a tree, parts from the first run "
            "no later than CP2 does; of these, shapes whose weights are initialised otherwise "
            "(TP, PP, EP) are not compared. `rows of` runs have 7 iterations, of which the last "
            "three count: two rows an iteration, of either length, tell what of a step does not "
            "depend on its tokens.\n\n" + training + "\n"
        )
    planner = planner_table(evidence)
    if planner:
        parts.append(
            "## Planning\n\nFrom a tree to its plan and digest, 16 cold rows, one thread. Wall "
            "time includes other work on the same cores; gains are the cost model's.\n\n"
            + planner
            + "\n"
        )
    prediction = prediction_table(evidence)
    if prediction:
        parts.append(
            "## Predicted against measured\n\nForward and backward of one layer, "
            "distinct plans of one or two rows a preset, none of them in the profile's fit. "
            "Medians; order counts pairs of plans that lie 1 % or more apart.\n\n"
            + prediction
            + "\n"
        )
    return "\n".join(parts)


def readme(text: str, evidence: list[Evidence]) -> str:
    """The README with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    beside = gdn_baseline_table(evidence)
    tables = (readme_table(evidence), published_table(evidence), beside)
    return f"{before}{BEGIN}\n" + "\n\n".join(filter(None, tables)) + f"\n{END}{after}"


if __name__ == "__main__":
    found = records()
    PAGE.write_text(page(found), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), found), encoding="utf-8")
