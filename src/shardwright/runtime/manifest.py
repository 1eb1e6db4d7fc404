"""The manifest of a checkpoint: everything in it that is no tensor, and where the tensors lie.

It is JSON, checked by pydantic, with a checksum over itself and over every file beside it. Nothing
in it is executed: file names are matched against a pattern, values are numbers, text and containers.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.runtime.tables import Manifest, ModuleTable
from shardwright.runtime.tensorfile import Piece, Stored, checksum
from shardwright.runtime.validity import STORED_DTYPES, check_manifest

FORMAT = 2
MANIFEST, LATEST, REPLACED = "manifest.json", "latest", ".replaced"
MOST_NESTED = 100
MOST_BYTES, LONGEST_NAME = 2**30, 64  # of a manifest, and of the name of the newest checkpoint
# -- the file --------------------------------------------------------------------------------------


def manifest_text(manifest: Manifest) -> str:
    """Return the text of a manifest with its checksum."""
    content = manifest.model_dump(exclude_defaults=True)
    return json.dumps({"format": FORMAT, "crc32": _crc(content), "content": content})


def _crc(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def find(root: Path) -> Path:
    """Return the directory of the newest checkpoint under ``root``, or ``root`` itself."""
    name = _newest(root / LATEST)
    if name and (root / name).is_dir():
        return root / name
    # A save of the same step was cut short between two renames.
    if name and (root / f"{name}{REPLACED}" / MANIFEST).exists():
        return root / f"{name}{REPLACED}"
    # The one it named was removed, or the word was lost or damaged: the newest that is complete.
    known = [] if (root / MANIFEST).exists() else complete(root)
    return known[-1] if known else root


def _newest(latest: Path) -> str:
    """Return the name of the newest checkpoint, "" where that was lost or damaged."""
    name = _text(latest, LONGEST_NAME).strip() if latest.is_file() else ""
    return name if name.startswith("step-") and name[5:].isdigit() else ""


def complete(root: Path) -> list[Path]:
    """Return the checkpoints of a directory that have a name, oldest first."""
    return sorted(p for p in root.glob("step-*") if p.name[5:].isdigit())


def read_manifest(directory: Path) -> Manifest:
    """Read and validate a manifest. Raises CheckpointError."""
    path = directory / MANIFEST
    try:
        document = json.loads(_text(path, MOST_BYTES))
        version = document["format"]
        if version == FORMAT:
            content = document["content"]
            if document["crc32"] != _crc(content):
                raise ValueError("its checksum is wrong")
            content["files"] = {name: tuple(pair) for name, pair in content["files"].items()}
            manifest = Manifest.model_validate(content)
            _check(directory, manifest)
            return manifest
    except ValidationError as error:
        raise _unreadable(path, str(error.errors()[0]["msg"])) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(path, str(error)) from error
    raise CheckpointError(
        f"a checkpoint must have format {FORMAT}, but {directory} has {version!r}; "
        "load it with the version that wrote it, or train again"
    )


def _text(path: Path, most: int) -> str:
    """Return how a file begins. Raises OSError for what is none: a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        raise OSError("it is no file")
    with path.open(errors="replace") as file:
        return file.read(most)


def _check(directory: Path, manifest: Manifest) -> None:
    """Raise ValueError where a manifest contradicts itself, its name, or what a save writes."""
    name = directory.name.removeprefix("step-")
    if name.isdecimal() and name != directory.name and int(name) != manifest.step:
        raise ValueError(f"it is of step {manifest.step}")
    check_manifest(manifest)
    whole = dict.fromkeys(key for key in manifest.tensors if key.startswith("extra"))
    if not isinstance(lively(manifest.extra, whole), dict):
        raise ValueError("extra is no mapping")
    if unused := whole.keys() - _tensors_in(manifest.extra):
        raise ValueError(f"extra lacks the tensor {min(unused)[:200]!r}")
    for value in (*manifest.values.values(), *(group.settings for group in manifest.groups)):
        lively(value, {})


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"a checkpoint must have a sound {MANIFEST}, but {path} is missing or damaged ({reason}); "
        f"{remedy(path.parent)}"
    )


def damaged_file(directory: Path, files: Mapping[str, tuple[int, int]]) -> str:
    """Return the first of the files that is not as it was written, "" if all are."""
    for name in sorted(files):
        try:
            path = directory / name
            is_whole = path.is_file() and path.stat().st_size == files[name][0]
            if not is_whole or checksum(path) != files[name]:
                return name
        except OSError:
            return name
    return ""


def damage_error(directory: Path, damage: str) -> CheckpointError:
    """Return the complaint about a damaged file, given by its name, and a reason after a colon."""
    name, _, reason = damage.partition(": ")
    return CheckpointError(
        f"every file of a checkpoint must be as it was written, but {directory / name} is missing "
        f"or damaged{f' ({reason})' if reason else ''}; {remedy(directory)}"
    )


def remedy(directory: Path) -> str:
    """Say what to do about a damaged checkpoint: which one to load instead."""
    others = [p for p in complete(directory.parent) if p.name < directory.name]
    if not others:
        return "name a directory that a run has saved to, or train again: there is no earlier one"
    return (
        f"load the previous checkpoint, {others[-1]}, or remove {directory}, which makes that one "
        "the newest"
    )


# -- tensors ---------------------------------------------------------------------------------------


def stored(directory: Path, manifest: Manifest, key: str) -> Stored:
    """Return where a tensor lies. Raises CheckpointError when the manifest contradicts itself."""
    entry = manifest.tensors.get(key)
    if entry is None:
        raise CheckpointError(
            f"a manifest must list what it refers to, but {directory / MANIFEST} lacks {key!r}; "
            f"{remedy(directory)}"
        )
    pieces = tuple(
        Piece(directory / box.file, box.name or key, tuple(box.start), tuple(box.size))
        for box in entry.pieces
    )
    return Stored(STORED_DTYPES[entry.dtype], tuple(entry.shape), pieces)


def differences(saved: Mapping[str, ModuleTable], here: Mapping[str, ModuleTable]) -> list[str]:
    """Return how the module of a checkpoint and a present one differ, one line each."""
    lines = [f"{name}: the checkpoint lacks it" for name in here if name not in saved]
    lines += [f"{name}: only in the checkpoint" for name in saved if name not in here]
    for name in saved:
        if name not in here:
            continue
        old, new = saved[name], here[name]
        if old.shape != new.shape:
            lines.append(f"{name}: shape {tuple(old.shape)} saved, {tuple(new.shape)} here")
        if old.dtype != new.dtype:
            lines.append(f"{name}: dtype {old.dtype} saved, {new.dtype} here")
        if old.key != new.key:
            lines.append(f"{name}: tied to other names than when it was saved")
    return lines


def check_module(
    directory: Path, manifest: Manifest, here: Mapping[str, ModuleTable], model: str
) -> None:
    """Raise CheckpointError with all differences between the saved module and the present one."""
    lines = differences(manifest.module, here)
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise CheckpointError(
            f"a checkpoint must fit the model, but {directory} (of {manifest.model!r}) and the "
            f"present model ({model!r}) differ in {len(lines)} places:\n{listed}\nbuild the model "
            "that was trained, or start from weights alone (load_weights)"
        )


# -- values ----------------------------------------------------------------------------------------

TUPLE, PAIRS, COUNTER, TENSOR = "$tuple", "$pairs", "$counter", "$tensor"


def plain(value: Any, where: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Return a value as JSON holds it; its tensors are put into ``tensors`` under their path.

    Raises CheckpointError for anything that is not a number, text, list, tuple, dict or tensor.
    """
    if depth > MOST_NESTED:
        raise CheckpointError(
            f"a checkpoint holds values nested {MOST_NESTED} deep at most, but {where[:200]} is "
            "deeper, or contains itself; save its tensors or a flat list"
        )
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Tensor):
        tensors[where] = value
        return {TENSOR: where}
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{where}/{i}", tensors, depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {TUPLE: items}
    if isinstance(value, dict):
        pairs = [
            [
                plain(k, f"{where}/key{i}", tensors, depth + 1),
                plain(v, f"{where}/{k}", tensors, depth + 1),
            ]
            for i, (k, v) in enumerate(value.items())
        ]
        if isinstance(value, Counter):
            return {COUNTER: pairs}
        simple = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if simple else {PAIRS: pairs}
    raise CheckpointError(
        f"a checkpoint holds numbers, text, lists, tuples, dicts and tensors only, but {where} is "
        f"a {type(value).__name__}; save its state_dict() or the values it is made of"
    )


def lively(value: Any, tensors: Mapping[str, Any], depth: int = 0) -> Any:
    """Return what ``plain`` was given. Raises ValueError for what it never writes."""
    if depth > 2 * MOST_NESTED + 2:  # a tag is a level of its own
        raise ValueError(f"it has values nested more than {MOST_NESTED} deep")
    if isinstance(value, list):
        return [lively(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tagged = [key for key in value if key.startswith("$")]
    if not tagged:
        return {key: lively(item, tensors, depth + 1) for key, item in value.items()}
    tag, inner = tagged[0], value[tagged[0]]
    if len(value) > 1 or tag not in (TENSOR, TUPLE, PAIRS, COUNTER):
        raise ValueError(f"it has a value marked {tag[:40]!r}, which means nothing")
    if tag == TENSOR:
        if not isinstance(inner, str) or inner not in tensors:
            raise ValueError(f"it has a value that is tensor {inner!r:.80}, which is not listed")
        return tensors[inner]
    if not isinstance(inner, list):
        raise ValueError(f"it has a value marked {tag} that is no list")
    items = [lively(item, tensors, depth + 1) for item in inner]
    if tag == TUPLE:
        return tuple(items)
    try:
        found = {_key(key): item for key, item in items}
    except TypeError as error:
        raise ValueError(f"it has a value marked {tag} whose keys are none ({error})") from error
    return Counter(found) if tag == COUNTER else found


def _tensors_in(value: Any) -> set[str]:
    """Return which tensors a value that ``plain`` made refers to."""
    found: set[str] = set()
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            found |= {one[TENSOR]} if TENSOR in one else set()
            left += one.values()
        elif isinstance(one, list):
            left += one
    return found


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without ``torch.``."""
    return str(dtype).removeprefix("torch.")
