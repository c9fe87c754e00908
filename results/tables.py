#!/usr/bin/env python3
"""Keeps tables and excerpts in README.md and docs/ equal to recorded runs: tables.py --check|--write [ROOT]

A table is the block of '|' lines that follows a comment in a page:

    <!-- table results/cpu-2core/NAME.json[,...] [where COLUMN=VALUE ...]: COLUMN[=HEADER][:FORMAT] ... -->

Rows of several files stand below one another. Columns are fields of `measurements` in gyre-result/1. Of bench-NAME.json, a
document of Google Benchmark, they are its fields, the arguments in the name, and `benchmark`, the rest of the name. Of
NAME.txt, which `gyre-attention --explain` printed, they are schedule, layout, cp, tokens, pass, sent, time and exposed.
Of results/gpu/DEVICE-DATE-kernels-GROUP.json they are group, the shape, name, id (the name in words with hyphens), ms,
flops_per_s or bytes_per_s, and ratio; of DEVICE-DATE-torch.json case, side, pass, ms and ratio.
FORMAT is Python's, with a G or a T at its end in units of 10^9 or 10^12; underscores in HEADER are blanks.

An excerpt is the fenced block that follows a comment; "..." stands for what is left out between two ranges:

    <!-- excerpt results/cpu-2core/NAME.txt lines FIRST-LAST[,FIRST-LAST ...] -->

Exit code 1 and one line when a page differs from its recorded runs, or when a run, or what a page asks of it, is malformed.
"""

import pathlib
import re
import sys

from gyre_result import CELL, LIST, OBJECT, TEXT, TIME, Malformed, get, load, load_json

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


def text_of(root, file):
    try:
        return (root / file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Malformed(f"{file}: {error}; wanted: a text") from error


def benchmark_row(file, document, index):
    """The fields of a benchmark; of its name "gradient/columns:4096/threads:2" also benchmark, columns and threads."""
    row = get(file, document, "benchmarks", index, kind=OBJECT)
    words = get(file, document, "benchmarks", index, "name", kind=TEXT).split("/")
    arguments = dict(word.split(":", 1) for word in words if ":" in word)
    return {**row, **arguments, "benchmark": "/".join(word for word in words if ":" not in word and word != "manual_time")}


def kernel_row(file, document, index):
    """Of a run of bench-gpu-kernels; the baseline of a group has ratio 1."""
    row = get(file, document, "results", index, kind=OBJECT)
    name = get(file, document, "results", index, "name", kind=TEXT)
    median = get(file, document, "results", index, "median_s", kind=TIME)
    return {"ratio": 1, **row, **get(file, document, "results", index, "shape", kind=OBJECT), "ms": 1e3 * median,
            "id": "-".join(re.findall(r"\w+", name))}


def torch_rows(file, document):
    """Of a run of bench/gpu_vs_torch.py; ratios are null where the side is ours."""
    rows = []
    for index in range(len(get(file, document, "cases", kind=LIST))):
        def part(*way, kind, case=index):
            return get(file, document, "cases", case, *way, kind=kind)
        for side in part("median_ms", kind=OBJECT):
            for name in part("median_ms", side, kind=OBJECT):
                ratio = part("ratio", side, name, kind=TIME) if side in part("ratio", kind=OBJECT) else None
                rows.append({"case": part("case", kind=TEXT), "side": side, "pass": name,
                             "ms": part("median_ms", side, name, kind=TIME), "ratio": ratio})
    return rows


def rows_of(root, file):
    """The rows of a recorded run: the file, the document, and the way to the row in it."""
    if file.endswith(".txt"):
        document = {"plan": explained_rows(text_of(root, file))}
        return [(file, document, ("plan", index)) for index in range(len(document["plan"]))]
    if pathlib.Path(file).name.startswith("bench-"):
        document = load_json(root / file, file, "Google Benchmark")
        count = len(get(file, document, "benchmarks", kind=LIST))
        rows = [benchmark_row(file, document, index) for index in range(count)]
        # As the program lists them: it may have run them in random order.
        rows.sort(key=lambda row: (row.get("family_index", 0), row.get("per_family_instance_index", 0)))
        return [(file, {"benchmarks": rows}, ("benchmarks", index)) for index in range(len(rows))]
    if re.search(r"-kernels(-\w+)?\.json$", file):
        document = load_json(root / file, file, "bench-gpu-kernels")
        count = len(get(file, document, "results", kind=LIST))
        document = {"results": [kernel_row(file, document, index) for index in range(count)]}
        return [(file, document, ("results", index)) for index in range(count)]
    if file.endswith("-torch.json"):
        document = {"cases": torch_rows(file, load_json(root / file, file, "bench/gpu_vs_torch.py"))}
        return [(file, document, ("cases", index)) for index in range(len(document["cases"]))]
    document = load(root / file, file)
    return [(file, document, ("results", index, "measurements")) for index in range(len(document["results"]))]


def field(row, name):
    file, document, way = row
    return get(file, document, *way, name, kind=CELL)


def cell(file, value, form):
    if value is None:
        return "n/a"
    if isinstance(value, (bool, str)):
        return str(value).replace("<", "&lt;")
    scale = {"G": 1e9, "T": 1e12}.get((form or " ")[-1], 1)
    try:
        return format(value / scale, form.rstrip("GT")) if form else format(value, "g")
    except ValueError as error:
        raise Malformed(f"{file}: a comment asks for {value} as '{form}': {error}; wanted: a format of numbers") from error


def parts(file, word, form, wanted):
    """The groups of `form` in a word of a comment."""
    match = re.fullmatch(form, word)
    if not match:
        raise Malformed(f"{file}: a comment asks for '{word}'; wanted: {wanted}")
    return match.groups()


def render(root, comment):
    """The lines of the table that a match of TABLE asks for."""
    file = comment["file"]
    rows = [row for one in file.split(",") for row in rows_of(root, one)]
    for condition in (comment["where"] or "").split():
        column, values = parts(file, condition, "([^=]+)=([^=]+)", "COLUMN=VALUE,...")
        rows = [row for row in rows if str(field(row, column)) in values.split(",")]
    if not rows:
        raise Malformed(f"{file}: no row where {comment['where'] or 'anything'}; wanted: at least one")
    columns = [parts(file, word, r"([^:=]+)(?:=([^:]+))?(?::(.+))?", "COLUMN[=HEADER][:FORMAT]")
               for word in comment["columns"].split()]
    values = [[field(row, name) for name, _, _ in columns] for row in rows]
    lines = ["| " + " | ".join(header.replace("_", " ") if header else name for name, header, _ in columns) + " |",
             "|" + "|".join("---" if isinstance(value, str) else "---:" for value in values[0]) + "|"]
    return lines + ["| " + " | ".join(cell(file, value, form) for value, (_, _, form) in zip(row, columns)) + " |"
                    for row in values]


def excerpt(root, comment):
    """The lines of the excerpt that a match of EXCERPT asks for."""
    file = comment["file"]
    lines, blocks = text_of(root, file).splitlines(), []
    for text in comment["ranges"].split(","):
        first, last = map(int, parts(file, text, r"(\d{1,9})-(\d{1,9})", "FIRST-LAST"))
        if not 1 <= first <= last <= len(lines):
            raise Malformed(f"{file}: a comment asks for lines {text}; wanted: some of lines 1-{len(lines)}")
        blocks.append("\n".join(lines[first - 1:last]))
    return "\n...\n".join(blocks).splitlines()


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
        try:
            text = with_recorded(root, page)
        except Malformed as error:
            sys.exit(f"{page.relative_to(root)}: {error}")
        if text != page.read_text():
            stale.append(str(page.relative_to(root)))
            if mode == "--write":
                page.write_text(text)
    if stale and mode == "--check":
        sys.exit("tables or excerpts differ from the recorded runs (results/tables.py --write): " + ", ".join(stale))


if __name__ == "__main__":
    main()
