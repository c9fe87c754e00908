#!/usr/bin/env python3
"""check_results.py SCHEMA FILE.json|FILE.jsonl [FILE.csv]: holds results against the published schema; a CSV file of the
same run must have the same numbers."""

import csv
import json
import math
import re
import sys

import jsonschema


def snake(name):
    return re.sub(r"[^a-z0-9]+", "_", name.lower().replace("%", "percent")).strip("_")


def documents(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file] if path.endswith(".jsonl") else [json.load(file)]


def rows_of(all_documents):
    for document in all_documents:
        yield from document.get("results", [document] if document.get("kind") == "row" else [])


def cell(value):
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value


def expected(row):
    """The cells that a CSV row must have, by name."""
    cells = {snake(name): cell(value) for name, value in row["key"].items()}
    for name, value in row["measurements"].items():
        unit = row["units"].get(name)
        cells[snake(name) + (f"_{snake(unit)}" if unit else "")] = cell(value)
    if row["samples_ms"]:
        cells["time_low_ms"] = cell(row["statistics_ms"]["median_low"])
        cells["cpu_share"] = cell(row["cpu_share"])
    cells["result"] = row["status"]["result"]
    return cells


def equal(got, wanted):
    if isinstance(wanted, (int, float)):
        return got != "" and math.isclose(float(got), wanted, rel_tol=1e-15)
    return got == wanted


def main():
    schema_path, path, *csv_paths = sys.argv[1:]
    with open(schema_path, encoding="utf-8") as file:
        schema = json.load(file)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    found = documents(path)
    for number, document in enumerate(found, 1):
        for error in validator.iter_errors(document):
            cause = jsonschema.exceptions.best_match([error])
            sys.exit(f"{path}: document {number}: {'.'.join(map(str, cause.absolute_path))}: {cause.message[:300]}")
    rows = list(rows_of(found))
    if not rows:
        sys.exit(f"{path}: no rows")
    for csv_path in csv_paths:
        with open(csv_path, encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
        if len(table) != len(rows):
            sys.exit(f"{csv_path}: {len(table)} rows, not {len(rows)}")
        for number, (cells, row) in enumerate(zip(table, rows), 1):
            for name, wanted in expected(row).items():
                if name not in cells or not equal(cells[name], wanted):
                    sys.exit(f"{csv_path}: row {number}, {name}: {cells.get(name)!r}, not {wanted!r}")
            names = set(cells) - {None}
            if bad := [name for name in names if name != snake(name)]:
                sys.exit(f"{csv_path}: not in snake_case: {bad}")


if __name__ == "__main__":
    main()
