"""The folder of a study.

    plan.json                     study, site, build, placements and their cases
    rows/PLACEMENT.jsonl          results, as the program appends them
    jobs/NNN/submission.json      what was handed over when: jobs, launches and their cases
    jobs/NNN/SHAPE.launches       the lines that job.sbatch reads
    jobs/NNN/*.state              begin and end of launches, as job.sbatch notes them
    jobs/NNN/held                 locked as long as gyre-study run, or a process of its launches, lives
    logs/                         what programs and Slurm say
    study.sqlite, report.html     made by collect and report
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .app import App, Option
from .cases import Case, Expansion, Placement
from .errors import RUNTIME, StudyError, raise_all
from .files import SITE_KEYS, STUDY_KEYS, Site, Study, wrong_values
from .shapes import ANY, NUMBER, misfit, read_json

SCHEMA = "gyre-study/1"
PLAN = {
    "schema": str,
    "study": {"name": str, "kind": str, "app": str, "axes": dict, "problems?": {"*": dict},
              "chosen?": {"*": [(str, int)]}, "*": ANY},
    "site": {"name": str, "cores_per_node": int, "*": ANY},
    "app": {"name": str, "path": str, "build": {"*": str}, "options": {"*": [[str], str]}},
    "placements": [
        {
            "id": str,
            "name": str,
            "nodes": int,
            "ranks": int,
            "ranks_per_node": int,
            "common": dict,
            "arguments": [str],
            "cases": [{"id": str, "kin": str, "axes": dict}],
            "repetition?": int,
        }
    ],
    "predicted?": {"*": {"*": NUMBER}},
}
SUBMISSION = {
    "number": str,
    "how": str,
    "time": NUMBER,
    "host": str,
    "pid": int,
    "user?": str,
    "report?": str,
    "launches": [
        {"id": str, "job": str, "log": str, "cases": [str], "kin": [str], "name?": str, "cluster?": str, "gone?": str,
         "*": ANY},
    ],
}
EVENT = {"launch": str, "event": str, "time": NUMBER, "code?": int, "process?": int, "*": ANY}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Adds the file's name to write errors, such as a full disk, which do not have it."""
    try:
        yield
    except OSError as error:
        raise StudyError(f"{path}: {error.strerror}", RUNTIME) from error


def write_whole(path: Path, text: str) -> None:
    """Writes under another name and renames: a reader sees the old text or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_events(file: Path) -> list[dict[str, Any]]:
    """Lines of a .state file. A job killed in the middle of a line leaves an incomplete one, which is skipped."""
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not misfit(event, EVENT):
            found.append(event)
    return found


def placement_of(data: dict[str, Any]) -> Placement:
    fields: dict[str, Any] = {**data, "cases": [Case(**case) for case in data["cases"]]}
    return Placement(**fields)


class Folder:
    """A planned study. Raises a StudyError where there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        plan = self.path / "plan.json"
        if not plan.is_file():
            raise StudyError(
                f"{path}: no plan.json is there; gyre-study plan STUDY --site SITE -o {path} makes one"
            )
        data = read_json(plan, {"schema": str, "*": ANY})
        if data["schema"] != SCHEMA:
            raise StudyError(f"{plan}: schema {data['schema']!r}; wanted: {SCHEMA}")
        data = read_json(plan, PLAN)
        for part, keys in (("study", STUDY_KEYS), ("site", SITE_KEYS)):
            raise_all(wrong_values(f"{plan}: {part}", data[part], {"name": str, **keys}))
        self.study = Study(**data["study"])
        self.site = Site(**data["site"])
        options = {
            name: Option(name, tuple(kinds), usual)
            for name, (kinds, usual) in data["app"]["options"].items()
        }
        program = self.path / data["app"]["path"]
        self.app = App(data["app"]["name"], str(program.resolve()), data["app"]["build"], options)
        self.predicted: dict[str, dict[str, float]] = data.get("predicted", {})
        self.placements = [placement_of(one) for one in data["placements"]]

    @property
    def cases(self) -> list[Case]:
        return [case for placement in self.placements for case in placement.cases]

    @property
    def accept(self) -> str:
        return self.study.accept

    def rows_file(self, placement: Placement) -> Path:
        return self.path / "rows" / f"{placement.name}.jsonl"

    def submissions(self) -> list[dict[str, Any]]:
        """All submissions, oldest first."""
        files = sorted((self.path / "jobs").glob("*/submission.json"))
        return [read_json(file, SUBMISSION) for file in files]

    def job_folder(self, submission: dict[str, Any]) -> Path:
        return self.path / "jobs" / submission["number"]

    def is_held(self, submission: dict[str, Any]) -> bool:
        """Whether a process of this `gyre-study run`, or of its launches, lives on this host."""
        try:
            with (self.job_folder(submission) / "held").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    def new_submission(self) -> Path:
        """Creates an empty folder jobs/NNN."""
        numbers = [int(one.name) for one in (self.path / "jobs").glob("[0-9]*")]
        place = self.path / "jobs" / f"{max(numbers, default=0) + 1:03d}"
        place.mkdir(parents=True)
        return place

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock that lets one command at a time start launches."""
        with (self.path / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StudyError(
                    f"{self.path}: another gyre-study is submitting or running it", RUNTIME
                ) from error
            yield


def write_plan(
    path: Path,
    study: Study,
    site: Site,
    app: App,
    expansion: Expansion,
    predicted: dict[str, dict[str, float]],
) -> None:
    for name in ("rows", "jobs", "logs"):
        (path / name).mkdir(parents=True, exist_ok=True)
    options = {option.name: [option.kinds, option.usual] for option in app.options.values()}
    program = os.path.relpath(app.path, path.resolve())  # relative: a published study names no folder of this host
    plan = {
        "schema": SCHEMA,
        "study": asdict(study),
        "site": asdict(site),
        "app": {"name": app.name, "path": program, "build": app.build, "options": options},
        "placements": [asdict(placement) for placement in expansion.placements],
        "predicted": predicted,
    }
    write_whole(path / "plan.json", json.dumps(plan, indent=1) + "\n")
