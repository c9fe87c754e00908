"""Inputs in the type that the ranks compute in, and the answers of these inputs."""

from dataclasses import replace
from typing import Any

import numpy as np

from .. import operations, reading, reference
from ..arrays import bfloat16_bits, from_bfloat16_bits


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


def rounded(file: reading.File, kind: str) -> reading.File:
    """A file of attention or log-probabilities whose inputs are in the type `kind`; where it does not hold one of
    them, answers are those of what they became."""
    name, inputs = file.schema.removeprefix("gyre/"), file.inputs
    # Inputs of single operations, log-probabilities of others, are in float32 whatever ranks compute in.
    arrays = {key: array if key in operations.INPUTS else in_type(array, kind) for key, array in inputs.items()}
    if all(np.array_equal(a, inputs[key], equal_nan=a.dtype.kind == "f") for key, a in arrays.items()):
        return file
    groups = dict(file.groups) | {name: replace(inputs, arrays=arrays)}
    if "reference" in file:
        given = {**arrays, **inputs.attributes}
        names = list(file.reference)
        found = reference.attention(**given) if name == "attention" else reference.logprobs(names, **given)
        groups["reference"] = replace(file.reference, arrays={key: found[key] for key in names})
    return replace(file, groups=groups)
