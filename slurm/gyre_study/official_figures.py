"""Measurements and figures of official problems, computed from samples and work."""

import math
import statistics
from typing import Any

from .errors import nearest
from .official_rules import all_differ, differ, is_number, summarize
from .official_setting import differences
from .official_work import Work
from .results import Row
from .status import CaseStatus

SHARES = ("of_peak", "of_limit", "share_of_limit")  # null where the limit is not known
COUNTS = ("msgs", "bins")
AVERAGED = ("gyre-attention", "gyre-logprobs")


def number(row: Row, name: str) -> float:
    value = row.data.get("measurements", {}).get(name)
    return float(value) if is_number(value) else float("nan")


def median(row: Row) -> float:
    """Of the slowest rank's times, in ms."""
    return statistics.median(row.slowest())


def judge_measurements(work: Work, row: Row, error: float | None) -> list[str]:
    """What a row states otherwise than its samples, its checks and the problem have it. `error`: of its checks, over the
    tolerance."""
    key, stated, ranks = row.key, row.data["measurements"], work.ranks
    found = summarize(row.slowest())
    computed = {"time": found["median"], "min": found["min"], "p95": found["p95"], "cv": 100 * found["cv"],
                "reps": found["count"], "check": "ok", "err_over_tol": error, **work.figures(row.data, found["median"] / 1e3)}
    own = {name: value for name, value in key.items() if name in stated}
    units = work.measured | {name: unit for name, unit in work.optional.items() if name in stated}
    names = {*own, *key} - {"grid", "cp", "tp"} | {*units}
    wrong = [f"measurements has no {name}" for name in sorted(names - {*stated})]
    wrong += [f"measurements.{name}: unknown; nearest: {nearest(name, names)}"
              for name in stated if name not in {*names, *own}]
    known = {name: computed[name] for name in units if name in computed}
    wrong += all_differ("measurements", stated, {**own, **known})
    for name, (least, most) in work.limits(row.data).items():
        value = stated.get(name)
        if name not in computed and not (value is None and name in SHARES) and not (
            is_number(value) and least <= value <= most
        ):
            wrong.append(f"measurements.{name} {value}; wanted: {least:.9g} to {most:.9g}")
    wrong += [f"measurements.{name} {stated[name]}; wanted: a whole number"
              for name in COUNTS if name in stated and not (is_number(stated[name]) and isinstance(stated[name], int))]
    wrong += differences(row.data["units"], {name: unit for name, unit in units.items() if unit}, "", "unit of ")
    wrong += differ("model.flops", row.data["model"]["flops"], work.flops(key))
    wire = row.data["model"]["bytes_wire"]
    sent = number(row, "sent") * 1e6  # of the busiest rank
    if ranks == 1 and wire not in (0, None):
        wrong.append(f"model.bytes_wire {wire}; wanted: 0, of one rank")
    if "sent" in work.measured and not sent * (1 - 1e-9) <= (wire or 0) <= sent * ranks + 1:
        wrong.append(f"model.bytes_wire {wire}; wanted: {sent:.9g}, which the busiest rank sends, to {ranks} times that")
    return wrong


def figures_of_merit(app: str, work: Work, rows: list[Row]) -> list[tuple[str, Any, str, dict[str, Any]]]:
    """Those of a run: metric, value (None: any), unit and tags."""
    each = [(metric, value, unit, row.key) for row in rows
            for metric, value, unit in work.foms(row.data) if value is not None]
    found = list(each)
    if app == "gyre-attention":  # the best of each pass
        best = {one[3]["pass"]: max((other for other in each if other[3]["pass"] == one[3]["pass"]), key=lambda a: a[1])
                for one in each}
        found = list(best.values())
    for metric, unit in sorted({(one[0], one[2]) for one in each}) if app in AVERAGED else ():
        values = [one[1] for one in each if one[0] == metric]
        if len(values) > 1:
            found.append((f"average_{metric}", sum(values) / len(values), unit, {"rows": len(values)}))
    if app == "gyre-pipeline":
        found = [(metric, value, unit, row.key) for row in rows for metric, value, unit in work.foms(row.data)]
        found += [(metric, None, "bit", {}) for metric in ("bits_per_byte", "mean_entropy") if rows]
    return found


def misstated_foms(app: str, work: Work, rows: list[Row], stated: list[dict[str, Any]]) -> list[str]:
    wanted = figures_of_merit(app, work, rows)
    wrong = differ("fom: metrics", [one["metric"] for one in stated], [one[0] for one in wanted])
    for index, (one, (_, value, unit, tags)) in enumerate(zip(stated, wanted) if not wrong else ()):
        place = f"fom[{index}]"
        wrong += differ(f"{place}.unit", one["unit"], unit) + differ(f"{place}.tags", one["tags"], tags)
        if value is not None or one["metric"] == "share_of_limit":
            wrong += differ(f"{place}.value", one["value"], value)
        elif one["value"] is None or one["value"] < 0:
            wrong.append(f"{place}.value {one['value']}; wanted: a number of at least 0")
    return wrong


def misstated_peaks(rows: list[Row]) -> list[str]:
    """A run measures one peak, of which all its shares are."""
    known = [row for row in rows if row.data["measurements"].get("of_peak") is not None]
    peaks = [number(row, "rate") / number(row, "of_peak") for row in known]
    if all(math.isclose(one, peaks[0], rel_tol=1e-6) for one in peaks) and len(known) in (0, len(rows)):
        return []
    return [f"measurements.of_peak: of peaks of {', '.join(f'{100 * one:.6g}' for one in peaks)} TFLOP/s in one run"]


def over_time(status: CaseStatus, name: str) -> float:
    """A rate of all passes together: that of each, weighted by its time."""
    rows = [row for _, row in status.rows]
    return sum(number(row, name) * median(row) for row in rows) / sum(median(row) for row in rows)


def percent(share: float, of: str) -> str:
    return f"{share:.1f} % of {of}" if share == share else f"n/a: share of {of}"


def attention_figure(cases: list[CaseStatus]) -> tuple[CaseStatus, str, str]:
    best = max(cases_of(cases, most_ranks(cases)), key=lambda one: over_time(one, "rate"))
    rate = over_time(best, "rate")
    alone = [over_time(one, "rate") for one in cases_of(cases, 1)]
    efficiency = percent(100 * rate / max(alone), "one rank") if alone else "n/a: no run of one rank"
    return best, f"{rate:.4g} TFLOP/s/rank", efficiency


def logprobs_figure(cases: list[CaseStatus]) -> tuple[CaseStatus, str, str]:
    best = max(cases_of(cases, most_ranks(cases)), key=lambda one: over_time(one, "share_of_limit"))
    share, rate = over_time(best, "share_of_limit"), over_time(best, "rate")
    return best, percent(100 * share, "measured bandwidth"), f"{rate:.4g} GB/s/rank"


def pack_figure(cases: list[CaseStatus]) -> tuple[CaseStatus, str, str]:
    best = min(cases, key=lambda one: number(one.rows[0][1], "cost"))
    row = best.rows[0][1]
    rate = 1e3 * number(row, "items") / median(row)
    return best, f"{rate:.4g} documents/s", f"cost {number(row, 'cost'):.4f} max/mean"


def pipeline_figure(cases: list[CaseStatus]) -> tuple[CaseStatus, str, str]:
    best = max(cases_of(cases, most_ranks(cases)), key=lambda one: over_time(one, "rate"))
    rate = over_time(best, "rate") / best.placement.ranks
    return best, f"{rate:.4g} tokens/s/rank", percent(over_time(best, "of_limit"), "the limit")


FIGURES = {
    "gyre-attention": attention_figure,
    "gyre-logprobs": logprobs_figure,
    "gyre-pack": pack_figure,
    "gyre-pipeline": pipeline_figure,
}


def most_ranks(cases: list[CaseStatus]) -> int:
    return max(one.placement.ranks for one in cases)


def cases_of(cases: list[CaseStatus], ranks: int) -> list[CaseStatus]:
    return [one for one in cases if one.placement.ranks == ranks]
