"""Gradients of DistributedDataParallel, averaged by a thread beside backward."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.futures import Future


def averaged_beside(
    thread: ThreadPoolExecutor,
    average: Callable[[], bool],
    buffer: Tensor,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
    waiting: list[Callable[[], None]] | None = None,
) -> Future[Tensor]:
    """Have a thread average a bucket in place; the future has its buffer when the means are in it: once ``average``
    says that it is done, as then are all buckets that were ``waiting``.

    ``within`` is entered around both: a GPU's stream, whose work the futures then stand for.
    What ``average`` raises is raised where backward asks for the future's value: an exception set on a
    future would reach backward as a result that is no tensor.
    """
    devices = [buffer.device] if buffer.device.type == "cuda" else []
    done: Future[Tensor] = Future(devices=devices)  # type: ignore[arg-type]
    failures, told = list[Exception](), [] if waiting is None else waiting

    def work() -> None:
        with within():
            told.append(lambda: done.set_result(buffer))
            try:
                is_over = average()
            except Exception as error:  # noqa: BLE001  # raised by backward, below
                failures.append(error)
                is_over = True
            while is_over and told:
                told.pop(0)()

    def result(future: Future[Tensor]) -> Tensor:
        if failures:
            raise failures[0]
        return future.value()

    after = done.then(result)
    thread.submit(work)
    return after  # type: ignore[return-value]
