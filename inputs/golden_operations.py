"""The cases of the single operations of gyre-logprobs in inputs/golden/: one each, whose problem and
answers are those of the module of gyre.operations. Its answers are the operation's arrays alone."""

import functools
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))

import golden_files  # noqa: E402
import golden_problems  # noqa: E402
import gyre  # noqa: E402
from gyre.operations import OPERATIONS  # noqa: E402


def write(path, name, operation):
    """Writes the case of an operation."""

    def answers(problem):
        return gyre.reference.logprobs(list(operation.arrays), **problem)

    make = functools.partial(operation.golden.make, full=golden_problems.full)
    golden_problems.write_problem(path, name, make, answers=answers)


for module, operation in OPERATIONS.items():
    file = "logprobs_" + module
    command = f"gyre-logprobs --input inputs/golden/{file}.h5 -n 1"
    golden_problems.CASES.append(
        golden_files.Case(file, "logprobs", operation.golden.edge, operation.golden.guards,
                          functools.partial(write, name=file, operation=operation), (command,),
                          ("operation",)))
