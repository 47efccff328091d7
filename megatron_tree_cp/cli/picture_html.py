"""A `Picture` as one HTML file: inline SVG, nothing loaded from elsewhere, all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from .picture import KINDS, Picture, kind_of, kinds_of, mixer_ends
from .picture_ticks import ticks

WIDTH = 1080
LEFT = 64

_STYLE = """
:root{--ink:#1f2933;--muted:#5f6c7b;--line:#dfe4ea;--paper:#fff;--page:#f5f7f9;--wait:#eceff3}
@media(prefers-color-scheme:dark){:root{--ink:#e4e9ef;--muted:#9aa7b5;--line:#37424f;
--paper:#1c232b;--page:#12171d;--wait:#2b343f}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:14px/1.45 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:1160px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:22px;margin:0 0 12px}h2{font-size:16px;margin:0 0 2px}
h3{font-size:13px;margin:14px 0 4px}
section{background:var(--paper);border:1px solid var(--line);border-radius:10px;
padding:16px 20px;margin:14px 0}p{margin:0 0 10px;color:var(--muted);max-width:100ch}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:10px 18px;margin:0}
dt{color:var(--muted);font-size:12px}dd{margin:0;font-size:16px;font-weight:600;
overflow-wrap:anywhere}svg{display:block;width:100%;height:auto}
svg text{fill:var(--muted);font-size:11px}svg .num{font-size:10px;fill:#1f2933}
.axis{stroke:var(--line)}.key{display:flex;flex-wrap:wrap;gap:4px 14px;margin:6px 0 10px;
font-size:12px;color:var(--muted)}.key span{cursor:default}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:5px;
vertical-align:-1px}table{border-collapse:collapse;font-size:13px;width:100%}
td,th{padding:3px 10px 3px 0;text-align:right;border-bottom:1px solid var(--line);
font-weight:400}td:first-child,th:first-child{text-align:left}th{color:var(--muted)}
tr.chosen td{font-weight:700}td.bar{width:40%;padding:0}td.bar i{display:block;height:9px;
background:#e08a2e;border-radius:2px;min-width:1px}tr.chosen td.bar i{background:#3f9b64}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:24px}
.dim [data-r]{opacity:.13}.dim [data-r].on{opacity:1}
details summary{cursor:pointer;color:var(--muted)}
"""

_SCRIPT = """
document.querySelectorAll('.ranks span').forEach(function(chip){
 chip.addEventListener('mouseenter',function(){
  document.body.classList.add('dim');
  document.querySelectorAll('[data-r="'+chip.dataset.r+'"]').forEach(
   function(e){e.classList.add('on')})});
 chip.addEventListener('mouseleave',function(){
  document.body.classList.remove('dim');
  document.querySelectorAll('.on').forEach(function(e){e.classList.remove('on')})})});
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html_page(picture: Picture) -> str:
    """The whole page; it opens without a network and carries a policy that forbids one."""
    title = escape(picture.title)
    figures = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in picture.figures
    )
    sections = [_tree(picture), _timelines(picture), _split(picture), _traffic(picture)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main><h1>{title}</h1>"
        f"<section><dl>{figures}</dl></section>{''.join(sections)}{_tried(picture)}"
        f"</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _section(title: str, note: str, *content: str) -> str:
    return f"<section><h2>{title}</h2><p>{note}</p>{''.join(content)}</section>"


def _svg(height: float, content: Iterable[str], width: float = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img">{"".join(content)}</svg>'


def _rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    label: str = "",
    rank: int | None = None,
    more: str = "",
) -> str:
    mark = "" if rank is None else f' data-r="{rank}"'
    title = f"<title>{escape(label)}</title>" if label else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" '
        f'height="{max(height, 0.3):.2f}" fill="{fill}"{mark}{more}>{title}</rect>'
    )


def _text(x: float, y: float, content: str, anchor: str = "start", kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{mark}>{escape(content)}</text>'


def _axis(
    end: float, y: float, top: float, unit: str, left: float = LEFT, right: float = WIDTH
) -> list[str]:
    """Ticks of [0, end] from ``left`` to ``right``, with faint lines up to ``top``."""
    scale, parts = (right - left) / end, []
    for value, name in ticks(end, max(round(8 * (right - left) / WIDTH), 2)):
        x = left + value * scale
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{y:g}"/>')
        anchor = "start" if value == 0 else "end" if x > WIDTH - 30 else "middle"
        parts.append(_text(x, y + 13, name + (f" {unit}" if value == 0 else ""), anchor))
    return parts


def _key(entries: Iterable[tuple[str, str]], ranks: bool = False) -> str:
    chips = "".join(
        f'<span{f" data-r={n}" if ranks else ""}><i style="background:{colour}"></i>'
        f"{escape(name)}</span>"
        for n, (name, colour) in enumerate(entries)
    )
    return f'<div class="key{" ranks" if ranks else ""}">{chips}</div>'


def _tree(picture: Picture) -> str:
    height = min(max(picture.num_leaves * 13, 90), 560)
    across = (WIDTH - LEFT) / picture.num_positions
    down = height / picture.num_leaves
    gap = 1.0 if down >= 5 else 0.0
    parts = _axis(picture.num_positions, height + 4, 0, "position")
    for p in picture.pieces:
        y, tall = p.y0 * down, (p.y1 - p.y0) * down
        colour = picture.colours[p.owner]
        parts.append(
            _rect(LEFT + p.x0 * across, y, (p.x1 - p.x0) * across, tall - gap, colour, p.label,
                  p.owner)
        )  # fmt: skip
    parts.append(_text(0, 12, "leaves"))
    strip = [_text(0, 15, "row")]
    scale = (WIDTH - LEFT) / picture.num_tokens
    for begin, end, rank in picture.strip:
        label = f"rank {rank}: rows {begin:,} to {end - 1:,}"
        strip.append(
            _rect(LEFT + begin * scale, 2, (end - begin) * scale, 18, picture.colours[rank], label,
                  rank)
        )  # fmt: skip
    strip += _axis(picture.num_tokens, 24, 20, "row index")
    note = (
        "Every box is a piece of a segment with one owner: its width is tokens, its height the "
        "leaves below it. Left of a box is what it sees. Below, the same tokens in row order."
    )
    if picture.segments_drawn:
        note += f" Too fine for this width: {picture.segments_drawn}."
    names = [(f"rank {r}", colour) for r, colour in enumerate(picture.colours)]
    return _section(
        "Tree and ownership",
        note,
        _key(names, ranks=True),
        _svg(height + 22, parts),
        _svg(42, strip),
    )


def _timelines(picture: Picture) -> str:
    content = [_key([KINDS[kind] for kind in kinds_of(*picture.timelines)])]
    lane = 26 if picture.cp_size <= 8 else 17 if picture.cp_size <= 16 else 11
    thin = lane * 0.24
    for line in picture.timelines:
        ends = mixer_ends(line)
        second = LEFT + (WIDTH - LEFT - 24) * ends["forward"] / sum(ends.values()) + 24
        span = {"forward": (LEFT, second - 24), "backward": (second, WIDTH)}
        height = picture.cp_size * lane + 18
        parts = []
        for direction, (left, right) in span.items():
            whole = line.forward_ms if direction == "forward" else line.backward_ms
            parts += _axis(ends[direction], height, 18, "ms", left, right)
            parts.append(_text(left, 11, f"{direction}, {whole:.3f} ms in all"))
            for rank in range(picture.cp_size):
                y = 18 + rank * lane
                parts.append(_rect(left, y, right - left, lane * 0.82 - thin, "var(--wait)"))
        for rank in range(0, picture.cp_size, 1 if lane > 11 else 4):
            parts.append(_text(0, 18 + (rank + 0.6) * lane, f"rank {rank}"))
        for step in line.steps:
            left, right = span[step.direction]
            scale = (right - left) / ends[step.direction]
            x, stop = left + step.begin * scale, min(left + step.end * scale, right)
            if x >= right:
                continue
            y = 18 + step.rank * lane
            wave = f", wave {step.wave}" if step.wave >= 0 else ""
            label = (
                f"rank {step.rank} {step.direction}: {step.kind}{wave}\n"
                f"{step.begin:.3f} to {step.end:.3f} ms ({step.end - step.begin:.3f})"
            )
            colour = KINDS[kind_of(step.kind)][1]
            wire = step.kind == "exchange"
            top, tall = (y + lane * 0.82 - thin + 1, thin) if wire else (y, lane * 0.82 - thin)
            shade = f' fill-opacity="{1 - 0.16 * (max(step.wave, 0) % 4):g}"'
            parts.append(_rect(x, top, stop - x, tall, colour, label, step.rank, shade))
        name = f"{line.name}, x {line.layers}" if line.layers > 1 else line.name
        content.append(f"<h3>{escape(name)}</h3>")
        content.append(_svg(height + 18, parts))
    note = (
        "One layer of each class in the executor's order, as the planner priced it: compute above, "
        "exchanges as thin bars below; later waves are lighter. Token-local work is cut off on the "
        "right. Hover for times."
    )
    return _section("Predicted timeline", note, *content)


def _split(picture: Picture) -> str:
    total = max(sum(rank.values()) for rank in picture.split)
    lane = 20 if picture.cp_size <= 16 else 9
    height = picture.cp_size * lane + 4
    parts = _axis(total, height, 0, "ms")
    scale = (WIDTH - LEFT) / total
    for rank, split in enumerate(picture.split):
        x = float(LEFT)
        if lane > 9 or rank % 4 == 0:
            parts.append(_text(0, rank * lane + 0.7 * lane, f"rank {rank}"))
        for kind, ms in split.items():
            if ms <= 0:
                continue
            name, colour = KINDS[kind]
            colour = "var(--wait)" if kind == "wait" else colour
            label = f"rank {rank}, {name}: {ms:.3f} ms ({100 * ms / total:.1f} %)"
            parts.append(_rect(x, rank * lane + 1, ms * scale, lane * 0.8, colour, label, rank))
            x += ms * scale
    return _section(
        "Where the time goes",
        "Forward and backward of all layers drawn above; waiting is for keys or states that have "
        "not arrived and for slower ranks.",
        _svg(height + 18, parts),
    )


def _traffic(picture: Picture) -> str:
    parts = [_matrix(picture, name, sent) for name, sent in picture.traffic]
    if not parts:
        return ""
    return _section(
        "Bytes between ranks",
        "MiB of keys and values, or of states and halos, that one layer sends forward; backward "
        "returns their gradients the other way.",
        f'<div class="two">{"".join(parts)}</div>',
    )


def _matrix(picture: Picture, name: str, sent: np.ndarray) -> str:
    size = picture.cp_size
    cell = min(46.0, 440 / size)
    mib = sent / 2**20
    most = max(float(mib.max()), 1e-12)
    parts = [_text(48, 12, "to rank"), _text(0, 36, "from")]
    step = 1 if size <= 16 else 8
    for s in range(size):
        if s % step == 0:
            parts.append(_text(48 + (s + 0.5) * cell, 27, str(s), "middle"))
            parts.append(_text(42, 32 + (s + 0.62) * cell, str(s), "end"))
        for d in range(size):
            share = float(mib[s, d]) / most
            fill = "var(--wait)" if share == 0 else _blend(share)
            label = f"rank {s} to rank {d}: {mib[s, d]:.3f} MiB"
            x, y = 48 + d * cell, 32 + s * cell
            parts.append(_rect(x, y, cell * 0.95, cell * 0.95, fill, label))
            if size <= 12 and share > 0:
                value = f"{mib[s, d]:.0f}" if most >= 100 else f"{mib[s, d]:.1f}"
                parts.append(_text(x + cell * 0.475, y + cell * 0.57, value, "middle", "num"))
    side = 52 + size * cell
    graph = _svg(side - 16, parts, side)
    return (
        f'<div><h3>{escape(name)}: {mib.sum():,.1f} MiB</h3><div style="max-width:{side:.0f}px">'
        f"{graph}</div></div>"
    )


def _blend(share: float) -> str:
    low, high = (253, 238, 213), (214, 105, 60)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high))


def _tried(picture: Picture) -> str:
    content = []
    for group, found in picture.tried:
        content.append(f"<h3>{escape(group)}</h3>{_candidates(found)}")
    note = (
        "Predicted ms of what the search priced: seeds on units of the row, then the contiguous "
        "layout and the moved one exactly; and how the keys of the chosen ones travel. The chosen "
        "is bold; bars show what others cost above the cheapest."
    )
    return _section("What the search tried", note, *content)


def _candidates(found: Sequence[tuple[str, float, bool]]) -> str:
    least = min(ms for _, ms, _ in found)
    most = max(max(ms for _, ms, _ in found) - least, 1e-9)
    rows = "".join(
        f"<tr{' class=chosen' if chosen else ''}><td>{escape(name)}</td><td>{ms:.3f}</td>"
        f"<td>{100 * (ms / least - 1):+.2f} %</td>"
        f'<td class="bar"><i style="width:{100 * (ms - least) / most:.1f}%"></i></td></tr>'
        for name, ms, chosen in found
    )
    return f"<table><tr><th>candidate</th><th>ms</th><th></th><th></th></tr>{rows}</table>"
