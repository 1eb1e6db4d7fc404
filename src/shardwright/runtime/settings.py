"""Settings of plain PyTorch that may make a step faster, each run in turns beside the step as it is."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from shardwright.runtime.capture.prepare import find_loss
from shardwright.runtime.capture.source import ModelSource
from shardwright.runtime.race import Laps, Rules, race
from shardwright.runtime.train import build_seeded

BACKENDS = {
    "attention: flash": SDPBackend.FLASH_ATTENTION,
    "attention: memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "attention: math": SDPBackend.MATH,
}
PLAIN = "plain"
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to run forward and backward of a model, ``step``, under a name."""

    name: str
    step: Callable[[Batch], Tensor]


def measure(
    source: ModelSource,
    batch_size: int,
    seq: int | None,
    rules: Rules,
    *,
    compiles: bool = False,
    tell: Callable[[int], None] = lambda turns: None,
) -> tuple[dict[str, Laps], dict[str, str]]:
    """Return the laps of every setting that the model has a use for and that runs here, and why others do not run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = build_seeded(source).to(device).train()
    batch = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in source.example(batch_size, seq).items()
    }
    running, refused = list[Setting](), dict[str, str]()
    for setting in possible_settings(module, batch, compiles=compiles):
        try:
            setting.step(batch)
        except Exception as error:  # whatever a back-end refuses with
            if setting.name == PLAIN:
                raise
            refused[setting.name] = str(error).strip().partition("\n")[0][:120]
        else:
            running.append(setting)
    laps = race([one.step for one in running], [batch], rules, tell)
    return dict(zip([one.name for one in running], laps, strict=True)), refused


def possible_settings(module: nn.Module, batch: Batch, *, compiles: bool) -> Iterator[Setting]:
    """Yield the step as it is, and what the model has a use for."""
    yield Setting(PLAIN, functools.partial(_step, module, contextlib.nullcontext))
    if _attends(module, batch):
        for name, backend in BACKENDS.items():
            inside = functools.partial(sdpa_kernel, backend)
            yield Setting(name, functools.partial(_step, module, inside))
    if any(isinstance(one, nn.Conv2d) for one in module.modules()):
        turned: nn.Module = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        yield Setting("channels-last", functools.partial(_channels_last, turned))
    if _repeated(module):
        again = recomputed(copy.deepcopy(module))
        yield Setting("recomputation", functools.partial(_step, again, contextlib.nullcontext))
    if compiles:
        made: Any = torch.compile(copy.deepcopy(module))
        yield Setting("torch.compile", functools.partial(_step, made, contextlib.nullcontext))


def recomputed(module: nn.Module) -> nn.Module:
    """Return the module, changed so that every repeated block is made again in backward."""
    for name in _repeated(module):
        block = module.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return module


def _step(
    module: nn.Module, inside: Callable[[], AbstractContextManager[Any]], batch: Mapping[str, Any]
) -> Tensor:
    """Run forward and backward; weights stay as they are."""
    with inside():
        loss = find_loss(module(**batch))
        loss.backward()
    module.zero_grad(set_to_none=True)
    return loss.detach()


def _channels_last(module: nn.Module, batch: Batch) -> Tensor:
    turned = {
        name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
        for name, value in batch.items()
    }
    return _step(module, contextlib.nullcontext, turned)


class _Attention(TorchFunctionMode):
    """Notes whether torch's attention is called."""

    is_called = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        self.is_called |= function is nn.functional.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


def _attends(module: nn.Module, batch: Batch) -> bool:
    with _Attention() as seen, torch.no_grad():
        module(**batch)
    return seen.is_called


def _repeated(module: nn.Module) -> list[str]:
    """Return the names of the blocks of the longest list of modules of one class."""
    best: list[str] = []
    for name, one in module.named_modules():
        if not isinstance(one, nn.ModuleList | nn.Sequential):
            continue
        kinds = {type(child) for child in one}
        if len(one) > max(1, len(best)) and len(kinds) == 1 and any(True for _ in one.parameters()):
            best = [f"{name}.{number}".lstrip(".") for number in range(len(one))]
    return best
