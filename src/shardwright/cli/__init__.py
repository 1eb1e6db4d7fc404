"""The command line: parse, call one verb, print.

Nothing heavy is imported before a command needs it, so that ``--help`` answers at once. Every
command prints tables for people or, with ``--json``, one object with stable keys. Exit codes: 0
good, 1 a negative answer (nothing fits, a rank failed), 2 misuse or bad input; interrupted 130,
ended by SIGTERM 143, by SIGHUP 129.
"""

from __future__ import annotations

import sys
from typing import Any

from shardwright.cli import advising, looking, planning, running  # their commands join the app
from shardwright.cli.app import app

__all__ = ["advising", "app", "looking", "main", "planning", "running"]


def main() -> None:
    """Run the command line; the one place where errors become a message and an exit code."""
    import warnings

    from shardwright.errors import InputError, ShardwrightError, ShardwrightWarning

    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, ShardwrightWarning):
            sys.stderr.write(f"note: {message}\n")
        else:
            shown(message, category, *rest, **more)

    warnings.showwarning = show
    code = 0
    try:
        app()  # misuse and interruption end here, with 2 and 130
    except SystemExit as end:
        # A command that ends by Ctrl-C in its own way has told of it.
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            sys.stderr.write("interrupted before it was done; the same command begins again\n")
        raise
    except ShardwrightError as error:
        code = _complain(str(error), 2 if isinstance(error, InputError) else 1)
    except MemoryError:
        code = _complain(
            "this machine is out of memory; use a smaller batch or free some memory", 1
        )
    except BrokenPipeError:
        sys.stderr.close()
        code = 1
    except OSError as error:
        code = _complain(f"the system refused: {error}; free space or check the path", 2)
    finally:
        _end_quietly()
        warnings.showwarning = shown
    sys.exit(code)


def _end_quietly() -> None:
    """Let Ctrl-C end Python's end: what runs then would tell of it with a traceback each."""
    import signal
    import threading

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _complain(message: str, code: int) -> int:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    return code
