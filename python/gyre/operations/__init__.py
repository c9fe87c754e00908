"""Operations on rows of logits that gyre-logprobs has as one entry each: a module an operation.

A module has OPERATION. What the package reads, checks and computes follows from it: arrays of
/reference, inputs and parameters of a problem, definitions, and the case of the golden suite.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Answer(NamedTuple):
    """Extents of an array of /reference, as letters, and the optional inputs that define it."""

    extents: str
    needs: tuple[str, ...] = ()


class Parameter(NamedTuple):
    """A number of all tokens, an attribute of /logprobs, and its range."""

    usual: float
    least: float
    most: float


class Rows(NamedTuple):
    """What a definition takes. T: tokens, V: ids, K: ids of a token."""

    logp: np.ndarray  # [T, V] at the temperature of the problem
    plain_logp: np.ndarray  # [T, V] at temperature 1
    z: np.ndarray  # [T, V]
    heat: Any  # temperature: a number, or [T, 1]
    targets: np.ndarray  # [T]
    ids: np.ndarray  # [T, K]
    g: np.ndarray  # [T, 1], d_value
    inputs: Mapping[str, np.ndarray]
    parameters: Mapping[str, float]

    @property
    def has_target(self) -> np.ndarray:
        """[T, 1]: whether a column has the token's target."""
        return ((self.targets >= 0) & (self.targets < self.z.shape[1]))[:, None]

    @property
    def hits(self) -> np.ndarray:
        """[T, V]: 1 at the target of a token."""
        return (np.arange(self.z.shape[1]) == self.targets[:, None]).astype(float)


class Golden(NamedTuple):
    """The case of the golden suite: what it is for, what it guards against, and its problem.

    make(rng, full): full(rng, tokens, vocab, picks, **more) is a problem with the usual inputs.
    """

    edge: str
    guards: str
    make: Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Operation:
    """define(rows) -> the arrays, in float64, by name."""

    arrays: Mapping[str, Answer]
    define: Callable[[Rows], dict[str, np.ndarray]]
    golden: Golden
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    # check(array, ids) -> the array of an input [T] or [T, K], or ValueError
    inputs: Mapping[str, Callable[[Any, np.ndarray], np.ndarray]] = field(default_factory=dict)


def _modules() -> dict[str, Operation]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").OPERATION for name in names}


OPERATIONS: dict[str, Operation] = _modules()
ARRAYS = {name: answer for each in OPERATIONS.values() for name, answer in each.arrays.items()}
PARAMETERS = {name: number for each in OPERATIONS.values() for name, number in each.parameters.items()}
INPUTS = {name: check for each in OPERATIONS.values() for name, check in each.inputs.items()}
