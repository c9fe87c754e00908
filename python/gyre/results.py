"""Reads what the programs measured (-J FILE.json, -J FILE.jsonl, --csv FILE.csv) as a table."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

SCHEMA = "gyre-result/1"

Json = dict[str, Any]


def _snake_case(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower().replace("%", "percent")).strip("_")


def _run_columns(run: Json) -> tuple[Json, Json]:
    """What all rows of a run have, and its configuration; a text without letters as pandas reads it from a CSV file."""
    columns = {
        "app": run["suite"]["program"],
        "git": run["suite"]["git"],
        "start": run["run"]["start"],
        "host": run["ranks"][0]["host"],
        "ranks": len(run["ranks"]),
    }
    return columns, {name: None if value == "" else value for name, value in run["configuration"].items()}


def _columns(of_run: tuple[Json, Json], row: Json) -> Json:
    """The columns that the CSV of the same run has; a later one of a name replaces the earlier."""
    measured = {}
    for name, value in row["measurements"].items():
        unit = row["units"].get(name)
        measured[_snake_case(name) + (f"_{_snake_case(unit)}" if unit else "")] = value
    columns, configuration = of_run
    columns = columns | {
        ("option_" if name in measured else "") + _snake_case(name): value for name, value in configuration.items()
    }
    columns |= {_snake_case(name): value for name, value in row["key"].items()} | measured
    if row["samples_ms"]:
        columns["time_low_ms"] = row["statistics_ms"]["median_low"]
        columns["time_high_ms"] = row["statistics_ms"]["median_high"]
        columns["cpu_share"] = row["cpu_share"]
    return columns | {"result": row["status"]["result"]}


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Says where a file is damaged; ValueError, whatever is wrong there."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{place}: it has no {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{place}: {error}") from error


def _of_schema(document: Any) -> Json:
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"it is not of the schema {SCHEMA}")
    return document


def _text_of(path: str) -> str:
    data = Path(path).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}: {error.reason} of UTF-8: 0x{data[error.start]:02x}") from error


def _table_of_lines(text: str) -> tuple[list[Json], list[Json]]:
    """Runs, and columns of each row; a last line without an end is of a run that was killed."""
    runs: dict[str, Json] = {}
    columns: dict[str, tuple[Json, Json]] = {}
    rows = []
    for number, text_of_line in enumerate(text.split("\n")[:-1], 1):
        with _at(f"line {number}"):
            line = _of_schema(json.loads(text_of_line))
            if line["kind"] == "run":
                runs[line["id"]], columns[line["id"]] = line, _run_columns(line)
            elif line["kind"] == "row":
                if line["run"] not in runs:
                    raise ValueError(f"no run {line['run']!r} stands before it")
                rows.append(_columns(columns[line["run"]], line))
            elif line["kind"] != "end":
                raise ValueError(f"kind {line['kind']!r}; wanted: run, row or end")
    return list(runs.values()), rows


def _table_of_document(text: str) -> tuple[list[Json], list[Json]]:
    with _at("the document"):
        document = _of_schema(json.loads(text))
        columns, listed = _run_columns(document), document["results"]
    rows = []
    for number, row in enumerate(listed):
        with _at(f"results[{number}]"):
            rows.append(_columns(columns, row))
    return [document], rows


def read_results(path: str | os.PathLike[str]) -> "pandas.DataFrame":
    """The rows of a results file, with the same columns from .json, .jsonl and .csv.

    Columns are the run's configuration, the row's key, its measurements, named with their units
    (time_ms, sent_mb_rank), and its verdict. Of JSON, `attrs["runs"]` has all that each file says
    of its runs: build, machine, inputs, verification, samples. Needs pandas. ValueError, with the
    file and the line: it is damaged, or not of the schema gyre-result/1.
    """
    import pandas

    name = os.fspath(path)
    try:
        if name.endswith(".csv"):
            frame = pandas.read_csv(name, keep_default_na=False, na_values=[""])
            if missing := [column for column in ("app", "result") if column not in frame]:
                raise ValueError(f"it has no column {missing[0]!r}")
            return frame
        text = _text_of(name)
        read = _table_of_lines if name.endswith(".jsonl") else _table_of_document
        runs, rows = read(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    frame = pandas.DataFrame(rows)
    frame.attrs["runs"] = runs
    return frame
