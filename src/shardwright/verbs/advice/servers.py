"""Advice on how many parameter servers are enough, beside an all-reduce."""

from __future__ import annotations

from shardwright.core.advice import Advice, Curve
from shardwright.core.scaling import BACKWARD_SHARE, Exchanged
from shardwright.report.units import bytes_text, count_text, seconds_text
from shardwright.verbs.advice.requests import PAPER, ServerRequest


def advise_servers(request: ServerRequest) -> Advice:
    """Say how many parameter servers hide their traffic behind computation, and whether an all-reduce would."""
    one = Exchanged(
        bytes=request.parameter_bytes,
        workers=request.workers,
        bandwidth=request.server_rate,
        worker_bandwidth=request.worker_rate,
        compute_seconds=request.compute_seconds,
        largest=min(request.largest_bytes, request.parameter_bytes),
    )
    half, full = one.servers(full_duplex=False), one.servers(full_duplex=True)
    wanted = full if request.duplex == "full" else half
    ring, room = one.all_reduce_seconds(), BACKWARD_SHARE * one.compute_seconds
    return Advice(
        title="How many parameter servers",
        answers=(
            f"{wanted:,} servers ({request.duplex} duplex) hide pushes and pulls behind "
            f"{seconds_text(one.compute_seconds)} of computation; {half:,} in half duplex, {full:,} in full.",
            _worker_link(one, request.duplex == "full"),
            *_uneven(one, wanted, request.duplex == "full"),
            f"An all-reduce in place of servers keeps a worker's link busy for {seconds_text(ring)}, "
            + ("hidden behind" if ring <= room else "longer than")
            + f" the {seconds_text(room)} of backward; it is hidden from {seconds_text(ring / BACKWARD_SHARE)} "
            "of computation on.",
        ),
        inputs=(
            ("parameters", bytes_text(one.bytes)),
            ("largest tensor", bytes_text(one.largest) if one.largest else "split over servers"),
            ("workers", f"{one.workers:,}"),
            ("a server's link", f"{count_text(one.bandwidth)}B/s"),
            ("a worker's link", f"{count_text(one.worker_bandwidth)}B/s"),
            ("computation of a step", seconds_text(one.compute_seconds)),
        ),
        assumptions=(
            "Every worker pushes all gradients and pulls all parameters in every step.",
            "Parameters lie evenly on the servers, which add up for nothing; latency is left out.",
            f"Backward is {BACKWARD_SHARE:.0%} of the computation, and the ring works beside all of it, in full "
            "duplex.",
        ),
        sources=(f"{PAPER}, lemma on the number of parameter servers: 2 S N / (B T_C)",
                 "all-reduce: every worker sends 2 S (n - 1) / n (Patarasuk, Yuan, 2009)"),
        columns=("servers", "busiest, half duplex", "busiest, full duplex"),
        rows=tuple(_server_rows(one, half, full)),
        curves=(_server_curve(one, half, wanted, request.duplex == "full"),),
        values={
            "servers": wanted,
            "servers_half_duplex": half,
            "servers_full_duplex": full,
            "worker_seconds_half_duplex": one.worker_seconds(full_duplex=False),
            "worker_seconds_full_duplex": one.worker_seconds(full_duplex=True),
            "server_seconds": one.server_seconds(wanted, full_duplex=request.duplex == "full"),
            "all_reduce_seconds": ring,
            "all_reduce_is_hidden": ring <= room,
            "all_reduce_least_compute_seconds": ring / BACKWARD_SHARE,
        },
    )  # fmt: skip


def _worker_link(one: Exchanged, full_duplex: bool) -> str:
    busy = one.worker_seconds(full_duplex=full_duplex)
    if busy <= one.compute_seconds:
        return f"A worker's own link is busy for {seconds_text(busy)} of that: it does not bind."
    return (
        f"A worker's own link is busy for {seconds_text(busy)}, longer than it computes: no number of "
        "servers hides the traffic; compute more for each exchange, or send less."
    )


def _uneven(one: Exchanged, servers: int, full_duplex: bool) -> tuple[str, ...]:
    if not one.largest:
        return ()
    busy = one.server_seconds(servers, full_duplex=full_duplex)
    if busy <= one.compute_seconds:
        return (
            f"Unsplit, the largest tensor keeps its server busy for at least {seconds_text(busy)}.",
        )
    return (
        f"Unsplit, the largest tensor keeps its server busy for {seconds_text(busy)}, longer than a step "
        "computes, however many there are: split it.",
    )


def _server_rows(one: Exchanged, half: int, full: int) -> list[tuple[str, ...]]:
    counts = sorted({1, max(1, full - 1), full, max(1, half - 1), half, half + 1, 2 * half})
    return [
        (
            f"{count:,}",
            *(
                seconds_text(one.server_seconds(count, full_duplex=duplex))
                + (" ▸" if count == enough else "")
                for duplex, enough in ((False, half), (True, full))
            ),
        )
        for count in counts
    ]


def _server_curve(one: Exchanged, half: int, wanted: int, full_duplex: bool) -> Curve:
    counts = sorted({max(1, round(2 * half * k / 60)) for k in range(1, 61)})
    lines = tuple(
        (name, tuple((float(k), one.server_seconds(k, full_duplex=duplex)) for k in counts))
        for name, duplex in (("half duplex", False), ("full duplex", True))
    )
    level = ((float(counts[0]), one.compute_seconds), (float(counts[-1]), one.compute_seconds))
    return Curve(
        title="How long the busiest server works",
        across="servers",
        up="s",
        lines=(*lines, ("computation", level)),
        marked=((float(wanted), one.server_seconds(wanted, full_duplex=full_duplex)),),
    )
