"""Checkpoints that any plan can load: one directory per saved step, written atomically.

Every rank writes the boxes it holds into one safetensors file; ``manifest.json`` says which box of
which tensor lies where, holds everything that is no tensor, and the size and CRC-32 of every file.
So another plan, another world size or a plain module reads the slices it needs. The directory gets
its name only when all of it is on disk. ``latest`` names the newest one. Nothing is pickled.
"""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.program import ValueRole
from shardwright.errors import CheckpointError
from shardwright.runtime import manifest as book
from shardwright.runtime.agreement import from_first, rank, together, world_size
from shardwright.runtime.capture import seen_as
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.manifest import LATEST, MANIFEST, REPLACED
from shardwright.runtime.parameters import Master
from shardwright.runtime.scaling import LossScaler
from shardwright.runtime.scratch import claim, release, sweep, unclaim
from shardwright.runtime.state import (
    SUMMED_STATES,
    Held,
    boxes_of,
    every_state,
    factors,
    idle_tensors,
    lasting,
    merged_groups,
    module_tables,
    module_tensors,
    optimizer_state,
    parameter_groups,
    settings_of,
    state_key,
    states,
    terms,
)
from shardwright.runtime.tables import Box, Group, Manifest, TensorTable
from shardwright.runtime.tensorfile import Outline, Stored, in_file_order, reading, write
from shardwright.runtime.validity import misfit

PARTIAL = "step-*.tmp-*"  # as ``save`` names what is not whole yet
KEPT = 2  # newest checkpoints that a save leaves in the directory
KERNELS = ("fused", "foreach")  # settings of optimizers that say how they compute, not what


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has written, for the manifest. ``boxes``: key, name in the file ("": the key),
    dtype, the whole tensor's shape, start and size."""

    file: str
    size_and_crc: tuple[int, int]
    boxes: tuple[tuple[str, str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
    values: Mapping[str, Any]
    groups: list[Group]


# -- saving ----------------------------------------------------------------------------------------


def save(
    machine: Machine,
    optimizer: torch.optim.Optimizer,
    root: Path,
    extra: Mapping[str, Any],
    scaler: LossScaler | None = None,
) -> Path:
    """Write a checkpoint of the present step and return its directory. A collective call."""
    final = root / f"step-{machine.clock.step:08d}"
    partial = root / f"{final.name}.tmp-{from_first(lambda: os.urandom(4).hex())}"
    claims: list[int] = []
    try:
        from_first(lambda: claims.append(_begin(partial)))
        more: dict[str, Tensor] = {}
        plain = together(lambda: book.plain(dict(extra), "extra", more))[0]
        parts = together(lambda: _write_part(machine, optimizer, partial, more))
        content = _manifest(machine, parts, plain, scaler)
        from_first(lambda: _publish(partial, final, content))
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {final} could not be written: {error}; earlier checkpoints are "
            "unharmed: free space or choose another directory, which all hosts must share"
        ) from error
    finally:
        if rank() == 0:  # nothing is there any more where all went well
            shutil.rmtree(partial, ignore_errors=True)
        for lock in claims:
            release(lock)
    return final


def _begin(partial: Path) -> int:
    partial.mkdir(parents=True)
    return claim(partial)


@contextmanager
def tidied(root: str) -> Iterator[None]:
    """Remove what saves left that were cut short, before and after; no root, nothing to do."""
    try:
        _tidy(root)
        yield
    finally:
        _tidy(root)


def _tidy(root: str | Path) -> None:
    if str(root):
        sweep(Path(root), PARTIAL)


def _write_part(
    machine: Machine, optimizer: torch.optim.Optimizer, partial: Path, extra: Mapping[str, Tensor]
) -> Part:
    """Write this rank's file."""
    boxes, values = optimizer_state(machine, optimizer)
    named: dict[str, Held] = {}
    for box in (*lasting(machine), *every_state(machine), *boxes, *_alone(machine, extra)):
        if box.is_writer:  # a flat shard is several boxes of one key
            number = next(n for n in itertools.count() if _named(box.key, n) not in named)
            named[_named(box.key, number)] = box
    outlines = in_file_order(
        Outline(name, box.local.dtype, tuple(box.local.shape)) for name, box in named.items()
    )
    file = f"rank-{rank():05d}.safetensors"
    written = write(partial / file, outlines, (named[one.name].local for one in outlines))
    listed = tuple(
        (
            box.key, name if name != box.key else "", book.dtype_name(box.local.dtype), box.shape,
            box.start, tuple(box.local.shape),
        )
        for name, box in named.items()
    )  # fmt: skip
    return Part(file, written, listed, values, parameter_groups(machine, optimizer))


def _alone(machine: Machine, extra: Mapping[str, Tensor]) -> Iterator[Held]:
    """Yield what lies on no mesh, and the first rank writes."""
    for key, tensor in (*idle_tensors(machine).items(), *extra.items()):
        shape = tuple(tensor.shape)
        yield Held(key, tensor, (0,) * len(shape), shape, rank() == 0)


def _named(key: str, number: int) -> str:
    return f"{key}#{number}" if number else key


def _manifest(
    machine: Machine, parts: list[Part], extra: Any, scaler: LossScaler | None
) -> Manifest:
    tensors: dict[str, TensorTable] = {}
    for part in parts:
        for key, name, dtype, shape, start, size in part.boxes:
            table = tensors.setdefault(key, TensorTable(dtype=dtype, shape=list(shape), pieces=[]))
            box = Box(file=part.file, start=list(start), size=list(size), name=name)
            table.pieces.append(box)
    modules = module_tables(machine.parameters.module)
    for name, table in modules.items():
        if table.key not in tensors:  # on the meta device, and not used
            modules[name] = table.model_copy(update={"key": ""})
    return Manifest(
        step=machine.clock.step,
        seed=next(iter(machine.sites.values())).source.seed,
        model=machine.captured.graph.name,
        module=modules,
        tensors=tensors,
        groups=merged_groups([part.groups for part in parts]),
        values={key: value for part in parts for key, value in part.values.items()},
        extra=extra,
        files={part.file: part.size_and_crc for part in parts},
        loss_scale=scaler.table() if scaler else None,
    )


def _publish(partial: Path, final: Path, content: Manifest) -> None:
    """Complete a written directory and give it its name: the moment it exists."""
    _write(partial / MANIFEST, book.manifest_text(content))
    _write(partial / LATEST, final.name)  # while nothing has its name: the disk may be full
    unclaim(partial)
    _sync(partial)
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    (final / LATEST).replace(final.parent / LATEST)
    _sync(final.parent)
    for old in book.complete(final.parent)[:-KEPT]:
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    for pattern in (PARTIAL, f"step-*{REPLACED}"):  # also of saves that were cut short
        for left in final.parent.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- loading ---------------------------------------------------------------------------------------


def load(
    machine: Machine,
    optimizer: torch.optim.Optimizer,
    root: Path,
    scaler: LossScaler | None = None,
) -> dict[str, Any]:
    """Load the newest checkpoint under ``root`` (or ``root`` itself). A collective call."""
    if rank() == 0:
        _tidy(root)
    directory, content = open_checkpoint(root)
    extra: dict[str, Any] = {}
    together(lambda: extra.update(_load(machine, optimizer, directory, content)))
    if scaler is not None and content.loss_scale is not None:
        scaler.restore(content.loss_scale)
    return extra


def _load(
    machine: Machine, optimizer: torch.optim.Optimizer, directory: Path, content: Manifest
) -> dict[str, Any]:
    here = module_tables(machine.parameters.module)
    book.check_module(directory, content, here, machine.captured.graph.name)
    extra: dict[str, Tensor] = {}
    with torch.no_grad(), reading() as reader:
        for held in lasting(machine):
            reader.read(book.stored(directory, content, held.key), held.start, held.local)
        for key, tensor in idle_tensors(machine).items():
            reader.read(book.stored(directory, content, key), (0,) * tensor.dim(), tensor)
        for key in content.tensors:
            if key.startswith("extra"):
                extra[key] = reader.whole(book.stored(directory, content, key))
        for role, words in SUMMED_STATES.items():
            _load_states(machine, directory, content, role, words)
        for held in factors(machine):  # what shards of another shape had is drawn anew
            entry = content.tensors.get(held.key)
            if entry is None or tuple(entry.shape) != held.shape:
                held.local.zero_()
            else:
                reader.read(book.stored(directory, content, held.key), held.start, held.local)
        _load_groups(machine, optimizer, content)
        _load_optimizer(machine, optimizer, directory, content)
    machine.clock.step = content.step
    for site in machine.sites.values():
        site.source.seed = content.seed
    return dict(book.lively(content.extra, extra))


def _load_states(
    machine: Machine, directory: Path, content: Manifest, role: ValueRole, words: str
) -> None:
    """Read the terms of every parameter's states of a role; where there were others, share out their sum.

    So what is still owed to a parameter is the same, whatever is owed by whom. Where nothing was kept,
    nothing is owed.
    """
    saved = _saved_terms(content, role)
    here = terms(machine, role)
    if saved != here and saved and rank() == 0:
        counts = sorted({(saved.get(name, 0), here.get(name, 0)) for name in {*saved, *here}})
        warnings.warn(
            f"{words} are those of a plan with other terms: by parameter, they are "
            "summed and shared out equally (saved and here: "
            f"{', '.join(f'{one} and {other}' for one, other in counts)}), or dropped where none are kept",
            stacklevel=2,
        )
    with reading() as reader:
        for held in states(machine, role):
            name = held.key.split("/", 2)[2]
            if saved.get(name, 0) == here[name]:
                reader.read(book.stored(directory, content, held.key), held.start, held.local)
                continue
            held.local.zero_()
            for term in range(saved.get(name, 0)):
                one = torch.empty_like(held.local)
                stored = book.stored(directory, content, state_key(name, term, role))
                reader.read(stored, held.start, one)
                held.local.add_(one, alpha=1.0 / here[name])


def _load_groups(machine: Machine, optimizer: torch.optim.Optimizer, content: Manifest) -> None:
    for group, present in zip(
        optimizer.param_groups, parameter_groups(machine, optimizer), strict=True
    ):
        for key, value in settings_of(present, content.groups).items():
            if key in KERNELS:
                continue
            found = book.lively(value, {})
            if not _are_alike(group.get(key), found):
                raise CheckpointError(
                    f"an optimizer's settings must keep their kind, but {key!r} is "
                    f"{group[key]!r:.80} here and {found!r:.80} in the checkpoint; make the "
                    "optimizer that was saved, or load weights alone (load_weights)"
                )
            if isinstance(group.get(key), Tensor):
                group[key].fill_(found)
            else:
                group[key] = found


def _are_alike(here: Any, saved: Any) -> bool:
    """Whether a saved setting may take the place of one: switches may be None, numbers may not."""
    if isinstance(here, (list, tuple)):
        return (
            isinstance(saved, (list, tuple))
            and len(here) == len(saved)
            and all(map(_are_alike, here, saved))
        )
    if isinstance(here, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(here, (int, float, Tensor)):
        return isinstance(saved, (int, float)) and not isinstance(saved, bool)
    return True


def _saved_terms(content: Manifest, role: ValueRole) -> dict[str, int]:
    """Return how many terms of each parameter's states were saved."""
    keys = [key for key in content.tensors if key.startswith(f"{role}/")]
    return dict(Counter(key.split("/", 2)[-1] for key in keys))


def _load_optimizer(
    machine: Machine, optimizer: torch.optim.Optimizer, directory: Path, content: Manifest
) -> None:
    """Replace the optimizer's state by the saved one, shards by their slices."""
    masters = {master.name: master for master in machine.parameters.masters}
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    for key in (*content.tensors, *content.values):
        kind, _, rest = key.partition("/")
        entry, _, name = rest.partition("/")
        if kind != "optimizer" or name not in masters:
            continue
        parameter = masters[name].parameter
        if key in content.values:
            optimizer.state[parameter][entry] = book.lively(content.values[key], {})
            continue
        stored = book.stored(directory, content, key)
        group = group_of.get(id(parameter), {})
        optimizer.state[parameter][entry] = _entry(machine, masters[name], group, key, stored)


def _entry(
    machine: Machine, master: Master, group: Mapping[str, Any], key: str, stored: Stored
) -> Tensor:
    """Read an entry of a parameter's state: its shard where it is as large as the parameter."""
    spec = machine.captured.graph.tensors[machine.program.values[master.value].tensor]
    with reading() as reader:
        if stored.shape == tuple(spec.shape):
            local = torch.zeros_like(master.parameter, dtype=stored.dtype, requires_grad=False)
            for held in boxes_of(machine, master.value, key, local):
                reader.read(stored, held.start, held.local)
            return local
        local = reader.whole(stored)
        stays = not (group.get("fused") or group.get("capturable"))
        return local if stays else local.to(master.parameter.device)


def load_into_module(root: str | Path, module: nn.Module) -> int:
    """Load parameters and buffers into a plain module, on this process alone; return the step."""
    directory, content = open_checkpoint(Path(root), alone=True)
    book.check_module(directory, content, module_tables(module), type(module).__name__)
    with torch.no_grad(), reading() as reader:
        for key, tensor in module_tensors(module).items():
            saved = book.stored(directory, content, key)
            tensor.copy_(seen_as(reader.whole(saved), tensor.shape))
    return content.step


def open_checkpoint(root: Path, *, alone: bool = False) -> tuple[Path, Manifest]:
    """Find a checkpoint, check its files against the manifest, and return both.

    A collective call unless ``alone``: ranks share the work. Raises CheckpointError.
    """
    directory = book.find(root)
    content = book.read_manifest(directory)
    names = sorted(content.files)
    if not alone:
        names = names[rank() :: world_size()]
    mine = book.damaged_file(directory, {name: content.files[name] for name in names})
    mine = mine or misfit(directory, content, names)
    damaged = [mine] if alone else together(lambda: mine)
    if any(damaged):
        raise book.damage_error(directory, next(filter(None, damaged)))
    return directory, content
