"""The repository's own promises: scripts parse, nothing machine-specific is committed."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHELL = sorted(
    [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("scripts/**/*.slurm"), ROOT / ".ci" / "run"]
)
TEXT = {".py", ".sh", ".md", ".toml", ".txt", ".yaml", ".yml", ".slurm", ".patch", ""}


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.suffix in TEXT and path.is_file()]


@pytest.mark.parametrize("script", SHELL, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_parse(script: Path):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)


def test_no_machine_paths_and_no_registry_hosts():
    forbidden = re.compile(r"(?<![\w.])/(?:work|root|tmp)/\w|index-url|pypi\.(?:org|python)")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in tracked_files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_pins_respect_the_lower_bounds_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {}
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *(r for rs in extras.values() for r in rs)]:
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[.*?\])?>=([0-9a-z.]+)", requirement)
        assert match, f"{requirement}: a lower bound is wanted"
        bounds[match[1].lower()] = match[2]

    from packaging.version import Version

    for name in ("cpu-py312.txt", "h200.txt"):
        for line in (ROOT / "constraints" / name).read_text().splitlines():
            pin = line.split("#")[0].strip()
            if not pin:
                continue
            package, version = pin.split("==")
            if package.lower() in bounds:
                assert Version(version) >= Version(bounds[package.lower()]), f"{name}: {pin}"
