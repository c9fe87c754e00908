"""Compares arrays as gyre-compare does: largest error, error over tolerance, and where."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .arrays import to_numpy
from .factor import CommonFactor
from .reading import Group, guards_of, offsets_of, read_arrays, read_npz, split_place
from .verdict import ArrayComparison, Comparison, Difference

Ties = Literal["exact", "any"]

BLOCK = 1 << 20  # elements that are compared at once
MOST_WORST = 10
IN_DOUBLE = (("f", 4), ("f", 8), ("i", 4))  # kinds and sizes; of others, a long double has all


@dataclass(frozen=True)
class _Tolerance:
    rtol: float
    atol: float
    equal_nan: bool


def is_wide(rtol: float, atol: float, mean: float) -> bool:
    """Whether a tolerance is larger than values of this mean: zeros would pass."""
    return rtol >= 1 or atol + rtol * mean > max(1.0, mean)


def _within_range(expected: np.ndarray, got: np.dtype) -> np.ndarray:
    """What was expected, where the type of what was got has a narrower range: a value beyond it is infinite."""
    if got.kind != "f" or got.itemsize >= expected.dtype.itemsize:
        return expected
    with np.errstate(over="ignore"):
        narrow = expected.astype(got)
    return np.where(np.isinf(narrow), narrow, expected)


def _in_double(array: np.ndarray) -> bool:
    return (array.dtype.kind, array.dtype.itemsize) in IN_DOUBLE


def _errors(
    got: np.ndarray, expected: np.ndarray, exact: bool, tolerance: _Tolerance, factor: CommonFactor
) -> tuple[np.ndarray, np.ndarray]:
    """|got - expected|, and the same over atol + rtol |expected|, which is 0 if exact."""
    real = got.dtype.type
    with np.errstate(all="ignore"):
        error = np.abs(got - expected)
        allowed = real(tolerance.atol) + real(tolerance.rtol) * np.abs(expected)
        factor.add(got, expected, np.zeros_like(allowed) if exact else allowed)
        over = np.where(exact | ~(allowed > 0), np.inf, error / allowed)
        undefined = ~(np.isfinite(got) & np.isfinite(expected))
        equal = got == expected
    if tolerance.equal_nan:
        equal |= np.isnan(got) & np.isnan(expected)
    error[undefined] = over[undefined] = np.inf
    error[equal] = over[equal] = 0
    return error.astype(np.float64), over.astype(np.float64)


def _compare_numbers(
    name: str, got: np.ndarray, expected: np.ndarray, tolerance: _Tolerance
) -> ArrayComparison:
    exact = got.dtype.kind in "biu" and expected.dtype.kind in "biu"
    real = np.float64 if _in_double(got) and _in_double(expected) else np.longdouble
    value = int if exact else float
    a, b = got.reshape(-1), expected.reshape(-1)
    worst: list[Difference] = []
    factor = CommonFactor()
    max_error, outside, size = 0.0, 0, np.longdouble(0)
    first: tuple[int, ...] = ()
    for begin in range(0, a.size, BLOCK):
        block = slice(begin, begin + BLOCK)
        x, y = a[block].astype(real), _within_range(b[block].astype(real), a.dtype)
        error, over = _errors(x, y, exact, tolerance, factor)
        size += np.abs(y[np.isfinite(y)]).sum(dtype=np.longdouble)
        max_error = max(max_error, float(error.max()))
        if not outside and (over > 1).any():
            flat = begin + int(np.argmax(over > 1))
            first = tuple(map(int, np.unravel_index(flat, got.shape)))
        outside += int((over > 1).sum())
        unequal = np.flatnonzero(error > 0)
        for i in unequal[np.argsort(-over[unequal], kind="stable")[:MOST_WORST]]:
            flat = begin + int(i)
            index = tuple(map(int, np.unravel_index(flat, got.shape)))
            pair = value(a[flat]), value(b[flat])
            worst.append(Difference(index, *pair, float(error[i]), float(over[i])))
        worst = sorted(worst, key=lambda d: -d.err_over_tol)[:MOST_WORST]
    verdict = (factor.hint() or "differs") if outside else "same"
    if not exact and a.size and is_wide(tolerance.rtol, tolerance.atol, float(size / a.size)):
        verdict = "the tolerance is larger than the values"
    share = worst[0].err_over_tol if worst else 0.0
    rows = got.shape[0] if got.ndim else 0
    return ArrayComparison(
        name, got.size, verdict, outside, max_error, share, tuple(worst), first, rows
    )


def _compare_texts(name: str, got: np.ndarray, expected: np.ndarray) -> ArrayComparison:
    unequal = [i for i in np.ndindex(got.shape) if _text(got[i]) != _text(expected[i])]
    if not unequal:
        return ArrayComparison(name, got.size)
    worst = tuple(
        Difference(i, _text(got[i]), _text(expected[i]), math.inf, math.inf)
        for i in unequal[:MOST_WORST]
    )
    return ArrayComparison(name, got.size, "differs", len(unequal), math.inf, math.inf, worst)


def _has_numbers(array: np.ndarray) -> bool:
    return array.dtype.kind in "biuf"


def _has_texts(array: np.ndarray) -> bool:
    if array.dtype.kind == "O":
        return all(isinstance(value, (str, bytes)) for value in array.reshape(-1))
    return array.dtype.kind in "SU"


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _incomparable(name: str, elements: int, verdict: str) -> ArrayComparison:
    return ArrayComparison(name, elements, verdict, 0, math.inf, math.inf)


def _compare_arrays(
    name: str, got: np.ndarray, expected: np.ndarray, tolerance: _Tolerance
) -> ArrayComparison:
    if got.shape != expected.shape:
        verdict = f"shapes {list(got.shape)} and {list(expected.shape)}"
        return _incomparable(name, got.size, verdict)
    if _has_numbers(got) and _has_numbers(expected):
        return _compare_numbers(name, got, expected, tolerance)
    if _has_texts(got) and _has_texts(expected):
        return _compare_texts(name, got, expected)
    return _incomparable(name, got.size, "types that cannot be compared")


def _without_order(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Ids [rows, entries] of descending values, where equal values have no order.

    The ids of each run of equal values are sorted; those of the last run of a row, which may go on
    behind the list, are -1.
    """
    run = np.zeros(ids.shape, np.int64)
    run[:, 1:] = np.cumsum(values[:, 1:] != values[:, :-1], axis=1)
    settled = np.take_along_axis(ids, np.lexsort((ids, run)), axis=1)
    return np.where(run == run[:, -1:], -1, settled)


def _settle_ties(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Removes the order of ids NAME_ids that stand beside values NAME_values."""
    for name in got.keys() & expected.keys():
        values = name.removesuffix("_ids") + "_values"
        if not name.endswith("_ids") or not (values in got and values in expected):
            continue
        mine, theirs, order = got[name], expected[name], got[values]
        are_ids = {mine.dtype.kind, theirs.dtype.kind} <= set("iu") and order.dtype.kind == "f"
        if are_ids and mine.ndim == 2 and mine.shape == theirs.shape == order.shape and mine.size:
            got[name] = _without_order(mine, order)
            expected[name] = _without_order(theirs, order)


def _is_path(source: Any) -> bool:
    return isinstance(source, (str, os.PathLike))


def is_npz(source: Any) -> bool:
    return _is_path(source) and os.fspath(source).endswith(".npz")


def place_of(source: Any, other: Any) -> str:
    """FILE.h5:/group of a path: /reference when the other side is no HDF5 file, else all."""
    path, group = split_place(os.fspath(source))
    is_file = _is_path(other) and not is_npz(other)
    return f"{path}:{group or ('/' if is_file else '/reference')}"


def _file_of(source: Any) -> str:
    """The HDF5 file of a path, or of a group that was read; "" of all else."""
    if isinstance(source, Group):
        return source.file
    return "" if not _is_path(source) or is_npz(source) else split_place(os.fspath(source))[0]


def _flattened(arrays: Mapping[str, Any], front: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in arrays.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{front}{name}/")
        else:
            yield front + name, to_numpy(value)


def _load(source: Any, other: Any) -> dict[str, np.ndarray]:
    """The arrays of one side by name; a single array has the name ""."""
    if isinstance(source, Mapping):
        return dict(_flattened(source))
    if is_npz(source):
        return read_npz(source)
    if _is_path(source):
        path, group = split_place(place_of(source, other))
        return read_arrays(path, group or "/")
    return {"": to_numpy(source)}


def compare(
    got: Any,
    expected: Any,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    equal_nan: bool = False,
    common: bool = False,
    ties: Ties = "exact",
) -> Comparison:
    """Compares arrays by name; the verdict is that of gyre-compare.

    Each side is an array or a tensor, a mapping of them, FILE.npz, FILE.h5 or FILE.h5:/group. Where
    the other side is no HDF5 file, FILE.h5 is its group /reference.

    Reals agree when |got - expected| <= atol + rtol |expected|, equal infinities agree, and NaN
    agrees with nothing, or with NaN if equal_nan. Integers, booleans and texts agree when they are
    equal. Nothing is rounded before it is compared, but what is expected beyond the range of the type
    of got, such as -4e38 of a float32, is infinite. An array of reals fails where the tolerance is
    larger than the values: rtol of 1 or more, or atol + rtol mean above 1 and above the mean of
    |expected|. An array that one side alone has is a difference, unless common. ties="any": NAME_ids
    [rows, entries] beside descending NAME_values, as top_ids and top_values are, may have ids of equal
    values in any order; those of the last value of a row, which others may share, may be any, and both
    are shown as -1.

    ValueError: a tolerance is negative or not finite, or there is nothing to compare.
    """
    if not (0 <= rtol < math.inf and 0 <= atol < math.inf):
        raise ValueError(f"tolerances must be finite, not negative: rtol {rtol}, atol {atol}")
    if ties not in ("exact", "any"):
        raise ValueError(f"ties is {ties!r}; it must be 'exact' or 'any'")
    a, b = _load(got, expected), _load(expected, got)
    if ("" in a) != ("" in b):
        raise ValueError("an array is compared with an array; of several, give both sides names")
    if ties == "any":
        _settle_ties(a, b)
    tolerance = _Tolerance(rtol, atol, equal_nan)
    only_in_a, only_in_b = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
    found = [
        _compare_arrays(name, a[name], b[name], tolerance) for name in sorted(a.keys() & b.keys())
    ]
    if not common:
        found += [_incomparable(name, 0, "only in A") for name in only_in_a]
        found += [_incomparable(name, 0, "only in B") for name in only_in_b]
        only_in_a = only_in_b = []
    if not found:
        raise ValueError("there is nothing to compare: no array has the same name on both sides")
    found.sort(key=lambda array: array.name)
    file = _file_of(expected)
    offsets = None if not file or all(one.verdict == "same" for one in found) else offsets_of(file)
    return Comparison(
        tuple(found),
        tuple(only_in_a),
        tuple(only_in_b),
        () if offsets is None else tuple(map(int, offsets)),
        guards_of(file) if file else "",
    )


def assert_close(got: Any, expected: Any, **options: Any) -> None:
    """Raises AssertionError with a table and the worst values, unless `compare` passes.

    The options are those of `compare`.
    """
    comparison = compare(got, expected, **options)
    if not comparison.passed:
        raise AssertionError(f"arrays differ\n{comparison}")
