"""Parameters and buffers of one rank: what stays between steps, and what is gathered for a while.

Where a parameter lies whole on this rank the module's own memory is used, so that the module keeps
being trained; shards are copies. A parameter in a layout of use that is not its layout at rest has
one lasting tensor whose storage is emptied and refilled, so that what autograd saved of it in
forward is valid again in backward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import FLAT, is_split, shard_boxes
from shardwright.core.program import STATES, Kind, Program, Value, data_of
from shardwright.errors import InputError
from shardwright.runtime.capture import Captured, seen_as
from shardwright.runtime.deferred import deferred_of, replace_parameters
from shardwright.runtime.segment import Site
from shardwright.runtime.store import DTYPES


@dataclass(frozen=True, slots=True)
class Part:
    """A view of a shard that is a box of the whole tensor, which begins at ``start``."""

    start: tuple[int, ...]
    local: Tensor

    def within(self, whole: Tensor) -> Tensor:
        """Return the view of the whole tensor that this is."""
        for dim, (start, size) in enumerate(zip(self.start, self.local.shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """A trained parameter as the optimizer sees it; ``gradient`` is the value it is updated by."""

    name: str
    value: int
    gradient: int
    parameter: nn.Parameter


def taken(program: Program, parameters: Parameters, index: int) -> list[Master]:
    """Return what a CLIP or an UPDATE takes on this rank: the norm is that of all its meshes."""
    if program.kind[index] == Kind.CLIP:
        return parameters.masters
    item, mesh, values = int(program.item[index]), int(program.group[index]), program.values
    if item < 0:
        return [master for master in parameters.masters if values[master.value].mesh == mesh]
    return [master for master in parameters.masters if master.value in program.updates[item]]


def parts(shape: tuple[int, ...], shard: Tensor, value: Value, site: Site) -> list[Part]:
    """Return what a device's shard holds of a tensor of this shape: views of the shard, by box."""
    boxes = shard_boxes(shape, value.layout, site.mesh.sizes, site.coordinate)
    if not is_flat(value):
        return [Part(box.start, shard) for box in boxes]
    return [
        Part(box.start, shard[box.first : box.first + math.prod(box.size)].view(box.size))
        for box in boxes
    ]


def _cut(whole: Tensor, shard: Tensor, value: Value, site: Site) -> None:
    for part in parts(tuple(whole.shape), shard, value, site):
        part.local.copy_(part.within(whole))


def written_buffers(graph: OperatorGraph) -> frozenset[int]:
    """Return the buffers that some operator writes as a whole."""
    return graph.written_buffers("opaque.")


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by name: of a graph's buffers, frozen parameters that forward writes are
    parameters of the module."""
    return operator.attrgetter(name)(module)


def is_flat(value: Value) -> bool:
    """Whether a shard is a flat one."""
    return FLAT in value.layout


def _updated(here: Mapping[int, Value]) -> dict[int, Value]:
    """Return what an optimizer updates: masters, and parameters at rest that have none."""
    separate = {value.tensor for value in here.values() if value.role == "master"}
    rest = {
        index: value
        for index, value in here.items()
        if value.role == "parameter" and value.resident and value.alias < 0
    }
    return {
        index: value
        for index, value in here.items()
        if value.role == "master" or (index in rest and value.tensor not in separate)
    }


def is_whole(value: Value) -> bool:
    """Whether a shard is the whole tensor."""
    return not any(is_split(placement) for placement in value.layout)


class _Lent:
    """The lasting tensors of a rank by what they are, not by value index."""

    def __init__(self, lender: Parameters) -> None:
        values, tensors = lender.program.values, lender.captured.graph.tensors
        self._tensors = {
            _said(tensors[values[index].tensor].name, values[index]): (lender.leaf[index], raw)
            for index, raw in lender.raw.items()
            if values[index].role == "buffer" or values[index].resident
        }
        self._masters = {
            (master.name, values[master.value].mesh): master.parameter for master in lender.masters
        }

    def tensors(self, name: str, value: Value) -> tuple[Tensor, Tensor]:
        """Return a value's leaf and its memory."""
        if _said(name, value) not in self._tensors:
            raise InputError(
                f"a model's state must lie alike at every batch size, but {name!r} as {value.layout} "
                "does not; leave out batches of other sizes (drop_last=True)"
            )
        return self._tensors[_said(name, value)]

    def master(self, name: str, mesh: int) -> nn.Parameter:
        """Return what the optimizer updates."""
        return self._masters[name, mesh]


def _said(name: str, value: Value) -> tuple[object, ...]:
    return name, value.role, value.mesh, value.layout, value.dtype


class Parameters:
    """The lasting tensors of one rank, by value index.

    With a ``lender``, of the same model and plan at another batch size, they are its own: what one
    of both updates, the other sees.
    """

    def __init__(
        self,
        captured: Captured,
        program: Program,
        module: nn.Module,
        sites: Mapping[int, Site],
        lender: Parameters | None = None,
    ) -> None:
        self._lent = _Lent(lender) if lender else None
        self.captured = captured
        self.program = program
        self.module = module
        self.sites = sites
        self.leaf: dict[int, Tensor] = {}
        self.raw: dict[int, Tensor] = {}
        self.masters: list[Master] = []
        self.buffers: dict[int, str] = {}
        self.states: dict[int, Tensor] = {}
        self._written = written_buffers(captured.graph)
        self._whole: dict[tuple[int, torch.device], Tensor] = {}
        self._deferred = deferred_of(module)
        self._later: dict[str, list[int]] = {}
        here = {index: value for index, value in enumerate(program.values) if value.mesh in sites}
        aliases: dict[int, Value] = {}
        for index, value in here.items():
            if value.role == "parameter" and value.alias >= 0:
                aliases[index] = value
            else:
                self._place(index, value)
        self._make_deferred()
        for index, value in aliases.items():
            self._place_alias(index, value)
        self._find_masters(here)

    # -- placing -------------------------------------------------------------------------------

    def _place(self, index: int, value: Value) -> None:
        if value.role == "buffer":
            self._place_buffer(index, value)
        elif value.role in STATES:
            self._place_state(index, value)
        elif value.role in ("master", "parameter"):
            self._place_parameter(index, value)

    def _place_parameter(self, index: int, value: Value) -> None:
        spec = self.captured.graph.tensors[value.tensor]
        site, dtype = self.sites[value.mesh], DTYPES[value.dtype]
        if value.resident and self._lent:
            self.leaf[index], self.raw[index] = self._lent.tensors(spec.name, value)
            return
        if value.resident and self._deferred and spec.name in self._deferred:
            tensor = torch.zeros(value.shape, dtype=dtype, device=site.device)
            self._later.setdefault(spec.name, []).append(index)
        elif value.resident:
            whole = seen_as(self.module.get_parameter(spec.name).detach(), spec.shape)
            tensor = self._local(whole, value, site)
        else:
            tensor = torch.empty(value.shape, dtype=dtype, device=site.device)
        self.leaf[index] = nn.Parameter(tensor, requires_grad=spec.needs_gradient)
        self.raw[index] = self.leaf[index].data
        if not value.resident:
            self.release(index)

    def _place_alias(self, index: int, value: Value) -> None:
        trained = self.captured.graph.tensors[value.tensor].needs_gradient
        leaf = self.leaf[data_of(self.program.values, index)]
        self.leaf[index] = leaf.detach().requires_grad_(trained)

    def _place_buffer(self, index: int, value: Value) -> None:
        spec = self.captured.graph.tensors[value.tensor]
        if spec.role == "constant":
            whole = self.captured.constants[value.tensor]
        else:
            self.buffers[index] = spec.name
            if self._lent:
                self.leaf[index], self.raw[index] = self._lent.tensors(spec.name, value)
                return
            whole = tensor_of(self.module, spec.name)
            if self._deferred and spec.name in self._deferred:  # a parameter that forward writes
                whole = torch.zeros(spec.shape, dtype=DTYPES[value.dtype])
                self._later.setdefault(spec.name, []).append(index)
        self.leaf[index] = self._seen(index, value, whole.detach())
        self.raw[index] = self.leaf[index]

    def _place_state(self, index: int, value: Value) -> None:
        if self._lent:
            name = self.captured.graph.tensors[value.tensor].name
            self.leaf[index], self.raw[index] = self._lent.tensors(name, value)
        else:
            zeros = torch.zeros(
                value.shape, dtype=DTYPES[value.dtype], device=self.sites[value.mesh].device
            )
            self.leaf[index] = self.raw[index] = zeros
        self.states[index] = self.raw[index]

    def _seen(self, index: int, value: Value, whole: Tensor) -> Tensor:
        """Return this rank's shard of a buffer: of one that forward writes a view of the rank's whole
        copy, since operators that write see all of it, and those that read a shard must see that."""
        site = self.sites[value.mesh]
        local = self._local(whole, value, site)
        if value.tensor not in self._written:
            return local
        copy = local if is_whole(value) else whole.to(device=site.device, dtype=local.dtype)
        copy = self._whole.setdefault((value.tensor, site.device), copy)
        if is_whole(value):
            return copy
        found = parts(tuple(whole.shape), local, value, site)
        return found[0].within(copy) if len(found) == 1 else local

    def _local(self, whole: Tensor, value: Value, site: Site) -> Tensor:
        if whole.is_meta:
            name = self.captured.graph.tensors[value.tensor].name
            raise InputError(
                f"the module to train must hold its values, but {name!r} is on the meta device; "
                "build the module on the CPU (or call to_empty and load a checkpoint into it)"
            )
        dtype = DTYPES[value.dtype]
        if is_whole(value) and whole.is_contiguous():
            return whole.to(device=site.device, dtype=dtype)
        shard = torch.zeros(value.shape, dtype=dtype, device=site.device)
        _cut(whole, shard, value, site)
        return shard

    def _make_deferred(self) -> None:
        """Make the parameters of a deferred module one at a time, and keep the shards of this rank.

        What the graph does not use is whole on every rank, as a checkpoint has it.
        """
        if self._deferred is None or self._lent:
            return
        tensors, used = self.captured.graph.tensors, self._used()
        idle = {name for name, _ in self.module.named_parameters() if name not in used}
        kept: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, whole in self._deferred.values({*self._later, *idle}):
                for index in self._later.get(name, ()):
                    value = self.program.values[index]
                    seen = seen_as(whole, tensors[value.tensor].shape)
                    _cut(seen, self.raw[index], value, self.sites[value.mesh])
                if name in idle:
                    kept[name] = whole
        replace_parameters(self.module, kept)

    def _used(self) -> set[str]:
        """The names of what the graph holds for the module: parameters, some of them as buffers."""
        roles = ("parameter", "buffer")
        return {spec.name for spec in self.captured.graph.tensors if spec.role in roles}

    def release_module(self) -> None:
        """Take the values of what the graph uses out of the module: the shards are all there is."""
        used = self._used()
        replace_parameters(
            self.module,
            {n: p.detach().to("meta") for n, p in self.module.named_parameters() if n in used},
        )

    def _find_masters(self, here: Mapping[int, Value]) -> None:
        for index, value in _updated(here).items():
            spec = self.captured.graph.tensors[value.tensor]
            if not spec.needs_gradient:
                continue
            parameter = self.leaf[index]
            if not isinstance(parameter, nn.Parameter) or value.gradient < 0:
                raise InputError(f"parameter {spec.name!r} has no gradient")
            parameter = (
                self._lent.master(spec.name, value.mesh)
                if self._lent
                else self._as_in_module(parameter, value.tensor)
            )
            self.masters.append(
                Master(name=spec.name, value=index, gradient=value.gradient, parameter=parameter)
            )

    def _as_in_module(self, parameter: nn.Parameter, tensor: int) -> nn.Parameter:
        """Return a shard with as many dims as the module's parameter, for optimizers that look:
        the graph may see blocks where the module has one dim (``capture.fused``), and a flat shard
        has one dim, whatever it is a shard of."""
        spec = self.captured.graph.tensors[tensor]
        declared = self.module.get_parameter(spec.name).shape
        shape = list(parameter.shape)
        if len(shape) == len(declared):
            return parameter
        if len(shape) < len(declared):
            row = parameter.detach().view(-1, *[1] * (len(declared) - 1))
            return nn.Parameter(row, requires_grad=parameter.requires_grad)
        differing = (d for d, size in enumerate(declared) if size != spec.shape[d])
        dim = next(differing, len(declared) - 1)  # blocks of one feature differ nowhere before
        shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
        return nn.Parameter(parameter.detach().view(shape), requires_grad=parameter.requires_grad)

    # -- filling and releasing -----------------------------------------------------------------

    def is_lasting(self, root: int) -> bool:
        """Whether a value (not an alias) is held here instead of in the store."""
        return root in self.raw

    def is_gathered(self, root: int) -> bool:
        """Whether a value is a parameter that is gathered for a while."""
        return (
            root in self.raw
            and not self.program.values[root].resident
            and (self.program.values[root].role == "parameter")
        )

    def release(self, root: int) -> None:
        """Give back the memory of a gathered parameter."""
        self.raw[root].untyped_storage().resize_(0)

    def memory(self, root: int) -> Tensor:
        """Return the memory of a lasting value, ready to be written."""
        raw = self.raw[root]
        storage, needed = raw.untyped_storage(), raw.numel() * raw.element_size()
        if storage.nbytes() < needed:
            storage.resize_(needed)
        return raw

    @cached_property
    def _changing(self) -> frozenset[int]:
        """The storages that a step writes: of parameters that are trained, as ``detach`` shows them, and of buffers."""
        tensors, values = self.captured.graph.tensors, self.program.values
        return frozenset(
            raw.untyped_storage()._cdata
            for root, raw in self.raw.items()
            if root in self.buffers or tensors[values[root].tensor].needs_gradient
        )

    def as_it_was(self, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that reads a value and copies it where it lies in memory that a step writes."""

        def copied() -> Tensor:
            tensor = read()
            return tensor.clone() if tensor.untyped_storage()._cdata in self._changing else tensor

        return copied

    def writer(self, root: int) -> Callable[[Tensor, bool], None]:
        """Return a function that writes a lasting value; writing its own memory to it is free."""

        def write(tensor: Tensor, owned: bool) -> None:
            memory = self.memory(root)
            if tensor.data_ptr() != memory.data_ptr():
                memory.copy_(tensor)

        return write

    # -- optimizer -----------------------------------------------------------------------------

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return what to optimise on this rank; never empty, so that any optimizer accepts it."""
        pairs = [(master.name, master.parameter) for master in self.masters]
        return pairs or [("nothing", nn.Parameter(torch.zeros(0)))]
