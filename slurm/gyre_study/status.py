"""How far each case is: from its rows, what was handed over, and what the queue says."""

import json
import os
import re
import socket
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .app import App
from .cases import Case, Placement
from .errors import RUNTIME, StudyError
from .folder import Folder
from .results import Row, Run, read_lines

# In the order in which they are told. "refused": the program cannot run this combination.
STATES = (
    "done",
    "running",
    "queued",
    "noisy",
    "invalid",
    "failed",
    "cut off",
    "refused",
    "missing",
)
ENDED = ("done", "refused")  # not launched again by themselves
UNDER_WAY = ("running", "queued")
USAGE = 2  # exit code of a program: impossible configuration


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
    """By key, of runs of this build."""
    rows = {}
    for run in runs:
        if run.build == app.build:
            for row in run.rows:
                rows[json.dumps(row.key, sort_keys=True)] = (run, row)
    return rows


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
    """The last launch of a case."""

    job: str
    log: Path
    begun: bool
    code: int | None
    is_local: dict[str, Any] | None  # host and pid of `gyre-study run`, or nothing
    cases: int = 1


def attempts(folder: Folder) -> dict[str, Attempt]:
    """By case."""
    found: dict[str, Attempt] = {}
    for submission in folder.submissions():
        place = folder.path / "jobs" / submission["number"]
        events: dict[str, dict[str, Any]] = {}
        for file in place.glob("*.state"):
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # the job was ended in the middle of a line
                events.setdefault(event["launch"], {})[event["event"]] = event
        for launch in submission["launches"]:
            own = events.get(launch["id"], {})
            code = own["end"]["code"] if "end" in own else None
            log = folder.path / "logs" / launch["log"]
            local = submission if submission["how"] == "run" else None
            attempt = Attempt(launch["job"], log, "begin" in own, code, local, len(launch["cases"]))
            found.update(dict.fromkeys(launch["cases"], attempt))
    return found


def queued_jobs() -> dict[str, str]:
    """State by job ("12_3" of an array), of all of this user's.

    An error where Slurm does not answer: what is not known to have ended must not be submitted again.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i %T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StudyError(
            f"jobs were submitted, but squeue does not say what became of them: {error}", RUNTIME
        ) from error
    if done.returncode != 0:
        raise StudyError(f"squeue: exit code {done.returncode}: {done.stderr.strip()}", RUNTIME)
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)


def is_alive(local: dict[str, Any]) -> bool:
    """Whether a `gyre-study run` of this host still runs; of another host it is taken to."""
    if local["host"] != socket.gethostname():
        return True
    try:
        command = Path(f"/proc/{local['pid']}/cmdline").read_bytes()
    except OSError:
        return False
    return b"gyre-study" in command and local["pid"] != os.getpid()


def last_words(log: Path) -> str:
    """What a program said at last, or about what it refused: one line."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "no log is there"
    said = [line.strip() for line in lines if line.strip()]
    for pattern in (r"^- |error:", r"Error|ERROR|killed|CANCELLED|TIME LIMIT|slurmstepd"):
        telling = [
            line
            for line in said
            if re.search(pattern, line) and not line.endswith("impossible configuration")
        ]
        if telling:
            return telling[0].removeprefix("- ")
    return said[-1] if said else "its log is empty"


def refusal(case: Case, log: Path) -> str:
    """The program's line about a combination that it left out of "all"."""
    words = [
        str(value)
        for name, value in case.axes.items()
        if name in ("schedule", "layout", "algorithm", "op")
    ]
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        named = re.search(r"schedule ([\w-]+):|^# refused: ([\w-]+):", line)
        if line.startswith("# refused") and (named is None or {*named.groups()} & {*words}):
            return line.removeprefix("# ")
    return "left out by the program"


# Together


def from_attempt(case: Case, attempt: Attempt | None, queue: dict[str, str]) -> tuple[str, str]:
    """State and reason of a case that has no rows that stand."""
    if attempt is None:
        return "missing", ""
    waits = queue.get(attempt.job, "")
    alive = attempt.is_local is not None and is_alive(attempt.is_local)
    if attempt.code is None and (waits or alive):
        is_running = attempt.begun and waits in ("", "RUNNING", "COMPLETING")
        return ("running" if is_running else "queued"), attempt.job
    if attempt.code is None:
        return (
            ("cut off", last_words(attempt.log))
            if attempt.begun
            else ("missing", f"job {attempt.job} ended before it")
        )
    if attempt.code == 0:
        return "refused", refusal(case, attempt.log)
    if attempt.code == USAGE and attempt.cases == 1:
        return "refused", last_words(attempt.log)
    more = (
        f"one of {attempt.cases} cases, which are launched one by one next: "
        if attempt.code == USAGE
        else ""
    )
    return "failed", f"exit code {attempt.code}: {more}{last_words(attempt.log)}"


def statuses(folder: Folder) -> list[CaseStatus]:
    """Of all cases, in the order of the plan."""
    handed = attempts(folder)
    waits = any(one.code is None and one.job and one.is_local is None for one in handed.values())
    queue = queued_jobs() if waits else {}
    unchecked = str(folder.study.options.get("check", "")) == "none"
    found = []
    for placement in folder.placements:
        rows = newest_rows(read_lines(folder.rows_file(placement)), folder.app)
        for case in placement.cases:
            own = [(run, row) for run, row in rows.values() if fits(case, row, folder.app)]
            attempt = handed.get(case.id)
            status = CaseStatus(case, placement, *from_attempt(case, attempt, queue), own)
            status.alone = attempt is not None and attempt.code == USAGE
            if own and status.state not in UNDER_WAY:
                judge(status, folder, unchecked)
            elif (
                own
                and is_complete(own, folder)
                and all(stands(row, folder.accept, unchecked) for _, row in own)
            ):
                status.state, status.reason = "done", ""  # the launch goes on with other cases
            found.append(status)
    return found


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
        status.state, status.reason = "noisy", "; ".join(doubtful[0].reasons)
    else:
        status.state, status.reason = "done", ""


def counts(found: list[CaseStatus]) -> dict[str, int]:
    """Cases in each state; states without any are left out."""
    number = Counter(status.state for status in found)
    return {state: number[state] for state in STATES if number[state]}
