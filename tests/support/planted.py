"""What planted errors are made of: a function with an error, and numbers of bfloat16."""

import dataclasses

import numpy as np

from gyre.distributed import rounding


@dataclasses.dataclass(frozen=True, eq=False)
class Bug:
    """A function with an error. origin: what is wrong, and where that comes from; options: those of its run; kind: how the
    harness is to call it, of those that it is asked to name ("values": it has no name)."""

    name: str
    contract: str
    origin: str
    function: object
    options: dict
    raises: bool = False  # or returns what the contract does not allow
    kind: str = ""


def bfloat16(values):
    """The nearest numbers of bfloat16, in float64."""
    return rounding.in_type(np.asarray(values, np.float32), "bfloat16").astype(np.float64)


class Narrow:
    """An array of bfloat16, as torch would return it."""

    dtype = "bfloat16"

    def __init__(self, values):
        self.values = bfloat16(values).astype(np.float32)
        self.shape = self.values.shape

    def __array__(self, *arguments, **options):
        return self.values


def bugs_of(right, contract, function_of):
    """The variants of a class, and of those, as bugs of a contract."""
    kinds, found = list(right.__subclasses__()), []
    for kind in kinds:
        kinds += [k for k in kind.__subclasses__() if k not in kinds]
        found.append(Bug(kind.__name__, contract, kind.__doc__, function_of(kind), kind.options, kind=getattr(kind, "kind", "")))
    return found
