"""The planner's own benchmark, at a size that takes no time."""

import sys

from megatron_tree_cp.bench.evidence import read_evidence
from megatron_tree_cp.bench.planner import main


def test_planner_bench_writes_evidence(tmp_path, monkeypatch, capsys):
    path = tmp_path / "planner.json"
    options = ["--preset", "dominant", "--size", "40000x2", "--rows", "2"]
    monkeypatch.setattr(sys, "argv", ["planner", *options, "--evidence", str(path)])
    main()
    (record,) = read_evidence(path)
    assert record.what == "planner" and record.cp == 2 and len(record.rows) == 2
    assert record.rows[0]["row"] == 16 and record.metrics["planning_cpu_ms"]["median"] > 0
    assert all(row["predicted_ms"] <= row["contiguous_ms"] for row in record.rows)
    assert "dominant" in capsys.readouterr().out
