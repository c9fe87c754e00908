"""Reports of runs as a file, gyre-conform/1 in JSON, and as a page: contracts x grids, green or the error."""

import html
import json
import math
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ..version import __version__
from .conform import Report
from .contract import Verdict

SCHEMA = "gyre-conform/1"
SAME = ("contract", "function", "ranks", "backend", "dtype", "layout", "convention", "case", "forward_only", "uneven")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #1c2024; }
table { border-collapse: collapse; margin: 1em 0; } th, td { border: 1px solid #c8ced6; padding: .35em .6em; text-align: left; }
th { background: #f1f3f6; font-weight: 600; } td { vertical-align: top; } code { font-size: 13px; }
.passed { background: #dff3e3; } .failed { background: #fbdfdc; } .none { color: #7a828c; } .said { font-size: 13px; font-weight: 400; }
.grid { white-space: nowrap; } ul { margin: .3em 0; padding-left: 1.4em; }
"""


def record_of(report: Report) -> dict[str, Any]:
    """One run."""
    options = {name: getattr(report.options, name) for name in SAME}
    return options | {
        "passed": report.passed,
        "grids": [str(grid) for grid in report.grids],
        "cases": [_case(v) for v in report.verdicts],
        "unasked": report.unasked,
    }


def _case(v: Verdict) -> dict[str, Any]:
    findings = [{"kind": f.kind, "text": f.text, "arrays": list(f.arrays), "ranks": list(f.ranks)} for f in v.findings]
    error = v.err_over_tol if math.isfinite(v.err_over_tol) else None
    return {"case": v.case, "grid": v.grid, "status": v.status, "err_over_tol": error, "values": v.values,
            "findings": findings, "places": v.places, "note": v.note}


def versions() -> dict[str, str]:
    """Of what the runs were made with."""
    found = {"gyre": __version__, "python": platform.python_version(), "numpy": np.__version__}
    for name in ("torch", "transformer_engine", "megatron-core"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def add(path: str | Path, report: Report) -> None:
    """Adds a run to a file, in place of one of the same function and options, and makes the page beside it.

    ValueError: the file is another one.
    """
    file, runs = Path(path), []
    if file.suffix != ".json":
        raise ValueError(f"{file}: the name of a report must end in .json; its page has the same in .html")
    if file.exists():
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            schema, runs = known["schema"], known["runs"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no report of gyre conform: {error}") from error
        if schema != SCHEMA:
            raise ValueError(f"{file} is {schema!r}; it must be {SCHEMA!r}")
    mine = record_of(report)
    kept = [run for run in runs if any(run.get(name) != mine[name] for name in SAME)]
    whole = {"schema": SCHEMA, "versions": versions(), "runs": [*kept, mine]}
    _write(file, json.dumps(whole, indent=1) + "\n")
    _write(file.with_suffix(".html"), page_of(whole))


def _write(path: Path, text: str) -> None:
    """The whole file or none."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def page_of(whole: dict[str, Any]) -> str:
    """The page: a table of runs and grids, and what is said of cases that failed."""
    grids = list(dict.fromkeys(grid for run in whole["runs"] for grid in run["grids"]))
    rows = []
    for run in whole["runs"]:
        more = ", ".join(filter(None, (run["dtype"], run["backend"], run["convention"])))
        name = f"<th>{_text(run['contract'])}<br><code>{_text(run['function'])}</code><br><span class='said'>{_text(more)}</span></th>"
        rows.append(f"<tr>{name}{''.join(_cell(run, grid) for grid in grids)}</tr>")
    passed = sum(run["passed"] for run in whole["runs"])
    head = "".join(f'<th class="grid">{_text(grid)}</th>' for grid in grids)
    made = ", ".join(f"{name} {version}" for name, version in whole["versions"].items())
    failures = "".join(_failures(run) for run in whole["runs"])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>gyre conform: {passed} of '
        f'{len(whole["runs"])} passed</title><style>{STYLE}</style></head>\n<body>\n<h1>{passed} of {len(whole["runs"])} '
        f"functions keep their contracts</h1>\n<p>{_text(made)}</p>\n<table>\n<tr><th>contract</th>{head}</tr>\n"
        + "\n".join(rows) + f"\n</table>\n{failures}</body></html>\n"
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _cell(run: dict[str, Any], grid: str) -> str:
    mine = [case for case in run["cases"] if case["grid"] == grid]
    compared = [case for case in mine if case["status"] != "left out"]
    if not compared:
        return f'<td class="none">{"nothing compared" if grid in run["grids"] else "not run"}</td>'
    failed = [case for case in compared if case["status"] == "failed"]
    good = f"{len(compared) - len(failed)} of {len(compared)} cases pass"
    if not failed:
        error = max((case["err_over_tol"] or 0 for case in compared), default=0)
        return f'<td class="passed">{good}<br><span class="said">error / tolerance {error:.2g}</span></td>'
    texts = dict.fromkeys(finding["text"] for case in failed for finding in case["findings"])
    said = "<br>".join(_text(text) for text in list(texts)[:3]) + ("<br>…" if len(texts) > 3 else "")
    return f'<td class="failed">{good}<br><span class="said">{said}</span></td>'


def _failures(run: dict[str, Any]) -> str:
    failed = [case for case in run["cases"] if case["status"] == "failed"]
    if not failed:
        return ""
    lines = []
    for case in failed:
        said = "; ".join(f["text"] + (f" ({', '.join(f['arrays'])})" if f["arrays"] else "") for f in case["findings"])
        places = "".join(f"<li>{_text(place)}</li>" for place in case["places"])
        lines.append(f"<tr><td>{_text(case['case'])}</td><td class=\"grid\">{_text(case['grid'])}</td><td>{_text(said)}<ul>{places}</ul></td></tr>")
    return (f"<h2>{_text(run['contract'])}: <code>{_text(run['function'])}</code></h2>\n<table>\n<tr><th>case</th><th>grid"
            "</th><th>what is wrong, and where</th></tr>\n" + "\n".join(lines) + "\n</table>\n")
