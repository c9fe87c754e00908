"""Plots as SVG for a page: colours are CSS variables, and each point links to its row.

matplotlib writes colours as numbers. Those of PALETTE stand for variables of report.css, so that a page can be light or
dark; no other colour is used.
"""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of a backend)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.axis import XAxis, YAxis  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator  # noqa: E402

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

    def points(self) -> list[Point]:
        return [point for points in self.lines.values() for point in points]


@dataclass
class Axis:
    """`scale`: "log2", "log", "linear" or "names". `reference`: a line to compare with: of y, or of y by x; or None."""

    label: str
    scale: str = "linear"
    format: Callable[[Any], str] | None = None
    reference: float | Callable[[float], float] | None = None
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
    x: Axis,
    shift: float,
) -> None:
    """`places`: where on the axis each x is. `shift`: so that equal points of series do not hide each other."""
    colour, marker = marker_style(number)
    xs = [places[point.x] * 2**shift if x.scale == "log2" else places[point.x] + shift for point in points]
    if x.connected:
        axes.plot(xs, [point.y for point in points], color=colour, linewidth=1.1, zorder=2)
    for place, point in zip(xs, points):
        if point.low is not None and point.high is not None:
            axes.plot([place, place], [point.low, point.high], color=colour, linewidth=0.8, zorder=2)
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


def round_down(value: float) -> float:
    """1, 2 or 5 times a power of ten, at most the value."""
    power = 10.0 ** math.floor(math.log10(value))
    return max(step * power for step in (1, 2, 5) if step * power <= value * (1 + 1e-9))


def set_log(axis: XAxis | YAxis, low: float, high: float) -> None:
    """A logarithmic axis with a tick at either end, which are not one."""
    bounds = round_down(low), 1 / round_down(1 / high)
    if bounds[0] == bounds[1]:
        bounds = bounds[0] / 2, bounds[1] * 2
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": bounds})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def set_x(axes: Axes, axis: Axis, values: Sequence[Any]) -> dict[Any, float]:
    """Places of all values of x, on an axis that shows each of them."""
    axes.set_xlabel(axis.label)
    places = {
        value: float(place if axis.scale == "names" else value)
        for place, value in enumerate(values)
    }
    if axis.scale == "log2":
        axes.set_xscale("log", base=2)
        if len(places) == 1:  # else the axis would be as wide as the shifts of its points
            axes.set_xlim(min(places) / 2, max(places) * 2)
    elif axis.scale == "log":
        set_log(axes.xaxis, min(places), max(places))
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


def set_y(axes: Axes, axis: Axis, points: Sequence[Point], xs: Sequence[float]) -> None:
    """`points`, `xs`: of all panels with this axis, which all have one scale."""
    ends = [end for one in points for end in (one.y, one.low, one.high) if end is not None]
    if axis.reference is not None:
        line = [axis.reference(x) if callable(axis.reference) else axis.reference for x in xs]
        ends += line
        style: dict[str, Any] = {"color": MUTED, "linewidth": 0.8, "dashes": (4, 3), "zorder": 1}
        if callable(axis.reference):
            axes.plot(xs, line, **style)
        else:
            axes.axhline(axis.reference, **style)
    if axis.scale == "linear":
        low = min([0.0, *ends]) if axis.from_zero else min(ends)
        margin = 0.06 * ((max(ends) - low) or 1.0)
        axes.set_ylim(low - (margin if low < 0 or not axis.from_zero else 0), max(ends) + margin)
        return
    ends = [end for end in ends if end > 0]
    if axis.scale == "log":
        set_log(axes.yaxis, min(ends), max(ends))
        return
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(ends) / 1.1, max(ends) * 1.1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def arrangement(panels: int, quantities: int) -> tuple[int, int]:
    """Rows and columns of panels: a row for each panel of several quantities, else as few rows as may be."""
    if quantities > 1:
        return panels, quantities
    columns = next((n for n in (COLUMNS, 2) if panels % n == 0), min(COLUMNS, panels))
    return -(-panels // columns), columns


def figure(name: str, quantities: Sequence[tuple[Axis, Sequence[Panel]]], x: Axis) -> str:
    """One SVG element: the panels of a quantity, or of several that stand beside one another.

    All panels of a quantity have the same scale. `name` tells the figure's ids from those of others of a page.
    """
    links: dict[str, Point] = {}
    series = 1 + max(number for _, panels in quantities for panel in panels for number in panel.lines)
    rows, columns = arrangement(len(quantities[0][1]), len(quantities))
    size = ((3.2 if columns > 1 else 4.6) * columns, 2.5 * rows + 0.2)
    several = len(quantities) > 1
    with plt.rc_context({**STYLE, "svg.hashsalt": name}):
        drawn, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
        for place, axes in enumerate(grid.flat):
            axis, panels = quantities[place % columns if several else 0]
            number = place // columns if several else place
            if number >= len(panels):
                axes.set_visible(False)
                continue
            is_first = place % columns == 0
            axes.set_title(panels[number].title if is_first or not several else "", color=INK)
            if is_first or several:
                axes.set_ylabel(axis.label)
            draw_panel(axes, panels[number], panels, x, axis, series, links)
        drawn.tight_layout(w_pad=1.6, h_pad=1.8)
        text = io.StringIO()
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(drawn)
    return for_page(text.getvalue(), name, links)


def draw_panel(
    axes: Axes, panel: Panel, panels: Sequence[Panel], x: Axis, y: Axis, series: int, links: dict[str, Point]
) -> None:
    """`panels`: those that have the same scale. `series`: how many there are on the page."""
    points = [point for one in panels for point in one.points()]
    values = list(dict.fromkeys(point.x for point in points))
    places = set_x(axes, x, values if x.scale == "names" else sorted(values))
    is_beside = x.scale == "log2" or (x.scale == "names" and not x.connected)
    is_sloped = callable(y.reference)  # a point beside its x would be on the wrong side of such a line
    step = min(0.07, 0.25 / series) if is_beside and not is_sloped else 0.0
    for number, line in panel.lines.items():
        draw_line(axes, number, line, places, links, x, step * (number - (series - 1) / 2))
    set_y(axes, y, points, sorted(places.values()))


def for_page(svg: str, name: str, links: dict[str, Point]) -> str:
    """Ids of its own, variables for colours, a title and a link for each point, the width of the page.

    On a narrow page it shrinks to the smallest width whose text can be read.
    """
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
    pixels = float(width[1]) * 96 / 72 if width else 0.0
    size = f"max-width: {pixels:.0f}px; min-width: {0.75 * pixels:.0f}px"
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


def words_below(value: Any) -> str:
    """dist=uniform,min=64: a word a line, for an axis."""
    return str(value).removeprefix("dist=").replace(",", "\n")
