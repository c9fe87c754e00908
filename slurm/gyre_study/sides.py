"""Reads the sides of a comparison: folders of studies, SQLite files, files of results; a list of runs each."""

import json
import re
import shlex
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import StudyError
from .identity import Experiment, experiments
from .official import is_result, opened
from .results import Row, Run, read_runs

FORMS = "a study's folder, an SQLite file of collect, .jsonl or .json"


@dataclass
class Side:
    """A row in a run. `samples`: ms of each iteration, of the slowest rank, of all its cycles that are right."""

    samples: list[float]
    wrong: bool
    where: str
    broken: str = ""  # run rules that it breaks

    def add(self, row: Row) -> None:
        if row.verdict == "INVALID":
            self.wrong = True
        else:
            reasons = "; ".join(row.reasons) or row.verdict
            self.broken = self.broken or ("" if row.verdict == "VALID" else reasons)
            self.samples += [sample for sample in row.slowest() if sample > 0]


Sides = dict[str, Side]  # rows of a run, by the name of their experiment


@dataclass
class Compared:
    """Runs of either side, and the experiments by name."""

    before: list[Sides]
    after: list[Sides]
    cases: dict[str, Experiment]
    runs: tuple[list[Run], list[Run]]  # of the programs


def runs_of_database(path: Path) -> list[Run]:
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    database.row_factory = sqlite3.Row
    try:
        times: dict[int, list[float]] = {}
        slowest = "SELECT row_id, max(ms) FROM samples GROUP BY row_id, iteration ORDER BY row_id, iteration"
        for row_id, ms in database.execute(slowest):
            times.setdefault(row_id, []).append(ms)
        runs = {row["run_id"]: run_of(row) for row in database.execute("SELECT * FROM runs ORDER BY run_id")}
        for row in database.execute("SELECT * FROM rows ORDER BY row_id"):
            keys = [name for name in row.keys() if name.startswith("key_") and row[name] is not None]
            status = {"result": row["result"], "reasons": [row["reasons"]] if row["reasons"] else []}
            data = {"key": {name[4:]: row[name] for name in keys}, "status": status}
            runs[row["run_id"]].rows.append(
                Row(row["line"], "", {**data, "samples_ms": [times.get(row["row_id"], [])]})
            )
    except (sqlite3.DatabaseError, LookupError, TypeError, ValueError) as error:
        raise StudyError(
            f"{path}: {error}; wanted: a file that gyre-study collect wrote"
        ) from error
    finally:
        database.close()
    return list(runs.values())


def run_of(row: sqlite3.Row) -> Run:
    """The head of a run, as far as a collected study has it."""
    hosts = row["hosts"].split() or [""]
    tables = ("configuration", "inputs", "libraries", "environment", "machine")
    builds = [name for name in row.keys() if name.startswith("build_") and row[name]]
    head = {
        "suite": {"program": row["program"], "git": row["build_git"]},
        "build": {name[6:]: row[name] for name in builds},
        "run": {"argv": shlex.split(row["argv"])},
        "ranks": [{"host": hosts[rank % len(hosts)]} for rank in range(row["ranks"])],
        "binding": row["binding"],
        **{name: json.loads(row[name] or "null") or {} for name in tables},
    }
    return Run(row["id"], Path(row["file"]), row["line"], head)


def runs_of(path: Path) -> list[Run]:
    """All runs of the programs that a path holds."""
    if path.is_dir():
        files = sorted((path / "rows").glob("*.jsonl"))
        if not files:
            raise StudyError(
                f"{path}: no rows/*.jsonl are there; wanted: the folder of a study that was run"
            )
        return [run for file in files for run in read_runs(file)]
    if not path.is_file():
        raise StudyError(f"{path}: no such file; wanted: {FORMS}")
    if path.suffix == ".json" and is_result(path):
        with opened(path) as (folder, _):
            return runs_of(folder.path)
    return runs_of_database(path) if path.suffix == ".sqlite" else read_runs(path)


def repetition_of(run: Run) -> int:
    """Of a study that repeats itself: its rows are in a file each."""
    number = re.search(r"-r(\d+)\.jsonl$", run.file.name)
    return int(number[1]) if number else 1


def split(runs: Sequence[tuple[Run, list[Experiment]]]) -> list[Sides]:
    """The runs of one path: one, or one a repetition, or as many as there are of every row.

    A row that was measured again, when others were not, counts as it was measured last.
    """
    found: list[Sides] = []
    for repetition in sorted({repetition_of(run) for run, _ in runs}):
        rows: dict[str, dict[int, Side]] = {}
        for place, (run, own) in enumerate(runs):
            if repetition_of(run) == repetition:
                for row, case in zip(run.rows, own):
                    side = Side([], False, f"{run.file.name}:{row.line}")
                    rows.setdefault(case.name, {}).setdefault(place, side).add(row)
        counts = {len(sides) for sides in rows.values()}
        many = counts.pop() if len(counts) == 1 else 1
        if not rows:
            continue
        found += [{name: [*sides.values()][turn - many] for name, sides in rows.items()} for turn in range(many)]
    return found


def read_sides(before: Sequence[Path], after: Sequence[Path]) -> Compared:
    """Reads the paths of both sides; what a row is of is decided over all of them."""
    of_path = [runs_of(path) for path in (*before, *after)]
    runs = [run for one in of_path for run in one]
    cases = experiments(runs)
    pairs = iter(zip(runs, cases))
    splits = [split([next(pairs) for _ in one]) for one in of_path]
    count = len(before)
    sides = [[run for one in side for run in one] for side in (splits[:count], splits[count:])]
    programs = [[run for one in side for run in one] for side in (of_path[:count], of_path[count:])]
    names = {case.name: case for own in cases for case in own}
    return Compared(sides[0], sides[1], names, (programs[0], programs[1]))
