"""The rooms and who may enter which (docs/architecture.md), held by reading the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_tree_cp"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Room -> our rooms it may import. Downwards only; bench and cli stand on top, nothing enters them.
BELOW = {
    "tree": {"tree"},
    "plan": {"plan", "tree"},
    "comm": {"comm", "plan", "tree"},
    "ops": {"ops", "comm", "plan", "tree"},
    "megatron": {"megatron", "ops", "comm", "plan", "tree"},
    "bench": {"bench", "megatron", "ops", "comm", "plan", "tree"},
    "cli": {"cli", "bench", "megatron", "ops", "comm", "plan", "tree"},
}
# Modules at the package's root are entry points: they may import what `megatron` may, and each
# other. __init__ imports nothing eagerly (its exports are strings).
ENTRY_POINTS = BELOW["megatron"] | {"pretrain", "launch"}

NUMPY_ROOMS = {"tree", "plan"}
LAZY_IN_NUMPY_ROOMS = {"tokenizers", "transformers", "rich"}  # inside functions only
MAX_LINES = 500


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imports_of(path: Path):
    """Yields (absolute module name, imported at module level and at run time, line)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = ("megatron_tree_cp", *path.relative_to(PACKAGE).with_suffix("").parts)
    package = module[:-1]  # of __init__.py too: its own name is the last part

    def visit(node: ast.AST, eager: bool):
        for child in ast.iter_child_nodes(node):
            below = eager
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                below = False
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                below = False
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, eager, child.lineno
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else ()
                origin = ".".join((*base, *([child.module] if child.module else [])))
                # `from . import x` names a module; `from .x import y` is x whatever y is.
                for alias in child.names:
                    named = child.module and origin != "megatron_tree_cp"
                    name = origin if named else f"{origin}.{alias.name}"
                    yield name, eager, child.lineno
            else:
                yield from visit(child, below)

    yield from visit(tree, True)


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_room_is_known():
    rooms = {room_of(path) for path in SOURCES} - {""}
    assert rooms <= set(BELOW), f"unknown rooms {rooms - set(BELOW)}: say who may enter them"


def test_imports_go_downwards_lazy_ones_too():
    wrong = []
    for path in SOURCES:
        room = room_of(path)
        if path == PACKAGE / "__init__.py":
            continue
        allowed = BELOW[room] if room else ENTRY_POINTS
        for name, _, line in imports_of(path):
            parts = name.split(".")
            if parts[0] != "megatron_tree_cp" or parts[1:] == ["__version__"]:
                continue
            # From the package itself nothing else: its lazy exports would hide the room.
            if len(parts) < 2 or parts[1] not in allowed:
                wrong.append(f"{place(path, line)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_only_the_megatron_room_and_entry_points_import_megatron():
    wrong = []
    for path in SOURCES:
        if room_of(path) in {"megatron", "bench", ""}:
            continue
        for name, _, line in imports_of(path):
            if name.split(".")[0] == "megatron":
                wrong.append(f"{place(path, line)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_entry_points_import_megatron_inside_functions():
    """DataLoader workers re-import the entry module; they must not pay for Megatron."""
    wrong = [
        f"{place(path, line)} imports {name}"
        for path in SOURCES
        if room_of(path) == ""
        for name, eager, line in imports_of(path)
        if eager and name.split(".")[0] in {"megatron", "torch"}
    ]
    assert not wrong, "\n".join(wrong)


def test_numpy_rooms_import_numpy_and_the_standard_library_only():
    wrong = []
    for path in SOURCES:
        if room_of(path) not in NUMPY_ROOMS:
            continue
        for name, eager, line in imports_of(path):
            top = name.split(".")[0]
            if top in {"megatron_tree_cp", "numpy"} or top in sys.stdlib_module_names:
                continue
            if top in LAZY_IN_NUMPY_ROOMS and not eager:
                continue
            wrong.append(f"{place(path, line)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_modules_hold_one_idea():
    for path in SOURCES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it"
        assert path.stem not in {"utils", "helpers", "misc", "common"}, path.relative_to(ROOT)


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import megatron_tree_cp",
        "from megatron_tree_cp import PackedTree, Trajectory, pack_trajectories",
        "from megatron_tree_cp import ModelShape, plan_row",
    ],
)
def test_numpy_names_load_without_torch(statement: str):
    assert not loaded_after(statement) & {"torch", "megatron", "tokenizers", "transformers"}


def test_every_exported_name_resolves():
    import megatron_tree_cp

    for name in megatron_tree_cp.__all__:
        assert getattr(megatron_tree_cp, name) is not None, name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = megatron_tree_cp.no_such_name
