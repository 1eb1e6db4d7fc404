"""Checkpoints damaged in hundreds of ways, with checksums that fit: the same values, or one refusal.

What only a checksum can know (a number among the script's own values) is not damaged here.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import CheckpointError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.checkpoint import load_into_module
from shardwright.runtime.executor import Executor
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.ranks
PLACES = 300  # of a manifest that are damaged
EXTRA = {"seen": (1, [2.5, None]), 3: "three", "random": torch.arange(4)}
BATCH = {"x": torch.ones(8, 6, dtype=torch.float64)}


class Counting(nn.Module):
    """A model with buffers that are integers and truths, and one parameter that is complex."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.idle = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]), requires_grad=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.up(x)) * self.mask).square().mean()


def executor_of(seed: Seed) -> Executor:
    module = Counting()
    captured = capture(module, BATCH)
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    return Executor(captured, program, module, optimizer=partial(torch.optim.AdamW, lr=0.1))


def save(folder: str) -> None:
    executor = executor_of(Seed(data=2, zero=3))
    executor.step(BATCH)
    executor.save(folder, extra=EXTRA)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, which hold pieces of every parameter."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(2, save, str(folder))
    return folder / "step-00000001"


@pytest.fixture(scope="module")
def reader() -> Executor:
    return executor_of(Seed())


def loaded(reader: Executor, folder: Path) -> tuple[str, dict[str, Tensor], int, Any]:
    """Load with all that a run loads, and into a plain module; return what was found."""
    module = Counting()
    for tensor in (*module.parameters(), *module.buffers()):
        with torch.no_grad():
            tensor.zero_()
    extra = reader.load(folder)
    load_into_module(folder, module)
    tensors = dict(module.state_dict())
    for number, state in enumerate(reader.optimizer.state.values()):
        tensors |= {f"{number} {entry}": value for entry, value in state.items()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in reader.optimizer.param_groups
    ]
    return repr(groups), tensors, reader.steps, repr(extra)


def check(reader: Executor, folder: Path, expected: Any, what: str) -> bool:
    """Load a damaged checkpoint; return whether it was refused."""
    refusal = ""
    try:
        groups, tensors, steps, extra = loaded(reader, folder)
    except CheckpointError as error:
        refusal = str(error)
    if refusal:
        assert "\n" not in refusal or "differ in" in refusal, what
        return True
    assert (groups, steps, extra) == (expected[0], *expected[2:]), what
    assert tensors.keys() == expected[1].keys(), what
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[1][name].dtype, f"{what}: {name}"
        assert torch.equal(tensor, expected[1][name]), f"{what}: {name}"
    return False


def seal(folder: Path, content: Any) -> None:
    """Write a manifest with a checksum that fits."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    crc = zlib.crc32(text.encode())
    text = json.dumps({"format": 2, "crc32": crc, "content": content})
    (folder / "manifest.json").write_text(text)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where everything of a tree is, containers too."""
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        inner = (*path, key)
        found += places(value, inner) if isinstance(value, (dict, list)) else [inner]
    return found


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else []


def other_values(value: Any) -> list[Any]:
    """Return what could stand in a value's place."""
    found: list[Any] = [None, {}, [], "", -1, 2**63, 2**64 + 1, 1.5, True, nested(300)]
    found += [{"$tensor": "extra/none"}, {"$nonsense": []}, {"$pairs": [[1, 2, 3]]}, {"$tuple": 1}]
    found += [{"$pairs": [[{}, 1]]}, {"$counter": 5}, {"$tuple": [], "$pairs": []}]
    if isinstance(value, int):
        found += [value + 1, value - 1, value * 2]
    if isinstance(value, str):
        found += ["float32", "complex64", "complex128", "int64", "bool", "float8_e4m3fn", "object"]
        found += [f"{value}x", value[:-1], "../x", "\x1b[31m", "\ud800"]
    if isinstance(value, list):
        found += [value[1:], [*value, *value[:1]], value[::-1]]
    if isinstance(value, dict):
        keys = list(value)
        found += [{k: value[k] for k in keys[1:]}, value | {"other": 1}]
        if len(keys) > 1:
            found.append(value | {keys[0]: value[keys[1]], keys[1]: value[keys[0]]})
    return found


# Leaves that may be anything: only a checksum knows what they were. Their containers are damaged.
FREE = ("extra", "values", "model", "loss_scale", "seed", "groups", "step")


def is_free(path: tuple[Any, ...], old: Any, new: Any) -> bool:
    if path[0] == "groups" and path[2:3] == ("names",):
        return False
    legal = not isinstance(new, dict) or not any(str(key).startswith("$") for key in new)
    if path[0] == "module" and path[-1] == "persistent":
        return True
    deep = isinstance(new, list) and new and new == nested(300)
    return path[0] in FREE and legal and not deep and not (path == ("extra",) and old != new)


def test_a_manifest_that_contradicts_itself_or_its_files_is_refused(
    whole: Path, reader: Executor, tmp_path: Path
) -> None:
    expected = copy.deepcopy(loaded(reader, whole))
    folder = Path(shutil.copytree(whole, tmp_path / "step-00000001"))
    content = json.loads((whole / "manifest.json").read_text())["content"]
    draw, refused, tried = random.Random(0), 0, 0
    found = places(content)
    while tried < PLACES:
        path = draw.choice(found)
        damaged = copy.deepcopy(content)
        home: Any = damaged
        for key in path[:-1]:
            home = home[key]
        old, new = home[path[-1]], draw.choice(other_values(home[path[-1]]))
        is_same = new == old and type(new) is type(old)
        if is_same or is_free(path, old, new):
            continue
        tried += 1
        home[path[-1]] = new
        seal(folder, damaged)
        refused += check(reader, folder, expected, f"{path}: {old!r:.80} -> {new!r:.80}")
    assert refused > PLACES * 0.9


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a safetensors file; the data stay."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def test_files_that_are_not_what_the_manifest_lists_are_refused(
    whole: Path, reader: Executor, tmp_path: Path
) -> None:
    expected = copy.deepcopy(loaded(reader, whole))
    content = json.loads((whole / "manifest.json").read_text())["content"]
    draw = random.Random(1)
    for turn in range(60):
        folder = Path(shutil.copytree(whole, tmp_path / str(turn) / "step-00000001"))
        path = folder / draw.choice(sorted(content["files"]))

        def change(header: dict[str, Any]) -> None:
            key = draw.choice([key for key in header if key != "__metadata__"])
            entry, other = header[key], draw.choice([k for k in header if k != "__metadata__"])
            match draw.randrange(6):
                case 0:
                    entry["dtype"] = draw.choice(["F32", "C64", "I64", "F64", "BOOL", "U8", "X"])
                case 1:
                    entry["shape"] = draw.choice([entry["shape"][::-1], [], [2**63], [-1]])
                case 2:
                    header[f"{key}x"] = header.pop(key)
                case 3:
                    header[key], header[other] = header[other], entry
                case 4:
                    entry["data_offsets"] = [draw.randrange(2**6), 2 ** draw.randrange(70)]
                case _:
                    del header[key]

        rewritten(path, change)
        size, crc = len(path.read_bytes()), zlib.crc32(path.read_bytes())
        damaged = copy.deepcopy(content)
        damaged["files"][path.name] = [size, crc]
        seal(folder, damaged)
        if change_is_swap_of_equals(path, whole / path.name):
            continue
        check(reader, folder, expected, f"header of {path.name} in turn {turn}")


def change_is_swap_of_equals(path: Path, before: Path) -> bool:
    """Whether two tensors of equal dtype and shape changed places: only a checksum knows."""

    def entries(one: Path) -> dict[str, Any]:
        data = one.read_bytes()
        return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])

    now, then = entries(path), entries(before)
    if now.keys() != then.keys() or now == then:
        return False
    about = [{k: (v.get("dtype"), v.get("shape")) for k, v in one.items()} for one in (now, then)]
    return about[0] == about[1]


def test_a_value_that_contains_itself_is_refused_when_it_is_saved(
    reader: Executor, tmp_path: Path
) -> None:
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(CheckpointError, match="contains itself"):
        reader.save(tmp_path, extra={"itself": itself})
    assert not list(tmp_path.iterdir())
