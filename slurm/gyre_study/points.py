"""From a collected study to what is drawn: which points, in which panels and lines."""

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from .errors import RUNTIME, StudyError
from .figures import Panel, Point
from .sizes import size_text

GRID_KEYS = ("key_cp", "key_tp", "key_dp")
SERIES_KEYS = ("key_schedule", "key_op", "key_algorithm", "key_method", "key_layout")
PANEL_KEYS = (
    "key_pass",
    "key_layout",
    "key_method",
    *GRID_KEYS,
    "ranks",
    "key_tokens",
    "axis_base",
    "axis_lengths",
    "axis_mask",
    "axis_network",
    "axis_dtype",
)
MOST_PANELS = 12


@dataclass
class StudyData:
    """`every`: the newest row of each key, with case and run. `rows`: of a study that repeats itself, those of the
    repetition with the middle median; these are drawn. `units`: by column."""

    about: dict[str, Any]
    plan: dict[str, Any]
    cases: pd.DataFrame
    runs: pd.DataFrame
    rows: pd.DataFrame
    units: dict[str, str]
    every: pd.DataFrame

    @property
    def series_key(self) -> str:
        """The column whose values are lines: the first that varies."""
        for name in SERIES_KEYS:
            if name in self.rows and self.rows[name].nunique() > 1:
                return name
        return next((name for name in SERIES_KEYS if name in self.rows), "program")

    def series(self) -> list[str]:
        """In order of the plan's options, then of appearance."""
        return list(dict.fromkeys(self.rows[self.series_key]))

    def has(self, *columns: str) -> bool:
        return all(name in self.rows and self.rows[name].notna().any() for name in columns)


def read_study(path: Path) -> StudyData:
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        about = pd.read_sql("SELECT * FROM study", database).iloc[0].to_dict()
        cases = pd.read_sql("SELECT * FROM cases", database)
        runs = pd.read_sql("SELECT * FROM runs", database)
        rows = pd.read_sql("SELECT * FROM rows WHERE is_newest = 1", database)
        units = dict(database.execute("SELECT * FROM units").fetchall())
    except (sqlite3.DatabaseError, pd.errors.DatabaseError, IndexError) as error:
        raise StudyError(
            f"{path}: {error}; wanted: a file that gyre-study collect wrote", RUNTIME
        ) from error
    finally:
        database.close()
    for name in rows:  # a column of NULLs alone is no numbers otherwise
        if name.endswith("_ms") or name in ("cv", "flops", "rate", "exposed"):
            rows[name] = pd.to_numeric(rows[name])
    in_case = [
        name
        for name in cases
        if name.startswith(("axis_", "predicted_")) or name in ("nodes", "ranks", "kin", "repetition")
    ]
    in_run = ["run_id", "program", "job", "hosts", "build_git", "build_git_state", "start"]
    rows = rows.merge(cases[["case_id", *in_case]], on="case_id").merge(runs[in_run], on="run_id")
    return StudyData(about, json.loads(about["plan"]), cases, runs, middle_rows(rows), units, rows)


def middle_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the repetitions of a row, the one with the middle median; of two, the faster."""
    if rows.empty or "repetition" not in rows or rows["repetition"].nunique() < 2:
        return rows
    names = ["kin", *(name for name in rows if name.startswith("key_"))]
    ordered = rows.sort_values(["median_ms", "row_id"])
    groups = ordered.groupby(names, dropna=False)
    place, count = groups.cumcount(), groups["row_id"].transform("size")
    return ordered[place == (count - 1) // 2].sort_values("row_id")


def what(value: Any, name: str) -> str:
    """A value of a column as one reads it in a heading."""
    short = name.removeprefix("key_").removeprefix("axis_")
    if short == "pass":
        return {"fwd": "forward", "bwd": "backward"}.get(str(value), str(value))
    if short == "ranks":
        return f"{value} rank{'s' if value != 1 else ''}"
    if short == "tokens":
        return f"{size_text(int(value))} tokens"
    if short in ("cp", "tp", "dp"):
        return f"{short} = {value}"
    if short == "base":
        return f"{size_text(int(value))} at one rank"
    return str(value)


def title_of(data: StudyData, row: pd.Series) -> str:
    """Description of a point: its case, how it was measured, and its row."""
    keys = " ".join(
        f"{name[4:]}={row[name]}"
        for name in data.rows
        if name.startswith("key_") and pd.notna(row[name])
    )
    time = f"{row['median_ms']:.4g} ms" if pd.notna(row["median_ms"]) else "no time"
    if pd.notna(row["min_ms"]) and pd.notna(row["p95_ms"]):
        time += f" ({row['min_ms']:.4g} to {row['p95_ms']:.4g})"
    noted = "" if row["result"] == "VALID" else f"\n{row['result']}: {row['reasons']}"
    origin = f"{row['file']}:{row['line']}, job {row['job']}, {row['hosts']}"
    return f"{keys}\n{time}, {row['repetitions']} repetitions\n{origin}{noted}"


def panel_columns(data: StudyData, x: str, given: tuple[str, ...] = ()) -> list[str]:
    """Columns that tell panels apart: those that vary, and are neither x nor the lines nor follow from x."""
    names = [
        name
        for name in PANEL_KEYS
        if name not in (x, data.series_key, *given)
        and name in data.rows
        and data.rows[name].nunique() > 1
    ]
    grid = [name for name in GRID_KEYS if name in names]
    follows = (
        grid[:1] if x == "ranks" else ["ranks"] if grid else []
    )  # ranks are what cp, tp and dp make
    if (x == "ranks" and data.has("axis_base")) or data.has("axis_lengths"):
        follows.append("key_tokens")  # of a weak study, or what the drawn lengths make
    return [name for name in names if name not in follows]


def in_order(data: StudyData, rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Sorted by a column: numbers by size, names as the study's axis has them, so that lines go from left to right."""
    if pd.api.types.is_numeric_dtype(rows[column]):
        return rows.sort_values([column, "row_id"])
    axis = data.plan["study"]["axes"].get(column.removeprefix("axis_").removeprefix("key_"), [])
    places = {name: place for place, name in enumerate(axis)} if isinstance(axis, list) else {}
    place = rows[column].map(lambda name: places.get(name, len(places)))
    return rows.assign(place=place).sort_values(["place", "row_id"])


def grouped(rows: pd.DataFrame, by: list[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Groups and their values, in order of these; forward comes before backward."""
    if not by:
        return [((), rows)]
    groups = [
        (values, group)
        for values, group in rows.groupby(by if len(by) > 1 else by[0], dropna=False)
    ]
    groups = [
        (values if isinstance(values, tuple) else (values,), group) for values, group in groups
    ]
    if "key_pass" in by:
        place = by.index("key_pass")
        groups.sort(
            key=lambda one: one[0][place], reverse=True
        )  # stable: the others keep their order
    return groups


def panels(
    data: StudyData,
    x: str,
    y: Callable[[pd.Series], float],
    given: tuple[str, ...] = (),
    power: int = 0,
) -> tuple[list[Panel], int]:
    """Panels and how many were left out. `y` gives NaN for rows without a point. `given`: columns that make no panels.

    `power`: y is proportional to time ** power, so that the spread of the repetitions is known; 0: it is not.
    """
    by = panel_columns(data, x, given)
    numbers = {name: number for number, name in enumerate(data.series())}
    found = []
    for values, group in grouped(data.rows, by):
        lines: dict[int, list[Point]] = {}
        for _, row in in_order(data, group, x).iterrows():
            height = y(row)
            if pd.notna(height) and pd.notna(row[x]):
                point = Point(
                    row[x],
                    float(height),
                    row["result"] == "VALID",
                    int(row["row_id"]),
                    title_of(data, row),
                )
                if power and pd.notna(row["min_ms"]) and pd.notna(row["p95_ms"]):
                    ends = (height * (row[end] / row["median_ms"]) ** power for end in ("min_ms", "p95_ms"))
                    point.low, point.high = sorted(ends)
                lines.setdefault(numbers[row[data.series_key]], []).append(point)
        if lines:
            found.append(
                Panel(", ".join(what(value, name) for value, name in zip(values, by)), lines)
            )
    return found[:MOST_PANELS], max(0, len(found) - MOST_PANELS)


def speed(row: pd.Series) -> float:
    """Work a rank does in a millisecond: FLOPs where they are known, else tokens."""
    work = row["flops"] if pd.notna(row.get("flops")) else row.get("key_tokens")
    if work is None or pd.isna(work) or pd.isna(row["median_ms"]):
        return float("nan")
    return float(work) / (float(row["median_ms"]) * float(row["ranks"]))


def scaling(data: StudyData) -> pd.DataFrame:
    """By row: `efficiency` in percent, its speed over that of the same case on the fewest ranks, and `speed_up`,
    efficiency times ranks, divided by the fewest ranks of any case. A case that starts on more ranks than others thus
    starts on the line of no loss."""
    size = "axis_base" if data.has("axis_base") else "key_tokens"
    grows = [name for name in GRID_KEYS if name in data.rows and data.rows[name].nunique() > 1][:1]
    names = [
        name for name in data.rows if name.startswith("key_") and name not in (*grows, "key_tokens")
    ]
    names += [
        name for name in (size, "axis_lengths", "axis_mask", "axis_network", "axis_dtype") if name in data.rows
    ]
    names = [name for name in dict.fromkeys(names) if data.rows[name].notna().any()]
    order = data.rows.assign(speed=data.rows.apply(speed, axis=1)).sort_values("ranks")
    first = order.groupby(names, dropna=False)["speed"].transform("first") if names else order["speed"].iloc[0]
    efficiency = order["speed"] / first
    found = {"efficiency": 100 * efficiency, "speed_up": efficiency * order["ranks"] / order["ranks"].min()}
    return pd.DataFrame(found).reindex(data.rows.index)


def length_column(data: StudyData) -> str:
    """What varies most often in lengths: drawn lengths, or tokens; "": neither."""
    if data.has("axis_lengths") and data.rows["axis_lengths"].nunique() > 1:
        return "axis_lengths"
    varies = data.has("key_tokens") and data.rows["key_tokens"].nunique() > 1
    return "key_tokens" if varies and not data.has("axis_base") else ""


def rate_unit(data: StudyData) -> tuple[str, float]:
    """The unit of the column `rate` on the page, and by what its values are multiplied: no table has 0.08 TFLOP/s."""
    unit = data.units.get("rate", "").replace("F/s", "FLOP/s")
    if unit.startswith("T") and data.rows["rate"].max() < 1:
        return "G" + unit[1:], 1000
    return unit, 1
