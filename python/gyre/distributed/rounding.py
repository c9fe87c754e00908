"""Inputs in the type that the ranks compute in, and the answers of these inputs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import reading, reference
from ..arrays import bfloat16_bits, from_bfloat16_bits
from .contract import Arrays, checked_file


def in_type(values: Any, kind: str) -> Any:
    """Reals in the type `kind`: the nearest numbers that it holds, in a type of NumPy; others as they are."""
    array = np.asarray(values)
    if array.dtype.kind != "f" or kind == "float64":
        return array
    array = array.astype(np.float32)
    if kind != "bfloat16":
        return array
    bits = array.reshape(-1).view(np.uint32)
    up = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))).view(np.float32)  # ties go to the even one
    return from_bfloat16_bits(bfloat16_bits(np.where(np.isfinite(array), up.reshape(array.shape), array)))


def inputs_of(path: Path, kind: str) -> tuple[reading.Group, reading.File]:
    """The inputs of a file in the type `kind`, and the file."""
    file = checked_file(path)
    return replace(file.inputs, arrays={name: in_type(array, kind) for name, array in file.inputs.items()}), file


def case_of(path: Path, kind: str, names: tuple[str, ...]) -> tuple[reading.Group, Arrays]:
    """The inputs of a file in the type `kind`, and their answers of these names: those of the file, or computed
    here where the type does not hold an input."""
    inputs, file = inputs_of(path, kind)
    asked = [name for name in names if name in file.reference]
    if all(np.array_equal(array, file.inputs[name], equal_nan=array.dtype.kind == "f") for name, array in inputs.items()):
        return inputs, {name: np.asarray(file.reference[name]) for name in asked}
    if file.schema == "gyre/attention":
        found = reference.attention(**inputs, **inputs.attributes)
    else:
        found = reference.logprobs(asked, **inputs, **inputs.attributes)
    return inputs, {name: found[name] for name in asked}
