"""Checkpoints whose files were damaged, swapped or replaced, as disks and people do it: one refusal, or
exactly what was saved; for all kinds of state that a run has."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.core.strategy import Precision, Strategy
from shardwright.errors import CheckpointError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.ranks
TURNS = 30  # of every kind of state
BATCH = {"x": torch.ones(8, 5)}
LOADER = {"epoch": 3, "seen": (1, [2.5, None]), "order": torch.arange(8), 7: {"seed": 2**40}}


class Odd(nn.Module):
    """No dim of it divides by two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down = nn.Linear(5, 7), nn.Dropout(0.1), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x))).square().mean()


def clipping(strategy: Strategy) -> Strategy:
    return replace(strategy, clips=True, max_norm=0.1)


def feeding_back(strategy: Strategy) -> Strategy:
    sync = replace(strategy.gradient_sync, dtype="bfloat16", error_feedback=True)
    return replace(strategy, gradient_sync=sync)


def as_it_is(strategy: Strategy) -> Strategy:
    return strategy


# ZeRO's stage, precision, and what else a strategy asks for.
KINDS: dict[str, tuple[int, Precision, Callable[[Strategy], Strategy]]] = {
    "clipped, moments in flat shards": (3, "float32", clipping),
    "residuals of error feedback": (1, "float32", feeding_back),
    "a loss that is scaled": (2, "float16", as_it_is),
}


def executor_of(kind: str, ranks: int) -> Executor:
    zero, precision, change = KINDS[kind]
    module = Odd()
    captured = capture(module, BATCH, precision=precision)

    seed = Seed(data=ranks, zero=zero if ranks > 1 else 0, precision=precision)
    program = lower(captured.graph, change(seed_strategy(captured.graph, seed)))
    return Executor(captured, program, module, optimizer=partial(torch.optim.AdamW, lr=0.1))


def save(root: str) -> None:
    for kind in KINDS:
        executor = executor_of(kind, 2)
        for _ in range(2):
            executor.step(BATCH)
            executor.save(Path(root) / kind, extra={"loader": LOADER})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of each kind, of two ranks."""
    root = tmp_path_factory.mktemp("whole")
    run_ranks(2, save, str(root))
    return root


def loaded(reader: Executor, root: Path) -> dict[str, Any]:
    """Return everything that a run goes on from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # residuals of two ranks are shared out to one
        extra = reader.load(root)
    found: dict[str, Any] = {"extra": repr(extra), "steps": reader.steps}
    found |= {f"{name}": value.clone() for name, value in reader.full_parameters().items()}
    for number, state in enumerate(reader.optimizer.state.values()):
        found |= {f"{number} {key}": torch.as_tensor(value) for key, value in state.items()}
    found["groups"] = repr([g | {"params": 0} for g in reader.optimizer.param_groups])
    found["scale"] = repr(vars(reader.scaler)) if reader.scaler else ""
    found["seeds"] = [site.source.seed for site in reader.machine.sites.values()]
    return found


def is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) and value.dtype == other[key].dtype
        if isinstance(value, Tensor)
        else value == other[key]
        for key, value in one.items()
    )


def hurt_bytes(path: Path, draw: Random) -> None:
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data))
    match draw.randrange(5):
        case 0:
            data[place] ^= 1 << draw.randrange(8)
        case 1:
            del data[place:]
        case 2:
            data[place:place] = draw.choice([b"\0", b"[" * 5000, b"9" * 5000, b"\xff" * 8])
        case 3:
            data[place : place + 8] = draw.choice([b"\xff", b"\0", b"\x7f"]) * 8
        case _:
            del data[place : place + draw.choice((1, 8, 100))]
    path.write_bytes(data)


def hurt_folder(root: Path, draw: Random) -> None:
    """Do to a folder of checkpoints what a hand or a copy that was cut short does."""
    newest, oldest = (root / f"step-0000000{step}" for step in (2, 1))
    path = draw.choice(sorted(newest.iterdir()))
    match draw.randrange(9):
        case 0:
            path.unlink()
        case 1:
            shutil.copy(oldest / path.name, path)
        case 2:
            others = [one for one in sorted(newest.iterdir()) if one != path]
            shutil.copy(draw.choice(others), path)
        case 3:
            path.unlink()
            path.symlink_to(draw.choice([path, oldest / path.name, "/dev/zero", root, "nowhere"]))
        case 4:
            path.unlink()
            path.mkdir()
        case 5:
            path.unlink()
            os.mkfifo(path)
        case 6:
            (newest / "more.safetensors").write_bytes(b"more")
        case 7:
            names = ["x" * 5000, "../x", "step-\u00b2", "", "\0", "step-99999999", "/", "[" * 10**6]
            (root / "latest").write_text(draw.choice(names))
        case _:
            latest = root / "latest"
            latest.unlink()
            draw.choice(
                [latest.mkdir, partial(os.mkfifo, latest), partial(latest.symlink_to, latest)]
            )()


def attempt(reader: Executor, root: Path) -> tuple[dict[str, Any], str]:
    """Return what was loaded, or why it was refused."""
    try:
        return loaded(reader, root), ""
    except CheckpointError as error:
        return {}, str(error)


def is_one_message(text: str) -> bool:
    """Whether it is one line that ends with a remedy."""
    return 0 < len(text) < 1500 and "\n" not in text and ";" in text


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_give_what_was_saved(
    kind: str, whole: Path, tmp_path: Path
) -> None:
    reader, refused = executor_of(kind, 1), 0
    saved = [loaded(reader, whole / kind / f"step-0000000{step}") for step in (1, 2)]
    assert not is_equal(*saved)
    for turn in range(int(os.environ.get("TURNS", TURNS))):
        draw = Random(f"{kind} {turn} {os.environ.get('SEED', '')}")
        root = Path(shutil.copytree(whole / kind, tmp_path / str(turn)))
        if draw.random() < 0.5:
            hurt_bytes(draw.choice(sorted((root / "step-00000002").iterdir())), draw)
        else:
            hurt_folder(root, draw)
        found, refusal = attempt(reader, root)
        refused += bool(refusal)
        assert any(is_equal(found, one) for one in saved) or is_one_message(refusal), turn
        shutil.rmtree(root)
    assert refused > TURNS / 2
