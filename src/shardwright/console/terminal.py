"""Where results go: standard output for tables or JSON, standard error for progress."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shardwright.errors import cleaned
from shardwright.report.units import count_text, seconds_text
from shardwright.verbs.request import Watch

WIDE = 110
LEAST_WAIT = 0.02  # of a step, for input: less is no news


class Terminal:
    """Where a command speaks: tables or JSON on standard output, progress on standard error; one that
    ``is_mute`` nowhere."""

    def __init__(self, as_json: bool = False, is_mute: bool = False) -> None:
        self.as_json, self.is_mute = as_json, is_mute
        self.out = _console(stderr=False)
        self.err = _console(stderr=True)

    def say(self, *parts: RenderableType) -> None:
        """Print for people, a blank line after each part."""
        if not (self.as_json or self.is_mute):
            for part in parts:
                if not self.out.is_terminal:
                    self.out.width = _width(self.out, part)
                self.out.print(part)
                self.out.print()

    def emit(self, **values: object) -> None:
        """Print for machines."""
        if self.as_json and not self.is_mute:
            from shardwright.core.codec import dumps

            self.out.file.write(dumps(encode_loosely(values)))

    def next(self, text: str) -> None:
        """Say what to do next."""
        if not (self.as_json or self.is_mute):
            self.out.print(Text.assemble(("Next: ", "dim"), text), soft_wrap=True)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show that something without known length is going on."""
        is_seen = self.err.is_terminal and not self.is_mute
        shown = self.err.status(what) if is_seen else contextlib.nullcontext()
        with self._aside(), shown:
            yield

    def _aside(self) -> contextlib.AbstractContextManager[object]:
        """Keep what code of the user's prints out of an answer in JSON."""
        return contextlib.redirect_stdout(sys.stderr) if self.as_json else contextlib.nullcontext()

    @contextlib.contextmanager
    def progress(self, stoppable: bool = False) -> Iterator[Watch]:
        """Show a bar. Where ``stoppable``, the first Ctrl-C asks for the best so far, if there can be one."""
        stopped, hurried = threading.Event(), threading.Event()
        with (
            self._aside(),
            self._bar() as bar,
            _interrupt(stopped if stoppable else None, self.err, hurried),
        ):
            task = bar.add_task("starting", total=1.0)

            def tell(what: str, fraction: float) -> None:
                bar.update(task, description=what[:70], completed=min(max(fraction, 0.0), 1.0))

            yield Watch(tell=tell, stop=stopped.is_set, at_once=partial(_while, hurried))

    @contextlib.contextmanager
    def training(self, steps: int) -> Iterator[Watch]:
        """Show training live: loss, step time, tokens per second. Ctrl-C asks for a checkpoint."""
        stopped = threading.Event()
        with self._aside(), self._bar() as bar, _interrupt(stopped, self.err):
            task = bar.add_task("starting ranks", total=float(steps))

            def step(event: dict[str, float]) -> None:
                text = f"loss {event['loss']:.4f}  {seconds_text(event['seconds'])}/step"
                waits = event.get("input_seconds", 0.0)
                if waits > LEAST_WAIT * event["seconds"]:
                    text += f"  waited {waits / (waits + event['seconds']):.0%}"
                if "gradient_norm" in event:
                    text += f"  gradient norm {event['gradient_norm']:.3g}"
                if event.get("tokens"):
                    text += f"  {count_text(event['tokens'] / event['seconds'])} tokens/s"
                bar.update(task, description=text, completed=event["step"])

            def tell(what: str, fraction: float) -> None:
                bar.update(task, description=what[:70], completed=fraction * steps)

            yield Watch(tell=tell, stop=stopped.is_set, step=step)

    def _bar(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=self.err,
            transient=True,
            disable=self.is_mute or not self.err.is_terminal,
        )


def encode_loosely(value: Any) -> Any:
    """Encode for ``--json``: like the codec, with dicts, and null for numbers JSON does not
    have."""
    if isinstance(value, dict):
        return {str(key): encode_loosely(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_loosely(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    from shardwright.core.codec import encode  # with all nouns that a plan has

    return encode(value)


class _Console(Console):
    """A console that does nothing which the text of a file tells it to."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Clean what is shown; what moves the cursor is rich's own."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(cleaned(segment.text), segment.style)


def _console(*, stderr: bool) -> Console:
    # The stream that there is now: another takes its place while a model is captured, which may print.
    console = _Console(stderr=stderr, file=sys.stderr if stderr else None, highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


def _width(console: Console, part: RenderableType) -> int:
    """Return in which width something is written into a file or a pipe: a table as wide as its cells, unless
    a column is there to take what is left."""
    if not isinstance(part, Table) or any(column.flexible for column in part.columns):
        return WIDE
    natural = Measurement.get(console, console.options.update(max_width=sys.maxsize), part)
    return max(WIDE, natural.maximum)


@contextlib.contextmanager
def _while(event: threading.Event) -> Iterator[None]:
    """Let an event be set for a while."""
    event.set()
    try:
        yield
    finally:
        event.clear()


@contextlib.contextmanager
def _interrupt(
    stopped: threading.Event | None, console: Console, hurried: threading.Event | None = None
) -> Iterator[None]:
    """Let the first Ctrl-C set an event; the second one, and any while ``hurried``, interrupts as usual."""
    if stopped is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        if stopped.is_set() or (hurried and hurried.is_set()):
            raise KeyboardInterrupt
        stopped.set()
        console.print("stopping at the next safe point; Ctrl-C again stops at once", style="yellow")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
