"""What a comparison prints."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from .compare import ALL_ROWS, VERDICTS, Change, Comparison, Group


def comparison_json(found: Comparison) -> str:
    return json.dumps(asdict(found), indent=1)


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def interval(ratio: float, low: float, high: float) -> str:
    return f"{percent(ratio)} ({percent(low)} to {percent(high)})"


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


def group_lines(groups: Sequence[Group], doubtful: set[str]) -> list[str]:
    lines = []
    for group in groups:
        verdict = group.verdict + ("~" if doubtful & {*group.cases} else "")
        change = interval(group.ratio, group.low, group.high)
        against = "" if group.name == ALL_ROWS else " against the other rows"
        lines.append(f"{verdict:15}  {change:34}  {group.name}: {len(group.cases)} rows{against}")
    return lines


def row_line(one: Change, shared: set[str], several: bool) -> str:
    verdict = one.verdict + ("~" if one.broken and one.verdict != "wrong result" else "")
    name = " ".join(word for word in one.case.split() if word not in shared).removesuffix(" |")
    change = "n/a"
    if one.change and one.low and one.high and one.ratio:
        change = interval(one.change, one.low, one.high)
        if several:
            with_group = f", with {one.group}" if one.group else " against the other rows"
            name += f"{with_group}; after / before {percent(one.ratio)}"
    return f"{verdict:15}  {change:34}  {name}  [{one.before} -> {one.after}]"


def verdict_line(found: Comparison) -> str:
    many = {verdict: sum(one.verdict == verdict for one in found.changes) for verdict in VERDICTS}
    told = ", ".join(f"{number} {verdict}" for verdict, number in many.items() if number)
    if found.stated is not None:
        told += f", beyond a stated drift of {100 * found.stated:g} %"
    warning = f"; NOT COMPARABLE: {'; '.join(found.grave)}" if found.grave else ""
    return f"# {len(found.changes)} rows in both: {told}{warning}"


def comparison_text(found: Comparison, everything: bool) -> str:
    """Groups and rows that changed, then lines that begin with #."""
    shown = [
        one
        for one in found.changes
        if everything or one.verdict == "wrong result" or (one.verdict in ("slower", "faster") and not one.group)
    ]
    shown.sort(key=lambda one: (VERDICTS.index(one.verdict), -abs((one.change or 1) - 1)))
    shared = shared_part([one.case for one in found.changes])
    doubtful = {one.case for one in found.changes if one.broken}
    tested = [one for one in found.changes if one.threshold]
    lines = [*rules_text(found.changes), *group_lines(found.groups, doubtful)]
    lines += [row_line(one, shared, len(tested) > 1) for one in shown]
    lines.append(verdict_line(found))
    lines.append(f"# noise between runs: {found.between}")
    if thresholds := [one.threshold for one in tested if one.threshold]:
        ends = f"{percent(min(thresholds))} to {percent(max(thresholds))}, median {percent(median(thresholds))}"
        lines.append(f"# smallest change of one row that counts: {ends}")
    lines += [f"# differs: {line}" for line in found.differences]
    for side, names in (("before", found.only_before), ("after", found.only_after)):
        if names:
            lines.append(f"# only {side}: {len(names)} rows, such as {names[0]}")
    return "\n".join(lines)
