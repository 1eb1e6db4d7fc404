"""Options are stated once: the command line, the keywords of ``plan`` and ``Training`` follow."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import shardwright
from shardwright.cli.options import asking
from shardwright.errors import InputError
from shardwright.planner.search import Training
from shardwright.planner.space import Seed, seed_strategy
from shardwright.verbs.options import check_options, option, options_of, takes
from shardwright.verbs.request import Job, PipelineRequest, Request, Trial
from shardwright.verbs.subject import training_for, training_of
from tests.planner.search.models import residual


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Two options of any sort, and a field that is none."""

    number_of: int = option(3, "How many.", "-n", least=1, most=9)
    words: tuple[str, ...] = option((), "Several.", "--word")
    size: str | float | None = option(None, "With a unit.")
    kind: str = option("a", "a or b.", one_of=("a", "b"))
    other: str = "left alone"

    def __post_init__(self) -> None:
        check_options(self)


def test_one_line_makes_an_option_of_the_command_line() -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @asking(Wanted)
    def command(name: Annotated[str, typer.Argument()], *, asked: dict[str, Any]) -> None:
        seen.append((name, Wanted(**asked)))

    words = ["x", "-n", "4", "--word", "p", "--word", "q", "--size", "2 GiB", "--kind", "b"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert CliRunner().invoke(app, ["x"]).exit_code == 0
    wanted = Wanted(number_of=4, words=("p", "q"), size="2 GiB", kind="b")
    assert seen == [("x", wanted), ("x", Wanted())]
    refused = CliRunner().invoke(app, ["x", "--number-of", "0"])
    assert refused.exit_code == 2
    assert "--other" not in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"number_of": 0}, "number of must be between 1 and 9, not 0"),
        ({"number_of": 10}, "number of must be between 1 and 9, not 10"),
        ({"kind": "c"}, "kind must be one of a, b, not 'c'"),
        ({"number_of": "4"}, "number of must be a whole number, not '4'"),
        ({"number_of": None}, "number of must be a whole number, not None"),
        ({"number_of": True}, "number of must be a whole number, not True"),
        ({"words": "one"}, "words must be a tuple, not 'one'"),
        ({"number_of": 4.5}, "number of must be a whole number, not 4.5"),
        ({"size": [2]}, r"size must be text or a number, not \[2\]"),
    ],
)
def test_what_it_may_be_is_checked(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Wanted(**values)


def test_a_verb_takes_the_fields_as_its_arguments() -> None:
    @takes(Wanted)
    def verb(asked: Wanted) -> int:
        """Do it."""
        return asked.number_of

    assert verb(number_of=5) == 5
    assert verb.__doc__ == "Do it."
    assert list(inspect.signature(verb).parameters) == [one.name for one in fields(Wanted)]
    with pytest.raises(TypeError, match=r"verb\(\) got an unexpected keyword argument 'nunber_of'"):
        verb(nunber_of=5)  # type: ignore[call-arg]


def test_plan_has_a_keyword_for_each_option_with_its_default() -> None:
    found = inspect.signature(shardwright.plan).parameters
    assert list(found)[:2] == ["model", "cluster"]
    assert found["cluster"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    defaults = {name: one.default for name, one in found.items() if name in options_of(Request)}
    assert defaults == {name: getattr(Request(), name) for name in options_of(Request)}
    assert set(found) - set(defaults) == {"model", "cluster", "batch"}


@pytest.mark.parametrize("kind", [Request, PipelineRequest, Job, Trial])
def test_every_bound_of_an_option_is_held(kind: type) -> None:
    """One step outside raises, whatever else the request needs is there."""
    needed = {"model": "m", "workers": "2", "bandwidth": "1e9"}
    names = {one.name for one in fields(kind)}
    good = kind(**{name: value for name, value in needed.items() if name in names})
    for name, about in options_of(kind).items():
        outside = ["no such word"] if about.one_of else []
        outside += [] if about.least is None else [about.least - 1, math.inf]
        for value in outside:
            with pytest.raises(InputError, match=r"\w{3} .*\w{3}"):
                replace(good, **{name: value})


def test_training_follows_from_a_request_and_from_a_plan() -> None:
    asked = Request(
        precision="bfloat16", optimizer="momentum", clip=0.5, accumulation="own",
        gradient_dtype="float16", batch_norm="synchronised", recompute="blocks",
    )  # fmt: skip
    assert training_for(asked) == Training(
        precision="bfloat16", optimizer_states=1, clips=True, max_norm=0.5, accumulation="own",
        gradient_dtype="float16", batch_norm="synchronised", recompute="blocks",
    )  # fmt: skip
    assert training_for(Request(precision="float32")) == Training()
    graph = residual(batch=4, width=8, depth=2, classes=4)
    strategy = seed_strategy(graph, Seed(precision="bfloat16"))
    changed = replace(
        strategy, recompute=(1,), accumulation="own", clips=True, max_norm=2.0, optimizer_states=0
    )
    expected = Training(
        precision="bfloat16", optimizer_states=0, clips=True, max_norm=2.0, accumulation="own"
    )
    assert training_of(changed) == expected
