"""`tree-cp inspect`: a page that needs nothing else, escapes what it shows, and adds up."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron_tree_cp.bench.presets import preset_tree
from megatron_tree_cp.cli import main
from megatron_tree_cp.cli.picture import kind_of, kinds_of, mixer_ends, picture, rank_colours
from megatron_tree_cp.cli.picture_html import html_page
from megatron_tree_cp.cli.picture_ticks import ticks
from megatron_tree_cp.plan import CostProfile, LayerClass, ModelShape, plan_row
from megatron_tree_cp.plan.layout import Layout
from megatron_tree_cp.plan.timeline import layer_timelines
from megatron_tree_cp.tree import PackedTree

HOSTILE = '<script>alert("x")</script><img src=http://x.example/a onerror=alert(1)>'
MODEL = ModelShape(classes=(LayerClass("global"), LayerClass("w777", window=777, layers=3)))


GDN = {"query_heads": 2, "kv_heads": 4, "head_dim": 32, "value_dim": 32}


class Page(HTMLParser):
    """Tags and attributes of a page; every tag must be closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(text):
    page = Page(text)
    assert page.tags.count("script") == 1 and not {"img", "link", "iframe"} & set(page.tags)
    assert not {"src", "href", "onerror", "srcset"} & {name for name, _ in page.attributes}
    assert "url(" not in text and "@import" not in text and "http:" not in re.sub(
        "&lt;.*?&gt;", "", text
    )  # fmt: skip
    assert "default-src 'none'" in text
    return page


def draw(tree, cp_size, waves=None, model=MODEL, profile=None):
    profile = profile or CostProfile()
    plan = plan_row(tree, cp_size, model, profile, waves=waves)
    return plan, picture("row", plan, profile, 1.0)


@pytest.mark.parametrize("name", ["varied_5k", "deep", "one_chain"])
@pytest.mark.parametrize("waves", [None, 0, 3])
def test_timelines_end_when_the_plan_says(name, waves):
    profile = CostProfile(exchange_bytes_per_ms=1e7)
    plan = plan_row(preset_tree(name, 4, num_tokens=30_000), 4, MODEL, profile, waves=waves)
    total = 0.0
    for line in layer_timelines(plan, profile):
        total += line.layers * (line.forward_ms + line.backward_ms)
        for direction in ("forward", "backward"):
            for rank in range(4):
                steps = [s for s in line.steps if s.rank == rank and s.direction == direction]
                compute = [s for s in steps if s.kind != "exchange"]
                for before, after in zip(compute, compute[1:]):
                    assert after.begin >= before.end - 1e-9
                waves_seen = [s.wave for s in steps if s.kind == "exchange"]
                assert waves_seen == list(range(plan.attention[line.name].num_waves))
    assert total == pytest.approx(plan.predicted.total_ms)


@pytest.mark.parametrize("name", ["deep", "one_chain"])
def test_recurrent_layers_are_drawn_as_they_are_priced(name):
    """With attention: one timeline each, whose ends are the plan's, and the states that travel."""
    profile = CostProfile()
    classes = (LayerClass("global"), LayerClass("gdn", kind="gdn", layers=3, **GDN))
    plan = plan_row(
        preset_tree(name, 4, num_tokens=30_000), 4, ModelShape(classes=classes), profile
    )
    lines = {line.name: line for line in layer_timelines(plan, profile)}
    total = sum(line.layers * (line.forward_ms + line.backward_ms) for line in lines.values())
    assert total == pytest.approx(plan.predicted.total_ms)
    shown = kinds_of(lines["gdn"])
    assert {"conv", "chunks", "states", "summary", "exchange"} <= set(shown)
    assert "local" not in shown and "states" not in kinds_of(lines["global"])
    drawn = picture("row", plan, profile, 1.0)
    chained = plan.predicted.chained_runs
    assert chained and str(chained) in dict(drawn.figures).values()
    check_page(html_page(drawn))


def test_a_state_and_a_halo_travel_from_the_run_above():
    layout = Layout.from_pieces(np.array([0, 100, 200]), np.array([0, 1]), 2, 1)
    model = ModelShape(classes=(LayerClass("gdn", kind="gdn", **GDN),))
    plan = plan_row(PackedTree([200], [-1]), 2, model, layout=layout)
    ((_, moved),) = picture("row", plan, CostProfile(), 1.0).traffic
    halo = 3 * (2 * 2 * 32 + 4 * 32) * 2  # rows of q, k and v in bf16
    state = 4 * 32 * 32 * 4
    assert moved.tolist() == [[0, halo + state], [0, 0]]


def test_the_split_adds_up_to_the_total():
    plan, drawn = draw(preset_tree("dominant", 4, num_tokens=60_000), 4)
    for rank in drawn.split:
        assert sum(rank.values()) == pytest.approx(plan.predicted.total_ms)
    for (name, sent), window in zip(drawn.traffic, (None, 777), strict=True):
        keys = plan.predicted.remote_tokens[name]
        assert sent.sum(0) == pytest.approx(keys * 2 * 4 * 2 * 128)
        assert plan.attention[name].window == window
    chosen = [name for group, found in drawn.tried for name, _, best in found if best]
    assert len(chosen) == 3  # the layout, and the waves of two windows


@pytest.mark.parametrize(
    ("lengths", "parents", "cp_size"), [([5], [-1], 1), ([1], [-1], 4), ([9, 4, 4], [-1, 0, 0], 2)]
)
def test_small_trees(lengths, parents, cp_size):
    _, drawn = draw(PackedTree(lengths, parents), cp_size)
    check_page(html_page(drawn))
    assert sum(p.x1 - p.x0 for p in drawn.pieces) == sum(lengths)


def test_large_trees_stay_readable():
    tree = preset_tree("varied_5k", 8, num_tokens=400_000)
    assert tree.num_segments > 1000
    _, drawn = draw(tree, 8)
    text = html_page(drawn)
    check_page(text)
    assert not drawn.segments_drawn and len(drawn.pieces) >= tree.num_segments
    many = preset_tree("short", 8, num_tokens=200_000)
    _, drawn = draw(many, 8)
    assert "pieces drawn" in drawn.segments_drawn
    assert len(html_page(drawn)) < 4_000_000


@pytest.fixture
def rollouts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    talk = [{"role": "user", "content": HOSTILE}]
    answers = ("a" * 9, "b" * 9)
    Path("r.jsonl").write_text(
        "\n".join(
            json.dumps({"messages": [*talk, {"role": "assistant", "content": a}]}) for a in answers
        )
    )
    return ["r.jsonl", "--max-tokens", "512", "--cp", "2"]


def test_text_is_shown_on_request_and_escaped(rollouts, capsys):
    Path("p.json").write_text(json.dumps({"name": HOSTILE}))
    assert main(["inspect", *rollouts, "--profile", "p.json"]) == 0
    assert capsys.readouterr().out == "wrote plan.html\n"
    plain = Path("plan.html").read_text()
    check_page(plain)
    assert "aaaa" not in plain
    assert main(["inspect", *rollouts, "--show-text", "--html", "t.html"]) == 0
    text = Path("t.html").read_text()
    check_page(text)
    assert "aaaa" in text and "&lt;script&gt;alert" in text and "<script>alert" not in text
    assert "<img" not in text


def test_packed_rows_and_png(rollouts, capsys):
    pytest.importorskip("matplotlib")
    assert main(["pack", *rollouts[:3], "--output", "rows.npz"]) == 0
    assert main(["inspect", "rows.npz", "--cp", "2", "--png", "p.png", "--windows", "8"]) == 0
    assert Path("p.png").read_bytes().startswith(b"\x89PNG") and not Path("plan.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "a.txt"], "expected a name that ends in .html"),
        (["--png", "no/a.png"], "no/a.png: cannot write"),
        (["--row", "5"], "--row 5: there are 1 rows"),
    ],
)
def test_bad_input(rollouts, arguments, message, capsys):
    assert main(["inspect", *rollouts, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(Path().glob("*.html"))


def test_presets_have_no_text_and_png_names_its_extra(capsys, monkeypatch):
    preset = ["inspect", "--preset", "short", "--tokens", "900", "--cp", "2"]
    assert main([*preset, "--show-text"]) == 2
    assert "a preset has no text" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*preset, "--png", "x.png"]) == 2
    assert "megatron-tree-cp[docs]" in capsys.readouterr().err


def test_ticks_and_colours():
    assert ticks(262_144)[1] == (50_000, "50k") and ticks(0.3)[1] == (0.05, "0.05")
    assert [name for _, name in ticks(3)] == ["0", "0.5", "1", "1.5", "2", "2.5", "3"]
    for size in (1, 8, 9, 64):
        assert len(set(rank_colours(size))) == size
    assert kind_of("delta") == "copies" and kind_of("local") == "local"
    _, drawn = draw(PackedTree([9], [-1]), 1)
    assert all(end > 0 for line in drawn.timelines for end in mixer_ends(line).values())
