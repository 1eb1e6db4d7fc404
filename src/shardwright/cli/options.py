"""Arguments and options that several commands take, and the terminal that answers."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from shardwright.verbs.options import Option, options_of

if TYPE_CHECKING:
    from shardwright.console import Terminal

MODEL_HELP = "file.py:factory, package.module:factory, or hf:NAME (hf:gpt2, hf:config.json)"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
MaybeModel = Annotated[
    str, typer.Argument(metavar="[MODEL]", help=MODEL_HELP + "; the plan's, if hf:")
]
MaybePlan = Annotated[str, typer.Argument(metavar="[PLAN]", help="A plan file.")]
PlanPath = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file.")]
Cluster = Annotated[
    str, typer.Option("--cluster", "-c", help="A cluster file, 8x8xH100, or local (this machine).")
]
Pick = Annotated[
    int | None,
    typer.Option("--pick", min=0, help="Plan of the frontier to use, not the chosen one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
LayerProfile = Annotated[
    str, typer.Option("--profile", help="Plan a pipeline of PipeDream's graph.txt, not a model.")
]
Draw = Annotated[
    str,
    typer.Option("--draw", help="With --profile: text, or a file such as order.svg: swim lanes."),
]
Steps = Annotated[int, typer.Option("--steps", "-n", min=1, help="Steps to train.")]


def asking(kind: type, *names: str, into: str = "asked") -> Callable[[Any], Callable[..., None]]:
    """Give a command the options of a request, or those named, in the place of one parameter.

    The command is called with that parameter ``into`` holding their values by field.
    """
    options = options_of(kind)
    chosen = {name: options[name] for name in names or options}

    def decorate(command: Any) -> Callable[..., None]:
        before = inspect.signature(command, eval_str=True)

        def parameters() -> Iterator[inspect.Parameter]:
            for parameter in before.parameters.values():
                if parameter.name == into:
                    yield from _parameters(kind, chosen)
                else:
                    yield parameter

        @functools.wraps(command)
        def run(**values: Any) -> None:
            asked = {name: values.pop(name) for name in chosen}
            tuples = {name: tuple(one) for name, one in asked.items() if isinstance(one, list)}
            command(**values, **{into: asked | tuples})

        made = list(parameters())
        run.__signature__ = before.replace(parameters=made)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in made}
        return run

    return decorate


def _parameters(kind: type, options: Mapping[str, Option]) -> Iterator[inspect.Parameter]:
    """Yield what typer makes options of, with the defaults of the fields."""
    hints = get_type_hints(kind)
    for name, about in options.items():
        hint, default = hints[name], inspect.signature(kind).parameters[name].default
        if str in get_args(hint):  # a number as well, or several: the command line has text
            hint = list[str] if isinstance(default, tuple) else str | None
        flags = about.flags
        if not any(flag.startswith("--") for flag in flags):
            flags = (f"--{name.replace('_', '-')}", *flags)
        said = typer.Option(*flags, min=about.least, help=about.help or None)
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=list(default) if isinstance(default, tuple) else default,
            annotation=Annotated[hint, said],
        )


def given(context: typer.Context) -> dict[str, str]:
    """Return the arguments and options that stand on the command line, as they are written there."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    written = {one.name: max(one.opts, key=len) for one in context.command.params}
    return {
        name: written[name]
        for name, source in sources.items()
        if source and source.name == "COMMANDLINE"
    }


def terminal_for(as_json: bool, *, ranks: bool = False) -> Terminal:
    """Return where a command speaks; one that all ``ranks`` call together says everything on rank 0."""
    from shardwright.console import Terminal

    return Terminal(as_json, is_mute=ranks and os.environ.get("RANK", "0") != "0")
