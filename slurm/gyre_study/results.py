"""Reads result files (gyre-result/1): lines of kind run, row and end, or one document a run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import RUNTIME, StudyError

SCHEMA = "gyre-result/1"


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
        """Its timing meets the run rules."""
        return bool(self.data.get("status", {}).get("measured", False))

    def slowest(self) -> list[float]:
        """Time of each iteration in ms: of the slowest rank."""
        ranks = self.data.get("samples_ms") or []
        return [max(times) for times in zip(*ranks) if all(time is not None for time in times)]


@dataclass
class Run:
    """`head`: what is known before the first row; `end`: what is known behind the last one, or nothing."""

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


def wrong(path: Path, place: str, what: str) -> StudyError:
    return StudyError(f"{path}: {place}: {what}; wanted: {SCHEMA}", RUNTIME)


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines and their numbers. A last line that was cut off is left out."""
    data = path.read_bytes()
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise wrong(path, f"line {number}", str(error)) from error
        if not isinstance(value, dict) or value.get("schema") != SCHEMA or "kind" not in value:
            raise wrong(path, f"line {number}", "it is no line of results")
        yield number, value


def read_lines(path: Path) -> list[Run]:
    """The runs of a file of lines, in order. No file: no runs."""
    runs: dict[str, Run] = {}
    if not path.exists():
        return []
    for number, value in objects(path):
        kind = value["kind"]
        if kind == "run":
            runs[value.get("id", "")] = Run(value.get("id", ""), path, number, value)
            continue
        run = runs.get(value.get("run", ""))
        if run is None:
            raise wrong(path, f"line {number}", f"no run {value.get('run')!r} stands before it")
        if kind == "row":
            if not isinstance(value.get("key"), dict):
                raise wrong(path, f"line {number}", "a row without a key")
            run.rows.append(Row(number, value.get("time", ""), value))
        elif kind == "end":
            run.end = value
    return list(runs.values())


def read_document(path: Path) -> list[Run]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise wrong(path, "the file", str(error)) from error
    if (
        not isinstance(value, dict)
        or value.get("schema") != SCHEMA
        or not isinstance(value.get("results"), list)
    ):
        raise wrong(path, "the file", "it is no result")
    stamp = value.get("run", {}).get("end", "")
    run = Run(f"{path.stem}", path, 1, value, end=value)
    run.rows = [Row(number, stamp, row) for number, row in enumerate(value["results"], 1)]
    return [run]


def read_runs(path: Path) -> list[Run]:
    """Of one file, lines or a document."""
    return read_document(path) if path.suffix == ".json" else read_lines(path)
