"""Examples print what stands beside them: the first in a process of its own, the others in this one; README's too."""

import os
import sys
import types

import pytest

from tests.command import shardwright
from tests.docs.pages import load_generator

make = load_generator()
SCRIPTS = make.examples()


def needs_torch(script):
    return "import torch" in script.read_text()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            script, id=script.stem, marks=[pytest.mark.ranks] if needs_torch(script) else []
        )
        for script in SCRIPTS
    ],
)
def test_an_example_prints_what_stands_beside_it(script, monkeypatch, capsys):
    if script == SCRIPTS[0]:
        printed = make.output_of(str(script))
    else:
        run_here(script, monkeypatch)
        printed = capsys.readouterr().out
    assert printed == script.with_suffix(".out").read_text()


def run_here(script, monkeypatch):
    """Run a script as the main module, from which ranks import what they run."""
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setenv("SHARDWRIGHT_STORE", os.devnull)
    exec(compile(script.read_text(), script, "exec"), main.__dict__)


@pytest.mark.torch
def test_the_readme_example_prints_what_stands_below_it(monkeypatch, capsys):
    monkeypatch.setenv("SHARDWRIGHT_STORE", os.devnull)
    code, output = make.readme_example(make.README.read_text())
    exec(code, {"__name__": "readme"})
    assert capsys.readouterr().out == output


@pytest.mark.torch
def test_the_readme_table_is_what_its_command_prints(monkeypatch, tmp_path):
    words, table = make.readme_table(make.README.read_text())
    monkeypatch.setenv("COLUMNS", str(make.TABLE_WIDTH))
    done = shardwright(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert make.frontier_in(done.stdout) == table
