"""Files are read within stated limits, which are checked before anything is parsed.

What a limit lets through is parsed in about a second, whatever it holds.
"""

from __future__ import annotations

import csv
import re
import tomllib
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwright.errors import InputError

CHUNK = 2**20
MOST_JSON_ENTRIES = 2_000_000
MOST_TOML_DOTS = 16  # of one line, in its keys: tomllib's time grows with their square
MOST_TOML_DIGITS = 100  # of an integer, which Python refuses to print where it has thousands
_DIGITS = re.compile(rf"[0-9a-fA-F_]{{{MOST_TOML_DIGITS + 1}}}")
_TEXT_OR_COMMENT = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|#[^\n]*")


def read_bytes(path: str | Path, most: int, what: str, remedy: str) -> bytes:
    """Return what a file holds, at most so many bytes of it.

    ``what`` it should be, with its article, and the ``remedy`` are for messages. Raises InputError.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}; check the path, or {remedy}") from None
    if len(data) > most:
        raise InputError(
            f"{what} has at most {_size(most)} ({most:,} bytes), but {path} has more; {remedy}"
        )
    return data


def read_text(path: str | Path, most: int, what: str, remedy: str) -> str:
    """Return what a text file holds; see ``read_bytes``."""
    try:
        return read_bytes(path, most, what, remedy).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{what} is text in UTF-8, but {path} is not (byte {error.start}); {remedy}"
        ) from None


def table_rows(
    lines: Iterable[str], name: object, remedy: str, delimiter: str = ","
) -> list[list[str]]:
    """Return the rows of a table, also empty ones. Raises InputError for quotes that are not closed and cells that are
    too long."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        return list(reader)
    except csv.Error as error:
        raise InputError(f"{name}, row {reader.line_num}: no table ({error}); {remedy}") from None


def numbered_rows(
    lines: Iterable[str], name: object, remedy: str, delimiter: str = ","
) -> list[tuple[int, list[str]]]:
    """Return those rows of a table that say anything, each with its number in the file."""
    rows = enumerate(table_rows(lines, name, remedy, delimiter), 1)
    return [(number, cells) for number, cells in rows if any(map(str.strip, cells))]


def check_width(cells: list[str], header: list[str], place: str) -> None:
    """Raise InputError for a row of more cells than columns: a comma inside a number makes two of it."""
    if any(map(str.strip, cells[len(header) :])):
        raise InputError(
            f"{place}: it has {len(cells)} cells, but there are {len(header)} columns; write numbers without commas (1024), "
            "and names with commas in quotes"
        )


def check_entries(data: bytes, what: str) -> None:
    """Raise ValueError where JSON has more values than are worth parsing."""
    found = data.count(b",") + data.count(b"[") + data.count(b"{")
    if found > MOST_JSON_ENTRIES:
        raise ValueError(
            f"{what} has at most {MOST_JSON_ENTRIES:,} lists, objects and entries, this one {found:,}"
        )


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML of a size that was checked. Raises ValueError with one line."""
    bare = _TEXT_OR_COMMENT.sub("''", text)
    for number, line in enumerate(bare.split("\n"), 1):
        if line.count(".") > MOST_TOML_DOTS:
            raise ValueError(
                f"line {number} of its TOML nests keys deeper than {MOST_TOML_DOTS} levels"
            )
        if len(line) > MOST_TOML_DIGITS and _DIGITS.search(line):
            raise ValueError(
                f"line {number} of its TOML has a number of over {MOST_TOML_DIGITS} digits"
            )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its TOML is nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise ValueError(f"it is not valid TOML: {str(error)[:200]}") from None


def unzipped(data: bytes, most: int, what: str) -> bytes:
    """Return gzipped bytes as they were, at most so many. Raises ValueError.

    They are counted first and kept only if there are not too many.
    """
    try:
        for keeps in (False, True):
            pieces, count = list[bytes](), 0
            machine, rest = zlib.decompressobj(wbits=31), data
            while not machine.eof:
                piece = machine.decompress(rest, CHUNK)
                rest = machine.unconsumed_tail
                if not piece and not rest:
                    raise ValueError("its gzip stream ends too early")
                count += len(piece)
                if keeps:
                    pieces.append(piece)
                if count > most:
                    raise ValueError(f"{what} has at most {_size(most)} unzipped, this one more")
    except zlib.error as error:
        raise ValueError(f"its gzip stream is damaged ({error})") from None
    return b"".join(pieces)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 2**20 else f"{count >> 10} KiB"
