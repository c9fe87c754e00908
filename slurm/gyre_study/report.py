"""The report of a study: one HTML page with its plots, its tables and the origin of every point inside."""

import html
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from .figures import Axis, figure, marker_svg, tokens_label
from .folder import write_whole
from .points import (
    StudyData,
    efficiency,
    grouped,
    in_order,
    panel_columns,
    panels,
    read_study,
    what,
)

STYLE = Path(__file__).with_name("report.css")
KINDS = {
    "strong": "Strong scaling",
    "weak-tokens": "Weak scaling, tokens a rank constant",
    "weak-work": "Weak scaling, work a rank constant",
    "network": "Network",
    "length": "Length",
}
# Measurements of programs that have no rate: name, title, caption.
COUNTED = (
    ("util", "Slots in use", "Share of the slots of all bins that hold a token."),
    ("cost", "Balance of bins", "Attention cost of the costliest bin over that of the mean."),
    ("pairs", "Balance of ranks", "Pairs that the slowest rank computes over those of the mean."),
    (
        "need",
        "Need of others' keys",
        "Share of what a ring would send that the ranks' queries see.",
    ),
    ("median_ms", "Time against length", "Median over iterations, of the slowest rank."),
)


def text(value: Any) -> str:
    return html.escape(str(value))


def number(value: Any, digits: int = 4) -> str:
    """A number as one prints it; n/a for none."""
    if value is None or pd.isna(value):
        return "n/a"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def cell_of(name: str, row: pd.Series) -> Any:
    return row[name]


def words_below(value: Any) -> str:
    """dist=uniform,min=64: a word a line, for an axis."""
    return str(value).removeprefix("dist=").replace(",", "\n")


def table(header: Sequence[tuple[str, bool]], rows: Sequence[str], style: str = "") -> str:
    """`header`: names, and whether they are of numbers. `rows`: <tr> elements."""
    cells = "".join(
        f"<th{' class=n' if is_number else ''}>{text(name)}</th>" for name, is_number in header
    )
    head, body = f"<thead><tr>{cells}</tr></thead>", f"<tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="{style}">{head}{body}</table></div>'


class Report:
    def __init__(self, data: StudyData) -> None:
        self.data = data
        self.figures = 0

    def figure(
        self, found: tuple[list[Any], int], x: Axis, y: Axis, title: str, caption: str
    ) -> str:
        shown, left_out = found
        if not shown:
            return ""
        self.figures += 1
        more = (
            f" {left_out} more panels are left out; their rows are in the table."
            if left_out
            else ""
        )
        svg = figure(f"figure{self.figures}", shown, x, y)
        label = f"<b>Figure {self.figures}. {text(title)}.</b>"
        return f"<figure>{svg}<figcaption>{label} {text(caption)}{more}</figcaption></figure>"

    # Figures

    def ranks_axis(self) -> Axis:
        return Axis("ranks", "log2", lambda value: str(int(value)))

    def scaling(self) -> str:
        data = self.data
        if data.rows["ranks"].nunique() < 2 or data.about["kind"] not in (
            "strong",
            "weak-tokens",
            "weak-work",
        ):
            return ""
        shares = efficiency(data)
        found = panels(data, "ranks", lambda row: shares[row.name])
        axis = Axis("efficiency (%)", reference=100, from_zero=True)
        caption = "Work that a rank does in a second, over that of the same case on the fewest ranks. Dashed: no loss."
        return self.figure(found, self.ranks_axis(), axis, "Parallel efficiency", caption)

    def length_axis(self) -> tuple[str, Axis] | None:
        """The column and axis of what varies most often in lengths: tokens, or drawn lengths."""
        data = self.data
        if data.has("axis_lengths") and data.rows["axis_lengths"].nunique() > 1:
            return "axis_lengths", Axis("", "names", words_below, connected=False)
        if (
            data.has("key_tokens")
            and data.rows["key_tokens"].nunique() > 1
            and not data.has("axis_base")
        ):
            return "key_tokens", Axis("tokens", "log2", tokens_label)
        return None

    def rates(self) -> str:
        length = self.length_axis()
        if length is None or not self.data.has("rate"):
            return ""
        unit, scale = self.data.units.get("rate", ""), 1
        if unit.startswith("T") and self.data.rows["rate"].max() < 1:
            unit, scale = "G" + unit[1:], 1000
        found = panels(self.data, length[0], lambda row: scale * row["rate"], bounds=True)
        caption = "Median over iterations, of the slowest rank. Bars: 95 % interval of the median, where it is known."
        return self.figure(
            found, length[1], Axis(f"rate ({unit})", from_zero=True), "Rate against length", caption
        )

    def exposed(self) -> str:
        if not self.data.has("exposed"):
            return ""
        length = self.length_axis()
        x, axis = length if length is not None else ("ranks", self.ranks_axis())
        several = self.data.rows[self.data.rows["ranks"] > 1]
        if several.empty:
            return ""
        data = StudyData(**{**vars(self.data), "rows": several})
        found = panels(data, x, lambda row: row["exposed"])
        caption = "Share of the time in which communication is not hidden behind compute. Below 0: noise is larger."
        return self.figure(
            found, axis, Axis("exposed (%)", reference=0), "Exposed communication", caption
        )

    def counted(self) -> str:
        """Figures of programs that pack and shard: their counts, and their times where measured."""
        length = self.length_axis()
        if length is None or self.data.has("rate"):
            return ""
        made = ""
        for name, title, caption in COUNTED:
            if self.data.has(name):
                unit = "ms" if name == "median_ms" else self.data.units.get(name, "")
                label = f"{name.removesuffix('_ms')} ({unit})"
                found = panels(self.data, length[0], partial(cell_of, name))
                made += self.figure(found, length[1], Axis(label, from_zero=True), title, caption)
        return made

    def networks(self) -> str:
        data = self.data
        if not data.has("axis_network") or data.rows["axis_network"].nunique() < 2:
            return ""
        found = panels(data, "axis_network", lambda row: row["median_ms"])
        caption = "Median time under each emulated network; none: that of the machine."
        return self.figure(
            found,
            Axis("", "names", words_below),
            Axis("time (ms)", from_zero=True),
            "Time under slower networks",
            caption,
        )

    def predicted(self) -> str:
        data = self.data
        if (
            not any(name.startswith("predicted_") for name in data.rows)
            or "key_pass" not in data.rows
        ):
            return ""

        def foretold(row: pd.Series) -> float:
            return float(row.get(f"predicted_{row['key_pass']}_ms", float("nan")))

        rows = data.rows.assign(foretold=data.rows.apply(foretold, axis=1))
        both = StudyData(**{**vars(data), "rows": rows})
        found = panels(
            both,
            "foretold",
            lambda row: row["median_ms"],
            ("key_cp", "key_tokens", "ranks", "axis_base", "axis_lengths"),
        )
        caption = "Each point is a case. Dashed: equal. The model is the site's: one rate, one link, one latency."
        return self.figure(
            found,
            Axis("predicted (ms)", "log", connected=False),
            Axis("measured (ms)", "log"),
            "Measured against predicted",
            caption,
        )

    # Tables

    def winners(self) -> str:
        """Series x length, a table for each of the other variables: time over the best of the column."""
        data, length = self.data, self.length_axis()
        series = data.series_key
        if data.rows[series].nunique() < 2 or not data.rows["median_ms"].notna().any():
            return ""
        column = length[0] if length is not None else "ranks"
        by = panel_columns(data, column)
        made = []
        for values, group in grouped(data.rows, by):
            title = ", ".join(what(value, name) for value, name in zip(values, by))
            made.append(self.winner_table(title, group, series, column))
        legend = (
            "Time over that of the fastest in the column; bold: the fastest, ≈: its 95 % interval and that of the"
            " fastest overlap, ○: not VALID. A cell links to its row."
        )
        return f"<h2>Who wins where</h2><p class=small>{legend}</p><div class=scroll>{''.join(made)}</div>"

    def winner_table(self, title: str, group: pd.DataFrame, series: str, column: str) -> str:
        columns = list(dict.fromkeys(in_order(self.data, group, column)[column]))
        best = {
            one: group[group[column] == one].sort_values("median_ms").iloc[0] for one in columns
        }
        head = "".join(
            f"<th>{text(tokens_label(one) if column == 'key_tokens' else one)}</th>"
            for one in columns
        )
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

    def legend(self) -> str:
        items = [
            f"<li>{marker_svg(place)}{text(name)}</li>"
            for place, name in enumerate(self.data.series())
        ]
        hollow = (self.data.rows["result"] != "VALID").sum()
        note = f"Hollow markers are not VALID ({hollow} of {len(self.data.rows)} rows): point at one for the reasons."
        return f'<ul class="legend">{"".join(items)}<li class=note>{note}</li></ul>'

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
            + f"<td>{text(row['state'])}</td><td class=wide>{text(row['reason'])}</td></tr>"
            for _, row in rest.iterrows()
        ]
        header = [*((name[5:], False) for name in axes), ("state", False), ("why", False)]
        return f"<h2>Cases without a result that counts</h2>{table(header, rows)}"

    def row_table(self) -> str:
        data = self.data
        keys = [name for name in data.rows if name.startswith("key_")]
        extra = [name for name in ("axis_lengths", "axis_network", "axis_dtype") if data.has(name)]
        more = [name for name in ("rate", "exposed", "of_peak", "sent", "util") if data.has(name)]
        header = [
            *((name[4:], False) for name in keys),
            *((name[5:], False) for name in extra),
            ("ranks", True),
            ("time (ms)", True),
            ("CV (%)", True),
            ("rep.", True),
            *(
                (f"{name} ({data.units[name]})" if data.units.get(name) else name, True)
                for name in more
            ),
            ("result", False),
            ("origin", False),
            ("reasons", False),
        ]
        rows = []
        for _, row in data.rows.iterrows():
            cells = [f"<td>{text(number(row[name]))}</td>" for name in (*keys, *extra)]
            cv = None if pd.isna(row["cv"]) else 100 * float(row["cv"])
            values = [
                row["ranks"],
                row["median_ms"],
                cv,
                row["repetitions"],
                *(row[name] for name in more),
            ]
            cells += [f"<td class=n>{number(value)}</td>" for value in values]
            place = f"{row['file']}:{row['line']}"
            cells.append(
                f"<td>{text(row['result'])}</td><td><a href='#run-{row['run_id']}'>{text(place)}</a></td>"
            )
            cells.append(f"<td class=wide>{text(row['reasons'])}</td>")
            rows.append(f'<tr id="row-{row["row_id"]}">{"".join(cells)}</tr>')
        note = "Origin: file and line below rows/, as the program wrote them."
        return f"<h2>All rows</h2><p class=small>{note}</p>{table(header, rows, 'rows')}"

    def run_table(self) -> str:
        used = self.data.runs[self.data.runs["run_id"].isin(self.data.rows["run_id"])]
        rows = []
        for _, run in used.iterrows():
            build = f"{run['build_git']} ({run['build_git_state']}), {run['build_type']}, {run['build_compiler']}"
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
                f'<tr id="run-{run["run_id"]}">{listed}<td class=wide><code>{text(run["argv"])}</code></td></tr>'
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

    # Page

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
            f"{count} {name}" for name, count in data.rows["result"].value_counts().items()
        )
        build = ", ".join(
            sorted(
                {
                    f"{run['build_git']} ({run['build_git_state']})"
                    for _, run in data.runs.iterrows()
                }
            )
        )
        listed = (
            ("Program", f"{data.about['app']}, build {build}"),
            ("Machine", f"{machine} a node, launched by {site['launcher']}"),
            ("Cases", f"{len(data.cases)}: {states}"),
            ("Rows", f"{len(data.rows)}: {results}"),
            ("Options", options),
            (
                "Measured (UTC)",
                f"{data.rows['measured_at'].min()} to {data.rows['measured_at'].max()}",
            ),
        )
        rows = "".join(f"<tr><th>{name}</th><td>{text(value)}</td></tr>" for name, value in listed)
        return f'<table class="facts"><tbody>{rows}</tbody></table>'

    def page(self) -> str:
        about = self.data.about
        title = text(about["title"])
        kind = KINDS[about["kind"]]
        head = f"<header><p class=kicker>Gyre study · {kind}</p><h1>{title}</h1>{self.facts()}</header>"
        if self.data.rows.empty:
            body = "<p>No row has been measured yet.</p>" + self.open_cases()
        else:
            made: list[Callable[[], str]] = [
                self.counted,
                self.scaling,
                self.rates,
                self.exposed,
                self.networks,
                self.predicted,
            ]
            figures = "".join(make() for make in made)
            body = f"{self.legend()}{figures}{self.winners()}{self.open_cases()}{self.row_table()}{self.run_table()}"
        foot = "<footer class=small>Made by gyre-study report from study.sqlite, which has all samples.</footer>"
        style = STYLE.read_text(encoding="utf-8")
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
            f"<body>{head}<main>{body}</main>{foot}</body></html>\n"
        )


def write_report(database: Path, output: Path) -> int:
    """The number of figures."""
    report = Report(read_study(database))
    write_whole(output, report.page())
    return report.figures
