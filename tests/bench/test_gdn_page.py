"""The benchmark page's tables of Gated DeltaNet, from evidence records."""

import runpy
from pathlib import Path

from megatron_tree_cp.bench.evidence import Evidence
from megatron_tree_cp.cli.bench_gdn import baseline_metrics

GENERATOR = Path(__file__).parents[2] / "docs" / "benchmarks" / "generate.py"
SERIES = {
    "forward_ms": 4.0,
    "backward_ms": 8.0,
    "fwd_bwd_ms": 12.0,
    "conv_ms": 2.0,
    "rule_ms": 9.5,
    "byte_bound_ms": 1.27,
    "byte_bound_percent": 10.6,
    "runs": 120,
    "chained_runs": 7,
    "plan_ms": 20,
    "metadata_ms": 5,
    "peak_gib": 9.0,
    "new_compilations": 0,
}


def test_tables_show_what_was_measured():
    page_of = runpy.run_path(str(GENERATOR))["page"]
    metrics = {name: dict.fromkeys(("median", "p95", "worst"), x) for name, x in SERIES.items()}
    theirs = {"name": "fla flattened", "row": 16, "tokens": 500, "fwd_bwd_ms": 120.0}
    theirs |= {"speed_up": 10.0, "token_saving": 12.5, "speed_up_per_saving": 0.8}
    record = Evidence("gdn", "varied_5k", 2, metrics, "H200", {}, "abc", "x", "2026-01-01", "v")
    page = page_of([record])
    line = "| varied_5k | 2 | v | 4.00 | 8.00 | **12.00** | 12.00 | 2.00 | 9.50 | 1.27 | 11 % |"
    assert f"{line} 7 / 113 | 25 | 9.0 | 0 | H200 |" in page
    assert "flash-linear-attention" not in page
    metrics |= baseline_metrics(theirs)
    line = "| varied_5k | 2 | fla flattened | 120.00 | 12.00 | **10.00x** | 12.50x | 0.80 | H200 |"
    assert line in page_of([record])
