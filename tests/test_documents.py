"""Documents follow the code: the argument page, links, figures, configs."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "megatron_tree_cp").rglob("*.md"),
]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_argument_page_is_current():
    path = ROOT / "docs" / "generate_arguments.py"
    generator = load(path)
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), (
        f"options changed: run python {path.relative_to(ROOT)}"
    )


def test_the_benchmark_figures_come_from_evidence():
    path = ROOT / "docs" / "benchmarks" / "generate.py"
    generator = load(path)
    evidence = generator.records()
    hint = f"evidence changed: run python {path.relative_to(ROOT)}"
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(evidence), hint
    text = generator.README.read_text(encoding="utf-8")
    assert text == generator.readme(text, evidence), hint


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists():
            broken.append(target)
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.M)
            if anchor not in {slug(heading) for heading in headings}:
                broken.append(target)
    assert not broken, broken


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configs_are_flat_flag_names(config: Path):
    for key, value in yaml.safe_load(config.read_text(encoding="utf-8")).items():
        assert re.fullmatch(r"[a-z][a-z0-9-]*", key), key
        values = value if isinstance(value, list) else [value]
        assert all(isinstance(item, bool | int | float | str) for item in values), key


def test_configs_name_options_that_exist():
    from megatron_tree_cp.megatron.run_config import expand_tree_config

    for config in CONFIGS:
        assert expand_tree_config(["--tree-config", str(config)]), config
