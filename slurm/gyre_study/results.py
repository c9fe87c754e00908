"""Reads result files (gyre-result/1): lines of kind run, row and end, or one document a run."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import RUNTIME, StudyError
from .shapes import ANY, NUMBER, misfit, parse_json

SCHEMA = "gyre-result/1"
OPEN = {"*": ANY}
ROW = {
    "key": OPEN,
    "status?": {"reasons?": [str], "result?": str, "*": ANY},
    "samples_ms?": (None, [[(None, NUMBER)]]),
    "statistics_ms?": OPEN,
    "measurements?": OPEN,
    "model?": OPEN,
    "units?": {"*": str},
    "time?": str,
    "*": ANY,
}
TEXT = (None, str)
ROUTE = (None, {"small?": TEXT, "large?": TEXT, "*": ANY})
MPI = {"library?": TEXT, "device?": TEXT, "transport?": TEXT, "inside_host?": ROUTE, "between_hosts?": ROUTE}
HOST = {
    "names?": [str],
    "cpu?": TEXT,
    "sockets?": (None, int),
    "cores?": (None, int),
    "memory_bytes?": (None, int),
    "gpus?": [str],
    "gpu_driver?": TEXT,
    "*": ANY,
}
HEAD = {
    "suite": {"program": str, "*": ANY},
    "build?": OPEN,
    "ranks?": [{"host?": str, "device?": str, "*": ANY}],
    "run?": {"argv?": [str], "start?": str, "*": ANY},
    "configuration?": OPEN,
    "inputs?": [{"file": str, "sha256": TEXT, "*": ANY}],
    "machine?": {"hosts?": [HOST], "mpi?": (None, {**MPI, "*": ANY}), "*": ANY},
    "*": ANY,
}
END = {"status?": {"reasons?": [str], "*": ANY}, "fom?": [OPEN], "*": ANY}
KINDS = {"run": {**HEAD, "id": str}, "row": {**ROW, "run": str}, "end": {**END, "run": str}}


@dataclass
class Row:
    """One measured row. `line`: in its file, from 1; of a document, its place in "results", from 1."""

    line: int
    time: str
    data: dict[str, Any]

    @property
    def key(self) -> dict[str, Any]:
        return self.data["key"]

    @property
    def verdict(self) -> str:
        return self.data.get("status", {}).get("result", "INVALID")

    @property
    def reasons(self) -> list[str]:
        return self.data.get("status", {}).get("reasons", [])

    @property
    def is_measured(self) -> bool:
        """Whether its timing meets the run rules."""
        return bool(self.data.get("status", {}).get("measured", False))

    def slowest(self) -> list[float]:
        """Time of each iteration in ms: of the slowest rank."""
        ranks = self.data.get("samples_ms") or []
        return [max(times) for times in zip(*ranks) if all(time is not None for time in times)]


@dataclass
class Run:
    """`head`: what is known before the first row; `end`: what is known after the last one, or nothing."""

    id: str
    file: Path
    line: int
    head: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @property
    def build(self) -> dict[str, str]:
        suite, build = self.head.get("suite", {}), self.head.get("build", {})
        from_suite = {name: suite.get(name, "") for name in ("version", "git", "git_state")}
        return {**from_suite, "type": build.get("type", ""), "compiler": build.get("compiler", "")}

    @property
    def flags(self) -> str:
        """Compiler flags; "" of older programs, which do not record them."""
        return str(self.head.get("build", {}).get("flags", ""))

    @property
    def binding(self) -> str:
        """CPUs of each rank: "0: 0-1, 1: 2-3"; "": unknown."""
        cpus = [f"{rank.get('rank')}: {rank['cpus']}" for rank in self.head.get("ranks", []) if rank.get("cpus")]
        return ", ".join(cpus) or self.head.get("binding") or ""


def portable(value: Any) -> Any:
    """A value without the folders of the files that it names, which differ between hosts."""
    if isinstance(value, dict):
        return {key: portable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [portable(one) for one in value]
    return re.sub(r"(?:(?<==)|^)[^=,]*/", "", value) if isinstance(value, str) else value


def wrong(path: Path, place: str, what: str) -> StudyError:
    return StudyError(f"{path}: {place}: {what}; wanted: {SCHEMA}", RUNTIME)


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines and their numbers. A last line that was cut off is left out."""
    data = path.read_bytes()
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        value = parse_json(Path(f"{path}: line {number}"), line)
        if not isinstance(value, dict) or value.get("schema") != SCHEMA or "kind" not in value:
            raise wrong(path, f"line {number}", "it is no line of results")
        shape = KINDS.get(str(value["kind"]), {"run": str, "*": ANY})
        if reason := misfit(value, shape, "it"):
            raise wrong(path, f"line {number}", reason)
        yield number, value


def read_lines(path: Path) -> list[Run]:
    """The runs of a file of lines, in order. No file: no runs."""
    return runs_of(path, objects(path)) if path.exists() else []


def runs_of(path: Path, lines: Iterable[tuple[int, dict[str, Any]]]) -> list[Run]:
    """The runs of numbered lines, in order."""
    runs: dict[str, Run] = {}
    for number, value in lines:
        kind = value["kind"]
        if kind == "run":
            runs[value["id"]] = Run(value["id"], path, number, value)
            continue
        run = runs.get(value.get("run", ""))
        if run is None:
            raise wrong(path, f"line {number}", f"no run {value.get('run')!r} stands before it")
        if kind == "row":
            run.rows.append(Row(number, value.get("time", ""), value))
        elif kind == "end":
            run.end = value
    return list(runs.values())


def read_document(path: Path) -> list[Run]:
    value = parse_json(path, path.read_bytes())
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise wrong(path, "the file", "it is no result")
    if reason := misfit(value, {**HEAD, **END, "results": [ROW]}, "it"):
        raise wrong(path, "the file", reason)
    stamp = value.get("run", {}).get("end", "")
    run = Run(f"{path.stem}", path, 1, value, end=value)
    run.rows = [Row(number, stamp, row) for number, row in enumerate(value["results"], 1)]
    return [run]


def read_runs(path: Path) -> list[Run]:
    """The runs of one file, of lines or a document."""
    return read_document(path) if path.suffix == ".json" else read_lines(path)
