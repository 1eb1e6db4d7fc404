"""What may be asked of gradients that are compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shardwright.core.compression import LEAST_SENT, MERGED, SPARSE
from shardwright.core.legality import check_feedback
from shardwright.core.strategy import Compressor, Feedback, GradientSync, Residual
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.verbs.request import Request


def check_compression(request: Request) -> None:
    """Check what a request says of compression."""
    _check_error_feedback(request)
    if request.allow_compression:
        _check_allowed(request)
    elif not _is_density(request):
        raise InputError(
            "top-k and gtop-k send a share of a gradient's elements, above 0 and below 1, and other compressors "
            f"all of them, but the compressor is {request.compressor} and the density "
            f"{request.density:g}; give --gradient-compressor top-k --gradient-density 0.01"
        )
    _check_feedback(request)
    said = "compression" if request.allow_compression else request.compressor
    if said == "none":
        return
    if request.error_feedback or request.gradient_dtype != "parameter":
        raise InputError(
            f"{said} says what travels and feeds back what that loses, but gradients are "
            f"to travel in {request.gradient_dtype}; leave out --gradient-dtype and "
            f"--gradient-error-feedback, or {_option(request)}"
        )
    if request.precision == "float16":
        raise InputError(
            "what compressed gradients owe would change its unit with the scale of the loss; plan for "
            f"bfloat16 or float32, or leave out {_option(request)}"
        )


def _is_density(request: Request) -> bool:
    """Whether a density is one that the compressor has."""
    if request.compressor in SPARSE:
        return 0 < request.density < 1
    return request.density == 1


def _check_error_feedback(request: Request) -> None:
    """Check what a request says of feedback to gradients in another dtype."""
    if request.error_feedback and request.gradient_dtype == "parameter":
        raise InputError(
            "error feedback keeps what gradients lose on the wire, but they travel in their "
            "parameters' dtype; name a narrower one, such as --gradient-dtype bfloat16"
        )
    if request.error_feedback and request.precision == "float16":
        raise InputError(
            "what error feedback keeps would change its unit with the scale of the loss, but the precision is "
            "float16; plan for bfloat16 or float32, or leave out --gradient-error-feedback"
        )


def check_lateness(request: Request) -> None:
    """Check what a request says of gradients that may be late: as plans of asynchronous pipelines are checked."""
    owes = request.error_feedback or request.compressor != "none"
    if request.staleness and (owes or request.precision == "float16"):
        raise InputError(
            "an asynchronous pipeline updates by whole gradients, and no stage waits for what all say of a scaled "
            f"loss, but the precision is {request.precision}, the compressor {request.compressor} and error "
            f"feedback {request.error_feedback}; leave these out, or --allow-staleness"
        )


def feedback_of(request: Request) -> Feedback:
    """Return what goes with a compressor."""
    return Feedback(
        residual=cast(Residual, request.residual),
        rank=request.rank,
        momentum=request.momentum,
        masked=not request.unmasked,
        local_norm=request.local_norm,
        warm_up=request.warm_up,
    )


def _check_feedback(request: Request) -> None:
    """Check it as plans are checked: what is wrong is the same."""
    check_feedback(
        GradientSync(
            compressor=cast(Compressor, request.compressor),
            density=request.density,
            feedback=feedback_of(request),
        )
    )


def _option(request: Request) -> str:
    return "--allow-compression" if request.allow_compression else "--gradient-compressor"


def _check_allowed(request: Request) -> None:
    if feedback_of(request) != Feedback():
        raise InputError(
            "a planner that may compress chooses the compressor and its rank, with residuals, but asked are "
            f"{feedback_of(request).words}; leave these out, or --allow-compression"
        )
    if request.compressor != "none" or not 0 < request.density <= 1:
        raise InputError(
            "a planner that may compress chooses the compressor, and sends a share of gradients' bits "
            f"above 0, but the compressor is {request.compressor} and the density "
            f"{request.density:g}; leave out --gradient-compressor, and give --gradient-density 0.001"
        )
    if request.method == "mcmc" or request.mode != "min-time":
        raise InputError(
            "gradients are compressed for speed, by the exact search, but the method is "
            f"{request.method} and the mode {request.mode}; leave these out, or --allow-compression"
        )


def notes_of(sync: GradientSync, optimizer: str) -> tuple[str, ...]:
    """Say what is to be known of a plan that merges selections, or has momentum before them."""
    found, momentum = set(sync.compressors), sync.feedback.momentum
    rules = (
        (momentum and "gtop-k-tree" in found,
         f"along a tree what merging drops is owed by the rank that merges, which with a momentum of {momentum:g} "
         "diverges at learning rates that gtop-k bears; plan --gradient-compressor gtop-k, or lower the rate"),
        (momentum and optimizer != "momentum",
         f"gradients that travel whole have no momentum with the optimizer {optimizer}; train with SGD of "
         "the same (--optimizer momentum: 0.9), which is taken off those that are compressed"),
        (found & MERGED,
         "gtop-k applies as many elements as one rank sends, top-k of the same density up to as many times more as "
         "there are ranks; compare losses, and warm up (--gradient-warm-up)"),
    )  # fmt: skip
    return tuple([note for is_so, note in rules if is_so])


def least_sent(request: Request) -> float:
    """Return the share of its bits that a gradient sends at least; 1: nothing is compressed."""
    if not request.allow_compression:
        return 1.0
    return request.density if request.density < 1 else LEAST_SENT
