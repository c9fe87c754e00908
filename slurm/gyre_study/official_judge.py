"""Judges results of official problems.

Everything is computed again that follows from the problem's definition and the samples, and the rest must be there, of
its kind and as the problem has it: official_work.py says what the problem means, official_rules.py and
official_figures.py what the samples say, official_setting.py how was measured. Reasons name field, value and what is
wanted.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from .cases import Expansion, Placement, expand
from .errors import StudyError
from .files import Study
from .folder import Folder
from .official import NumberedLines, Opened, Problem, problem_of
from .official_figures import judge_measurements, misstated_foms, misstated_peaks
from .official_rules import (
    differ,
    misstated_checks,
    misstated_load,
    misstated_row,
    misstated_samples,
    misstated_verdict,
    reasons_of_run,
)
from .official_setting import (
    ROOT,
    crowded,
    differences,
    hosts_of,
    misstated_build,
    misstated_command,
    misstated_configuration,
    misstated_hosts,
    misstated_ranks,
    misstated_times,
    of_several_machines,
    words_of,
)
from .official_work import WORK, Work
from .results import Run, portable, runs_of
from .schema import Schema, read_schema
from .status import CaseStatus, statuses


@dataclass
class Judgement:
    """`refused`: reasons why it is no result of the problem. `noise`: why its times are not to be quoted."""

    path: Path
    folder: Folder
    problem: Problem | None = None
    expansion: Expansion | None = None
    cases: list[CaseStatus] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)

    def refuse(self, place: str, reasons: list[str]) -> None:
        self.refused += [f"{place}: {one}" for one in reasons]


# Plan


def flat(study: Study) -> dict[str, Any]:
    """All of a study that a result depends on, by name."""
    found: dict[str, Any] = {}
    for name, value in asdict(study).items():
        if isinstance(value, dict):
            for key, one in value.items():
                inner = one if isinstance(one, dict) else {"": one}
                found |= {f"{name}.{key}{'.' if last else ''}{last}": portable(own) for last, own in inner.items()}
        elif name not in ("title", "minutes", "tunable"):
            found[name] = value
    return found


def judge_plan(judgement: Judgement, stated: str) -> None:
    folder = judgement.folder
    try:
        if not {*folder.study.tunable} & {name.replace("-", "_") for name in folder.app.options}:
            raise StudyError("plan: app.options has none that may be tuned; wanted: the options of the program")
        problem = problem_of(folder.study)
        wanted = expand(problem.study, folder.site, folder.app, f"{problem.study.name}.toml")
    except StudyError as error:
        judgement.refused += str(error).splitlines()
        return
    judgement.problem = problem
    judgement.refused += differences(flat(folder.study), flat(problem.study), "plan: ", "")
    judgement.refused += [f"plan: tunable {one}; it is part of the problem"
                          for one in folder.study.tunable if one not in problem.study.tunable]
    if stated and stated != problem.hash:
        judgement.refused.append(f"problem {stated}; {problem.study.name} {problem.study.size} is {problem.hash}")
    of_app = differ("app.name", folder.app.name, problem.study.app)
    of_app += differ("app.path", Path(folder.app.path).name, folder.app.name)
    judgement.refuse("plan", of_app)
    ids = [case.id for one in folder.placements for case in one.cases]
    forms = [*ids, *(case.kin for one in folder.placements for case in one.cases), *(one.id for one in folder.placements)]
    if len({*ids}) < len(ids) or not all(re.fullmatch(r"[0-9a-f]{12}", one) for one in forms):
        judgement.refused.append("plan: ids of cases; wanted: twelve digits each, of 0 to f, none of them twice")
    plans = [[shape_of(one) for one in plan] for plan in (folder.placements, wanted.placements)]
    if plans[0] == plans[1]:
        judgement.expansion = None if of_app else wanted
    else:
        judgement.refused.append("plan: its cases are not those of the problem")


def shape_of(placement: Placement) -> dict[str, Any]:
    """A placement without its ids, which are hashes of folders, too."""
    cases = [portable(case.axes) for case in placement.cases]
    name = placement.name.removesuffix(f"-{placement.id[:8]}")
    own = {"id": "", "name": name, "cases": cases, "arguments": words_of(placement.arguments)}
    return {**portable(asdict(placement)), **own}


# Runs and their rows


@lru_cache(maxsize=None)
def lines_schema() -> Schema:
    return read_schema(ROOT / "results/gyre-result-1.schema.json")


def misfits(lines: NumberedLines) -> list[str]:
    """What is not of the schema."""
    found = []
    for number, line in lines:
        kind = line.get("kind")
        wrong = f"kind {kind!r}; wanted: run, row, end" if kind not in ("run", "row", "end") else ""
        wrong = wrong or lines_schema().definition(f"{kind}_line")(line, str(kind))
        found += [f"line {number}: {wrong}"] if wrong else []
    return found


def key_text(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def judge_setting(judgement: Judgement, place: str, placement: Placement, run: Run, work: Work) -> None:
    folder = judgement.folder
    given = words_of(placement.arguments)[0]
    on_cpu = given.get("backend", "cpu") == "cpu"
    problem = judgement.problem
    assert problem is not None
    inputs = {one["file"]: one["sha256"] for one in run.head["inputs"]}
    for wrong in (
        differ("suite.program", run.head["suite"]["program"], folder.app.name),
        misstated_command(run, placement, folder.app, problem.study.accept),
        misstated_configuration(run, folder.app.name, work),
        misstated_build(run, folder.app),
        misstated_ranks(run, placement.ranks, on_cpu),
        crowded(run, int(given.get("threads", 1))),
        misstated_hosts(run),
        misstated_times(run),
        differences(inputs, problem.inputs, "", "SHA-256 of "),
    ):
        judgement.refuse(place, wrong)


def judge_rows(run: Run, work: Work, what: dict[str, str], on_cpu: bool) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with the rows of a run, and the checks that must be there. `what`: cases by key of row. On GPUs not
    every operation compares the bits of its runs."""
    wrong: list[str] = []
    checks: dict[str, Any] = {}
    stated = run.end["verification"]["checks"] if run.end else []
    errors = {one["name"]: one["error_over_tolerance"] or 0.0 for one in stated}
    if len({key_text(row.key) for row in run.rows}) < len(run.rows):
        wrong.append("a row is there twice")
    for row in run.rows:
        text = what.get(key_text(row.key), "")
        own = misstated_samples(work.ranks, row) if text else [f"a row of no case: {key_text(row.key)}"]
        if not own:
            names = work.checks(row.key, len(row.slowest()))
            checks |= {name: count for name, count in names.items() if on_cpu or "bits of timed" not in name}
            error = max((errors[name] for name in names if name in errors), default=None)
            if run.end is None:  # then its checks are not there
                error = row.data["measurements"].get("err_over_tol")
            own = misstated_row(row, on_cpu) + judge_measurements(work, row, error)
        wrong += [f"{one}: {text}" for one in own]
    return wrong or misstated_peaks(run.rows), checks


def judge_run(
    judgement: Judgement, placement: Placement, run: Run, work: Work, what: dict[str, str], counts: bool
) -> None:
    """`counts`: whether the run has a row that was not measured again since."""
    place = placement.name
    judge_setting(judgement, place, placement, run, work)
    on_cpu = all(one["device"] == "cpu" for one in run.head["ranks"])
    wrong, checks = judge_rows(run, work, what, on_cpu)
    judgement.refuse(place, wrong)
    if run.end is None:
        if counts:
            judgement.refused.append(f"{place}: a run was cut off; plan the study in a new folder")
        return
    end = run.end
    cores = {name: host["threads"] for name, host in hosts_of(run).items()}
    tokens = 0 if work.study.app == "gyre-pack" else work.documents.tokens
    wrong_checks = misstated_checks(end, checks, tokens, work.most_tolerance)
    judgement.refuse(place, wrong_checks + misstated_load(run, cores))
    if wrong:
        return
    reasons = reasons_of_run(run.rows, end["foreign_load"])
    judgement.refuse(place, misstated_verdict(end["status"], reasons))
    judgement.refuse(place, misstated_foms(judgement.folder.app.name, work, run.rows, end["fom"]))
    if counts:
        judgement.noise += [f"{place}: {one}" for one in reasons]


def judge_placement(judgement: Judgement, placement: Placement, wanted: Placement, lines: NumberedLines) -> None:
    problem = judgement.problem
    assert problem is not None
    if wrong := misfits(lines):
        judgement.refuse(placement.name, wrong)
        return
    work = WORK[problem.study.app](problem.study, wanted)
    cases = {key_text(key): case for case in placement.cases for key in work.keys(case)}
    what = {key: " ".join(f"{name}={value}" for name, value in portable(case.axes).items())
            for key, case in cases.items()}
    runs = runs_of(judgement.path, lines)
    newest = {key_text(row.key): (run, row) for run in runs for row in run.rows}
    counted = {run.id for run, _ in newest.values()}
    judgement.runs += runs
    for run in runs:
        judge_run(judgement, placement, run, work, what, run.id in counted)
    for case in placement.cases:
        own = {key: newest[key] for key, of in cases.items() if of is case and key in newest}
        judgement.cases.append(CaseStatus(case, placement, "", rows=[*own.values()]))
        missing = [json.loads(key) for key, of in cases.items() if of is case and key not in own]
        if missing:
            words = ", ".join(sorted(str(one["pass"]) for one in missing)) if own else "any pass"
            text = next(text for key, text in what.items() if cases[key] is case)
            why = why_missing(judgement, case.id)
            judgement.refused.append(f"{placement.name}: no result of {words} of the case {text}{why}")


def why_missing(judgement: Judgement, case: str) -> str:
    """What the study's folder knows of a case without rows."""
    if not judgement.path.is_dir():
        return ""
    try:
        reasons = [one.reason for one in statuses(judgement.folder) if one.case.id == case and one.reason]
    except StudyError:
        return ""
    return f" ({reasons[0]})" if reasons else ""


def judge(result: Opened, path: Path) -> Judgement:
    judgement = Judgement(path, result.folder)
    judge_plan(judgement, result.stated)
    if judgement.expansion is not None:
        try:
            for placement, wanted in zip(judgement.folder.placements, judgement.expansion.placements):
                judge_placement(judgement, placement, wanted, result.lines[placement.name])
        except StudyError as error:
            judgement.refused += str(error).splitlines()
        ids = [run.id for run in judgement.runs]
        if len({*ids}) < len(ids):
            judgement.refused.append("two runs have one id")
        if judgement.runs and not judgement.refused:
            judgement.refused += of_several_machines(judgement.runs) + of_several_answers(judgement.runs)
    judgement.refused = list(dict.fromkeys(judgement.refused))
    # The first of each rule and placement.
    judgement.noise = list({re.sub(r" [\d.]+ .*", "", one): one for one in reversed(judgement.noise)}.values())[::-1]
    return judgement


def of_several_answers(runs: list[Run]) -> list[str]:
    """What the runs of a pipeline found for the same documents, which grids only round otherwise."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for one in run.end["fom"] if run.end else ():
            if one["metric"] in ("bits_per_byte", "mean_entropy"):
                found.setdefault(one["metric"], []).append(one["value"])
    return [f"fom {name}: {', '.join(f'{one:.9g}' for one in values)} in runs of one result"
            for name, values in found.items() if max(values) > 1.01 * min(values)]


