"""How far each case is: from its rows, what was handed over, and what the queue says."""

import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .app import App
from .cases import Case, Placement
from .errors import RUNTIME, USAGE, StudyError
from .folder import Folder, read_events
from .identity import contradicts
from .results import Row, Run, read_lines
from .slurm import queued_jobs, this_user

# In the order in which they are told. "refused": the program cannot run this combination.
STATES = (
    "done",
    "running",
    "queued",
    "unknown",
    "noisy",
    "invalid",
    "failed",
    "cut off",
    "refused",
    "missing",
)
ENDED = ("done", "refused")  # not launched again by themselves
UNDER_WAY = ("running", "queued", "unknown")  # not launched again before their end is known
TIMED_OUT = 124  # in place of an exit code: gyre-study has ended the launch


@dataclass
class CaseStatus:
    """`rows`: the newest of each key, with its run. `reason`: one line, or "".

    `alone`: the program refused a launch of several cases, and it is not known which; they are launched one by one.
    """

    case: Case
    placement: Placement
    state: str
    reason: str = ""
    rows: list[tuple[Run, Row]] = field(default_factory=list)
    alone: bool = False


def fits(case: Case, row: Row, app: App) -> bool:
    return all(row.key.get(name) == value for name, value in case.axes.items() if name in app.swept)


def stands(row: Row, accept: str, unchecked: bool) -> bool:
    """Whether a row need not be measured again."""
    if row.verdict == "INVALID" or (row.verdict == "UNVERIFIED" and not unchecked):
        return False
    return accept == "finished" or row.is_measured


def newest_rows(runs: list[Run], app: App) -> dict[str, tuple[Run, Row]]:
    """The newest row of each key, from runs of this build."""
    rows = {}
    for run in runs:
        if run.build == app.build:
            for row in run.rows:
                rows[json.dumps(row.key, sort_keys=True)] = (run, row)
    return rows


def other_run(case_rows: list[tuple[Run, Row]], placement: Placement, app: App, flags: str) -> str:
    """Why rows do not count, whatever they hold: their run was started or compiled otherwise. Or "".

    `flags`: of the last run. A program does not say its compiler flags before it runs.
    """
    for run, _ in case_rows:
        if differs := contradicts(run, placement.arguments, app.swept):
            return f"its rows are of a run with {differs}"
        if run.flags != flags:
            return f"its rows are of a program that was compiled with {run.flags or 'flags that it does not say'}"
    return ""


def is_complete(case_rows: list[tuple[Run, Row]], folder: Folder) -> bool:
    """Whether nothing that belongs to the case was cut off: its run ended, or all passes are there."""
    if all(run.end is not None for run, _ in case_rows):
        return True
    option = folder.app.options.get("pass")
    if option is None:
        return False
    wanted = str(folder.study.options.get("pass", option.usual))
    passes = set(option.choices) - {"both"} if wanted == "both" else {wanted}
    return len(case_rows) % len(passes) == 0 and passes <= {
        row.key.get("pass") for _, row in case_rows
    }


# What was handed over


@dataclass
class Attempt:
    """The last launch of a case.

    `job`: "17_3", or "" where sbatch's answer is not known. `name`: of the job, once it was handed to sbatch. `gone`: why
    it is known to have ended, or never to have been there.
    """

    id: str
    job: str
    log: Path
    begun: bool
    code: int | None
    submission: dict[str, Any]
    cases: int = 1
    process: int | None = None  # process group of a launch of `gyre-study run`
    name: str = ""
    cluster: str = ""
    gone: str = ""

    @property
    def is_local(self) -> bool:
        return bool(self.submission["how"] == "run")

    def is_refused(self, app: App) -> bool:
        """Whether the program itself refused the launch: launchers have an exit code 2, too."""
        return self.code == USAGE and any(f"{app.name}: error:" in line for line in said(self.log))


def attempts(folder: Folder) -> dict[str, Attempt]:
    """The last launch of each case."""
    found: dict[str, Attempt] = {}
    for submission in folder.submissions():
        events: dict[str, dict[str, Any]] = {}
        for file in folder.job_folder(submission).glob("*.state"):
            for event in read_events(file):
                events.setdefault(event["launch"], {})[event["event"]] = event
        for launch in submission["launches"]:
            job = launch["job"] if re.fullmatch(r"(\d+(_\d+)?)?", launch["job"]) else ""
            usual = f"gyre-{folder.study.name}" if launch["job"] else ""  # the name that jobs had before all had their own
            own = events.get(launch["id"], {})
            attempt = Attempt(
                launch["id"],
                job,
                folder.path / "logs" / launch["log"],
                "begin" in own,
                own["end"].get("code", RUNTIME) if "end" in own else None,
                submission,
                len(launch["cases"]),
                own["begin"].get("process") if "begin" in own else None,
                launch.get("name", usual),
                launch.get("cluster", ""),
                launch.get("gone", ""),
            )
            found.update(dict.fromkeys(launch["cases"], attempt))
    return found


def queue_of(folder: Folder, handed: Iterable[Attempt]) -> dict[tuple[str, str], str]:
    """What the queue says of the jobs whose end is not noted; Slurm is asked only where there are some."""
    waits = [one for one in handed if one.code is None and one.name and not one.is_local]
    if not waits:
        return {}
    users = {one.submission.get("user") or this_user() for one in waits}
    return queued_jobs(users, sorted({one.cluster for one in waits}))


def is_alive(folder: Folder, submission: dict[str, Any]) -> bool:
    """Whether a `gyre-study run` of this host, or a launch of it, still runs; of another host it is taken to."""
    return submission["host"] != socket.gethostname() or folder.is_held(submission)


def said(log: Path) -> list[str]:
    """The lines of a log that have words; none without a log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip()]


def last_words(log: Path) -> str:
    """What a program said at last, or about what it refused: one line."""
    lines = said(log)
    for pattern in (r"^- |error:", r"Error|ERROR|killed|CANCELLED|TIME LIMIT|slurmstepd"):
        telling = [
            line
            for line in lines
            if re.search(pattern, line) and not line.endswith("impossible configuration")
        ]
        if telling:
            return telling[0].removeprefix("- ")
    return lines[-1] if lines else "its log is empty, or not there"


def refusal(case: Case, log: Path) -> str:
    """The program's line about a combination that it left out of "all", or ""."""
    words = [
        str(value)
        for name, value in case.axes.items()
        if name in ("schedule", "layout", "algorithm", "op")
    ]
    for line in said(log):
        named = re.search(r"schedule ([\w-]+):|^# refused:? ([\w-]+)(?:[:,]| by )", line)
        if line.startswith("# refused") and (named is None or {*named.groups()} & {*words}):
            return line.removeprefix("# ")
    return ""


def code_text(code: int) -> str:
    """How a launch ended."""
    if code == TIMED_OUT:
        return "it took longer than the study's minutes, and was ended"
    if code >= 0:
        return f"exit code {code}"
    names = {sign.value: sign.name for sign in signal.Signals}
    return f"its launcher was killed by {names.get(-code, f'signal {-code}')}"


# Together


def open_end(attempt: Attempt, queue: dict[tuple[str, str], str], folder: Folder) -> tuple[str, str]:
    """State and reason of a launch that has not noted its end."""
    waits = queue.get((attempt.cluster, attempt.job or attempt.name), "")
    if waits or (attempt.is_local and is_alive(folder, attempt.submission)):
        is_running = attempt.begun and waits in ("", "RUNNING", "COMPLETING")
        return ("running" if is_running else "queued"), attempt.job or attempt.name
    if attempt.begun:
        return "cut off", last_words(attempt.log)
    if attempt.gone:
        return "missing", attempt.gone
    if attempt.is_local or attempt.job:
        return "missing", f"{'gyre-study run' if attempt.is_local else f'job {attempt.job}'} ended before it"
    if not attempt.name:
        return "missing", "it was not handed to sbatch"
    what = f"squeue has no job {attempt.name}, and sbatch's answer is not known"
    return "unknown", f"{what}; gyre-study cancel ends it, if it is there, and gives it free"


def from_attempt(
    case: Case, attempt: Attempt | None, queue: dict[tuple[str, str], str], folder: Folder
) -> tuple[str, str]:
    """State and reason of a case that has no rows that stand."""
    if attempt is None:
        return "missing", ""
    if attempt.code is None:
        return open_end(attempt, queue, folder)
    if attempt.code == 0:
        reason = refusal(case, attempt.log)
        return ("refused", reason) if reason else ("failed", "exit code 0, but its rows are missing")
    refused = attempt.is_refused(folder.app)
    if refused and attempt.cases == 1:
        return "refused", last_words(attempt.log)
    more = f"one of {attempt.cases} cases, which are launched one by one next: " if refused else ""
    return "failed", f"{code_text(attempt.code)}: {more}{last_words(attempt.log)}"


def statuses(folder: Folder) -> list[CaseStatus]:
    """States of all cases, in the order of the plan."""
    handed = attempts(folder)
    queue = queue_of(folder, handed.values())
    unchecked = str(folder.study.options.get("check", "")) == "none"
    found = []
    for placement in folder.placements:
        runs = read_lines(folder.rows_file(placement))
        rows = newest_rows(runs, folder.app)
        for case in placement.cases:
            own = [(run, row) for run, row in rows.values() if fits(case, row, folder.app)]
            attempt = handed.get(case.id)
            status = CaseStatus(
                case, placement, *from_attempt(case, attempt, queue, folder), own
            )
            status.alone = attempt is not None and attempt.is_refused(folder.app)
            other = other_run(own, placement, folder.app, runs[-1].flags if runs else "")
            if other and status.state not in UNDER_WAY:
                status.state, status.reason = "missing", other
            elif own and status.state not in UNDER_WAY:
                judge(status, folder, unchecked)
            elif (
                own
                and not other
                and is_complete(own, folder)
                and all(stands(row, folder.accept, unchecked) for _, row in own)
            ):
                status.state, status.reason = "done", ""  # the launch goes on with other cases
            found.append(status)
    return found


def report_log(folder: Folder, job: str) -> Path:
    return folder.path / "logs" / f"report-{job}.log"


def report_job(folder: Folder) -> str:
    """The job of the last `submit --report` while it is in the queue; else ""."""
    asked = [one for one in folder.submissions() if "report" in one]
    waits = queued_jobs({asked[-1].get("user") or this_user()}) if asked and not has_page(folder, asked[-1]) else {}
    return asked[-1]["report"] if asked and ("", asked[-1]["report"]) in waits else ""


def has_page(folder: Folder, submission: dict[str, Any]) -> bool:
    page = folder.path / "report.html"
    return page.is_file() and page.stat().st_mtime > submission["time"]


def report_text(folder: Folder) -> str:
    """What became of the report that `submit --report` asked for last; "" if it is there, or none was asked for."""
    asked = [one for one in folder.submissions() if "report" in one]
    if not asked or has_page(folder, asked[-1]):
        return ""
    job = asked[-1]["report"]
    try:
        waits = queued_jobs({asked[-1].get("user") or this_user()}).get(("", job))
    except StudyError as error:
        return f"job {job}: {str(error).splitlines()[0]}"
    if waits:
        return f"job {job} is {waits.lower()}"
    return f"job {job} failed: {last_words(report_log(folder, job))}"


def judge(status: CaseStatus, folder: Folder, unchecked: bool) -> None:
    """Sets the state of a case that has rows and is not under way."""
    wrong = [row for _, row in status.rows if row.verdict == "INVALID"]
    doubtful = [row for _, row in status.rows if not stands(row, folder.accept, unchecked)]
    if wrong:
        status.state, status.reason = "invalid", "; ".join(wrong[0].reasons)
    elif not is_complete(status.rows, folder):
        if status.state not in ("failed", "cut off"):
            status.state, status.reason = "missing", "some of its rows are missing"
    elif doubtful:
        reasons = [reason.removeprefix("noisy: ") for reason in doubtful[0].reasons]
        status.state, status.reason = "noisy", "; ".join(reasons)
    else:
        status.state, status.reason = "done", ""


def counts(found: list[CaseStatus]) -> dict[str, int]:
    """Cases in each state; states without any are left out."""
    number = Counter(status.state for status in found)
    return {state: number[state] for state in STATES if number[state]}
