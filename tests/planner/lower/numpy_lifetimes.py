"""A second way to what ``planner.lower.kernels`` says of lifetimes: NumPy, on all steps of a phase at once.

A microbatch's forward and backward are looked at together. A value that backward reads before it
writes survives from forward; one that backward writes first (recomputed, or gathered again) does not.
Data lives as long as the last alias or view of it.

Sets of values are arrays of flags, and lists of steps are columns (``template``), so that a stage
takes a few hundred NumPy calls however many steps it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.core.program import BACKWARD_KINDS, Kind
from shardwright.planner.lower.builder import ACTIVATION, BY_MICROBATCH, GATHERED, GRADIENT, WIDE
from shardwright.planner.lower.template import Facts, Flags, Ints
from tests.planner.lower.numpy_waits import Template

_NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class Lifetimes:
    """Per template position: bytes appearing and disappearing, and which values are freed where.

    ``first`` holds bytes which appear with the first microbatch only (gradients that accumulate),
    ``second`` and ``onward`` the temporary bytes of the other microbatches, which add to those; all
    are empty outside backward.
    """

    allocated: Ints
    freed: Ints
    temporary: Ints
    free_place: Ints
    free_value: Ints
    first: Ints = field(default_factory=lambda: _NOTHING)
    second: Ints = field(default_factory=lambda: _NOTHING)
    onward: Ints = field(default_factory=lambda: _NOTHING)

    def free(self, place: int, values: Ints) -> None:
        """Free values with a step; their bytes are counted by whoever calls."""
        self.free_place = np.append(self.free_place, np.full(len(values), place))
        self.free_value = np.append(self.free_value, values)


def marked(facts: Facts, mark: int) -> Flags:
    """Return the set of values with a mark."""
    return (facts.marks & mark) > 0


def set_of(facts: Facts, values: Ints | Sequence[int]) -> Flags:
    """Return a set of values."""
    chosen = np.zeros(len(facts.bytes), dtype=np.bool_)
    chosen[np.asarray(values, dtype=np.int64)] = True
    return chosen


def _returns(facts: Facts, template: Template) -> Flags:
    """Values that every microbatch makes anew: per-microbatch ones and gathered parameters."""
    found = set_of(facts, facts.storage[template.value]) & marked(facts, BY_MICROBATCH)
    gathered = template.written[marked(facts, GATHERED)[template.written]]
    found[facts.storage[gathered]] = True
    return found


def forward_lifetimes(
    facts: Facts, forward: Template, backward: Template, reported: Flags
) -> tuple[Lifetimes, Flags]:
    """Return a forward template's lifetimes and the values alive when it ends."""
    returning = _returns(facts, forward)
    dying = returning & ~_held_first(facts, backward) & ~reported
    return _walk(facts, forward, (dying, returning, set_of(facts, [])))


def input_lifetimes(
    facts: Facts, inputs: Template, weights: Template, alive: Flags, reported: Flags
) -> tuple[Lifetimes, Flags]:
    """Return the lifetimes of the first half of a split backward and what is alive when it ends."""
    returning = _returns(facts, inputs) | alive
    dying = returning & ~_held_first(facts, weights) & ~reported
    lifetimes, left = _walk(facts, inputs, (dying, returning, alive))
    _add_up(facts, inputs, lifetimes)
    return lifetimes, left


def _held_first(facts: Facts, template: Template) -> Flags:
    """Return the values that steps hold before any writes them."""
    moment = np.full(len(facts.bytes), 1)  # of its first touch; odd: it is written
    if len(template.value):
        moment[:] = 2 * len(template) + 1
        order = 2 * template.place + template.writes
        np.minimum.at(moment, facts.storage[template.value], order)
    return (moment & 1) == 0


def backward_lifetimes(
    facts: Facts, backward: Template, alive: Flags, reported: Flags
) -> Lifetimes:
    """Return a backward template's lifetimes, given what forward left alive."""
    returning = _returns(facts, backward) | alive
    synced = set_of(facts, backward.chosen(backward.syncs)[1])
    dying = (returning | synced) & ~reported
    lifetimes, _ = _walk(facts, backward, (dying, returning, alive))
    _add_up(facts, backward, lifetimes)
    places, values = backward.chosen(backward.last_only)
    done = synced[values] & ~marked(facts, BY_MICROBATCH)[values]
    pairs = np.unique(places[done] * len(facts.bytes) + values[done])
    places, values = np.divmod(pairs, len(facts.bytes))
    np.add.at(lifetimes.freed, places, facts.bytes[values])
    return lifetimes


def _add_up(facts: Facts, backward: Template, lifetimes: Lifetimes) -> None:
    """Count gradients that are written more than once, in a microbatch or over all of them.

    What is added to a wider sum is another tensor even the first time.
    """
    count = len(backward)
    places, values = backward.written_at, backward.written
    turn = _turns(values)
    once = turn == 0
    is_sum = marked(facts, GRADIENT)[values]
    last_only = backward.last_only
    kept = is_sum & once & ~marked(facts, BY_MICROBATCH)[values]
    new = kept & ~last_only[places]
    late = kept & last_only[places]
    np.add.at(lifetimes.allocated, places[late], facts.bytes[values[late]])
    lifetimes.first = np.zeros(count, dtype=np.int64)
    np.add.at(lifetimes.first, places[new], facts.bytes[values[new]])
    computes = np.isin(backward.kind, BACKWARD_KINDS)
    weights = backward.kind == Kind.WEIGHT_GRADIENT  # one term at a time
    saved, alone = backward.freed, lifetimes.temporary
    wide = is_sum & marked(facts, WIDE)[values]
    again = is_sum & ~once & ~wide
    # A slot's second term is added out of place, further ones in place, where each microbatch begins anew and where
    # all add to one.
    own = marked(facts, BY_MICROBATCH)[values]
    times = np.bincount(values[~last_only[places]], minlength=len(facts.bytes))[values]
    for before, name in enumerate(("temporary", "second", "onward")):
        chosen = again if before == 0 else again | (new & ~wide)
        is_new = chosen & (np.where(own, turn, turn + before * times) == 1)
        sizes, mine = facts.bytes[values], places
        total, most, largest = np.zeros(count, dtype=np.int64), *np.full((2, count), -1)
        np.add.at(total, mine[chosen], sizes[chosen])
        np.maximum.at(most, mine[chosen], sizes[chosen])
        np.maximum.at(largest, mine[is_new], sizes[is_new])
        # All terms of a backward are there before the first is added; by then what autograd saved is gone.
        total = np.where(weights, np.maximum(most, 0), total)
        freed = np.where(weights, 0, saved)
        late = np.maximum(alone, np.maximum(largest, 0) - freed)
        setattr(lifetimes, name, total + np.where(computes & (most >= 0), late, alone))
    if wide.any():
        _add_wide(facts, backward, lifetimes, (wide & ~once, wide & new))


def _turns(values: Ints) -> Ints:
    """Return of each entry how many before it are equal."""
    order = np.argsort(values, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(values[order]) != 0))
    counts = np.diff(np.append(begins, len(values)))
    turn = np.empty(len(values), dtype=np.int64)
    turn[order] = np.arange(len(values)) - np.repeat(begins, counts)
    return turn


def _add_wide(
    facts: Facts, backward: Template, lifetimes: Lifetimes, chosen: tuple[Flags, Flags]
) -> None:
    """Count the terms of sums in twice their bytes: those which are written ``again`` and ``new`` ones.

    All those of a backward are there before the first of these sums, and by then what autograd
    saved is gone. A new sum that a message makes comes when what has arrived goes.
    """
    again, new = chosen
    count, alone = len(backward), backward.temporary
    terms, sums = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for flags, total, part in ((again, terms, 2), (new, terms, 2), (new, sums, 1)):
        sizes = facts.bytes[backward.written[flags]] // part
        np.add.at(total, backward.written_at[flags], sizes)
    computes = np.isin(backward.kind, BACKWARD_KINDS) & (terms > 0)
    others = lifetimes.temporary - alone  # of sums that are as wide as their terms
    freed = np.where(backward.kind == Kind.WEIGHT_GRADIENT, 0, backward.freed)
    late = np.maximum(alone + terms - sums, terms - freed)
    lifetimes.temporary = others + np.where(computes, late, alone + terms - sums // 2)
    lifetimes.second = lifetimes.second + terms
    lifetimes.onward = lifetimes.onward + terms


def once_lifetimes(facts: Facts, template: Template, before: Ints, *, ends_step: bool) -> Lifetimes:
    """Return lifetimes of steps that run once per training step (prologue, exchange, epilogue).

    What they make lives until the end of the step, except temporaries of the epilogue itself.
    Gradients that were written ``before`` are there and only accumulate.
    """
    if not len(template):
        return Lifetimes(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING)
    made = set_of(facts, template.written)
    between = made & marked(facts, ACTIVATION) if ends_step else set_of(facts, [])
    return _walk(facts, template, (between, made, set_of(facts, before)))[0]


def _walk(
    facts: Facts, template: Template, sets: tuple[Flags, Flags, Flags]
) -> tuple[Lifetimes, Flags]:
    """Play the steps: allocate at a first write, free ``dying`` values after their last touch, or
    after the last before they are made anew.

    ``sets``: the dying, those that are made here, and those alive before. Returns what is alive
    afterwards too.
    """
    dying, returning, alive = sets
    allocated, freed = template.allocated.copy(), template.freed.copy()
    result = Lifetimes(allocated, freed, template.temporary, _NOTHING, _NOTHING)
    if not len(template.value):
        return result, alive
    uses = _Uses(facts, template)
    value, place, ends = uses.value, uses.place, uses.is_last & dying[uses.value]
    # A life begins with a value's first use or after its last end, and lasts to its next one.
    begins = np.ones(len(value), dtype=np.bool_)
    begins[1:] = (value[1:] != value[:-1]) | ends[:-1]
    life = np.cumsum(begins) - 1
    is_first = np.ones(len(value), dtype=np.bool_)
    is_first[1:] = value[1:] != value[:-1]
    living = (alive[value] & is_first)[begins]
    written = np.flatnonzero(uses.is_own & returning[value] & ~living[life])
    new = written[np.unique(life[written], return_index=True)[1]]
    np.add.at(result.allocated, place[new], facts.bytes[value[new]])
    living[life[new]] = True
    ended = np.flatnonzero(ends)
    ended = ended[np.argsort(uses.order[ended])]
    result.free_place, result.free_value = place[ended], value[ended]
    gone = ended[living[life[ended]]]
    np.add.at(result.freed, place[gone], facts.bytes[value[gone]])
    living[life[ended]] = False
    alive = alive.copy()
    alive[value] = False
    alive[value[begins][living]] = True
    return result, alive


class _Uses:
    """What steps touch, value by value and step by step, each pair once.

    ``is_own``: the step writes the value itself, not a view of it. ``is_last``: no use follows, or the
    next step that touches it makes it anew. ``order``: of pairs as steps touch them.
    """

    def __init__(self, facts: Facts, template: Template) -> None:
        count = len(template)
        storage, writes = facts.storage[template.value], template.writes
        pairs, self.order, inverse = np.unique(
            storage * count + template.place, return_index=True, return_inverse=True
        )
        self.value, self.place = np.divmod(pairs, count)

        def any_of(chosen: Flags) -> Flags:
            return np.bincount(inverse[chosen], minlength=len(pairs)) > 0

        self.is_own = any_of(writes & (template.value == storage))
        made = any_of(writes & ~marked(facts, GRADIENT)[template.value]) & ~any_of(~writes)
        self.is_last = np.ones(len(pairs), dtype=np.bool_)
        self.is_last[:-1] = (self.value[1:] != self.value[:-1]) | made[1:]


def free_at_update(
    facts: Facts,
    frame: tuple[int, int],
    lifetimes: Lifetimes,
    templates: tuple[Template, Template, Sequence[Template]],
    reported: Flags,
) -> None:
    """At the update, give back what lived for the whole step: prologue and reduced gradients.

    ``frame``: mesh and number of microbatches. ``templates``: prologue, backward, and those after it,
    the epilogue last.
    """
    mesh, num_microbatches = frame
    prologue, backward, others = templates
    synced = set_of(facts, backward.chosen(backward.last_only)[1])
    written = set_of(facts, np.concatenate([t.written for t in (backward, *others)]))
    values = written & marked(facts, GRADIENT) & ~marked(facts, BY_MICROBATCH) & ~synced
    values |= set_of(facts, prologue.written)
    place = int(np.flatnonzero(others[-1].kind == Kind.UPDATE)[0])
    here = facts.mesh == mesh
    asked = np.flatnonzero(reported & ~values & here)
    lives = np.where(marked(facts, BY_MICROBATCH)[asked], num_microbatches, 1)
    mine = np.flatnonzero(values & here)
    lifetimes.free(place, np.concatenate([asked, mine]))
    lifetimes.freed[place] += int((lives * facts.bytes[asked]).sum() + facts.bytes[mine].sum())
