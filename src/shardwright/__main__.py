"""``python -m shardwright``, and ``shardwright``."""

import os
import signal


def main() -> None:
    """Run the command line. Until it answers Ctrl-C itself, that ends this process as it ends any program: what is
    imported would tell of it with a traceback."""
    answers = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if answers:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shardwright.cli import main as run

    if "TORCHELASTIC_RUN_ID" in os.environ:
        from shardwright.runtime.lifeline import die_with_agent

        die_with_agent()
    if answers:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
