"""Plots as SVG for a page: colours are CSS variables, and each point links to its row.

matplotlib writes colours as numbers. Those of PALETTE stand for variables of report.css, so that a page can be light or
dark; no other colour is used.
"""

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of a backend)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator  # noqa: E402

from .sizes import size_text  # noqa: E402

INK, MUTED, GRID, PAPER = "#101112", "#707172", "#d0d1d2", "#fdfefc"
PALETTE = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
SERIES = [f"#{10 * number:02x}5a{200 - number:02x}" for number in range(1, 11)]
PALETTE.update({colour: f"series-{number}" for number, colour in enumerate(SERIES)})
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "p"]
COLUMNS = 3  # panels beside one another, at most
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.titlepad": 8,
}


@dataclass
class Point:
    """`low`, `high`: interval of y, or None. `row`: its number in the table of the page."""

    x: Any
    y: float
    valid: bool
    row: int
    title: str
    low: float | None = None
    high: float | None = None


@dataclass
class Panel:
    """`lines`: number of a series (its colour and marker), and its points in order of x."""

    title: str
    lines: dict[int, list[Point]]


@dataclass
class Axis:
    """`scale`: "log2", "log" (x and y alike), "linear" or "names". `reference`: a line to compare with, or None."""

    label: str
    scale: str = "linear"
    format: Callable[[Any], str] | None = None
    reference: float | None = None
    from_zero: bool = False
    connected: bool = True


def marker_style(number: int) -> tuple[str, str]:
    return SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]


def draw_line(
    axes: Axes,
    number: int,
    points: Sequence[Point],
    places: dict[Any, float],
    links: dict[str, Point],
    connected: bool,
    shift: float,
) -> None:
    """`places`: where on the axis each x is. `shift`: so that equal points of series do not hide each other."""
    colour, marker = marker_style(number)
    xs = [places[point.x] + shift for point in points]
    if connected:
        axes.plot(xs, [point.y for point in points], color=colour, linewidth=1.1, zorder=2)
    for x, point in zip(xs, points):
        if point.low is not None and point.high is not None:
            axes.plot([x, x], [point.low, point.high], color=colour, linewidth=0.8, zorder=2)
    faces = [colour if point.valid else PAPER for point in points]
    # Two widths: with one of everything matplotlib takes a short cut that forgets the links.
    drawn = axes.scatter(
        xs,
        [point.y for point in points],
        s=24,
        marker=marker,
        c=faces,
        edgecolors=colour,
        linewidths=[1.0, 1.0],
        zorder=3,
    )
    urls = []
    for point in points:
        url = f"row:{len(links)}"
        links[url] = point
        urls.append(url)
    drawn.set_urls(urls)


def set_x(axes: Axes, axis: Axis, values: Sequence[Any]) -> dict[Any, float]:
    """Places of all values of x, on an axis that shows each of them."""
    axes.set_xlabel(axis.label)
    places = {
        value: float(place if axis.scale == "names" else value)
        for place, value in enumerate(values)
    }
    if axis.scale == "log2":
        axes.set_xscale("log", base=2)
    elif axis.scale == "log":
        axes.set_xscale("log")
        return places
    axes.xaxis.set_minor_locator(NullLocator())
    shown = list(values)
    while len(shown) > 8:
        shown = shown[::2]
    axes.set_xticks(
        [places[value] for value in shown],
        [axis.format(value) if axis.format else str(value) for value in shown],
    )
    if axis.scale == "names":
        axes.set_xlim(-0.4, len(values) - 0.6)
        axes.tick_params(axis="x", labelsize=8)
    return places


def set_y(axes: Axes, axis: Axis, panel: Panel) -> None:
    if axis.scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if axis.reference is not None:
        axes.axhline(axis.reference, color=MUTED, linewidth=0.8, dashes=(4, 3), zorder=1)
    if axis.format is not None:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: axis.format(value)))  # type: ignore[misc]
    if axis.from_zero:
        ys = [point.y for points in panel.lines.values() for point in points]
        axes.set_ylim(
            min(0.0, *ys) if len(ys) > 1 else 0.0, max([axis.reference or 0.0, *ys]) * 1.08 or 1.0
        )


def figure(name: str, panels: Sequence[Panel], x: Axis, y: Axis) -> str:
    """One SVG element. `name` tells its ids from those of other figures of a page."""
    links: dict[str, Point] = {}
    series = 1 + max(number for panel in panels for number in panel.lines)
    columns = next((n for n in (COLUMNS, 2) if len(panels) % n == 0), min(COLUMNS, len(panels)))
    rows = -(-len(panels) // columns)
    with plt.rc_context({**STYLE, "svg.hashsalt": name}):
        drawn, grid = plt.subplots(
            rows,
            columns,
            figsize=((3.2 if len(panels) > 1 else 4.6) * columns, 2.5 * rows + 0.2),
            squeeze=False,
        )
        values = {
            point.x for panel in panels for points in panel.lines.values() for point in points
        }
        ordered = list(
            dict.fromkeys(
                p.x for panel in panels for points in panel.lines.values() for p in points
            )
        )
        for place, axes in enumerate(grid.flat):
            if place >= len(panels):
                axes.set_visible(False)
                continue
            panel = panels[place]
            axes.set_title(panel.title, color=INK)
            places = set_x(axes, x, ordered if x.scale == "names" else sorted(values))
            if place % columns == 0:
                axes.set_ylabel(y.label)
            for number, points in panel.lines.items():
                is_beside = x.scale == "names" and not x.connected
                shift = 0.07 * (number - (series - 1) / 2) if is_beside else 0.0
                draw_line(axes, number, points, places, links, x.connected, shift)
            if x.scale == "log":
                draw_diagonal(axes, values)
            set_y(axes, y, panel)
        drawn.tight_layout(w_pad=1.6, h_pad=1.8)
        text = io.StringIO()
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(drawn)
    return for_page(text.getvalue(), name, links)


def draw_diagonal(axes: Axes, values: set[float]) -> None:
    """Where measured and predicted are equal."""
    axes.plot(
        [min(values), max(values)],
        [min(values), max(values)],
        color=MUTED,
        linewidth=0.8,
        dashes=(4, 3),
        zorder=1,
    )


def for_page(svg: str, name: str, links: dict[str, Point]) -> str:
    """Ids of its own, variables for colours, a title and a link for each point, the width of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(
        r"#[0-9a-f]{6}",
        lambda match: f"var(--{PALETTE[match[0]]})" if match[0] in PALETTE else match[0],
        svg,
    )
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)

    def link(match: re.Match[str]) -> str:
        point = links[match[1]]
        return f'<a href="#row-{point.row}"><title>{html.escape(point.title)}</title>'

    svg = re.sub(r'<a xlink:href="(row:\d+)"[^>]*>', link, svg)
    width = re.search(r'width="([\d.]+)pt"', svg)
    size = f"max-width: {float(width[1]) * 96 / 72:.0f}px" if width else ""
    svg = re.sub(r'(<svg [^>]*?)height="[\d.]+pt"', rf'\1style="{size}" role="img"', svg, count=1)
    return re.sub(r'width="[\d.]+pt"', 'width="100%"', svg, count=1)


def marker_svg(number: int, valid: bool = True) -> str:
    """A series' marker, for a legend."""
    colour, marker = marker_style(number)
    with plt.rc_context({**STYLE, "svg.hashsalt": f"marker{number}"}):
        drawn, axes = plt.subplots(figsize=(0.3, 0.16))
        axes.axis("off")
        axes.plot([-1, 1], [0, 0], color=colour, linewidth=1.1)
        axes.scatter(
            [0],
            [0],
            s=24,
            marker=marker,
            c=[colour if valid else PAPER],
            edgecolors=colour,
            linewidths=1.0,
            zorder=3,
        )
        axes.set_position((0, 0, 1, 1))
        text = io.StringIO()
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(drawn)
    svg = for_page(text.getvalue(), f"marker{number}{'' if valid else 'h'}", {})
    return svg.replace('width="100%"', 'width="29" height="15"').replace(
        'role="img"', 'aria-hidden="true"'
    )


def tokens_label(value: float) -> str:
    return size_text(int(value))
