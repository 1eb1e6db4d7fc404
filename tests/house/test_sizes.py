"""Files and functions stay small enough to read in one go."""

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shardwright"
FILES = sorted(SOURCE.rglob("*.py"))
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 450, 80, 8

# Larger than allowed, each with the reason why it is not cut.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_PARAMETERS = {
    "cli/planning.py:plan": "typer makes an option of every parameter",
    "cli/planning.py:simulate": "likewise",
    "cli/planning.py:why_not": "likewise",
    "runtime/capture/packed.py:packed_recurrence": "those of torch.lstm, and lengths",
    "runtime/capture/vocabulary.py:vocabulary_cross_entropy_sum": "those of cross_entropy, and its share",
    "runtime/capture/convolved.py:convolution_backward": "those of ATen's operator",
    "runtime/offsets.py:attend_from": "the arguments of the operator it stands for",
}


def name_of(path):
    return path.relative_to(SOURCE).as_posix()


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def functions(path):
    return [
        (f"{name_of(path)}:{node.name}", node)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def num_parameters(function):
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in {"self", "cls"}])


def test_files_and_functions_are_within_their_limits():
    for path in FILES:
        lines = len(path.read_text().splitlines())
        assert lines <= MOST_FILE_LINES or name_of(path) in LONG_FILES, f"{name_of(path)}: {lines}"
        for name, function in functions(path):
            length = function.end_lineno - function.lineno + 1
            assert length <= MOST_FUNCTION_LINES or name in LONG_FUNCTIONS, f"{name}: {length}"
            count = num_parameters(function)
            assert count < MOST_PARAMETERS or name in MANY_PARAMETERS, f"{name}: {count} parameters"
            assert function.returns is not None, f"{name} does not say what it returns"


def test_every_exception_to_the_limits_is_still_needed():
    known = {name for path in FILES for name, _ in functions(path)}
    assert {*LONG_FUNCTIONS, *MANY_PARAMETERS} <= known
    assert set(LONG_FILES) <= {name_of(path) for path in FILES}


def test_every_module_says_what_it_is_for():
    for path in FILES:
        text = ast.get_docstring(tree_of(path)) or ""
        assert len(text) > 15, name_of(path)


def test_no_name_says_nothing():
    banned = ("get_", "do_", "handle_", "process_")
    bad = [
        name
        for path in FILES
        for name, _ in functions(path)
        if name.split(":")[1].startswith(banned)
    ]
    rooms = [name_of(path) for path in FILES if path.stem in {"utils", "helpers", "manager"}]
    assert not bad + rooms
