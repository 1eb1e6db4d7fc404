"""Numbers that steer the search stand in one table, at most twenty, each with its reason."""

import ast
from pathlib import Path

SEARCH = Path(__file__).resolve().parents[3] / "src" / "shardwright" / "planner" / "search"
MOST = 20
# Numbers elsewhere that steer no search, each with what it is instead.
OTHERS = {
    "limits.py:RESERVE": "memory that plans may not use",
    "candidates.py:WEIGHINGS": "all that could hide remains, or the share of the table",
    "survey.py:PLAIN_MICROBATCHES": "what users already have",
    "local/moves.py:MOST_AXES": "which meshes there are",
    "local/mcmc.py:PATIENCE": "the rule of FlexFlow's paper",
    "local/mcmc.py:OVERWEIGHT": "of the chains, another method",
    "local/proposals.py:GOES_ON": "FlexFlow's own",
}


def numbers(path: Path) -> list[str]:
    """The names of a module's upper-case assignments that hold numbers."""
    found: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [
                one.id
                for target in targets
                for one in ast.walk(target)
                if isinstance(one, ast.Name)
            ]
            constants = [one for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            if any(isinstance(one.value, int | float) for one in constants):
                found += [name for name in names if name.isupper()]
    return found


def test_numbers_that_steer_the_search_stand_in_one_table() -> None:
    table = numbers(SEARCH / "steering.py")
    assert len(table) <= MOST
    text = (SEARCH / "steering.py").read_text()
    assert all(text.split(name)[0].rstrip().splitlines()[-1].startswith("#")
               for name in ("SAME =", "BUDGET =", "SHARES ="))  # fmt: skip
    elsewhere = {
        f"{path.relative_to(SEARCH).as_posix()}:{name}"
        for path in SEARCH.rglob("*.py")
        for name in numbers(path)
        if path.name not in ("steering.py", "refit.py") and path.parent.name != "reasons"
    }
    assert elsewhere == OTHERS.keys()


def test_every_number_of_the_table_is_used() -> None:
    rest = "".join(path.read_text() for path in SEARCH.rglob("*.py") if path.name != "steering.py")
    assert all(name in rest for name in numbers(SEARCH / "steering.py"))
