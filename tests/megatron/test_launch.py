"""The launcher around a script, without Megatron: what it runs, strips and refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_tree_cp import launch

SCRIPT = """
import json, sys
import neighbour
assert __name__ == "__main__" and neighbour.here
print(json.dumps({"argv": sys.argv, "megatron": "megatron" in sys.modules}))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "neighbour.py").write_text("here = True\n")
    path = tmp_path / "pretrain_toy.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("choice", [[], ["--context-parallel-backend=te"]])
def test_te_runs_the_script_as_python_does(script, choice):
    command = [sys.executable, "-m", "megatron_tree_cp.launch", str(script), "--a", "-1", *choice]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout) == {"argv": [str(script), "--a", "-1"], "megatron": False}


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "no script to run: usage: python -m megatron_tree_cp.launch SCRIPT"),
        (["--context-parallel-backend", "tree"], "no script to run"),
        (["no_such.py"], "no_such.py: no such script"),
        (["SCRIPT", "--tree-data", "x"], "--tree-data needs --context-parallel-backend tree"),
        (["SCRIPT", "--no-tree-shuffle"], "--no-tree-shuffle needs --context-parallel-backend tr"),
        (["SCRIPT", "--tree-waves=2"], "--tree-waves=2 needs"),
    ],
)
def test_bad_calls_end_in_one_line(argv, message, script, capsys):
    with pytest.raises(SystemExit) as exit:
        launch.main([str(script) if word == "SCRIPT" else word for word in argv])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and len(error.splitlines()) == 1


def test_help_says_what_it_is(capsys):
    launch.main(["--help"])
    assert "Run an unmodified stock Megatron-LM script" in capsys.readouterr().out


def test_another_release_of_megatron_is_refused(monkeypatch):
    from megatron.core import package_info
    from megatron.training import arguments

    from megatron_tree_cp.megatron.install import install
    from megatron_tree_cp.tree.errors import InputError

    stock = arguments.validate_args
    monkeypatch.setattr(package_info, "__version__", "0.20.0")
    with pytest.raises(InputError, match="megatron-core 0.20.0: the hooks of a tree run are made"):
        install(exit_on_bad_input=False)
    with pytest.raises(SystemExit) as exit:
        install()
    assert exit.value.code == 2 and arguments.validate_args is stock
