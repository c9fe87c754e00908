"""Checks of arguments. A message names the array, the place, the value, and what would be right."""

import difflib
import math
import operator
from collections.abc import Collection
from numbers import Real
from typing import Any

import numpy as np

from .arrays import to_numpy

INT32 = np.iinfo(np.int32)
REALS = ("float16", "float32", "float64")  # and bfloat16, which is float32 by now


def shape_text(extents: tuple[int | None, ...]) -> str:
    """[3, any]"""
    return "[" + ", ".join("any" if e is None else str(e) for e in extents) + "]"


def shaped(name: str, value: Any, extents: tuple[int | None, ...], hint: str = "") -> np.ndarray:
    """The array, if it has this shape; an extent of None is any."""
    array = to_numpy(value)
    same_rank = array.ndim == len(extents)
    if same_rank and all(e in (None, n) for e, n in zip(extents, array.shape)):
        return array
    raise ValueError(
        f"{name} is {shape_text(array.shape)}; it must be {shape_text(extents)}"
        + (f": {hint}" if hint else "")
    )


def reals(name: str, value: Any, *extents: int | None, hint: str = "") -> np.ndarray:
    """Floating-point numbers of a type that a file may hold."""
    array = shaped(name, value, extents, hint)
    if array.dtype.name not in REALS:
        raise TypeError(f"{name} is {array.dtype}; it must be one of {', '.join(REALS)}, bfloat16")
    return array


def integers(name: str, value: Any, *extents: int | None, hint: str = "") -> np.ndarray:
    """Integers that fit 32 bits, as int64."""
    array = shaped(name, value, extents, hint)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} is {array.dtype}; it must be an integer type")
    every(name, array, (array >= INT32.min) & (array <= INT32.max), "an integer of 32 bits")
    return array.astype(np.int64)


def every(name: str, array: np.ndarray, good: np.ndarray, wanted: str) -> None:
    """Refuses an array with an element that is not good."""
    if good.all():
        return
    index = np.unravel_index(np.argmin(good), good.shape)
    place = ", ".join(map(str, index))
    raise ValueError(f"{name}[{place}] is {array[index]}; it must be {wanted}")


def finite(name: str, array: np.ndarray) -> np.ndarray:
    every(name, array, np.isfinite(array), "finite")
    return array


def logits(name: str, rows: np.ndarray) -> None:
    """Finite numbers or -inf, and a finite one in every row."""
    every(name, rows, rows < np.inf, "finite or -inf")
    some = np.isfinite(rows).any(axis=1)
    every(name, rows, np.broadcast_to(some[:, None], rows.shape), "finite in some column")


def offsets(name: str, value: Any, total: int | None = None, of: str = "") -> np.ndarray:
    """Boundaries [n + 1] of parts that lie one after another, int64: from 0 to `total`, if any."""
    bounds = integers(name, value, None)
    if bounds.size == 0:
        raise ValueError(f"{name} is empty; it must hold one element more than there are parts")
    every(name, bounds[:1], bounds[:1] == 0, "0, where the first part begins")
    every(name, bounds, np.diff(bounds, prepend=0) >= 0, "at least the offset before it")
    if total not in (None, bounds[-1]):
        last = f"{name}[{bounds.size - 1}], the last,"
        raise ValueError(f"{last} is {bounds[-1]}; it must be {total}, {of}")
    return bounds


def number(name: str, value: float, least: float, most: float) -> float:
    """A number in [least, most], and not NaN."""
    if least <= (one := real(name, value)) <= most:
        return one
    raise ValueError(f"{name} is {value}; it must be {least} to {most}")


def real(name: str, value: Any) -> float:
    """One number, also of NumPy or a tensor: no text, no truth value, no array of several."""
    try:
        one = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # raised by NumPy, by torch
        one = value
    if isinstance(one, Real) and not isinstance(one, bool):
        return float(one)
    raise TypeError(f"{name} is {value!r}; it must be one number")


def size(name: str, value: int, least: int = 0, most: int = INT32.max) -> int:
    """An integer in [least, most]."""
    try:
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from None
    if least <= whole <= most:
        return whole
    raise ValueError(f"{name} is {whole}; it must be {least} to {most}")


def positive(name: str, value: float) -> float:
    if 0 < (one := real(name, value)) < math.inf:
        return one
    raise ValueError(f"{name} is {value}; it must be positive")


def known(name: str, names: Collection[str]) -> str:
    """The name, if it is one of the names; the message for another one has the nearest."""
    if name in names:
        return name
    nearest = difflib.get_close_matches(name, names, 1, 0)
    raise ValueError(f"a reference has no array {name!r}; nearest: {nearest[0]!r}")


def numbers(name: str, value: Any, *front: int) -> np.ndarray:
    """Numbers of any type whose extents begin with `front`; the others are at least 1."""
    array = to_numpy(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} is {array.dtype}; it must be of integers, reals or booleans")
    further = array.shape[len(front) :]
    if array.shape[: len(front)] != front or (front and 0 in further):
        wanted = f"{shape_text(front)[:-1]}, ...]"
        raise ValueError(f"{name} is {shape_text(array.shape)}; it must be {wanted}")
    return array


def answer(label: str, value: Any, *extents: int | None) -> np.ndarray:
    """Reals of a reference, without NaN."""
    array = reals(label, value, *extents)
    every(label, array, ~np.isnan(array), "a number")
    return array


def float32(name: str, array: np.ndarray) -> np.ndarray:
    """The same values as float32; a value that float32 cannot represent is refused."""
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    every(name, array, narrow == array, "a value that float32 holds: round the array first")
    return narrow
