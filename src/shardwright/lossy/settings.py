"""How gradients travel where packets may be lost: one checked value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from typing import Literal, get_args

from shardwright.errors import InputError

Fill = Literal["zero", "rescale", "stale"]
Form = Literal["direct", "ring"]
Policy = Literal["none", "layer", "magnitude", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Which losses are accepted, and what stands where values were lost.

    ``push`` bounds the share of packets that may be missing of gradients on their way to the rank that
    sums them, ``pull`` of sums on their way back: with anything above 0 there, replicas differ.
    ``bounds`` has other push bounds for parameters by name. A packet with values of several parameters
    has the strictest.

    ``fill``: ``zero``; ``rescale`` divides each sum by the share of ranks that are in it (direct only);
    ``stale`` takes what was last there. ``error_feedback`` adds what was lost to the sender's next
    gradient. ``important`` is the share of each message, largest magnitudes first, that must arrive
    whatever the bound. ``droppable`` says which packets switches may drop first: of front layers, of
    small magnitude, both or none; at most four times the bound's share of a message.

    ``form``: each rank sends to each (``direct``), or in a ``ring``, whose hops share the bound.
    """

    push: float = 0.01
    pull: float = 0.0
    bounds: Mapping[str, float] = field(default_factory=dict)
    fill: Fill = "zero"
    error_feedback: bool = True
    important: float = 0.05
    droppable: Policy = "magnitude"
    form: Form = "direct"

    def __post_init__(self) -> None:
        for name, kind in (("fill", Fill), ("droppable", Policy), ("form", Form)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise InputError(
                    f"{name} must be one of {', '.join(known)}, not {value!r:.40}; choose one"
                )
        if not isinstance(self.error_feedback, bool):
            raise InputError(
                f"error_feedback is True or False, not {self.error_feedback!r:.40}; choose one"
            )
        self._check_shares()
        if self.fill != "zero" and self.form == "ring":
            raise InputError(
                f"a ring sends sums of several ranks on, of which fill {self.fill!r} knows none apart; "
                "choose fill='zero' or form='direct'"
            )
        if self.fill != "zero" and self.error_feedback:
            raise InputError(
                f"what is lost counts twice with fill {self.fill!r} and error feedback; choose "
                "fill='zero', or error_feedback=False"
            )

    def _check_shares(self) -> None:
        if not isinstance(self.bounds, Mapping):
            raise InputError(
                f"bounds are a mapping from names of parameters, not {self.bounds!r:.40}; give "
                'bounds={"head.weight": 0.0}'
            )
        shares = {"push": self.push, "pull": self.pull, "important": self.important}
        for name, value in (shares | dict(self.bounds)).items():
            if not isinstance(value, Real) or not 0 <= value < 1:
                raise InputError(
                    f"{name} is a share of packets, at least 0 and below 1, not {value!r:.40}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How packets are sent. Equal on all ranks.

    ``packet_bytes`` is what UDP carries in one packet: what fits the network's MTU less 28. ``rate``
    is what a host's link carries, in bytes per second, where it is known: packets are then spaced in
    time, and ranks that send at once take turns. Without it only the window adapts.
    ``ports`` is how many source ports packets are sprayed over, which spreads them over equal paths.

    Seconds: ``grace`` after the end of a message has arrived, in which late packets still count;
    ``timeout`` after which a message that is not through fails.
    """

    packet_bytes: int = 1448
    rate: float = math.inf
    ports: int = 4
    grace: float = 0.0005
    timeout: float = 300.0
    window: int = 16
    most_window: int = 512

    def __post_init__(self) -> None:
        wholes = {
            "packet_bytes": (256, 65_000),
            "ports": (1, 64),
            "window": (2, 65_536),
            "most_window": (self.window, 65_536),
        }
        for name, (least, most) in wholes.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise InputError(
                    f"{name} must be a whole number from {least} to {most}, not {value!r:.40}"
                )
        if not isinstance(self.rate, Real) or not self.rate > 0:
            raise InputError(
                f"rate is in bytes per second, above 0, not {self.rate!r:.40}; leave it out where unknown"
            )
        for name in ("grace", "timeout"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 < float(value) < math.inf:
                raise InputError(f"{name} must be seconds, finite and above 0, not {value!r:.40}")


def lost_at_most(bound: float | Fraction, packets: int) -> int:
    """Return how many of a message's packets may be missing: N - ceil((1 - p) N), without rounding.

    A float counts as the decimal fraction it is written as.
    """
    exact = bound if isinstance(bound, Fraction) else Fraction(repr(float(bound)))
    return math.floor(exact * packets)
