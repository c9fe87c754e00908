"""python -m gyre COMMAND: the commands of the package under one name."""

import sys
from collections.abc import Callable, Sequence

from .console import ended

USAGE = """\
usage: gyre check|conform|text ...

check     compares arrays with a reference (gyre-check)
conform   runs a function on ranks over the golden suite, and says which contract it breaks
text      makes documents of texts by a model's tokenizer (gyre-text)
"""


def _command(name: str) -> Callable[[Sequence[str]], int] | None:
    if name == "check":
        from .cli import main
    elif name == "conform":
        from .distributed.cli import main
    elif name == "text":
        from .text import main
    else:
        return None
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return ended("gyre", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    command = _command(given[0]) if given else None
    if command is None:
        print(USAGE, end="", file=sys.stderr)
        return 2
    return command(given[1:])


if __name__ == "__main__":
    sys.exit(main())
