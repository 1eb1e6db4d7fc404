"""Branches and hand-set numbers: as many as stand today at most, and fewer with time."""

import ast

import pytest

from tests.house.test_sizes import FILES, SOURCE, name_of, tree_of

# Functions that may have more branches than this.
MOST_BRANCHES, MOST_BRANCHED = 10, 95
# Named numbers per room that steer the search, which should be 20 in all; those of ``search`` stand in ``steering.py``.
MOST_NUMBERS = {
    "schedule": 5, "lower": 1, "simulate": 2, "solve": 13, "model": 3, "judge": 3, "search": 8, "contest": 1,
}  # fmt: skip
# Numbers there that steer nothing, each with what it is instead.
STEERING_NOTHING = {
    "schedule/folded.py:DELAYS": "of the paper's orders",
    "schedule/generators.py:GENERATED": "names",
    "schedule/pipeline.py:GROWTH": "what an action does to the microbatches held",
    "schedule/pipeline.py:SHOWN": "of a message",
    "schedule/pipeline.py:MOST_NAMED": "of a message",
    "schedule/play.py:ROUNDING": "rounding",
    "schedule/play.py:UNIT": "seconds, where nobody knows any",
    "schedule/program.py:KEPT": "memory for orders; no answer depends on it",
    "schedule/program.py:TRAVEL": "turns of a transfer: one",
    "lower/builder.py:BY_MICROBATCH": "a bit",
    "lower/builder.py:GRADIENT": "a bit",
    "lower/builder.py:ACTIVATION": "a bit",
    "lower/builder.py:GATHERED": "a bit",
    "lower/builder.py:WIDE": "a bit",
    "lower/compress.py:_TEMPORARIES": "bytes of an algorithm",
    "lower/fold.py:KEPT": "follows from what is looked at",
    "lower/fold.py:MOST_GRAPHS": "memory for folded graphs; no answer depends on it",
    "lower/memo.py:MOST_REMEMBERED": "memory for what was lowered; no answer depends on it",
    "lower/outline.py:REACH": "how far blocks are looked at; no answer depends on it",
    "lower/phases.py:BEFORE": "a bit",
    "lower/phases.py:EACH": "a bit",
    "lower/phases.py:BEHIND": "a bit",
    "lower/phases.py:STASHES": "a bit",
    "lower/phases.py:ADDS": "a bit",
    "lower/phases.py:ASIDE": "a bit",
    "lower/phases.py:UPDATES": "a bit",
    "lower/remake.py:ELSEWHERE": "stands for another block",
    "lower/spread.py:SHOWN": "follows from what is looked at",
    "simulate/steps.py:ALIKE": "rounding",
    "search/limits.py:RESERVE": "memory that plans may not use",
    "search/survey.py:PLAIN_MICROBATCHES": "what users already have",
    "judge/ties.py:MEETING": "how well messages are known",
    "judge/ties.py:UNLIKE": "how well a difference is known",
    "model/messages.py:MANY": "infinitely many, for what starting a message takes",
    "model/prices.py:STARTING": "a price, where nobody measured",
    "model/problem.py:WORKING_COPIES": "a tensor and its gradient",
    "solve/buckets.py:MAX_CELLS": "memory",
    "solve/core.py:MAX_OTHERS": "two, between which messages go",
    "solve/core.py:RANGE": "digits of whole numbers",
    "solve/frontier.py:TOLERANCE": "rounding",
    "contest/feasible.py:CEILING": "stands for what is forbidden",
    "solve/wide/net.py:BIG": "stands for what is forbidden",
    "contest/solver.py:FEASIBLE": "promised: something legal in so much of the time",
}


LEAVES = frozenset({ast.Name, ast.Load, ast.Store, ast.Attribute, ast.Call, ast.Constant, ast.arg})


def complexity(function):
    """Cyclomatic complexity as radon counts it: 1, and 1 for each way to go on elsewhere; functions
    inside count towards the one around them."""
    count = 0
    for node in ast.walk(function):
        if type(node) in LEAVES:  # most of them
            continue
        match node:
            case ast.If() | ast.IfExp() | ast.Assert() | ast.FunctionDef():
                count += 1
            case ast.For() | ast.While() | ast.AsyncFor():
                count += 1 + bool(node.orelse)
            case ast.Try():
                count += len(node.handlers) + bool(node.orelse)
            case ast.BoolOp():
                count += len(node.values) - 1
            case ast.comprehension():
                count += 1 + len(node.ifs)
            case ast.Match():
                count += sum(not _takes_all(case) for case in node.cases)
    return count


def _takes_all(case):
    return isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def outer_functions(node):
    """Functions and methods, but for those inside other functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif not isinstance(child, ast.expr):
            yield from outer_functions(child)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("def f(): return 1", 1),
        ("def f(a):\n if a and a > 1 or a < 0: return 1\n return 2 if a else 3", 5),
        (
            "def f(a):\n for b in a:\n  pass\n else:\n  pass\n return [c for c in a if c if c > 1]",
            6,
        ),
        ("def f():\n try:\n  pass\n except A:\n  pass\n except B:\n  pass\n else:\n  pass", 4),
        ("def f(a):\n def g(b):\n  while b: pass\n return g", 3),
        ("def f(a):\n match a:\n  case 1: pass\n  case 2: pass\n  case _: pass", 3),
    ],
)
def test_branches_are_counted_as_by_hand(code, count):
    assert complexity(ast.parse(code).body[0]) == count


def test_no_more_functions_branch_often_than_before():
    counts = [
        (complexity(node), f"{name_of(path)}:{node.name}")
        for path in FILES
        for node in outer_functions(tree_of(path))
    ]
    often = sorted(pair for pair in counts if pair[0] > MOST_BRANCHES)
    assert len(often) <= MOST_BRANCHED, often[-20:]


def named_numbers(tree):
    """Names in capitals at the top of a module whose value holds a number, but for columns: names of
    a range count places in a table."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if value is None or ast.unparse(value).startswith("range("):
            continue
        numbers = {type(one.value) for one in ast.walk(value) if isinstance(one, ast.Constant)}
        if numbers & {int, float}:
            names = [one for target in targets if target for one in ast.walk(target)]
            yield from (n.id for n in names if isinstance(n, ast.Name) and n.id.isupper())


def numbers_of(room):
    """Named numbers of a room of the planner, or of the contest's solver, by file and name."""
    house = SOURCE if room == "contest" else SOURCE / "planner"
    return [
        f"{path.relative_to(house).as_posix()}:{name}"
        for path in sorted((house / room).rglob("*.py"))
        for name in named_numbers(tree_of(path))
    ]


@pytest.mark.parametrize("room", MOST_NUMBERS)
def test_no_more_numbers_steer_the_search_than_before(room):
    found = [one for one in numbers_of(room) if one not in STEERING_NOTHING]
    assert len(found) == MOST_NUMBERS[room], found


def test_what_steers_the_search_stands_in_one_table_and_is_used():
    found = [one for one in numbers_of("search") if one not in STEERING_NOTHING]
    assert {one.partition(":")[0] for one in found} == {"search/steering.py"}
    rooms = [SOURCE / "planner" / room for room in ("search", "schedule")]
    rest = [path.read_text() for room in rooms for path in room.rglob("*.py")]
    for one in found:
        assert sum(one.partition(":")[2] in text for text in rest) > 1, one


def test_every_number_that_steers_nothing_is_still_there():
    assert STEERING_NOTHING.keys() <= {one for room in MOST_NUMBERS for one in numbers_of(room)}


def test_tests_import_no_benchmarks():
    """Benchmarks may use the oracles of tests; what both need lies with the tests."""
    for path in sorted((SOURCE.parents[1] / "tests").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "benchmarks" in text else ():
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "benchmarks" for name in names), path
