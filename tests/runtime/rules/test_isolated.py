"""Kernels that end their process, hang or raise: isolated work goes on, this process does not notice."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwright.core.example import Call
from shardwright.errors import InputError
from shardwright.runtime.rules import Axis, Crashed, Differ, draw, run_isolated
from shardwright.verbs.examples.notation import F, call
from shardwright.verbs.finder import propose
from shardwright.verbs.rules import verify_rules
from tests.processes import is_alive, wait_until

pytestmark = pytest.mark.torch

EXAMPLE = call(F(6, 8))
ROWS = Axis(pieces=2, inputs=((0, 0),), outputs=((0, 0),))
COLUMNS = Axis(pieces=2, inputs=((1, 1),), outputs=((1, 1),))


def _fragile(x: Tensor) -> Tensor:
    """Double, but read address 0 where columns are not eights, and never return for one long row."""
    if x.shape[1] % 8:
        ctypes.string_at(0)
    if x.shape == (1, 40):
        time.sleep(3600)
    return x * 2


@pytest.fixture(scope="module")
def fragile() -> Iterator[str]:
    """A differentiable operator whose kernel does not look before it reads."""
    with torch.library._scoped_library("shardwright_tests", "DEF") as library:
        library.define("fragile(Tensor x) -> Tensor")
        library.impl("fragile", _fragile, "CompositeImplicitAutograd")
        yield "shardwright_tests.fragile.default"


def test_a_trial_that_ends_its_process_is_a_wrong_split_and_work_goes_on(fragile: str) -> None:
    cases = [draw(fragile, one) for one in (EXAMPLE, call(F(6, 16)), EXAMPLE)]

    def work(differ: Differ) -> list[tuple[float, str]]:
        return [differ(case, [axis]) for axis in (COLUMNS, ROWS) for case in cases]

    answers = run_isolated(work)
    assert [gap for gap, _ in answers] == [math.inf, 0.0, math.inf, 0.0, 0.0, 0.0]
    assert answers[0][1] == "a piece ended its process (SIGSEGV)"


def test_a_kernel_that_hangs_is_ended(fragile: str) -> None:
    case = draw(fragile, call(F(2, 40)))
    gap, reason = run_isolated(lambda differ: differ(case, [ROWS]), seconds=0.3)
    assert gap == math.inf
    assert reason == "a piece ended its process (not done after 0.3 s)"


def test_the_finder_survives_a_crash_and_still_finds_what_holds(fragile: str) -> None:
    sizes = Call((F(6, 8),), {}, fixed=(8,))
    found = propose(fragile, (sizes,))
    assert found.lines == (
        '"shardwright_tests.fragile.default": equation("x b.. _ -> b.. _", linear="x"),',
    )
    assert found.num_crashes > 0


def test_a_kind_that_always_crashes_is_named_and_the_others_are_verified(
    fragile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.verbs import rules

    monkeypatch.setitem(rules.KIND, fragile, rules.KIND["aten.relu.default"])
    monkeypatch.setitem(rules.EXAMPLES, fragile, (EXAMPLE,))
    one, other = verify_rules(["aten.relu.default", fragile]).rows
    assert not one.problem
    assert other.problem.endswith("ended its process (SIGSEGV)")
    assert f"{fragile}(float[6, 8]) split d1 by 2" in other.problem
    monkeypatch.setitem(rules.EXAMPLES, fragile, (call(F(6, 5)),))
    assert "SIGSEGV) outside of any split" in verify_rules([fragile]).rows[0].problem


def children() -> set[str]:
    """Return this process's children: earlier tests may have left a fork server."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are read from /proc")
def test_errors_come_through_and_no_child_is_left() -> None:
    before = children()

    def work(_: Differ) -> None:
        raise InputError("no such thing")

    with pytest.raises(InputError, match="no such thing"):
        run_isolated(work)
    with pytest.raises(Crashed, match=r"\(SIGABRT\) outside of any split"):
        run_isolated(lambda _: os.abort())
    assert children() <= before


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "child"

    def linger(_: Differ) -> None:
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        time.sleep(1000)

    if (parent := os.fork()) == 0:
        run_isolated(linger)
        os._exit(0)
    assert wait_until(path.exists)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert wait_until(lambda: not is_alive(int(path.read_text())), 5)
