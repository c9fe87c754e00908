"""Reads what the programs measured (-J FILE.json, -J FILE.jsonl, --csv FILE.csv) as a table."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

SCHEMA = "gyre-result/1"

Json = dict[str, Any]


def _snake_case(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower().replace("%", "percent")).strip("_")


def _columns(run: Json, row: Json) -> Json:
    """The columns that the CSV of the same run has; a later one of a name replaces the earlier."""
    ranks = run["ranks"]
    columns = {
        "app": run["suite"]["program"],
        "git": run["suite"]["git"],
        "start": run["run"]["start"],
        "host": ranks[0]["host"],
        "ranks": len(ranks),
    }
    measured = {}
    for name, value in row["measurements"].items():
        unit = row["units"].get(name)
        measured[_snake_case(name) + (f"_{_snake_case(unit)}" if unit else "")] = value
    for name, value in run["configuration"].items():
        empty = value == ""  # as pandas reads it from a CSV file
        columns[("option_" if name in measured else "") + _snake_case(name)] = None if empty else value
    columns |= {_snake_case(name): value for name, value in row["key"].items()}
    columns |= measured
    if row["samples_ms"]:
        columns["time_low_ms"] = row["statistics_ms"]["median_low"]
        columns["time_high_ms"] = row["statistics_ms"]["median_high"]
        columns["cpu_share"] = row["cpu_share"]
    return columns | {"result": row["status"]["result"]}


def _lines(text: str) -> Iterator[Json]:
    """The objects of JSON lines; a last line without an end is of a run that was killed."""
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error


def _runs_and_rows(text: str, is_lines: bool) -> tuple[list[Json], list[tuple[Json, Json]]]:
    """Runs, and each row with its run."""
    documents = list(_lines(text)) if is_lines else [json.loads(text)]
    for document in documents:
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"this is not of the schema {SCHEMA}")
    if not is_lines:
        return documents, [(documents[0], row) for row in documents[0]["results"]]
    runs = {line["id"]: line for line in documents if line["kind"] == "run"}
    rows = [(runs[line["run"]], line) for line in documents if line["kind"] == "row"]
    return list(runs.values()), rows


def read_results(path: str | os.PathLike[str]) -> "pandas.DataFrame":
    """The rows of a results file, with the same columns from .json, .jsonl and .csv.

    Columns are the run's configuration, the row's key, its measurements, named with their units
    (time_ms, sent_mb_rank), and its verdict. Of JSON, `attrs["runs"]` has all that each file says
    of its runs: build, machine, inputs, verification, samples. Needs pandas. ValueError: the file
    is not of the schema gyre-result/1.
    """
    import pandas

    name = os.fspath(path)
    if name.endswith(".csv"):
        return pandas.read_csv(name, keep_default_na=False, na_values=[""])
    try:
        text = Path(name).read_text(encoding="utf-8")
        runs, rows = _runs_and_rows(text, name.endswith(".jsonl"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    frame = pandas.DataFrame([_columns(run, row) for run, row in rows])
    frame.attrs["runs"] = runs
    return frame
