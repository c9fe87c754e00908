"""Statistics, run rules and verdicts of a result, computed from its samples as the programs compute them
(src/report/statistics.cpp, repeat.cpp, result.cpp), and held against what the result states."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .results import Row, Run

LEAST_REPETITIONS = 9  # of --iters auto
LEAST_SAMPLED = 64  # tokens of a check that does not compare all
CLOSE = 1e-9  # relative: two ways to round a sum


@dataclass(frozen=True)
class Rule:
    """`text`: of its value in a reason. `scale`: from the value to the text's unit."""

    kind: str
    text: str
    scale: float
    at_least: bool
    limit: float

    def broken_by(self, value: float) -> bool:
        return value < self.limit if self.at_least else value > self.limit

    def reason(self, value: float, where: str = "") -> str:
        bound = "least" if self.at_least else "most"
        return f"{self.kind}: {self.text.format(value * self.scale)}{where}, at {bound} {self.limit * self.scale:g}"


RULES = (
    Rule("too few repetitions", "{:.3g}", 1, True, 6),
    Rule("too short", "{:.3g} s measured", 1, True, 0.1),
    Rule("noisy", "CV {:.3g} %", 100, False, 0.2),
    Rule("noisy", "median known to {:.3g} %", 100, False, 0.05),
    Rule("noisy", "a rank had {:.3g} % of its core", 100, True, 0.9),
)
MOST_FOREIGN_CORES = 0.5


def differ(place: str, got: Any, wanted: Any) -> list[str]:
    """A reason if a stated value is not the computed one."""
    same = type(got) is type(wanted) or (is_number(got) and is_number(wanted))
    if same and (math.isclose(got, wanted, rel_tol=CLOSE, abs_tol=1e-12) if is_number(wanted) else got == wanted):
        return []
    return [f"{place} {shown(got)}; computed: {shown(wanted)}"]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


def all_differ(place: str, got: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Of the fields that `wanted` has."""
    return [one for name, value in wanted.items() for one in differ(f"{place}.{name}", got.get(name), value)]


# Statistics


def quantile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def median_interval(ordered: Sequence[float]) -> tuple[float, float] | None:
    """The two samples between which the median lies with 95 %, by the binomial distribution."""
    n, k = len(ordered), 0
    if n > 1000:
        k = int(n / 2 - 0.98 * math.sqrt(n))
    else:
        total = probability = 0.5**n
        while total <= 0.025:
            k += 1
            probability *= (n - k + 1) / k
            total += probability
    return (ordered[k - 1], ordered[n - k]) if k else None


def summarize(samples: Sequence[float]) -> dict[str, Any]:
    """statistics_ms of samples of which there is one at least."""
    ordered = sorted(samples)
    n, mean = len(ordered), sum(samples) / len(samples)
    low, high = median_interval(ordered) or (None, None)
    squares = sum((one - mean) ** 2 for one in samples)
    return {"count": n, "median": quantile(ordered, 0.5), "median_low": low, "median_high": high, "min": ordered[0],
            "p95": quantile(ordered, 0.95), "mean": mean,
            "cv": math.sqrt(squares / (n - 1)) / abs(mean) if n > 1 else None}


def breaches(row: Row) -> dict[Rule, float]:
    """The rules that a row's timing breaks, with its values."""
    slowest = row.slowest()
    found = summarize(slowest)
    values = [found["count"], sum(slowest) / 1e3, found["cv"], None, row.data["cpu_share"]]
    if found["median_low"] is not None:
        middle = found["median"]
        values[3] = max(found["median_high"] - middle, middle - found["median_low"]) / middle
    return {rule: value for rule, value in zip(RULES, values) if value is not None and rule.broken_by(value)}


# What is stated of a row and of a run


def misstated_samples(ranks: int, row: Row) -> list[str]:
    samples = row.data["samples_ms"]
    counts = [len(one) for one in samples]
    if len(samples) != ranks:
        return [f"samples_ms of {len(samples)} ranks; wanted: {ranks}"]
    if len({*counts}) != 1 or counts[0] < LEAST_REPETITIONS:
        found = ", ".join(map(str, counts))
        return [f"samples_ms: {found} repetitions; wanted: as many of each rank, {LEAST_REPETITIONS} at least"]
    bad = [time for times in samples for time in times if time is None or not time > 0]
    return [f"samples_ms: a time of {bad[0]}; wanted: above 0"] if bad else []


def misstated_row(row: Row, on_cpu: bool) -> list[str]:
    """Statistics and verdict of a row whose samples are sound."""
    wrong = all_differ("statistics_ms", row.data["statistics_ms"], summarize(row.slowest()))
    if (row.data["cpu_share"] is None) == on_cpu:
        wrong.append(f"cpu_share {row.data['cpu_share']}; wanted: {'a number' if on_cpu else 'null, as a GPU computes'}")
    reasons = [rule.reason(value) for rule, value in breaches(row).items()]
    status = row.data["status"]
    wrong += differ("status.measured", status["measured"], not reasons)
    return wrong + misstated_verdict(status, reasons)


def misstated_verdict(status: dict[str, Any], reasons: list[str]) -> list[str]:
    """What differs from the verdict that the computed reasons make."""
    more = [f"{status['result']} ({one})" for one in status["reasons"] if one not in reasons]
    more += [f"status.reasons lacks {one!r}, which the samples say" for one in reasons if one not in status["reasons"]]
    more += differ("status.reasons", status["reasons"], reasons) if not more else []
    return more + differ("status.result", status["result"], "UNOFFICIAL" if reasons else "VALID")


def reasons_of_run(rows: Iterable[Row], load: dict[str, Any]) -> list[str]:
    """What the RESULT line of a run says in brackets."""
    found = [breaches(row) for row in rows]
    reasons = []
    for rule in RULES:
        values = [one[rule] for one in found if rule in one]
        if values:
            worst = min(values) if rule.at_least else max(values)
            reasons.append(rule.reason(worst, f" in {len(values)} of {len(found)} rows"))
    return reasons + ([load_text(load)] if found and load_text(load) else [])


def load_text(load: dict[str, Any]) -> str:
    """The reason that the load by other processes is, or ""."""
    if load["cores"] is None or load["cores"] <= MOST_FOREIGN_CORES:
        return ""
    busy = f"other processes kept {load['cores']:.1f} of {load['of_cores']} cores of {load['host']} busy"
    return f"noisy: {busy}, at most {MOST_FOREIGN_CORES}"


def misstated_load(run: Run, cores: dict[str, int | None]) -> list[str]:
    """`cores`: hardware threads of each host of the run."""
    assert run.end is not None
    load = run.end["foreign_load"]
    if load["cores"] is None:
        return ["foreign_load.cores null; wanted: a number, as rows were measured"] if run.rows else []
    if load["host"] not in cores:
        return [f"foreign_load.host {load['host']!r}; the run's: {', '.join(cores)}"]
    wrong = differ("foreign_load.of_cores", load["of_cores"], cores[load["host"]])
    if load["cores"] > load["of_cores"]:
        wrong.append(f"foreign_load.cores {load['cores']:.3g}; wanted: at most {load['of_cores']}")
    return wrong


# Verification


def misstated_checks(
    end: dict[str, Any], counts: dict[str, Any], tokens: int, most_tolerance: Callable[[str], float]
) -> list[str]:
    """`counts`: of each check that must be there, the least and the most values that it compares, by the tokens that it
    samples; None: unknown. `tokens`: of the problem. `most_tolerance`: of an array."""
    stated = end["verification"]
    wrong = differ("verification.tolerance_scale", stated["tolerance_scale"], 1)
    wrong += differ("verification.passed", stated["passed"], True if counts else None)
    found = {one["name"]: one for one in stated["checks"]}
    if len(found) != len(stated["checks"]):
        wrong.append("verification.checks has one twice")
    wrong += [f"verification has no check {name!r}" for name in counts if name not in found]
    for name, check in found.items():
        place = f"check {name!r}"
        right = {"passed": True, "fault": "", "outside": 0, "worst": [], "error_over_tolerance": over_tolerance(check)}
        wrong += all_differ(place, check, right)
        if (check["error_over_tolerance"] or 0) > 1:
            wrong.append(f"{place}.error_over_tolerance {check['error_over_tolerance']}; wanted: at most 1")
        tolerance, most_of = check["tolerance"], most_tolerance(name.rpartition(": ")[2])
        if tolerance is None or tolerance > most_of * (1 + CLOSE):
            wrong.append(f"{place}.tolerance {tolerance}; wanted: at most {most_of:.4g}")
        sampled, of = check.get("sampled_tokens", -1), check.get("of_tokens", -1)
        if of not in (0, tokens) or not min(LEAST_SAMPLED, of) <= sampled <= of:
            wanted = f"{LEAST_SAMPLED} at least of {tokens}, or 0 of 0"
            wrong.append(f"{place}: sampled_tokens {sampled}, of_tokens {of}; wanted: {wanted}")
        least, most = (counts.get(name) or every)(sampled)
        if not least <= check["count"] <= most:
            wrong.append(f"{place}.count {check['count']}; wanted: {least} to {most}")
    return wrong


def every(sampled: int) -> tuple[float, float]:
    return 1, math.inf


def over_tolerance(check: dict[str, Any]) -> float | None:
    error, tolerance = check["max_error"], check["tolerance"]
    if error == 0 and tolerance is not None:
        return 0.0
    return error / tolerance if error is not None and tolerance else None
