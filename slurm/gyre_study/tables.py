"""The tables of a report: facts in its head, who wins where, open cases, all rows, all runs."""

import html
from collections.abc import Sequence
from typing import Any

import pandas as pd

from .figures import tokens_label, words_below
from .machines import machine_facts
from .points import StudyData, grouped, in_order, length_column, panel_columns, rate_unit, what


def text(value: Any) -> str:
    return html.escape(str(value))


def number(value: Any, digits: int = 4) -> str:
    """A number as one prints it; n/a for none."""
    if value is None or pd.isna(value):
        return "n/a"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def table(header: Sequence[tuple[str, bool]], rows: Sequence[str], style: str = "") -> str:
    """`header`: names, and whether they are of numbers. `rows`: <tr> elements."""
    cells = "".join(
        f"<th{' class=n' if is_number else ''}>{text(name).replace(' (', '<br>(')}</th>" for name, is_number in header
    )
    head, body = f"<thead><tr>{cells}</tr></thead>", f"<tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll wide long" tabindex=0><table class="{style}">{head}{body}</table></div>'


class Tables:
    def __init__(self, data: StudyData) -> None:
        self.data = data

    def facts(self) -> str:
        data, site, study = self.data, self.data.plan["site"], self.data.plan["study"]
        many = data.cases["state"].value_counts()
        states = ", ".join(f"{count} {state}" for state, count in many.items())
        machine = f"{site['name']}: {site['cores_per_node']} cores" + (
            f" and {site['gpus_per_node']} GPUs" if site["gpus_per_node"] else ""
        )
        options = (
            " ".join(f"{name}={value}" for name, value in study["options"].items())
            or "as they come"
        )
        results = ", ".join(
            f"{count} {name}" for name, count in data.every["result"].value_counts().items()
        )
        build = ", ".join(
            sorted(
                {
                    f"{run['build_git']} ({run['build_git_state']})"
                    + (f" with {run['build_flags']}" if run.get("build_flags") else "")
                    for _, run in data.runs.iterrows()
                }
            )
        )
        listed = (
            ("Program", f"{data.about['app']}, build {build}"),
            ("Machine", f"{machine} a node, launched by {site['launcher']}"),
            *machine_facts(data.runs["machine"]),
            ("Cases", f"{len(data.cases)}: {states}"),
            ("Rows", f"{len(data.every)}: {results}" + self.repeated()),
            ("Options", options),
            (
                "Measured (UTC)",
                f"{data.every['measured_at'].min()} to {data.every['measured_at'].max()}",
            ),
        )
        rows = "".join(f"<tr><th>{name}</th><td>{text(value)}</td></tr>" for name, value in listed)
        return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'

    def repeated(self) -> str:
        repeat = self.data.plan["study"].get("repeat", 1)
        return f"; each was run {repeat} times, of which plots show the one with the middle median" if repeat > 1 else ""

    def winners(self) -> str:
        """Series x length, a table for each of the other variables: time over the best of the column."""
        data = self.data
        series = data.series_key
        if data.rows[series].nunique() < 2 or not data.rows["median_ms"].notna().any():
            return ""
        column = length_column(data) or "ranks"
        by = panel_columns(data, column)
        made = []
        for values, group in grouped(data.rows, by):
            title = ", ".join(what(value, name) for value, name in zip(values, by))
            made.append(self.winner_table(title, group, series, column))
        legend = (
            "Time over that of the fastest in the column; bold: the fastest, ≈: its 95 % interval and that of the"
            " fastest overlap, ○: not VALID. A cell links to its row."
        )
        tables = f"<div class='scroll wide' tabindex=0>{''.join(made)}</div>"
        return f"<h2>Who wins where</h2><p class=small>{legend}</p>{tables}"

    def winner_table(self, title: str, group: pd.DataFrame, series: str, column: str) -> str:
        columns = list(dict.fromkeys(in_order(self.data, group, column)[column]))
        best = {
            one: group[group[column] == one].sort_values("median_ms").iloc[0] for one in columns
        }
        words = tokens_label if column == "key_tokens" else words_below
        names = (text(words(one)).replace("\n", "<br>") for one in columns)
        head = "".join(f"<th>{name}</th>" for name in names)
        lines = []
        for name in self.data.series():
            cells = []
            for one in columns:
                rows = group[(group[series] == name) & (group[column] == one)]
                cells.append(
                    self.winner_cell(rows.iloc[0], best[one])
                    if len(rows)
                    else "<td class=doubt>–</td>"
                )
            lines.append(f"<tr><th>{text(name)}</th>{''.join(cells)}</tr>")
        corner = {"key_tokens": "tokens", "ranks": "ranks"}.get(column, "")
        caption = f"<caption>{text(title)}</caption>" if title else ""
        top = f"<thead><tr><th>{corner}</th>{head}</tr></thead>"
        return f'<table class="wins">{caption}{top}<tbody>{"".join(lines)}</tbody></table>'

    def winner_cell(self, row: pd.Series, best: pd.Series) -> str:
        if pd.isna(row["median_ms"]):
            return "<td class=doubt>n/a</td>"
        ratio = row["median_ms"] / best["median_ms"]
        is_best = row["row_id"] == best["row_id"]
        overlaps = not is_best and row["median_low_ms"] <= best["median_high_ms"]
        marks = ("≈" if overlaps else "") + ("" if row["result"] == "VALID" else "○")
        shade = max(0.0, 1 - (ratio - 1) / 1.0) * 0.32
        title = text(f"{row['median_ms']:.4g} ms; {row['result']}")
        style = f"background: rgba(var(--win), {shade:.2f})"
        kind = "best" if is_best else ""
        link = f'<a href="#row-{row["row_id"]}" title="{title}">{marks}{ratio:.2f}</a>'
        return f'<td class="{kind}" style="{style}">{link}</td>'

    def open_cases(self) -> str:
        """Cases that are not done, and why."""
        cases = self.data.cases
        rest = cases[cases["state"] != "done"]
        if rest.empty:
            return ""
        axes = [name for name in cases if name.startswith("axis_") and rest[name].notna().any()]
        rows = [
            "<tr>"
            + "".join(f"<td>{text(number(row[name]))}</td>" for name in axes)
            + f"<td>{text(row['state'])}</td><td class=text>{text(row['reason'])}</td></tr>"
            for _, row in rest.iterrows()
        ]
        header = [*((name[5:], False) for name in axes), ("state", False), ("why", False)]
        return f"<h2>Cases without a result that counts</h2>{table(header, rows)}"

    def row_table(self) -> str:
        data = self.data
        keys = [name for name in data.rows if name.startswith("key_")]
        extra = [name for name in ("axis_lengths", "axis_network", "axis_dtype") if data.has(name)]
        more = [name for name in ("rate", "exposed", "of_peak", "sent", "util") if data.has(name)]
        rate, scale = rate_unit(data)
        units = {**data.units, "rate": rate}
        header = [
            *((name[4:], False) for name in keys),
            *((name[5:], False) for name in extra),
            ("ranks", True),
            ("time (ms)", True),
            ("fastest", True),
            ("95 %", True),
            ("CV (%)", True),
            ("rep.", True),
            *((f"{name.replace('_', ' ')} ({units[name]})" if units.get(name) else name, True) for name in more),
            ("result", False),
            ("origin", False),
            ("reasons", False),
        ]
        rows = []
        for _, row in data.every.iterrows():
            cells = [f"<td>{text(number(row[name]))}</td>" for name in (*keys, *extra)]
            cv = None if pd.isna(row["cv"]) else 100 * float(row["cv"])
            values = [
                row["ranks"],
                *(row[name] for name in ("median_ms", "min_ms", "p95_ms")),
                cv,
                row["repetitions"],
                *(scale * row[name] if name == "rate" else row[name] for name in more),
            ]
            cells += [f"<td class=n>{number(value)}</td>" for value in values]
            place = f"{row['file']}:{row['line']}"
            cells.append(
                f"<td>{text(row['result'])}</td><td><a href='#run-{row['run_id']}'>{text(place)}</a></td>"
            )
            cells.append(f"<td class=text>{text(row['reasons'])}</td>")
            rows.append(f'<tr id="row-{row["row_id"]}">{"".join(cells)}</tr>')
        note = (
            "Time: the median, the fastest and the 95th percentile of the repetitions."
            " Origin: file and line below rows/, as the program wrote them."
        )
        return f"<h2>All rows</h2><p class=small>{note}</p>{table(header, rows, 'rows')}"

    def run_table(self) -> str:
        used = self.data.runs[self.data.runs["run_id"].isin(self.data.every["run_id"])]
        rows = []
        for _, run in used.iterrows():
            build = f"{run['build_git']} ({run['build_git_state']}), {run['build_type']}, {run['build_compiler']}"
            build += f", {run['build_flags']}" if run.get("build_flags") else ""
            cells = [
                run["id"],
                run["start"],
                run["job"],
                run["launcher"],
                run["hosts"],
                run["ranks"],
                run["binding"] or "n/a",
                build,
            ]
            listed = "".join(f"<td>{text(cell)}</td>" for cell in cells)
            rows.append(
                f'<tr id="run-{run["run_id"]}">{listed}<td class=text><code>{text(run["argv"])}</code></td></tr>'
            )
        names = (
            "run",
            "start (UTC)",
            "job",
            "launcher",
            "hosts",
            "ranks",
            "CPUs of ranks",
            "build",
            "command",
        )
        return f"<h2>Runs</h2>{table([(name, False) for name in names], rows, 'rows')}"

