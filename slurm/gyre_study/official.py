"""Official problems: studies official-*.toml whose results can be compared everywhere. docs/official.md has the rules.

A result is the folder of a study, or one JSON file of the same content:

    schema     "gyre-official/1"
    problem    hash of the problem (Problem.hash)
    plan       the folder's plan.json
    rows       by placement: the lines of rows/PLACEMENT.jsonl
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import Placement, digest, expand
from .errors import RUNTIME, StudyError, nearest
from .files import Study, load_study
from .folder import Folder, write_whole
from .official_figures import FIGURES, has_its_median, misstated
from .results import Run, objects, portable, read_lines
from .shapes import ANY, misfit, parse_json
from .status import CaseStatus, statuses

STUDIES = Path(__file__).resolve().parent.parent / "studies"
PREFIX = "official-"
SCHEMA = "gyre-official/1"
ENTRY = {"schema": str, "problem": str, "plan": {"*": ANY}, "rows": {"*": [{"*": ANY}]}}
# How the programs begin reasons that the timing of a run has (docs/run-rules.md). All others are refused.
NOISE = ("noisy: ", "too few repetitions: ", "too short: ")
CONTROL = ("json", "resume")  # what gyre-study gives to each launch


def files_of(study: Study) -> list[Path]:
    """The files that the study's problem names."""
    tables = [study.options, study.axes, *study.problems.values()]
    texts = [str(value) for table in tables for value in table.values()]
    return sorted({Path(word) for text in texts for word in re.findall(r"(?:(?<==)|^)/[^=,]+", text)})


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def definition(study: Study) -> dict[str, Any]:
    """What may not be changed, by the name that it has in the study's file."""
    fixed = {"study": study.name, "size": study.size, "kind": study.kind, "app": study.app}
    for name in ("options", "axes"):
        fixed |= {
            f"{name}.{key}": value
            for key, value in getattr(study, name).items()
            if key not in study.tunable
        }
    for problem, table in study.problems.items():
        fixed |= {f"problems.{problem}.{key}": value for key, value in table.items()}
    return {key: portable(value) for key, value in fixed.items()}


@dataclass
class Problem:
    """An official problem of this clone. `inputs`: SHA-256 of its files, by name."""

    study: Study
    inputs: dict[str, str]

    @property
    def hash(self) -> str:
        return digest({"definition": definition(self.study), "inputs": self.inputs})


def problem_of(given: Study) -> Problem:
    """The official problem that a study says it is, with the same choices."""
    names = sorted(file.stem for file in STUDIES.glob(f"{PREFIX}*.toml"))
    if given.name not in names:
        raise StudyError(f"{given.name} is no official problem; nearest: {nearest(given.name, names)}")
    words = [f"{name}={','.join(map(str, value))}" for name, value in given.chosen.items()]
    study = load_study(STUDIES / f"{given.name}.toml", given.size, words)
    return Problem(study, {file.name: sha256(file) for file in files_of(study)})


@dataclass
class Judgement:
    """`refused`: reasons why it is no result of the problem. `noise`: why its times are not to be quoted."""

    path: Path
    folder: Folder
    problem: Problem | None = None
    cases: list[CaseStatus] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)


def is_result(path: Path) -> bool:
    """Whether a file is of SCHEMA."""
    value = parse_json(path, path.read_bytes())
    return isinstance(value, dict) and value.get("schema") == SCHEMA


@contextmanager
def opened(path: Path) -> Iterator[tuple[Folder, str]]:
    """The folder of a result, and the hash that its file states, if it is a file."""
    if path.is_dir():
        yield Folder(path), ""
        return
    if not path.is_file():
        raise StudyError(f"{path}: no such file or folder")
    entry = parse_json(path, path.read_bytes())
    schema = entry.get("schema") if isinstance(entry, dict) else None
    if schema != SCHEMA:
        raise StudyError(f"{path}: schema {schema!r}; wanted: {SCHEMA}", RUNTIME)
    if reason := misfit(entry, ENTRY):
        raise StudyError(f"{path}: {reason}; wanted: {SCHEMA}", RUNTIME)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "rows").mkdir()
        write_whole(Path(place) / "plan.json", json.dumps(entry["plan"]))
        folder = Folder(Path(place))
        for placement in folder.placements:
            if not re.fullmatch(r"[\w-]+", placement.name):  # it becomes the name of a file
                raise StudyError(f"{path}: placement {placement.name!r}; wanted: a name such as cp2-0123abcd", RUNTIME)
            lines = [json.dumps(line) + "\n" for line in entry["rows"].get(placement.name, [])]
            write_whole(folder.rows_file(placement), "".join(lines))
        yield folder, entry["problem"]


def entry_text(judgement: Judgement) -> str:
    """The result as one file: its lines are as the programs wrote them, but name no folder of this host."""
    folder = judgement.folder
    rows = {
        one.name: [line for _, line in objects(folder.rows_file(one))]
        for one in folder.placements
    }
    assert judgement.problem is not None
    plan = parse_json(folder.path / "plan.json", (folder.path / "plan.json").read_bytes())
    plan["app"]["path"] = folder.app.name
    entry = {"schema": SCHEMA, "problem": judgement.problem.hash, "plan": plan, "rows": rows}
    return json.dumps(entry, separators=(",", ":")).replace(f"{STUDIES.parent.parent}/", "") + "\n"


def words_of(arguments: Sequence[str]) -> dict[str, str]:
    """Options and their values; a flag's value is ""."""
    found: dict[str, str] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name = word[2:]
            found[name] = ""
        elif name:
            found[name] = portable(word)
    return found


def differences(got: dict[str, Any], wanted: dict[str, Any], place: str, prefix: str) -> list[str]:
    """A reason for each name whose value is another one."""
    reasons = []
    for name in sorted({*got, *wanted}):
        if got.get(name) != wanted.get(name):
            own = f"{prefix}{name} {got[name]}" if name in got else f"no {prefix}{name}"
            theirs = f"has {wanted[name]}" if name in wanted else f"has no {prefix}{name}"
            reasons.append(f"{place}{own}; the problem {theirs}")
    return reasons


def judge_plan(judgement: Judgement, stated: str) -> None:
    folder = judgement.folder
    try:
        problem = problem_of(folder.study)
        wanted = expand(problem.study, folder.site, folder.app, f"{problem.study.name}.toml")
    except StudyError as error:
        judgement.refused += str(error).splitlines()
        return
    judgement.problem = problem
    changed = differences(definition(folder.study), definition(problem.study), "plan: ", "")
    if stated and stated != problem.hash:
        judgement.refused.append(f"problem {stated}; {problem.study.name} {problem.study.size} is {problem.hash}")
    if not changed:
        plans = [
            [(one.ranks, words_of(one.arguments), [portable(case.axes) for case in one.cases]) for one in plan]
            for plan in (folder.placements, wanted.placements)
        ]
        if plans[0] != plans[1]:
            changed = ["plan: its cases are not those of the problem"]
    judgement.refused += changed


def judge_run(judgement: Judgement, placement: Placement, run: Run) -> None:
    app, place = judgement.folder.app, f"{placement.name}: "
    build = run.build
    if build != app.build:
        judgement.refused.append(f"{place}build {build['git']} ({build['git_state']}); planned with {app.build['git']}")
    if build["git_state"] != "clean":
        judgement.refused.append(f"{place}sources of the build are not those of a commit ({build['git_state']})")
    if build["type"] != "Release":
        judgement.refused.append(f"{place}{build['type']} build; wanted: Release")
    if len(run.head.get("ranks", [])) != placement.ranks:
        judgement.refused.append(f"{place}{len(run.head.get('ranks', []))} ranks; wanted: {placement.ranks}")
    sweep = {*app.swept, "min", "max", "factor", "step", *CONTROL}
    got, wanted = (
        {name: value for name, value in words_of(words).items() if name not in sweep}
        for words in (run.head.get("run", {}).get("argv", []), placement.arguments)
    )
    judgement.refused += differences(got, wanted, place, "--")
    if judgement.problem is not None:
        inputs = {one["file"]: one["sha256"] for one in run.head.get("inputs", [])}
        judgement.refused += differences(inputs, judgement.problem.inputs, place, "SHA-256 of ")
    if run.end is None:
        judgement.refused.append(f"{place}a run was cut off; plan the study in a new folder")
    else:
        sort(judgement, place, run.end.get("status", {}).get("reasons", []))


def sort(judgement: Judgement, place: str, reasons: list[str]) -> None:
    """Files each reason under noise or refusal. "N rows that stay ..." is left out: the rows themselves are judged."""
    for reason in reasons:
        if reason.startswith(NOISE):
            judgement.noise.append(f"{place}{reason}")
        elif not re.match(r"\d+ rows? that stays? ", reason):
            judgement.refused.append(f"{place}{reason}")


def judge_case(judgement: Judgement, status: CaseStatus) -> None:
    place = f"{status.placement.name}: "
    what = " ".join(f"{name}={value}" for name, value in portable(status.case.axes).items())
    option = judgement.folder.app.options.get("pass")
    passes = set(option.choices) - {"both"} if option else set()
    missing = passes - {row.key.get("pass") for _, row in status.rows}
    if not status.rows or missing:
        words = ", ".join(sorted(missing)) if status.rows else "any pass"
        why = f" ({status.reason})" if status.reason else ""
        judgement.refused.append(f"{place}no result of {words} of the case {what}{why}")
    for run, row in status.rows:
        if row.verdict in ("INVALID", "UNVERIFIED"):
            judgement.refused.append(f"{place}{row.verdict} ({'; '.join(row.reasons)}): {what}")
        elif not row.slowest():
            judgement.refused.append(f"{place}no times: {what}")
        elif not has_its_median(row):
            judgement.refused.append(f"{place}its median is not that of its samples: {what}")
        elif wrong := misstated(status.placement.ranks, judgement.folder.study.app, run, row):
            judgement.refused += [f"{place}{one}: {what}" for one in wrong]
        else:
            sort(judgement, place, row.reasons)


def judge(folder: Folder, path: Path, stated: str = "") -> Judgement:
    judgement = Judgement(path, folder)
    judge_plan(judgement, stated)
    try:
        judgement.cases = statuses(folder)
        counted = {(one.placement.name, run.id) for one in judgement.cases for run, _ in one.rows}
        for placement in folder.placements:
            runs = read_lines(folder.rows_file(placement))
            own = [run for run in runs if (placement.name, run.id) in counted]  # not of rows measured again since
            for run in own or runs:
                judgement.runs.append(run)
                judge_run(judgement, placement, run)
        for status in judgement.cases:
            judge_case(judgement, status)
    except StudyError as error:
        judgement.refused += str(error).splitlines()
    judgement.refused = list(dict.fromkeys(judgement.refused))
    # The first of each rule and placement: those of a run come before those of its rows.
    judgement.noise = list({re.sub(r" [\d.]+ .*", "", one): one for one in reversed(judgement.noise)}.values())[::-1]
    return judgement


# Figures


@dataclass
class Figure:
    """The figure of a result, and what is quoted beside it. `ranks`: on how many; `how`: what was tuned."""

    value: str
    beside: str
    ranks: int
    how: str


def figure_of(judgement: Judgement) -> Figure:
    """Of a result that was not refused."""
    study = judgement.folder.study
    best, value, beside = FIGURES[study.app](judgement.cases)
    tuned = {**study.options, **best.case.axes}
    how = " ".join(
        f"{name}={tuned[name]}" for name in (one.replace("_", "-") for one in study.tunable) if name in tuned
    )
    return Figure(value, beside, best.placement.ranks, how)


def machine_of(judgement: Judgement) -> str:
    head = judgement.runs[-1].head
    host = (head.get("machine", {}).get("hosts") or [{}])[0]
    devices = sorted({rank.get("device", "cpu").partition(" ")[2] for rank in head.get("ranks", [])} - {""})
    hosts = len({rank["host"] for rank in head.get("ranks", []) if "host" in rank})
    nodes = f"{hosts} x " if hosts > 1 else ""
    if devices:  # ranks that share one are refused
        return f"{len(head['ranks'])} x {devices[0]}" + (f", {hosts} hosts" if hosts > 1 else "")
    return f"{nodes}{host.get('cpu', 'unknown')}, {host.get('cores', '?')} cores"


def check_text(judgement: Judgement) -> str:
    study = judgement.folder.study
    name = f"{study.name} {study.size}"
    if judgement.problem is not None:
        name += f", problem {judgement.problem.hash}"
    lines = [f"# {judgement.path}: {name}"]
    if judgement.refused:
        return "\n".join([*lines, "REFUSED", *(f"  {reason}" for reason in judgement.refused)])
    figure = figure_of(judgement)
    ranks = f"{figure.ranks} rank{'s' if figure.ranks > 1 else ''}"
    lines.append(f"FIGURE {figure.value}, {figure.beside}; {ranks}, {machine_of(judgement)}; {figure.how}")
    if judgement.noise:
        lines += ["ACCEPTED, NOISY: correct, but its times are not to be quoted"]
        lines += [f"  {reason}" for reason in judgement.noise]
    else:
        lines.append("ACCEPTED")
    return "\n".join(lines)


def table_text(folder: Path) -> str:
    """A page of Markdown with a row for each result of a folder. All must be accepted."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        with opened(path) as (study, stated):
            judgement = judge(study, path, stated)
            if judgement.refused:
                raise StudyError(check_text(judgement), 1)
            figure, run = figure_of(judgement), judgement.runs[-1]
            cells = [
                study.study.name.removeprefix(PREFIX),
                study.study.size,
                machine_of(judgement),
                str(figure.ranks),
                f"{'~ ' if judgement.noise else ''}{figure.value}",
                figure.beside,
                figure.how,
                run.head.get("run", {}).get("start", "")[:10],
                run.build["git"],
                f"[{path.stem}]({folder.name}/{path.name})",
            ]
            rows.append(f"| {' | '.join(cells)} |\n")
    if not rows:
        raise StudyError(f"{folder}: no result is there; gyre-study check FOLDER -o FILE makes one")
    head = "| program | size | machine | ranks | figure | beside it | tuned | recorded | commit | result |\n"
    return TABLE_HEAD + head + "|---|---|---|---:|---|---|---|---|---|---|\n" + "".join(rows)


TABLE_HEAD = """# Official results

Accepted results of the [official problems](../docs/official.md), made from the files of [official/](official) by
`slurm/gyre-study table results/official -o results/table.md`. A `~` marks times that break a
[run rule](../docs/run-rules.md): the results are right, but their figures are not to be quoted.

"""
