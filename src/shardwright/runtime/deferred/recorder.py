"""Build a module without memory for it: fake tensors, and a trace of what is done to them.

To the factory everything looks as on the CPU. Where Python asks for a value (a rejection loop, a
condition), the steps that lead to it are run for real at that moment. Where something cannot be
repeated later, ``Undeferrable`` says what.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.runtime.capture.counting import tensors_of, written_by
from shardwright.runtime.deferred.replay import GENERATOR, Replay, Undeferrable, state_now
from shardwright.runtime.deferred.trace import Ref, Step, Trace

# Values that a factory brings along (a table, weights it has loaded) are copied; more than this is
# better held once, by building the module whole.
MOST_CONSTANT_BYTES = 64 << 20

_aten = torch.ops.aten
# Operators that leave nothing of what their first argument held.
_OVERWRITE = frozenset({
    _aten.normal_, _aten.uniform_, _aten.random_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_, _aten.bernoulli_, _aten.zero_, _aten.fill_, _aten.copy_,
})  # fmt: skip
# What reads memory without an operator.
_OUTSIDE = frozenset({
    Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.share_memory_, Tensor.__reduce_ex__,
    Tensor.storage,
})  # fmt: skip


class Recorder(FakeTensorMode):
    """Records every operator on its fake tensors, from whatever thread or moment it comes."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.trace = Trace()
        self.failure = ""
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._is_inside = False
        self._thread = threading.get_ident()
        self._numbers = state_now()
        self.replay = Replay(self.trace, self._numbers)

    # -- what the factory sees -----------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens in the block; the default generator is stood in for."""
        true: Any = _Generator(self)
        places = ((torch.random, "default_generator", true), (torch, "default_generator", true),
                  (torch, "Generator", _OwnGenerator), (nn.Module, "_apply", self._convert()))  # fmt: skip
        before = [getattr(place, name) for place, name, _ in places]
        try:
            for place, name, stand_in in places:
                setattr(place, name, stand_in)
            with self, _Outside(self):
                yield
        finally:
            for (place, name, _), held in zip(places, before, strict=True):
                setattr(place, name, held)

    def _convert(self) -> Callable[..., nn.Module]:
        """Return what converts a module as on the CPU: torch treats fake parameters in another way,
        which needs that nothing refers to them."""

        def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
            for child in module.children() if recurse else ():
                child._apply(fn)
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                with torch.no_grad():
                    converted = fn(parameter)
                if not (self.is_our_fake(parameter) and self.is_our_fake(converted)):
                    raise self.fail("it converts parameters that hold values")
                parameter.data = converted
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
            return module

        return apply

    def fail(self, reason: str) -> Undeferrable:
        """Note that this cannot be replayed, and return the error to raise: it may be caught."""
        self.failure = self.failure or reason
        return Undeferrable(reason)

    def seeded(self) -> None:
        """Note that the default generator was given a state."""
        self._numbers = state_now()
        self.trace.append(Step(state=self._numbers))

    def look(self) -> None:
        """Notice a seed that did not pass through here."""
        if not _same(state_now(), self._numbers):
            self.seeded()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if self._is_inside:
            return super().__torch_dispatch__(func, types, args, given)
        if threading.get_ident() != self._thread:
            raise self.fail("it changes tensors from another thread")
        self._is_inside = True
        try:
            return self._record(func, types, args, given)
        finally:
            self._is_inside = False

    # -- recording -----------------------------------------------------------------------------

    def _record(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_lifted = func in (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
        if is_lifted and not isinstance(args[0], FakeTensor):
            value = self._constant(args[0])
            result: Any = super().__torch_dispatch__(func, types, args, kwargs)
            self.trace.constants[self.ref(result).storage] = value
            return result
        written = written_by(func, args, kwargs)
        if any(not self.is_our_fake(tensor) for tensor in written):
            raise self.fail(f"it writes to a tensor from outside ({func})")
        args, kwargs = pytree.tree_map_only(Tensor, self._adopted, (args, kwargs))
        refs = [self.ref(leaf) for leaf in tensors_of((args, kwargs))]
        writes = frozenset(self.ref(tensor).storage for tensor in written)
        is_random, state, step_args, step_kwargs = self._drawn(func, args, kwargs)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if writes or is_random or state is not None:
                raise self.fail(f"what {func} does depends on values") from None
            return self._computed(func, args, kwargs)
        if is_random and not _same(state_now(), self._numbers):
            GENERATOR.set_state(self._numbers)
        outputs = tuple(self.ref(leaf) for leaf in tensors_of(result))
        reads = frozenset(ref.storage for ref in refs)
        makes = frozenset(ref.storage for ref in outputs) - reads
        if makes or writes or is_random:
            self.trace.append(
                Step(
                    func=func,
                    args=self._as_refs(step_args),
                    kwargs=self._as_refs(step_kwargs),
                    outputs=outputs,
                    reads=reads,
                    writes=writes,
                    makes=makes,
                    overwrites=self._overwritten(func, args),
                    is_random=is_random,
                    state=state,
                )
            )
        return result

    def _drawn(
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[bool, Tensor | None, Any, dict[str, Any]]:
        """Return whether an operator draws of the default generator, or the state of the factory's
        own, which is advanced at once; and the arguments without it."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return False, None, args, kwargs
        names = [argument.name for argument in func._schema.arguments]
        named = dict(zip(names, args, strict=False)) | kwargs
        generator = named.get("generator")
        rest = {k: v for k, v in kwargs.items() if k != "generator"}
        if generator is None or generator is GENERATOR:
            self.look()
            return True, None, args, rest
        if "generator" not in kwargs:
            raise self.fail(f"it passes a generator to {func} by position")
        with _disable_current_modes():
            state = generator.get_state()
        refs = [self.ref(leaf) for leaf in tensors_of((args, kwargs))]
        values = iter(self.values(refs))
        real = pytree.tree_map_only(Tensor, lambda _: next(values).clone(), (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            func(*real[0], **real[1])
        return False, state, args, rest

    def _overwritten(self, func: Any, args: Any) -> frozenset[int]:
        """Return the storage of which an operator leaves nothing, if any."""
        if func.overloadpacket not in _OVERWRITE:
            return frozenset()
        storage = self.ref(args[0]).storage
        read = [self.ref(leaf).storage for leaf in tensors_of(args[1:])]
        whole = args[0].is_contiguous() and self.is_whole(args[0])
        return frozenset({storage}) if whole and storage not in read else frozenset()

    def is_whole(self, tensor: Tensor) -> bool:
        """Whether a tensor has as many elements as its storage."""
        return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()

    def ref(self, tensor: Tensor) -> Ref:
        """Return a fake tensor as a window on its storage."""
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise self.fail(f"it makes tensors of layout {tensor.layout} on {tensor.device}")
        if tensor.is_conj() or tensor.is_neg():
            raise self.fail("it makes lazily conjugated tensors")
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known[0].expired():
            known = (StorageWeakRef(storage), len(self.trace.bytes))
            self._known[storage._cdata] = known
            self._alive[known[1]] = known[0]
            self.trace.bytes[known[1]] = storage.nbytes()
        elif storage.nbytes() != self.trace.bytes[known[1]]:
            raise self.fail("it resizes storages")
        return Ref(
            known[1],
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

    def _as_refs(self, tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, self.ref, tree)

    # -- values from outside, and values asked for -----------------------------------------------

    def _constant(self, tensor: Tensor) -> Tensor:
        with _disable_current_modes(), torch.no_grad():
            if tensor.layout != torch.strided or tensor.device.type != "cpu":
                raise self.fail(f"it brings values on {tensor.device}")
            held = sum(one.untyped_storage().nbytes() for one in self.trace.constants.values())
            if held + tensor.numel() * tensor.element_size() > MOST_CONSTANT_BYTES:
                raise self.fail(f"it loads more than {MOST_CONSTANT_BYTES >> 20} MiB of values")
            return tensor.detach().clone()

    def _adopted(self, tensor: Tensor) -> Tensor:
        """Return a tensor with values, as it is now, as a fake one."""
        if self.is_our_fake(tensor):
            return tensor
        return self._fake(self._constant(tensor))

    def _fake(self, value: Tensor) -> Tensor:
        with self:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        self.trace.constants[self.ref(fake).storage] = value
        return fake

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator for real because what it returns cannot be known otherwise."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        values = self.values([self.ref(leaves[place]) for place in places])
        for place, value in zip(places, values, strict=True):
            leaves[place] = value
        real_args, real_kwargs = pytree.tree_unflatten(leaves, spec)
        with _disable_current_modes(), torch.no_grad():
            result = func(*real_args, **real_kwargs)
        return pytree.tree_map_only(Tensor, lambda t: self._fake(self._constant(t)), result)

    def values(self, refs: list[Ref]) -> list[Tensor]:
        """Return the values that tensors have now."""
        return self.replay.tensors(refs, lambda storage: not self._alive[storage].expired())


class _Generator:
    """Stands for torch's default generator while a factory runs: its state is the true one."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def state(self) -> Tensor:
        self._recorder.look()
        with _disable_current_modes():
            return self._recorder.replay.advance().clone()

    get_state = state  # as torch calls it

    def set_state(self, state: Tensor) -> Any:
        GENERATOR.set_state(state)
        self._recorder.seeded()
        return self

    def manual_seed(self, seed: int) -> Any:
        GENERATOR.manual_seed(seed)
        self._recorder.seeded()
        return self

    def seed(self) -> int:
        number = GENERATOR.seed()
        self._recorder.seeded()
        return number

    def initial_seed(self) -> int:
        return GENERATOR.initial_seed()

    def __getattr__(self, name: str) -> Any:
        raise self._recorder.fail(f"it uses the default generator's {name}")


class _OwnGenerator(torch.Generator):
    """A factory's own generator: its state has memory under a fake mode, too."""

    def state(self) -> Tensor:
        with _disable_current_modes():
            return super().get_state()

    get_state = state  # as torch calls it


class _Outside(TorchFunctionMode):
    """Notes reads of memory that no operator shows."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fake = bool(args) and self._recorder.is_our_fake(args[0])
        if is_fake and func is Tensor.__deepcopy__:
            return self._copied(*args)
        if func in _OUTSIDE:
            if is_fake:
                raise self._recorder.fail(f"it reads memory by {func.__name__}")
            with _disable_current_modes():  # which would take the memory away
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _copied(self, tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
        """Return what ``copy.deepcopy`` makes of the tensor that a fake one stands for."""
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf or not self._recorder.is_whole(tensor):
            raise self._recorder.fail("it copies a tensor that is part of another")
        with torch.no_grad():
            copied = tensor.clone(memory_format=torch.preserve_format)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        else:
            copied.requires_grad_(tensor.requires_grad)
            own = {k: v for k, v in vars(tensor).items() if k not in vars(copied)}
            vars(copied).update(copy.deepcopy(own, memo))
        memo[id(tensor)] = copied
        return copied


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two states of a generator are equal, without an operator."""
    with _disable_current_modes():
        return one.numpy().tobytes() == other.numpy().tobytes()
