#!/usr/bin/env python3
"""Keeps tables and excerpts in README.md and docs/ equal to recorded runs: tables.py --check|--write [ROOT]

A table is the block of '|' lines that follows a comment in a page:

    <!-- table results/cpu-2core/NAME.json [where COLUMN=VALUE ...]: COLUMN[=HEADER][:FORMAT] ... -->

Columns are fields of `measurements` in gyre-result/1. Of NAME.txt, which `gyre-attention --explain` printed, they are
schedule, layout, cp, tokens, pass, sent, time and exposed. FORMAT is Python's; underscores in HEADER are blanks.

An excerpt is the fenced block that follows a comment; "..." stands for what is left out between two ranges:

    <!-- excerpt results/cpu-2core/NAME.txt lines FIRST-LAST[,FIRST-LAST ...] -->
"""

import json
import pathlib
import re
import sys

TABLE = re.compile(r"(?P<comment><!-- table\s+(?P<file>\S+?)(?:\s+where\s+(?P<where>[^:]*))?:\s+(?P<columns>.*?)\s*-->)"
                   r"\n\n?(?:\|[^\n]*\n)*\n?", re.DOTALL)
EXCERPT = re.compile(r"(?P<comment><!-- excerpt (?P<file>\S+) lines (?P<ranges>[-,0-9]+) -->)\n\n?(?:```.*?^```\n)?\n?",
                     re.DOTALL | re.MULTILINE)
PLAN = re.compile(r"# (?P<schedule>\S+), (?P<layout>\S+), cp = (?P<cp>\d+), (?P<tokens>\d+) tokens")
TOTAL = re.compile(r"# all ranks: .* pairs, (?P<sent>.*) sent; (?P<time>.*), compute only .*, exposed (?P<exposed>.*)")


def explained_rows(text):
    rows, plan, way = [], {}, ""
    for line in text.splitlines():
        if match := PLAN.match(line):
            plan = match.groupdict()
        elif line in ("# forward", "# backward"):
            way = line[2:]
        elif match := TOTAL.match(line):
            rows.append({**plan, "pass": way, **match.groupdict()})
    return rows


def rows_of(path):
    if path.suffix == ".txt":
        return explained_rows(path.read_text())
    return [result["measurements"] for result in json.loads(path.read_text())["results"]]


def cell(value, form):
    if value is None:
        return "n/a"
    return str(value) if isinstance(value, str) else format(value, form or "g")


def render(root, comment):
    """The lines of the table that a match of TABLE asks for."""
    rows = rows_of(root / comment["file"])
    for condition in (comment["where"] or "").split():
        column, value = condition.split("=")
        rows = [row for row in rows if str(row[column]) in value.split(",")]
    columns = [re.fullmatch(r"([^:=]+)(?:=([^:]+))?(?::(.+))?", word).groups() for word in comment["columns"].split()]
    lines = ["| " + " | ".join(header.replace("_", " ") if header else name for name, header, _ in columns) + " |",
             "|" + "|".join("---" if isinstance(rows[0][name], str) else "---:" for name, _, _ in columns) + "|"]
    return lines + ["| " + " | ".join(cell(row[name], form) for name, _, form in columns) + " |" for row in rows]


def excerpt(root, comment):
    """The lines of the excerpt that a match of EXCERPT asks for."""
    lines = (root / comment["file"]).read_text().splitlines()
    ranges = [map(int, text.split("-")) for text in comment["ranges"].split(",")]
    return "\n...\n".join("\n".join(lines[first - 1:last]) for first, last in ranges).splitlines()


def with_recorded(root, page):
    """The text of the page, every table and excerpt made anew."""
    def table(match):
        return "\n".join([match["comment"], "", *render(root, match), "", ""])

    def block(match):
        return "\n".join([match["comment"], "", "```text", *excerpt(root, match), "```", "", ""])
    return EXCERPT.sub(block, TABLE.sub(table, page.read_text()))


def main():
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    if mode not in ("--check", "--write"):
        sys.exit(__doc__)
    root = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else pathlib.Path(__file__).parent.parent)
    stale = []
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        text = with_recorded(root, page)
        if text != page.read_text():
            stale.append(str(page.relative_to(root)))
            if mode == "--write":
                page.write_text(text)
    if stale and mode == "--check":
        sys.exit("tables or excerpts differ from the recorded runs (results/tables.py --write): " + ", ".join(stale))


if __name__ == "__main__":
    main()
