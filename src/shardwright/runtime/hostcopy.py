"""Numbers that a device makes and the host wants to know, without making the device stand still."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.runtime.collectives import Pending


class HostCopy:
    """The result of a message on its way to the host, begun as soon as the message is.

    On the CPU it is the result itself. On a GPU a stream of its own waits for the message and copies:
    the kernels that were queued before must have run until ``read`` returns, those queued since need
    not, so the device has work meanwhile.
    """

    def __init__(
        self, pending: Pending, device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        self._pending: Pending | None = pending
        self._device = device
        self._result: Tensor | None = None
        self._numbers: list[float] | None = None
        self._event: torch.cuda.Event | None = None
        if stream is None:
            return
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._result = pending.wait()
            self._host = torch.empty_like(self._result, device="cpu", pin_memory=True)
            self._host.copy_(self._result, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)
        self._result.record_stream(stream)

    def tensor(self) -> Tensor:
        """Return the result on its device, to be used by the current stream."""
        if self._result is None:
            assert self._pending is not None  # until it is let go of
            self._result = self._pending.wait()
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        return self._result

    def read(self) -> list[float]:
        """Return the numbers; waits for them."""
        if self._numbers is None:
            if self._event is not None:
                self._event.synchronize()
            self._numbers = (self.tensor() if self._event is None else self._host).tolist()
        return self._numbers

    def let_go(self) -> None:
        """Keep the numbers, not the memory of the device."""
        if self._event is None:
            self.read()
        self._pending = self._result = None
