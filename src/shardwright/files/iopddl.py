"""The border where problems of the IOPDDL contest come in and solutions go out.

Format: google/iopddl, ASPLOS / EuroSys 2025 contest on intra-operator parallelism. A file is one
JSON object ``problem``, gzipped where its name ends so. A solution is the list of strategy indices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import InputError, cleaned
from shardwright.files.limits import read_bytes, unzipped
from shardwright.files.planfile import write_atomically

Ints = NDArray[np.int64]

# What the contest writes for "not allowed".
FORBIDDEN = 10**18
MOST_TIME = 10_000_000
LARGEST_FILE = 256 * 2**20  # unzipped; the contest's largest has 100 MB
MOST_LISTS = 2_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class ContestProblem:
    """A problem as the contest states it, in columns of integers.

    Node ``i`` has the strategies ``first[i]:first[i + 1]``; ``tables`` are the distinct edge tables
    one after another, ``table[e]`` says where the one of edge ``e`` begins.
    """

    name: str
    first: Ints
    cost: Ints
    usage: Ints
    intervals: Ints
    ends: Ints
    table: Ints
    cells: Ints
    limit: int | None

    def evaluate(self, choice: Sequence[int]) -> int:
        """Return the exact cost of a solution."""
        picks = np.asarray(choice, dtype=np.int64)
        own = self.cost[self.first[:-1] + picks]
        return sum(own.tolist()) + sum(self._pairs(picks).tolist())

    def is_allowed(self, choice: Sequence[int]) -> bool:
        """Return whether no strategy and no pair of a solution is forbidden."""
        picks = np.asarray(choice, dtype=np.int64)
        own = self.cost[self.first[:-1] + picks]
        return int(own.max()) < FORBIDDEN and int(self._pairs(picks).max(initial=0)) < FORBIDDEN

    def _pairs(self, picks: Ints) -> Ints:
        one, two = self.ends[:, 0], self.ends[:, 1]
        return self.cells[self.table + picks[one] * np.diff(self.first)[two] + picks[two]]

    def peak(self, choice: Sequence[int]) -> int:
        """Return the largest usage at any time point."""
        picks = np.asarray(choice, dtype=np.int64)
        return int(self.over_time(self.usage[self.first[:-1] + picks]).max(initial=0))

    def over_time(self, usage: Ints) -> NDArray[Any]:
        """Return the sum of the usages of the nodes alive at every time, exact: integers of 64 bits
        where they suffice, else Python's."""
        begin, end = self.intervals[:, 0], self.intervals[:, 1]
        alive = begin < end
        kind = np.int64 if sum(usage.tolist()) < 2**63 else object
        change = np.zeros(int(self.intervals.max(initial=0)) + 2, dtype=kind)
        np.add.at(change, begin[alive], usage[alive].astype(kind))
        np.subtract.at(change, end[alive], usage[alive].astype(kind))
        return np.cumsum(change)


def read_iopddl(path: str | Path) -> ContestProblem:
    """Read and check a problem. Raises InputError with one line for whatever is wrong."""
    data = read_bytes(path, LARGEST_FILE, "a problem", "give one of the contest's")
    try:
        if data[:2] == b"\x1f\x8b":
            data = unzipped(data, LARGEST_FILE, "a problem")
        if data.count(b"[") + data.count(b"{") > MOST_LISTS:
            raise ValueError(f"it has more than {MOST_LISTS:,} lists and objects")
        tree = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise _refusal(path, f"JSON is UTF-8, and its byte {error.start} is not") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise _refusal(path, f"it is not complete JSON ({error})") from error
    except ValueError as error:
        raise _refusal(path, str(error)) from error
    try:
        return _columns(tree)
    except (ValueError, OverflowError) as error:
        raise _refusal(path, str(error)) from error


def _object(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, which has every key once."""
    found = dict(items)
    if len(found) < len(items):
        keys = [key for key, _ in items]
        raise ValueError(f"{max(keys, key=keys.count)!r:.40} occurs twice in one object")
    return found


def write_choice(path: str | Path, choice: Sequence[int]) -> Path:
    """Write a solution as the contest wants it: a JSON list of strategy indices."""
    return write_atomically(path, (json.dumps(list(choice)) + "\n").encode())


def _refusal(path: str | Path, reason: str) -> InputError:
    return InputError(
        f"{path} is not a problem of the IOPDDL contest: {reason[:300]}; write it as "
        "docs/guides/iopddl.md describes"
    )


def _columns(tree: Any) -> ContestProblem:
    problem = _field(tree, "problem", dict, "the file")
    nodes = _field(problem, "nodes", dict, "problem")
    edges = _field(problem, "edges", dict, "problem")
    costs = _rows(_field(nodes, "costs", list, "nodes"), "nodes.costs")
    usages = _rows(_field(nodes, "usages", list, "nodes"), "nodes.usages")
    intervals = _pairs(_field(nodes, "intervals", list, "nodes"), "nodes.intervals")
    sizes = np.fromiter(map(len, costs), dtype=np.int64, count=len(costs))
    if not len(costs) or len(usages) != len(costs) or len(intervals) != len(costs):
        raise ValueError(
            f"{len(costs)} lists of costs, {len(usages)} of usages and {len(intervals)} intervals, "
            "but every node needs one of each, and there must be a node"
        )
    for index, row in enumerate(usages):
        if len(row) != sizes[index] or not row:
            raise ValueError(f"node {index} has {sizes[index]} costs and {len(row)} usages")
    limit = problem.get("usage_limit")
    if limit is not None and (type(limit) is not int or limit < 0):
        raise ValueError("usage_limit is not an integer of at least 0")
    if intervals.max() > MOST_TIME:
        raise ValueError(f"an interval ends at {intervals.max()}, after {MOST_TIME}")
    usage = _flat(usages, "nodes.usages")
    ends = _pairs(_field(edges, "nodes", list, "edges"), "edges.nodes")
    rows = _rows(_field(edges, "costs", list, "edges"), "edges.costs")
    table, cells = _tables(ends, rows, sizes)
    return ContestProblem(
        name=cleaned(str(problem.get("name", "")))[:200],
        first=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]),
        cost=_flat(costs, "nodes.costs"),
        usage=usage,
        intervals=intervals,
        ends=ends,
        table=table,
        cells=cells,
        limit=limit,
    )


def _tables(ends: Ints, rows: list[list[int]], sizes: Ints) -> tuple[Ints, Ints]:
    """Return where each edge's table begins, and the distinct tables one after another."""
    if len(ends) != len(rows):
        raise ValueError(f"{len(ends)} edges, but {len(rows)} tables of edges")
    if ends.max(initial=0) >= len(sizes):
        raise ValueError(f"an edge names a node outside of 0 ... {len(sizes) - 1}")
    if (ends[:, 0] == ends[:, 1]).any():
        raise ValueError(f"edge {int((ends[:, 0] == ends[:, 1]).argmax())} joins a node to itself")
    found: dict[bytes, int] = {}
    table = np.zeros(len(ends), dtype=np.int64)
    pool: list[Ints] = []
    size = 0
    expected = (sizes[ends[:, 0]] * sizes[ends[:, 1]]).tolist()
    for edge, row in enumerate(rows):
        if len(row) != expected[edge]:
            raise ValueError(
                f"edge {edge} has {len(row)} costs, but its nodes have {expected[edge]} pairs of "
                "strategies"
            )
        cells = _integers(row, "edges.costs")
        key = cells.tobytes()
        if key not in found:
            found[key] = size
            pool.append(cells)
            size += len(cells)
        table[edge] = found[key]
    return table, np.concatenate(pool) if pool else np.zeros(0, dtype=np.int64)


def _field(tree: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(tree, dict) or not isinstance(tree.get(name), kind):
        raise ValueError(f"{where} has no {'list' if kind is list else 'object'} {name!r}")
    return tree[name]


def _rows(value: list[Any], name: str) -> list[list[int]]:
    for index, row in enumerate(value):
        if not isinstance(row, list):
            raise ValueError(f"{name}[{index}] is not a list")
    return value


def _pairs(value: list[Any], name: str) -> Ints:
    for index, row in enumerate(value):
        if not isinstance(row, list) or len(row) != 2:
            raise ValueError(f"{name}[{index}] is not a pair")
    return _flat(value, name).reshape(-1, 2)


def _flat(rows: list[list[int]], name: str) -> Ints:
    return _integers(list(chain.from_iterable(rows)), name)


def _integers(row: list[int], name: str) -> Ints:
    """Return a list as integers of 64 bits; floats, booleans and texts are refused."""
    if not {int}.issuperset(map(type, row)):
        other = next(one for one in row if type(one) is not int)
        raise ValueError(f"{name} has {other!r:.40}, which is not an integer")
    try:
        found = np.array(row, dtype=np.int64)
    except OverflowError as error:
        most = max(row, key=abs)
        raise ValueError(f"{name} has {most!s:.40}, which is not an integer of 64 bits") from error
    if found.min(initial=0) < 0:
        raise ValueError(f"{name} has a negative number, {found.min()}")
    return found
