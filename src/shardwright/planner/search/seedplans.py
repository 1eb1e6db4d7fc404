"""What strategies may be asked for by name, and how their sizes are written."""

from __future__ import annotations

from shardwright.core.counts import read_count
from shardwright.core.schedules import NAMED, SCHEDULES, SEARCHED
from shardwright.core.staleness import ACCUMULATES, ASYNCHRONOUS
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError


def _asks_chunks(name: str) -> bool:
    """Whether a schedule takes any number of chunks: a V has two."""
    return SCHEDULES[name].chunks and not SCHEDULES[name].folds


SERVERS = "parameter-server"
# What may be asked for by name, and how its grid is written.
SEED_PLANS = {
    "megatron": "DATAxTENSOR",
    "megatron-sequence": "DATAxTENSOR",
    "expert": "DATAxEXPERT",
    SERVERS: "WORKERSxSERVERS",
    "summa": "ROWSxCOLUMNS",
    "tesseract": "DEPTHxROWSxCOLUMNS",
    "cube": "IxJxL",
    "spatial": "DATAxHEIGHT",
    "spatial-2d": "DATAxHEIGHTxWIDTH",
    **{
        name: "STAGESxCHUNKSxMICROBATCHES" if _asks_chunks(name) else "STAGESxMICROBATCHES"
        for name in NAMED
    },
    **dict.fromkeys(SEARCHED, "STAGESxMICROBATCHES"),
    **dict.fromkeys(ASYNCHRONOUS, "STAGES[xTENSOR]"),
    **dict.fromkeys(sorted(ACCUMULATES), "STAGESxMICROBATCHES[xTENSOR]"),
}


def read_sizes(name: str, text: str) -> tuple[int, ...]:
    """Read the sizes of a named strategy; what is in brackets may be left out. Raises InputError where they are
    written otherwise."""
    parts, form = text.split("x"), SEED_PLANS[name]
    most = form.count("x") + 1
    sizes = tuple(read_count(part, 10**6) for part in parts)
    if not most - form.count("[") <= len(parts) <= most or 0 in sizes:
        shown = "x".join("2" * most)
        raise InputError(
            f"the sizes of {name} are written {form}, such as {shown}, not {text[:40]!r}; write so"
        )
    return sizes


def check_linears(name: str, strategy: Strategy) -> None:
    """Raise InputError where a tensor axis splits nothing."""
    if not uses(strategy, "tensor"):
        mesh = strategy.meshes[0]
        raise InputError(
            f"{name} splits linear layers whose results can stay split until the next one, but the model has "
            f"none that {mesh.sizes[mesh.axes.index('tensor')]} devices divide; choose another seed plan"
        )


def uses(strategy: Strategy, axis: str) -> bool:
    """Whether an axis of more than one device, if there is one, splits anything."""
    mesh = strategy.meshes[0]
    if axis not in mesh.axes or mesh.sizes[mesh.axes.index(axis)] == 1:
        return True
    return any(config.dims[mesh.axes.index(axis)] for config in strategy.configs)
