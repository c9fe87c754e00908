"""Reads what the programs measured (-J FILE.json, -J FILE.jsonl, --csv FILE.csv) as a table."""

import json
import os
import re
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
    columns |= {_snake_case(name): value for name, value in run["configuration"].items()}
    columns |= {_snake_case(name): value for name, value in row["key"].items()}
    for name, value in row["measurements"].items():
        unit = row["units"].get(name)
        columns[_snake_case(name) + (f"_{_snake_case(unit)}" if unit else "")] = value
    if row["samples_ms"]:
        columns["time_low_ms"] = row["statistics_ms"]["median_low"]
        columns["time_high_ms"] = row["statistics_ms"]["median_high"]
        columns["cpu_share"] = row["cpu_share"]
    return columns | {"result": row["status"]["result"]}


class _Table:
    """Runs, and the columns of rows, of the JSON of one or several runs."""

    def __init__(self) -> None:
        self.runs: dict[Any, Json] = {}
        self.rows: list[Json] = []

    def add(self, text: str, is_line: bool) -> None:
        """Adds a document, or a line of JSON lines. ValueError: it is damaged."""
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"this is not of the schema {SCHEMA}")
        try:
            if not is_line:
                self.runs[""] = document
                self.rows += [_columns(document, row) for row in document["results"]]
            elif document["kind"] == "run":
                self.runs[document["id"]] = document
            elif document["kind"] == "row":
                self.rows.append(_columns(self.runs[document["run"]], document))
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"it is damaged: {type(error).__name__} {error}") from error


def _table(name: str, text: str) -> _Table:
    """The table of a file's text; a last line of JSON lines without an end is of a run that was killed."""
    found = _Table()
    if not name.endswith(".jsonl"):
        found.add(text, False)
        return found
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            found.add(line, True)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return found


def read_results(path: str | os.PathLike[str]) -> "pandas.DataFrame":
    """The rows of a results file, with the same columns from .json, .jsonl and .csv.

    Columns are the run's configuration, the row's key, its measurements, named with their units
    (time_ms, sent_mb_rank), and its verdict. Of JSON, `attrs["runs"]` has all that each file says
    of its runs: build, machine, inputs, verification, samples. Needs pandas. ValueError: the file
    is not of the schema gyre-result/1, or damaged; it names the file and the line.
    """
    import pandas

    name = os.fspath(path)
    try:
        if name.endswith(".csv"):
            return pandas.read_csv(name, keep_default_na=False, na_values=[""])
        table = _table(name, Path(name).read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
    frame = pandas.DataFrame(table.rows)
    frame.attrs["runs"] = list(table.runs.values())
    return frame
