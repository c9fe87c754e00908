"""Types and functions that contracts share: cases, arguments of a rank, verdicts."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import attention, compare, logprobs, operations, reading
from ..arrays import is_bfloat16, to_numpy
from ..comparison import is_wide
from ..factor import CommonFactor

STATISTICS = ("lse", "logprob", "loss", "kl")  # sums of a row: an accurate kernel adds them in float32
COARSE = 2e-2  # a tolerance from which on a known error must be as near as a right answer, not four times as far
FEW = 8  # with fewer wrong values, a known error may match by chance
ROUNDED_32, ROUNDED_16 = 2.0**-22, 2.0**-7  # of the largest value: what some roundings of a type leave
ALLOWED = ("mask", "window", "regions", "lengths")  # parameters that `allowed` stands for
Arrays = Mapping[str, np.ndarray]


class Malformed(Exception):
    """A rank returned what its contract does not allow: another shape, type, or number of arrays."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


class LeftOut(Exception):
    """A function does not take an option that a case needs."""


@dataclass(frozen=True)
class Tolerance:
    """|got - expected| <= atol scale + rtol |expected|; of gradients, scale is the largest |expected|, at least 1.

    wide: the bound of rtol and atol of statistics of rows that a rank returns in a wider type than its inputs'.
    sizes: of the terms that gradients are sums of, by array; a scale is at least the size, as terms may cancel.
    """

    rtol: float
    atol: float
    wide: float = math.inf
    sizes: Mapping[str, float] = field(default_factory=dict)

    def widened(self, error: float, sizes: Mapping[str, float]) -> "Tolerance":
        """With another error that adds up with those that rtol and atol are of as independent ones do."""
        return Tolerance(math.hypot(error, self.rtol), math.hypot(error, self.atol), self.wide, sizes)

    def of(self, name: str, expected: np.ndarray, got: np.ndarray) -> tuple[float, float]:
        if name in STATISTICS and got.dtype == np.float64 and self.wide < max(self.rtol, self.atol):
            return self.wide, self.wide
        finite = np.abs(expected[np.isfinite(expected)]) if name.startswith("d_") else np.zeros(0)
        stored = (
            8 * float(np.finfo(expected.dtype).eps) if expected.dtype.kind == "f" else 0.0
        )  # some answers are float32
        scale = max(1.0, float(finite.max(initial=0)), self.sizes.get(name, 0.0))
        return max(self.rtol, stored), max(self.atol, stored) * scale

    def is_wide(self, name: str, expected: np.ndarray) -> bool:
        """Whether zeros would pass."""
        if expected.dtype.kind in "iub" or not expected.size:
            return False
        sizes = np.abs(expected[np.isfinite(expected)].astype(np.float64))
        mean = float(sizes.sum()) / expected.size
        if name.startswith("d_"):  # a tolerance of gradients is a share of the largest
            mean = 1.0 if mean else 0.0
        return is_wide(self.rtol, self.atol, mean)

    def wrong(self, name: str, got: np.ndarray, expected: np.ndarray) -> np.ndarray:
        """Booleans: the elements that are outside of the tolerance."""
        if expected.dtype.kind in "iub":
            return np.asarray(got != expected)
        rtol, atol = self.of(name, expected, got)
        return ~np.isclose(got.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=atol)

    def near(self, name: str, got: np.ndarray, expected: np.ndarray) -> bool:
        if got.shape != expected.shape:
            return False
        if expected.dtype.kind in "iub":
            return bool(np.array_equal(got, expected))
        rtol, atol = self.of(name, expected, got)
        slack = 1 if max(rtol, atol) > COARSE else 4
        return bool(np.allclose(got, expected, rtol=slack * rtol, atol=slack * atol))


@dataclass(frozen=True)
class Finding:
    """One thing that is broken. kind: a name for programs; text: what is said; arrays: where it shows."""

    kind: str
    text: str
    arrays: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hypothesis:
    """A known error, and what arrays would be with it."""

    kind: str
    text: str
    arrays: Callable[[], Arrays]


@dataclass
class Verdict:
    """The verdict of one case. status: passed, failed or left out."""

    case: str
    status: str = "passed"
    findings: list[Finding] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    note: str = ""
    values: int = 0
    err_over_tol: float = 0.0
    grid: str = ""
    needs: tuple[str, ...] = ()

    def fail(self, *findings: Finding, places: Iterable[str] = ()) -> "Verdict":
        self.status = "failed"
        self.findings += findings
        self.places += places
        return self


@dataclass(frozen=True)
class Problem:
    """One case of one contract on cp x tp ranks.

    pieces: of each rank, by parameter. needs: parameters without which the case cannot be asked, and
    why. judge: says what is wrong with the arrays that the ranks returned.
    """

    name: str
    pieces: list[dict[str, Any]]
    needs: Mapping[str, str]
    judge: Callable[[list[dict[str, np.ndarray]], Tolerance], Verdict]


def checked_file(path: Path) -> reading.File:
    """A file of attention or log-probabilities, whose answers fit its inputs. ValueError: an array breaks a rule."""
    file = reading.read(path)
    of = {"gyre/attention": (attention, "attention_problem"), "gyre/logprobs": (logprobs, "logprob_problem")}
    module, name = of[file.schema]
    problem_of = getattr(module, name)
    given = {**file.inputs.attributes, **file.inputs}
    taken = {*inspect.signature(problem_of).parameters, *operations.INPUTS, *operations.PARAMETERS}
    problem = problem_of(**{name: value for name, value in given.items() if name in taken})
    reference = dict(file.get("reference", {}))
    module.check_reference(problem, {n: a for n, a in reference.items() if n in module.ANSWERS})
    return with_regions(file) if "selected_keys" in file.inputs else file


def with_regions(file: reading.File) -> reading.File:
    """The same attention, but keys that queries select are regions, for which functions of ranks have a parameter."""
    inputs = file.inputs
    arrays = dict(inputs)
    selected, offsets = arrays.pop("selected_keys"), np.asarray(arrays["offsets"], np.int64)
    queries = np.asarray(arrays.get("query_offsets", offsets), np.int64)
    arrays["regions"] = attention.regions_of(np.asarray(selected, np.int64), offsets, queries)
    changed = replace(inputs, arrays=arrays, attributes={**inputs.attributes, "mask": "regions"})
    return replace(file, groups={**file.groups, "attention": changed})


def parameters_of(function: Callable[..., Any]) -> set[str] | None:
    """Names of the parameters of a function; None: it takes any. The apply of an autograd function has none."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and hasattr(owner, "forward") and hasattr(owner, "backward"):
        return set()
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return set()
    return None if any(p.kind is p.VAR_KEYWORD for p in found) else {p.name for p in found}


def keywords(function: Callable[..., Any], offers: Mapping[str, Any], needs: Mapping[str, str]) -> dict[str, Any]:
    """The offers that a function takes. LeftOut: it does not take one that the case needs."""
    names = parameters_of(function)
    for name, why in needs.items():
        if names is not None and name not in names and not (name in ALLOWED and "allowed" in names):
            hint = "" if names else "; nothing says what it takes: wrap it in a def that has it"
            raise LeftOut(f"{why}, and the function has no parameter {name!r}{hint}")
    return {name: value for name, value in offers.items() if names is None or name in names}


def returned(name: str, array: Any, shape: tuple[int, ...], types: Iterable[str]) -> np.ndarray:
    """An array that a function returned, if shape and type are those of the contract.

    One that is wider than inputs of bfloat16 becomes float64, as Tolerance.wide has it.
    """
    if hasattr(array, "to_local"):  # a DTensor
        array = array.to_local()
    if not hasattr(array, "dtype"):
        raise Malformed("other-type", f"{name} is {type(array).__name__}; it must be an array")
    if tuple(array.shape) != tuple(shape):
        raise Malformed("other-shape", f"{name} is {list(array.shape)}; it must be {list(shape)}")
    kind = "bfloat16" if is_bfloat16(array) else str(array.dtype).removeprefix("torch.")
    wanted = list(types)
    if kind not in wanted:
        raise Malformed("other-type", f"{name} is {kind}; it must be {' or '.join(wanted)}")
    return to_numpy(array).astype(np.float64) if wanted[0] == "bfloat16" != kind else to_numpy(array)


def explain(
    got: Arrays, expected: Arrays, failing: set[str], hypotheses: Iterable[Hypothesis], tolerance: Tolerance
) -> list[Finding]:
    """Known errors that turn what was expected into what was got.

    One that explains all failing arrays wins; otherwise the one that explains most, then of the rest. Gradients follow
    from values: what explains some gradients alone, while values fail that nothing explains, would be a coincidence.
    """
    matches: list[tuple[Hypothesis, set[str]]] = []
    for hypothesis in hypotheses:
        alternative = hypothesis.arrays()
        if any(not tolerance.near(n, np.asarray(alternative[n]), np.asarray(expected[n]))
               for n in (alternative.keys() & got.keys() & expected.keys()) - failing):
            continue  # it would have changed an array that is right
        found = {
            n
            for n in failing & alternative.keys()
            if tolerance.near(n, got[n], np.asarray(alternative[n]))
            and not tolerance.near(n, np.asarray(alternative[n]), np.asarray(expected[n]))
        }
        if found == failing:
            return [Finding(hypothesis.kind, hypothesis.text, tuple(sorted(found)))]
        if found:
            matches.append((hypothesis, found))
    values = {n for n in failing if not n.startswith("d_")}
    if values != failing and not any(values <= m[1] for m in matches):
        matches = [m for m in matches if m[1] & values]
    findings, left = [], set(failing)
    while left:
        best = max(matches, key=lambda m: (values & left <= m[1], len(m[1] & left)), default=None)
        if best is None or not best[1] & left:
            findings.append(Finding("values", "no known error explains it", tuple(sorted(left))))
            break
        findings.append(Finding(best[0].kind, best[0].text, tuple(sorted(best[1] & left))))
        left -= best[1]
    return findings


def factors(got: Arrays, expected: Arrays, failing: set[str], known: Mapping[str, int]) -> Iterator[Hypothesis]:
    """The factor that all failing arrays have in common, by the name of a number that it equals.

    Without `known`, factors that have no name.
    """
    names = {}
    for name in failing:
        factor = CommonFactor()
        want = np.asarray(expected[name], np.float64)
        factor.add(got[name].astype(np.float64), want, 1e-4 * np.abs(want) + 1e-6)
        hint = factor.hint()
        if hint:
            names[name] = hint.split("factor ")[1].split(":")[0]
    for text in dict.fromkeys(names.values()):
        value = 1 / int(text[2:]) if text.startswith("1/") else float(text)
        for name in failing - names.keys():  # one value alone has any factor
            if got[name].size == 1 and np.allclose(got[name], value * np.asarray(expected[name]), rtol=1e-4):
                names[name] = text
        whole = round(max(value, 1 / value))
        called = [n for n, size in known.items() if size == whole]
        label = f" = {'1/' if value < 1 else ''}{' or '.join(called)}" if called else ""
        kind = "factor-" + ("1/" if value < 1 else "") + (called[0] if called else str(whole))
        mine = [n for n, t in names.items() if t == text]
        yield Hypothesis(
            kind,
            f"a factor {text}{label}",
            lambda mine=mine, value=value: {n: value * np.asarray(expected[n], np.float64) for n in mine},
        )


def judged(
    name: str,
    got: Arrays,
    expected: Arrays,
    tolerance: Tolerance,
    hypotheses: Callable[[set[str]], Iterable[Hypothesis]],
    places: Callable[[str, np.ndarray], str],
) -> Verdict:
    """Compares arrays; of what differs, says which known error it is and where it shows.

    places(array, bad): where the elements that differ are.
    """
    verdict, failing, wide = Verdict(name), set(), []
    for array in expected.keys() & got.keys():
        rtol, atol = tolerance.of(array, np.asarray(expected[array]), got[array])
        result = compare(got[array], expected[array], rtol=rtol, atol=atol).arrays[0]
        verdict.values += result.elements
        verdict.err_over_tol = max(verdict.err_over_tol, result.err_over_tol)
        if result.outside or result.verdict.startswith(("shapes", "types")):
            failing.add(array)
        elif tolerance.is_wide(array, np.asarray(expected[array])):
            wide.append(array)
    if wide:
        text = "the tolerance is larger than the values: nothing was verified"
        verdict.fail(Finding("wide-tolerance", text, tuple(sorted(wide))))
    if not failing:
        return verdict
    wrong = 0
    for array in sorted(failing):
        bad = tolerance.wrong(array, got[array], np.asarray(expected[array]))
        wrong += int(bad.sum())
        if bad.any():
            verdict.places.append(f"{array}: {places(array, bad)}")
    findings = [
        replace(f, text=f.text + _size_of_differences(got, expected, f.arrays)) if f.kind == "values" else f
        for f in explain(got, expected, failing, hypotheses(failing), tolerance)
    ]
    if wrong < FEW:
        few = f" (only {wrong} value{'s' * (wrong > 1)} differ{'s' * (wrong == 1)})"
        findings = [f if f.kind == "values" else replace(f, text=f.text + few) for f in findings]
    return verdict.fail(*findings)


def _size_of_differences(got: Arrays, expected: Arrays, names: Iterable[str]) -> str:
    """Says that roundings may be behind differences: many, of both signs, none larger than those of bfloat16."""
    for name in names:
        want, have = np.asarray(expected[name], np.float64), got[name].astype(np.float64)
        known = np.isfinite(want) & np.isfinite(have)
        size = float(np.abs(want[known]).max(initial=0))
        gap = np.where(known, have, 0) - np.where(known, want, 0)
        differ = gap[np.abs(gap) > ROUNDED_32 * size]
        few = np.asarray(expected[name]).dtype.kind in "iub" or not known.all() or len(differ) < 4 * FEW
        if few or np.abs(gap).max() > ROUNDED_16 * size or not 0.25 < (differ > 0).mean() < 0.75:
            return ""
    return "; differences are as small as roundings to bfloat16"


def not_numbers(
    arrays: list[dict[str, np.ndarray]], rows: Callable[[int, str, np.ndarray], np.ndarray]
) -> list[Finding]:
    """NaN in what ranks returned, in the elements that count."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name in sorted({n for mine in arrays for n in mine}):
        bad = tuple(
            r
            for r, mine in enumerate(arrays)
            if name in mine and mine[name].dtype.kind == "f" and np.isnan(rows(r, name, mine[name])).any()
        )
        if bad:
            found.setdefault(bad, []).append(name)
    return [
        Finding(
            "nan",
            f"NaN in {', '.join(names)} of rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}",
            tuple(names),
            bad,
        )
        for bad, names in found.items()
    ]
