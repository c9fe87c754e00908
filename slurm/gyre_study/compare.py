"""Which cases of two sets of results became slower or faster."""

import json
import math
import re
import sqlite3
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

from .errors import StudyError
from .noise import (
    LEAST_CASES,
    LEAST_SAMPLES,
    holm,
    median_interval,
    p_value,
    ratio_interval,
    scatter,
    spread,
)
from .official import is_result, opened, portable
from .results import Run, read_runs

VERDICTS = (
    "wrong result",
    "slower",
    "faster",
    "too noisy",
    "too few samples",
    "no time",
    "unchanged",
)
MOST_THRESHOLD = 2.0  # where the noise hides more than a doubling, a case is not called unchanged
# Entries of a configuration that describe the measurement, or repeat the first row's key.
NOT_COMPARED = ("iters", "warmup", "check", "tokens", "max_seconds")


@dataclass
class Side:
    """A case of one set. `samples`: ms of each iteration, of the slowest rank, of all its rows that are right."""

    samples: list[float]
    wrong: bool
    where: str
    broken: str = ""  # run rules that a row of it breaks


@dataclass
class Change:
    """`ratio`: after / before, with its interval; None where nothing could be said."""

    case: str
    verdict: str  # one of VERDICTS
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    threshold: float = 1.0  # smallest ratio that counts as a change
    before: str = ""
    after: str = ""
    broken: dict[str, str] = field(default_factory=dict)  # run rules that a side breaks


@dataclass
class Group:
    """Cases that share a word of their names, and changed together: the centre of their ratios, and its interval."""

    name: str
    verdict: str  # "slower" or "faster"
    ratio: float
    low: float
    high: float
    cases: list[str]


@dataclass
class Comparison:
    groups: list[Group]
    changes: list[Change]
    only_before: list[str]
    only_after: list[str]
    scatter: float  # of the logarithm of most ratios; 0: too few cases to tell

    @property
    def slower(self) -> list[Change | Group]:
        both: list[Change | Group] = [*self.groups, *self.changes]
        return [one for one in both if one.verdict in ("slower", "wrong result")]


def case_name(
    program: str, ranks: int, nodes: int, configuration: dict[str, Any], key: dict[str, Any]
) -> str:
    """What must be equal for two rows to be compared."""
    settings = portable(
        {name: value for name, value in configuration.items() if name not in (*NOT_COMPARED, *key)}
    )
    if re.fullmatch(r"\d+ x \d+ tokens", str(settings.get("source", ""))):
        del settings["source"]  # documents, and the key's tokens, say it
    own = " ".join(f"{name}={value}" for name, value in key.items())
    other = " ".join(f"{name}={value}" for name, value in settings.items())
    return f"{program} {own} | {ranks} ranks on {nodes} nodes | {other}"


def add(
    sides: dict[str, Side], name: str, samples: list[float], result: str, reasons: str, where: str
) -> None:
    side = sides.setdefault(name, Side([], False, where))
    if result == "INVALID":
        side.wrong = True
    else:
        side.broken = side.broken or ("" if result == "VALID" else reasons or result)
        side.samples += [sample for sample in samples if sample > 0]


def sides_of_runs(runs: list[Run]) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    for run in runs:
        ranks = run.head.get("ranks", [])
        nodes = len({rank.get("host") for rank in ranks})
        for row in run.rows:
            key = {name: value for name, value in row.key.items() if name != "cycle"}
            name = case_name(
                run.head["suite"]["program"],
                len(ranks),
                nodes,
                run.head.get("configuration", {}),
                key,
            )
            add(
                sides,
                name,
                row.slowest(),
                row.verdict,
                "; ".join(row.reasons),
                f"{run.file.name}:{row.line}",
            )
    return sides


def sides_of_database(path: Path) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    database.row_factory = sqlite3.Row
    try:
        times: dict[int, list[float]] = {}
        slowest = "SELECT row_id, max(ms) FROM samples GROUP BY row_id, iteration ORDER BY row_id, iteration"
        for row_id, ms in database.execute(slowest):
            times.setdefault(row_id, []).append(ms)
        of_run = "runs.program, runs.ranks, runs.nodes, runs.configuration"
        query = f"SELECT rows.*, {of_run} FROM rows JOIN runs USING (run_id)"
        for row in database.execute(query):
            keys = {
                name[4:]: row[name]
                for name in row.keys()
                if name.startswith("key_") and row[name] is not None
            }
            keys.pop("cycle", None)
            name = case_name(
                row["program"],
                row["ranks"],
                row["nodes"],
                json.loads(row["configuration"] or "{}"),
                keys,
            )
            add(
                sides,
                name,
                times.get(row["row_id"], []),
                row["result"],
                row["reasons"],
                f"{row['file']}:{row['line']}",
            )
    except (sqlite3.DatabaseError, IndexError, TypeError, ValueError) as error:
        raise StudyError(
            f"{path}: {error}; wanted: a file that gyre-study collect wrote"
        ) from error
    finally:
        database.close()
    return sides


def read_sides(path: Path) -> dict[str, Side]:
    """Reads a study's folder (its rows), an SQLite file, or a file of results."""
    if path.is_dir():
        files = sorted((path / "rows").glob("*.jsonl"))
        if not files:
            raise StudyError(
                f"{path}: no rows/*.jsonl are there; wanted: the folder of a study that was run"
            )
        return sides_of_runs([run for file in files for run in read_runs(file)])
    if not path.is_file():
        raise StudyError(
            f"{path}: no such file; wanted: a study's folder, an SQLite file of collect, .jsonl or .json"
        )
    if path.suffix == ".json" and is_result(path):
        with opened(path) as (folder, _):
            return read_sides(folder.path)
    return sides_of_database(path) if path.suffix == ".sqlite" else sides_of_runs(read_runs(path))


def compare_files(before: Path, after: Path, min_effect: float, alpha: float) -> Comparison:
    return compare(read_sides(before), read_sides(after), min_effect, alpha)


def groups_of(tested: list[Change], min_effect: float, alpha: float) -> list[Group]:
    """What all rows, or those with one value of a variable, have in common, where that is beyond min_effect.

    One kernel that became slower by less than a single case can show is found in the cases that run it.
    """
    logs = {one.case: math.log(one.ratio) for one in tested if one.ratio}
    words: dict[str, set[str]] = {"all rows": set(logs)}
    for case in logs:
        for word in re.findall(r"\S+=\S+", case):
            words.setdefault(word, set()).add(case)
    names: dict[frozenset[str], str] = {}
    for word, cases in words.items():
        names.setdefault(frozenset(cases), word)
    found = []
    for cases, name in names.items():
        interval = median_interval([logs[case] for case in cases], alpha / len(names))
        if interval is None:
            continue
        low, high = (math.exp(end) for end in interval)
        if low > 1 + min_effect or high < 1 / (1 + min_effect):
            ratio = math.exp(median(logs[case] for case in cases))
            verdict = "slower" if low > 1 else "faster"
            found.append(Group(name, verdict, ratio, low, high, sorted(cases)))
    everything = [group for group in found if len(group.cases) == len(logs)]
    return everything or sorted(found, key=lambda group: -abs(math.log(group.ratio)))


def compare(
    before: dict[str, Side], after: dict[str, Side], min_effect: float, alpha: float
) -> Comparison:
    """`min_effect`: as a share (0.05).

    A case changed when three things hold:
      - Mann and Whitney's test finds it; with few cases, corrected for their number after Holm
      - the whole interval of its ratio is beyond min_effect
      - the ratio is beyond what two runs of one build differ by. That is more than samples of one run tell, so it is
        taken from the cases themselves: most of them have not changed, or not each by another amount. It is estimated
        as a ratio, and in units of a case's own spread; the larger of both counts, for as many cases as there are.
        What changed for a whole group of cases is subtracted before.
    """
    both = [name for name in before if name in after]
    if not both:
        raise StudyError(
            "the two have no row in common: program, ranks, nodes, options and key must be equal"
        )
    changes = [
        Change(
            name,
            first_verdict(before[name], after[name]),
            before=before[name].where,
            after=after[name].where,
            broken={
                side: one.broken
                for side, one in (("before", before[name]), ("after", after[name]))
                if one.broken
            },
        )
        for name in both
    ]
    tested = [change for change in changes if not change.verdict]
    samples = [(before[one.case].samples, after[one.case].samples) for one in tested]
    found = [p_value(*pair) for pair in samples]
    spreads = [max(spread(pair[0]), spread(pair[1])) for pair in samples]
    for change, pair, p in zip(
        tested, samples, found if len(tested) >= LEAST_CASES else holm(found)
    ):
        change.ratio, change.low, change.high = ratio_interval(*pair, alpha)
        change.p = p
    groups = groups_of(tested, min_effect, alpha)
    common = {case: math.log(group.ratio) for group in reversed(groups) for case in group.cases}
    logs = [math.log(one.ratio) - common.get(one.case, 0) for one in tested if one.ratio]
    width, own_width = scatter(logs), scatter([log / own for log, own in zip(logs, spreads)])
    own_width = max(math.sqrt(2), own_width)  # as if each run were off by as much as a sample of it
    spreads = [
        max(own, median(spreads)) for own in spreads
    ]  # the spread of few samples may be small by chance
    quantile = NormalDist().inv_cdf(1 - alpha / (2 * max(1, len(tested))))
    for change, own in zip(tested, spreads):
        change.threshold = math.exp(
            max(math.log1p(min_effect), quantile * max(width, own_width * own))
        )
        change.verdict = verdict_of(change, 1 + min_effect, alpha)
    only_before = [name for name in before if name not in after]
    return Comparison(
        groups, changes, only_before, [name for name in after if name not in before], width
    )


def verdict_of(change: Change, least: float, alpha: float) -> str:
    assert change.ratio and change.low and change.high and change.p is not None
    if change.p < alpha and change.ratio > change.threshold and change.low > least:
        return "slower"
    if change.p < alpha and change.ratio < 1 / change.threshold and change.high < 1 / least:
        return "faster"
    return "too noisy" if change.threshold > MOST_THRESHOLD else "unchanged"


def first_verdict(before: Side, after: Side) -> str:
    """The verdict that needs no test, or ""."""
    if after.wrong:
        return "wrong result"
    if not before.samples or not after.samples:
        return "no time"
    return "too few samples" if min(len(before.samples), len(after.samples)) < LEAST_SAMPLES else ""


def comparison_json(found: Comparison) -> str:
    return json.dumps(asdict(found), indent=1)


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def shared_part(names: list[str]) -> set[str]:
    """Words that all names share; they need not be repeated."""
    return (
        set.intersection(*(set(name.split(" | ")[-1].split()) for name in names))
        if len(names) > 1
        else set()
    )


def rules_text(changes: list[Change]) -> list[str]:
    """Lines about the rows that break a run rule; empty if none does."""
    lines = []
    for side in ("before", "after"):
        if reasons := [one.broken[side] for one in changes if side in one.broken]:
            lines.append(
                f"# {side}: {len(reasons)} of {len(changes)} rows break a run rule, such as: {reasons[0]}"
            )
    if lines:
        lines.append("# a verdict on such rows is marked ~; measure them again")
    return lines


def comparison_text(found: Comparison, everything: bool) -> str:
    shown = [
        one
        for one in found.changes
        if everything or one.verdict in ("wrong result", "slower", "faster")
    ]
    shown.sort(key=lambda one: (VERDICTS.index(one.verdict), -abs(math.log(one.ratio or 1))))
    shared = shared_part([one.case for one in found.changes])
    doubtful = {one.case for one in found.changes if one.broken}
    lines = rules_text(found.changes)
    for group in found.groups:
        verdict = group.verdict + ("~" if doubtful & {*group.cases} else "")
        change = f"{percent(group.ratio)} ({percent(group.low)} to {percent(group.high)})"
        lines.append(
            f"{verdict:15}  {change:34}  {group.name}: median of {len(group.cases)} rows"
        )
    for one in shown:
        verdict = one.verdict + ("~" if one.broken and one.verdict != "wrong result" else "")
        name = " ".join(word for word in one.case.split() if word not in shared).removesuffix(" |")
        change = (
            f"{percent(one.ratio)} ({percent(one.low or 1)} to {percent(one.high or 1)})"
            if one.ratio
            else "n/a"
        )
        lines.append(f"{verdict:15}  {change:34}  {name}  [{one.before} -> {one.after}]")
    many = {verdict: sum(one.verdict == verdict for one in found.changes) for verdict in VERDICTS}
    told = ", ".join(f"{number} {verdict}" for verdict, number in many.items() if number)
    lines.append(f"# {len(found.changes)} rows in both: {told}")
    thresholds = [one.threshold for one in found.changes if one.p is not None]
    if thresholds:
        width = (
            f"most rows scatter by {100 * found.scatter:.2g} % between the two"
            if found.scatter
            else "too few rows to see how they scatter"
        )
        lines.append(
            f"# smallest change that counts, by row: {percent(min(thresholds))} to {percent(max(thresholds))},"
            f" median {percent(median(thresholds))}; {width}"
        )
    for side, names in (("before", found.only_before), ("after", found.only_after)):
        if names:
            lines.append(f"# only {side}: {len(names)} rows, such as {names[0]}")
    return "\n".join(lines)
