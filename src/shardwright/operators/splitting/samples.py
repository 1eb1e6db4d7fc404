"""Which dim of every operator and tensor counts the samples of the batch.

Microbatches cut the batch into equal pieces that run one after another; a mesh axis on the sample
dim cuts it in space. Both need to know, for every operator, which dim that is. The analysis walks
the graph once and sorts tensors into four states.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from shardwright.core.graph import SYNCHRONISED, OperatorGraph
from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules import has_rule, iterate

# Constants that may be one number for every sample.
FILLS = ("aten.ones.default", "aten.zeros.default", "aten.full.default")


class State(enum.Enum):
    """How a tensor depends on the batch."""

    FREE = "does not depend on the batch"
    SPLIT = "carries the sample dim"
    SUM = "is a sum over samples, so that sums over microbatches add up to it"
    WHOLE = "needs the whole batch at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The sample dim of everything.

    ``operator_dim``: per operator the name of its sample dim, or "". ``tensor_dim``: per tensor the
    dim which counts samples, or -1. ``prologue``: operators that must see the whole batch before any
    microbatch can run (they depend on the batch, never on parameters). ``blocker``: a sentence why
    more than one microbatch is impossible, and what would mend that, or "". ``common``: into as many pieces
    whatever carries samples divides, or into a divisor of them: fewer than samples where these are groups (0:
    nothing carries any). ``iterations``: the iteration space of every operator, equal calls sharing one.
    """

    operator_dim: tuple[str, ...]
    tensor_dim: tuple[int, ...]
    state: tuple[State, ...]
    prologue: frozenset[int]
    blocker: str
    common: int
    iterations: tuple[Iteration, ...]

    def weights(self, graph: OperatorGraph, index: int) -> list[int]:
        """Return at which positions an operator reads what is trained and knows no samples."""
        return [
            position
            for position, tensor in enumerate(graph.operators[index].inputs)
            if self.state[tensor] is State.FREE and graph.tensors[tensor].needs_gradient
        ]


def find_samples(graph: OperatorGraph) -> Samples:
    """Run the analysis; linear in the size of the graph."""
    found = _Analysis(graph, fills=False).run()
    if not found.blocker:
        return found
    # What fills a dim as long as the batch may fill one number per sample (a gradient's first factor).
    other = _Analysis(graph, fills=True).run()
    return found if other.blocker else other


class _Analysis:
    """One walk; ``fills``: constants whose first dim is as long as the batch have a row per sample."""

    def __init__(self, graph: OperatorGraph, fills: bool) -> None:
        self.graph, self.fills = graph, fills
        count = len(graph.tensors)
        self.state = [State.FREE] * count
        self.dim = [-1] * count
        self.trained = [tensor.role == "parameter" for tensor in graph.tensors]
        self.operator_dim: list[str] = []
        self.iterations = tuple([iterate(graph, index) for index in range(len(graph.operators))])
        self.common = 0
        self.wanted_whole: set[int] = set()
        self.blocker = ""
        shapes = [graph.tensors[index].shape for index in graph.inputs]
        self.batch = max((shape[0] for shape in shapes if shape), default=0)
        for index in graph.inputs:
            self._label_whole(index)

    def run(self) -> Samples:
        for index, operator in enumerate(self.graph.operators):
            trained = any(self.trained[tensor] for tensor in operator.inputs)
            for tensor in operator.outputs:
                self.trained[tensor] = trained
            iteration = self.iterations[index]
            self.operator_dim.append(sample := self._visit(index, iteration, trained))
            if sample:
                self.common = math.gcd(self.common, iteration.dim(sample).size)
        if not self.blocker and self.state[self.graph.loss] not in (State.SUM, State.FREE):
            self.blocker = "the loss is not a sum or mean over samples (return one that is)"
        self._check_written()
        return Samples(
            operator_dim=tuple(self.operator_dim),
            tensor_dim=tuple(self.dim),
            state=tuple(self.state),
            prologue=self._ancestors(),
            blocker=self.blocker,
            common=math.gcd(self.common, *self._lengths()),
            iterations=self.iterations,
        )

    def _lengths(self) -> list[int]:
        """Return the lengths of the dims along which tensors carry samples."""
        pairs = zip(self.graph.tensors, self.dim, strict=True)
        return [tensor.shape[dim] for tensor, dim in pairs if dim >= 0]

    def _visit(self, index: int, iteration: Iteration, trained: bool) -> str:
        if self.fills and self._is_fill(index):
            self._see_whole(index)
            return ""
        states = [self.state[tensor] for tensor in self.graph.operators[index].inputs]
        names = self._sample_names(index, iteration)
        if len(names) == 1 and "" not in names:
            sample = names.pop()
            if self._claim_sums(index, states):
                if not self._cut_free(index, iteration, sample):
                    what = "reads, sample by sample, what is made of parameters for the whole batch"
                    self._block(index, what, "look its rows up by numbers that come with the batch")
                self._label(index, iteration, sample)
                return sample
        elif not names:
            kind = self.graph.operators[index].kind
            if trained and kind.startswith(("bent.", "opaque.")):
                verb = "bends" if kind.startswith("bent.") else "may bend, as one opaque operator,"
                what = f"{verb} the gradient of each microbatch, not their sum"
                self._block(
                    index, what, "bend gradients of samples, or all in the optimizer's step"
                )
            repeated = self._repeats_for_batch(index, iteration, states)
            if repeated:
                self._label(index, iteration, repeated)
                return repeated
            if self._passes_sums(index, iteration, states):
                self._mark(index, State.SUM)
                return ""
            if State.WHOLE not in states and self._claim_sums(index, states):
                return ""
        self._need_whole(index, iteration, names)
        return ""

    def _need_whole(self, index: int, iteration: Iteration, names: set[str]) -> None:
        """Note that an operator sees the whole batch at once: one that depends on parameters blocks."""
        operator = self.graph.operators[index]
        self._mark(index, State.WHOLE)
        if any(self.trained[tensor] for tensor in operator.inputs):
            self._block(index, "mixes samples of the batch", self._remedy(index, iteration, names))
            return
        self._see_whole(index)

    def _see_whole(self, index: int) -> None:
        """Let an operator run once for the whole batch, and what it makes be cut."""
        for tensor in self.graph.operators[index].outputs:
            self.wanted_whole.add(tensor)
            self._label_whole(tensor)

    def _is_fill(self, index: int) -> bool:
        operator = self.graph.operators[index]
        shape = self.graph.tensors[operator.outputs[0]].shape if operator.outputs else ()
        is_fill = operator.kind in FILLS and not operator.inputs
        return is_fill and len(shape) > 0 and shape[0] == self.batch

    def _remedy(self, index: int, iteration: Iteration, names: set[str]) -> str:
        """Say what an operator that mixes samples does with them, and what to do instead."""
        operator = self.graph.operators[index]
        if operator.kind.startswith("opaque."):
            return "it is one opaque operator: a note says what keeps its parts out of the graph"
        if any(self.trained[one] and self.state[one] is State.SUM for one in operator.inputs):
            if SYNCHRONISED in self.graph.notes:
                return "it waits for a sum over all samples; --batch-norm local takes that of a microbatch"
            return "it waits for a sum over all samples; take that over each sample"
        if len(names) > 1 and "" not in names:
            return (
                "samples meet each other, as in contrastive losses; split them over devices instead"
            )
        if not has_rule(operator.kind):
            return "it has no rule; write it with operators that have one"
        if not iteration.dims:
            return "it takes all samples at once; let it take each by itself"
        return "it runs along the dim that counts samples; let it run along another"

    def _sample_names(self, index: int, iteration: Iteration) -> set[str]:
        """Return what an operator calls the dims along which its inputs carry samples; "" of one without."""
        return {
            names[self.dim[tensor]] if names else ""
            for names, tensor in zip(
                iteration.inputs, self.graph.operators[index].inputs, strict=True
            )
            if self.state[tensor] is State.SPLIT
        }

    def _check_written(self) -> None:
        """Block microbatches where each would find in a buffer what the one before it left there.

        Where the batch decides what is written (batch norm) that is so, or not, for what it computes;
        a counter that nobody reads, as batch norm's, may count microbatches.
        """
        for index, operator in enumerate(self.graph.operators):
            if operator.outputs or any(self.state[t] is not State.FREE for t in operator.inputs):
                continue
            buffer = operator.inputs[0]
            readers = self.graph.consumers[buffer]
            if any(self.graph.operators[reader].outputs for reader in readers):
                name = self.graph.tensors[buffer].name
                what = f"changes {name}, which forward reads, once per call"
                self._block(index, what, "change it after the step instead")

    def _block(self, index: int, what: str, remedy: str) -> None:
        operator = self.graph.operators[index]
        where = f", in {operator.module}" if operator.module else ""
        named = f"operator {operator.name} ({operator.kind}{where})"
        self.blocker = self.blocker or f"{named} {what} ({remedy})"

    def _label_whole(self, tensor: int) -> None:
        """A tensor at hand as a whole can be cut along its first dim if that is as long as the batch.

        Any consistent cut is exact, since every rule is; should the dim not count samples after all,
        the next operator that meets the real sample dim finds two names and stops the analysis.
        """
        shape = self.graph.tensors[tensor].shape
        if shape and shape[0] == self.batch:
            self.state[tensor], self.dim[tensor] = State.SPLIT, 0

    def _cut_free(self, index: int, iteration: Iteration, sample: str) -> bool:
        """Cut along the samples what was made of parameters alone, one row per sample (the first step of
        a recurrence that starts from zeros); false where it cannot be.

        What depends on no parameters either is made once, and read piece by piece.
        """
        cut: dict[int, int] = {}
        names: dict[int, str] = {}
        pending = self._read_along(index, iteration, sample)
        while pending:
            tensor, dim = pending.pop()
            if cut.setdefault(tensor, dim) != dim:
                return False
            producer = self.graph.tensors[tensor].producer
            if producer < 0:
                return False  # a parameter
            made = self.iterations[producer]
            outputs = self.graph.operators[producer].outputs
            name = made.outputs[outputs.index(tensor)][dim]
            if not name or names.setdefault(producer, name) != name:
                return False
            if any(name not in those for those in made.outputs):
                return False
            places = zip(outputs, [those.index(name) for those in made.outputs], strict=True)
            pending += [place for place in places if place[0] not in cut]
            pending += [p for p in self._read_along(producer, made, name) if p[0] not in cut]
        readers = {reader for tensor in cut for reader in self.graph.consumers[tensor]}
        if any(reader < index and reader not in names for reader in readers):
            return False  # it was read whole, too
        for tensor, dim in cut.items():
            self.state[tensor], self.dim[tensor] = State.SPLIT, dim
        for producer, name in names.items():
            self.operator_dim[producer] = name
        return True

    def _read_along(self, index: int, iteration: Iteration, name: str) -> list[tuple[int, int]]:
        """Return (tensor, dim) of what an operator reads along a dim that depends on parameters only."""
        pairs = zip(self.graph.operators[index].inputs, iteration.inputs, strict=True)
        return [
            (tensor, names.index(name))
            for tensor, names in pairs
            if name in names and self.state[tensor] is State.FREE and self.trained[tensor]
        ]

    def _repeats_for_batch(self, index: int, iteration: Iteration, states: list[State]) -> str:
        """Return the dim along which something without samples is repeated once for each, or ""."""
        operator = self.graph.operators[index]
        shape = self.graph.tensors[operator.outputs[0]].shape if operator.outputs else ()
        is_free = all(state is State.FREE for state in states)
        if not (is_free and operator.kind.startswith("aten.expand") and shape):
            return ""
        name = iteration.outputs[0][0]
        is_new = all(name not in names for names in iteration.inputs)
        return name if is_new and shape[0] == self.batch else ""

    def _passes_sums(self, index: int, iteration: Iteration, states: list[State]) -> bool:
        """A sum over microbatches may pass where the operator is linear in it."""
        if State.SUM not in states or not iteration.linear:
            return False
        if any(states[position] is not State.SUM for position in iteration.linear):
            return False
        others = [i for i in range(len(states)) if i not in iteration.linear]
        return self._claim_sums(
            index, [states[i] if i in others else State.FREE for i in range(len(states))]
        )

    def _claim_sums(self, index: int, states: list[State]) -> bool:
        """Ask for the finished value of every sum among the inputs; false if one is not ready."""
        operator = self.graph.operators[index]
        sums = [operator.inputs[i] for i, state in enumerate(states) if state is State.SUM]
        if any(self.trained[tensor] for tensor in sums):
            return False
        if any(self.trained[t] and self.state[t] is State.WHOLE for t in operator.inputs):
            return False  # blocked before, nothing downstream can be cut
        self.wanted_whole.update(sums)
        return True

    def _label(self, index: int, iteration: Iteration, sample: str) -> None:
        for tensor, names in zip(
            self.graph.operators[index].outputs, iteration.outputs, strict=True
        ):
            if sample in names:
                self.state[tensor], self.dim[tensor] = State.SPLIT, names.index(sample)
            else:
                self.state[tensor] = State.SUM

    def _mark(self, index: int, state: State) -> None:
        for tensor in self.graph.operators[index].outputs:
            self.state[tensor] = state

    def _writes_whole(self, index: int) -> bool:
        """Whether an operator writes what the whole batch says, untrained: batch norm of the batch itself."""
        operator = self.graph.operators[index]
        of_batch = {self.state[tensor] for tensor in operator.inputs} & {State.SUM, State.WHOLE}
        trained = any(self.trained[tensor] for tensor in operator.inputs)
        return not operator.outputs and not trained and bool(of_batch)

    def _ancestors(self) -> frozenset[int]:
        """Operators that lead to a tensor which is wanted whole, or write what such tensors say."""
        pending = [self.graph.tensors[tensor].producer for tensor in self.wanted_whole]
        pending += filter(self._writes_whole, range(len(self.graph.operators)))
        found: set[int] = set()
        while pending:
            index = pending.pop()
            if index >= 0 and index not in found:
                found.add(index)
                pending += self.graph.makers(index)
        return frozenset(found)


def batch_size(graph: OperatorGraph, samples: Samples) -> int:
    """Return the number of samples in a step."""
    dims = samples.tensor_dim
    return max((graph.tensors[i].shape[dims[i]] for i in graph.inputs if dims[i] >= 0), default=1)
