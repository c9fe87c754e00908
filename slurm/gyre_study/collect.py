"""All results of a study as one SQLite file.

    study     one line: name, title, kind, app, site, plan (JSON)
    cases     one a case: case_id, placement, state, reason, nodes, ranks, predicted_fwd_ms ..., axis_NAME ...
    runs      one a launch that wrote results: who, when, where, by which build, how it ended
    rows      one a measured row: row_id, run_id, case_id, file, line, result, NAME_ms of its times, key_NAME, and what
              was measured
    units     of the measurements
    samples   one an iteration and rank: row_id, rank, iteration, ms
    foms      figures of merit of runs

In rows, is_newest is 1 for the last row of its key and build; earlier ones stay for the record.
"""

import json
import re
import shlex
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import RUNTIME, StudyError
from .folder import Folder
from .identity import contradicts
from .results import Row, Run, read_lines
from .status import CaseStatus, fits, newest_rows, statuses

STATISTICS = ("median", "median_low", "median_high", "min", "p95", "mean")


@dataclass
class Collected:
    file: Path
    runs: int
    rows: int
    cases: int


def column(name: str) -> str:
    """A name that SQL takes as it is."""
    return re.sub(r"\W", "_", name)


def cell(value: Any) -> Any:
    """SQLite's types; all else as JSON."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    return json.dumps(value)


def write_table(
    database: sqlite3.Connection, name: str, rows: list[dict[str, Any]], columns: Iterable[str] = ()
) -> None:
    """A table with the columns that any row has, in the order in which they come first."""
    names = list(dict.fromkeys([*columns, *(key for row in rows for key in row)]))
    listed = ", ".join(f'"{one}"' for one in names)
    database.execute(f'CREATE TABLE "{name}" ({listed})')
    marks = ", ".join("?" * len(names))
    database.executemany(
        f'INSERT INTO "{name}" VALUES ({marks})',
        ([cell(row.get(one)) for one in names] for row in rows),
    )


def run_fields(number: int, run: Run, placement: str) -> dict[str, Any]:
    head, end = run.head, run.end or {}
    hosts = list(dict.fromkeys(rank.get("host", "") for rank in head.get("ranks", [])))
    started = head.get("run", {})
    return {
        "run_id": number,
        "id": run.id,
        "placement": placement,
        "file": run.file.name,
        "line": run.line,
        "program": head.get("suite", {}).get("program"),
        **{f"build_{key}": value for key, value in run.build.items()},
        "build_flags": run.flags or None,
        "start": started.get("start"),
        "end": end.get("end") or started.get("end"),
        "launcher": started.get("launcher"),
        "job": started.get("job"),
        "hosts": " ".join(hosts),
        "nodes": len(hosts),
        "ranks": len(head.get("ranks", [])),
        "binding": run.binding or None,
        "argv": shlex.join(started.get("argv", [])),
        "libraries": head.get("libraries"),
        "environment": head.get("environment"),
        "configuration": head.get("configuration"),
        "inputs": head.get("inputs"),
        "machine": head.get("machine"),
        "result": end.get("status", {}).get("result"),
        "reasons": "; ".join(end.get("status", {}).get("reasons", [])),
    }


def row_fields(number: int, run_number: int, run: Run, row: Row) -> dict[str, Any]:
    data = row.data
    statistics = data.get("statistics_ms", {})
    fields = {
        "row_id": number,
        "run_id": run_number,
        "case_id": None,
        "is_newest": 0,
        "file": run.file.name,
        "line": row.line,
        "measured_at": row.time,
        "result": row.verdict,
        "is_measured": int(row.is_measured),
        "reasons": "; ".join(row.reasons),
        "repetitions": statistics.get("count"),
        **{f"{name}_ms": statistics.get(name) for name in STATISTICS},
        "cv": statistics.get("cv"),
        "cpu_share": data.get("cpu_share"),
        "flops": data.get("model", {}).get("flops"),
        "bytes_wire": data.get("model", {}).get("bytes_wire"),
        **{f"key_{column(name)}": value for name, value in row.key.items()},
    }
    for name, value in data.get("measurements", {}).items():
        if name not in row.key and column(name) not in fields:
            fields[column(name)] = value
    return fields


def samples_of(number: int, row: Row) -> Iterable[tuple[int, int, int, float]]:
    for rank, times in enumerate(row.data.get("samples_ms") or []):
        for iteration, time in enumerate(times):
            yield number, rank, iteration, time


class Collector:
    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.runs: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.samples: list[tuple[int, int, int, float]] = []
        self.foms: list[dict[str, Any]] = []
        self.units: dict[str, str] = {}

    def add_file(self, file: Path) -> None:
        placement = next(
            (one for one in self.folder.placements if self.folder.rows_file(one) == file), None
        )
        runs = read_lines(file)
        newest = {id(row) for _, row in newest_rows(runs, self.folder.app).values()}
        for run in runs:
            number = len(self.runs) + 1
            self.runs.append(run_fields(number, run, placement.name if placement else file.stem))
            for fom in (run.end or {}).get("fom", []):
                self.foms.append({"run_id": number, **fom})
            for row in run.rows:
                fields = row_fields(len(self.rows) + 1, number, run, row)
                self.units.update(
                    {column(name): unit for name, unit in row.data.get("units", {}).items()}
                )
                self.samples += samples_of(fields["row_id"], row)
                app = self.folder.app
                ours = placement is not None and run.build == app.build
                if placement and ours and not contradicts(run, placement.arguments, app.swept):
                    case = next(
                        (case for case in placement.cases if fits(case, row, app)), None
                    )
                    fields.update(
                        case_id=case.id if case else None,
                        is_newest=int(case is not None and id(row) in newest),
                    )
                self.rows.append(fields)


def case_fields(status: CaseStatus, folder: Folder) -> dict[str, Any]:
    placement = status.placement
    predicted = folder.predicted.get(status.case.id, {})
    return {
        "case_id": status.case.id,
        "kin": status.case.kin,
        "placement": placement.name,
        "repetition": placement.repetition,
        "state": status.state,
        "reason": status.reason,
        "nodes": placement.nodes,
        "ranks": placement.ranks,
        **{f"axis_{column(name)}": value for name, value in status.case.axes.items()},
        **{f"predicted_{name}_ms": time for name, time in predicted.items()},
    }


def collect(folder: Folder) -> Collected:
    """Writes study.sqlite under another name first, and renames it."""
    collector = Collector(folder)
    for file in sorted((folder.path / "rows").glob("*.jsonl")):
        collector.add_file(file)
    found = statuses(folder)
    path = folder.path / "study.sqlite"
    beside = folder.path / ".study.sqlite"
    beside.unlink(missing_ok=True)
    try:
        write_database(beside, folder, collector, found)
        beside.replace(path)
    except sqlite3.Error as error:  # a full disk
        raise StudyError(f"{path}: {error}", RUNTIME) from error
    finally:
        beside.unlink(missing_ok=True)
    return Collected(path, len(collector.runs), len(collector.rows), len(found))


def write_database(
    path: Path, folder: Folder, collector: Collector, found: list[CaseStatus]
) -> None:
    database = sqlite3.connect(path)
    try:
        study, site = folder.study, folder.site
        plan = {"study": asdict(study), "site": asdict(site), "build": folder.app.build}
        about = {
            "name": study.name,
            "title": study.title or study.name,
            "kind": study.kind,
            "app": study.app,
            "site": site.name,
        }
        write_table(database, "study", [{**about, "accept": study.accept, "plan": plan}])
        write_table(database, "cases", [case_fields(status, folder) for status in found])
        no_run = Run("", path, 0, {})  # all columns are there, also without a row
        write_table(database, "runs", collector.runs, run_fields(0, no_run, ""))
        write_table(
            database, "rows", collector.rows, row_fields(0, 0, no_run, Row(0, "", {"key": {}}))
        )
        units = {
            **{f"{name}_ms": "ms" for name in STATISTICS},
            "flops": "FLOP",
            "bytes_wire": "B",
            **collector.units,
        }
        write_table(
            database, "units", [{"column": name, "unit": unit} for name, unit in units.items()]
        )
        database.execute("CREATE TABLE samples (row_id, rank, iteration, ms)")
        database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?)", collector.samples)
        database.execute("CREATE INDEX samples_of_row ON samples (row_id)")
        write_table(database, "foms", collector.foms, ("run_id", "metric", "value", "unit", "tags"))
        database.commit()
    finally:
        database.close()
