"""How the commands of the package end: exit codes, and outputs that cannot be written or are inputs."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable


def complain(program: str, error: object, code: int) -> int:
    """Prints an error to standard error, if possible; returns the exit code."""
    with contextlib.suppress(OSError, AttributeError):  # None, if it was closed
        sys.stderr.write(f"{program}: {error}\n")
        sys.stderr.flush()
    return code


def ended(program: str, run: Callable[[], int]) -> int:
    """The exit code of a command, or 3 if what it printed cannot be written: a full disk, a closed pipe."""
    try:
        try:
            code = run()
        except SystemExit as end:  # of argparse: --help, or bad usage
            code = int(end.code or 0)
        if sys.stdout is None:
            raise OSError("standard output is closed")
        sys.stdout.flush()
    except OSError as error:
        code = complain(program, f"cannot write to standard output: {error.strerror or error}", 3)
        _drop_output()
    return code


def _drop_output() -> None:
    """Discards unwritten output: otherwise the interpreter would end with its own exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def refuse_input(option: str, output: str, inputs: Iterable[str]) -> None:
    """ValueError: the output would take the place of a file that is read."""
    for file in inputs:
        if os.path.exists(output) and os.path.exists(file) and os.path.samefile(output, file):
            raise ValueError(f"{option} {output} is the file of the input {file}, which it would overwrite")
