"""`tree-cp plan` and `inspect` show which waves cross a network once a node."""

import json

from megatron_tree_cp.cli import main

ROW = ["--preset", "one_tree", "--tokens", "131072", "--cp", "4", "--token-flops", "0"]


def test_two_levels_are_shown(tmp_path, capsys):
    nodes = {"name": "two nodes", "ranks_per_node": 2, "network_bytes_per_ms": 8e6}
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(nodes))
    slow = [*ROW, "--profile", str(profile)]
    main(["plan", *slow, "--json"])
    attention = json.loads(capsys.readouterr().out)["plan"]["attention"]["global"]
    assert attention["two_level"] == [True] * attention["waves"]
    assert len(attention["exchanges"]) == attention["waves"]
    main(["plan", *slow])
    assert "two-level" in " ".join(capsys.readouterr().out.split())
    page = tmp_path / "plan.html"
    main(["inspect", *slow, "--html", str(page)])
    assert "two-level" in page.read_text()
    capsys.readouterr()
    main(["plan", *ROW, "--json"])
    attention = json.loads(capsys.readouterr().out)["plan"]["attention"]["global"]
    assert attention["two_level"] == [False] * attention["waves"]
