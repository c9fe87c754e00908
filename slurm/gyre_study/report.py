"""The report of a study: one HTML page with its plots, its tables and the origin of every point inside."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from .figures import Axis, Panel, figure, marker_svg, tokens_label, words_below
from .folder import write_whole
from .points import StudyData, length_column, panels, rate_unit, read_study, scaling
from .tables import Tables, text

STYLE = Path(__file__).with_name("report.css")
KINDS = {
    "strong": "Strong scaling",
    "weak-tokens": "Weak scaling, tokens a rank constant",
    "weak-work": "Weak scaling, work a rank constant",
    "network": "Network",
    "length": "Length",
}
BARS = "Bars: from the fastest to the 95th percentile of the repetitions."
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
    ("median_ms", "Time against length", f"Median over iterations, of the slowest rank. {BARS}"),
)


def cell_of(name: str, row: pd.Series) -> Any:
    return row[name]


class Report:
    def __init__(self, data: StudyData) -> None:
        self.data = data
        self.tables = Tables(data)
        self.figures = 0

    def figure(
        self, quantities: Sequence[tuple[Axis, tuple[list[Panel], int]]], x: Axis, title: str, caption: str
    ) -> str:
        """`quantities`: of y, and their panels, with how many were left out."""
        _, (shown, left_out) = quantities[0]
        if not shown:
            return ""
        self.figures += 1
        more = (
            f" {left_out} more panels are left out; their rows are in the table."
            if left_out
            else ""
        )
        svg = figure(f"figure{self.figures}", [(y, panels) for y, (panels, _) in quantities], x)
        label = f"<b>Figure {self.figures}. {text(title)}.</b>"
        return f"<figure><div class=scroll>{svg}</div><figcaption>{label} {text(caption)}{more}</figcaption></figure>"

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
        shares, fewest = scaling(data), data.rows["ranks"].min()
        time = panels(data, "ranks", lambda row: row["median_ms"], power=1)
        speed_up = panels(data, "ranks", lambda row: shares["speed_up"][row.name], power=-1)
        efficiency = panels(data, "ranks", lambda row: shares["efficiency"][row.name], power=-1)
        caption = (
            "Median time. Speed-up: efficiency times ranks, divided by the fewest ranks of any case. Efficiency: work a"
            f" second and rank, over that of the same case on the fewest ranks. Dashed: no loss. {BARS}"
        )
        return self.figure(
            [
                (Axis("time (ms)", "log"), time),
                (Axis("speed-up", "log2", reference=lambda ranks: ranks / fewest), speed_up),
                (Axis("efficiency (%)", reference=100.0, from_zero=True), efficiency),
            ],
            self.ranks_axis(),
            "Time, speed-up and parallel efficiency",
            caption,
        )

    def length_axis(self) -> tuple[str, Axis] | None:
        """The column and axis of what varies most often in lengths."""
        axes = {
            "axis_lengths": Axis("", "names", words_below, connected=False),
            "key_tokens": Axis("tokens", "log2", tokens_label),
        }
        column = length_column(self.data)
        return (column, axes[column]) if column else None

    def rates(self) -> str:
        length = self.length_axis()
        if length is None or not self.data.has("rate"):
            return ""
        unit, scale = rate_unit(self.data)
        found = panels(self.data, length[0], lambda row: scale * row["rate"], power=-1)
        caption = f"Median over iterations, of the slowest rank. {BARS}"
        axis = Axis(f"rate ({unit})", from_zero=True)
        return self.figure([(axis, found)], length[1], "Rate against length", caption)

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
        y = Axis("exposed (%)", reference=0.0)
        return self.figure([(y, found)], axis, "Exposed communication", caption)

    def counted(self) -> str:
        """Figures of programs that pack and shard: their counts, and their times where measured."""
        length = self.length_axis()
        if length is None or self.data.has("rate"):
            return ""
        made = ""
        for name, title, caption in COUNTED:
            if self.data.has(name):
                unit = "ms" if name == "median_ms" else self.data.units.get(name, "")
                label = f"{'time' if name == 'median_ms' else name} ({unit})"
                is_time = name == "median_ms"
                found = panels(self.data, length[0], partial(cell_of, name), power=int(is_time))
                y = Axis(label, "log") if is_time else Axis(label, from_zero=True)
                made += self.figure([(y, found)], length[1], title, caption)
        return made

    def networks(self) -> str:
        data = self.data
        if not data.has("axis_network") or data.rows["axis_network"].nunique() < 2:
            return ""
        found = panels(data, "axis_network", lambda row: row["median_ms"], power=1)
        caption = f"Median time under each emulated network; none: that of the machine. {BARS}"
        y = Axis("time (ms)", "log")
        return self.figure([(y, found)], Axis("", "names", words_below), "Time under slower networks", caption)

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
        columns = ("key_cp", "key_tokens", "ranks", "axis_base", "axis_lengths")
        found = panels(both, "foretold", lambda row: row["median_ms"], columns, power=1)
        caption = (
            "Each point is a case. Dashed: equal. The model is the site's: one rate, one link, one latency."
            f" {BARS}"
        )
        y = Axis("measured (ms)", "log", reference=lambda predicted: predicted)
        x = Axis("predicted (ms)", "log", connected=False)
        return self.figure([(y, found)], x, "Measured against predicted", caption)

    # Page

    def legend(self) -> str:
        items = [
            f"<li>{marker_svg(place)}{text(name)}</li>"
            for place, name in enumerate(self.data.series())
        ]
        hollow = (self.data.rows["result"] != "VALID").sum()
        note = f"Hollow markers are not VALID ({hollow} of {len(self.data.rows)} rows): point at one for the reasons."
        noted = f"<li class=note>{note}</li>" if hollow else ""
        return f'<ul class="legend">{"".join(items)}{noted}</ul>'

    def page(self) -> str:
        about = self.data.about
        title = text(about["title"])
        kind = KINDS[about["kind"]]
        head = f"<header><p class=kicker>Gyre study · {kind}</p><h1>{title}</h1>{self.tables.facts()}</header>"
        if self.data.rows.empty:
            body = "<p>No row has been measured yet.</p>" + self.tables.open_cases()
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
            tables = self.tables
            listed = (tables.winners(), tables.open_cases(), tables.row_table(), tables.run_table())
            body = f"{self.legend()}{figures}{''.join(listed)}"
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
