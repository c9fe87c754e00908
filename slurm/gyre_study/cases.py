"""Expands a study into cases, and groups cases into placements.

A case is one point of the axes. A placement is what one launch can have in common: ranks on nodes, the grid, and all
options that a program does not run over by itself.
"""

import hashlib
import itertools
import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .app import RESERVED, App
from .errors import nearest, raise_all
from .files import Site, Study
from .sizes import parse_size, round_to, size_text, tokens_of_equal_work

GRID = ("dp", "cp", "tp", "ranks")  # ranks: of programs without a grid
ALIASES = {"lengths": "gen", "network": "emulate-network"}  # axes that are named for what they are

TOKENS = "{tokens}"  # in a text of an axis or a problem: stands for the tokens of the run, which are then no option
BASE = "base"  # of a weak study's case: what the axis tokens says, before it is scaled


@dataclass
class Case:
    """`axes`: everything that tells this case from others of the study, but for its repetition. `kin`: the id without
    the build and the repetition."""

    id: str
    kin: str
    axes: dict[str, Any]


@dataclass
class Placement:
    """`common`: axes that all its cases share, grid included. `arguments`: of a launch, without swept axes."""

    id: str
    name: str
    nodes: int
    ranks: int
    ranks_per_node: int
    common: dict[str, Any]
    arguments: list[str]
    cases: list[Case] = field(default_factory=list)
    repetition: int = 1


@dataclass
class Expansion:
    placements: list[Placement]
    duplicates: int


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def hyphens(table: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in table.items()}


def filled(point: dict[str, Any]) -> dict[str, Any]:
    """The point with its number of tokens in its texts, and no longer by itself."""
    tokens = size_text(point["tokens"])
    left = {name: value for name, value in point.items() if name != "tokens"}
    return {
        name: value.replace(TOKENS, tokens) if isinstance(value, str) else value
        for name, value in left.items()
    }


class Expander:
    """Checks a study against its program and its site, then expands it. `file`: the study's, for messages."""

    def __init__(self, study: Study, site: Site, app: App, file: str) -> None:
        self.study, self.site, self.app, self.file = study, site, app, file
        self.messages: list[str] = []
        self.options = hyphens(study.options)
        self.is_filled = TOKENS in str([study.axes, study.problems])
        axes = hyphens(study.axes)
        for name in (
            "tokens",
            *app.swept,
            *GRID,
        ):  # such an option is an axis with one value
            if name in self.options and name not in axes:
                axes[name] = self.options.pop(name)
        self.axes = {name: self.values(name, value) for name, value in axes.items()}
        self.problems = {name: self.problem(name, table) for name, table in study.problems.items()}

    def say(self, message: str) -> None:
        self.messages.append(f"{self.file}: {message}")

    # One axis

    def problem(self, problem: str, table: dict[str, Any]) -> dict[str, Any]:
        """The axes of a problem, of one value each."""
        found = {}
        for name, value in hyphens(table).items():
            if isinstance(value, list) or value == "all":
                self.say(f"problems.{problem}.{name} = {value!r}: wanted: one value")
            for one in self.values(name, value, f"problems.{problem}")[:1]:
                found[name] = one
        return found

    def known_axes(self) -> list[str]:
        grid = list(self.app.grid) or ["ranks"]
        aliases = [name for name, option in ALIASES.items() if option in self.app.options]
        if self.is_filled:
            aliases.append("tokens")
        return sorted(
            {*grid, *aliases, *(set(self.app.options) - set(RESERVED) - set(ALIASES.values()))}
        )

    def values(self, name: str, value: Any, table: str = "axes") -> list[Any]:
        """The valid values of an axis. `table`: where they stand."""
        if name not in self.known_axes():
            grid = " x ".join(self.app.grid) or "ranks"
            near = (
                nearest(name, self.app.grid or ["ranks"])
                if name in GRID
                else nearest(name, self.known_axes())
            )
            more = f" (its grid is {grid})" if name in GRID else ""
            self.say(f"{table}.{name}: {self.app.name} has no such axis; nearest: {table}.{near}{more}")
            return []
        option = self.app.options.get(ALIASES.get(name, name))
        if value == "all" and option is not None and option.choices:
            return list(option.choices)
        listed = value if isinstance(value, list) else [value]
        if not listed:
            self.say(f"{table}.{name} = []: wanted: one value at least")
        return [self.value(name, one) for one in listed if self.is_right(name, one, table)]

    def is_right(self, name: str, value: Any, table: str) -> bool:
        if isinstance(value, str):
            value = value.replace(TOKENS, "1")
        if name in GRID or name == "tokens":
            try:
                error = "" if parse_size(value) > 0 else f"{value} is not above 0"
            except ValueError as wrong:
                error = str(wrong)
        elif name == "network" and value == "none":
            error = ""
        elif value == "all":
            error = "'all' stands alone: write all, not a list with it"
        else:
            error = self.app.options[ALIASES.get(name, name)].error(value)
        if error:
            self.say(f"{table}.{name}: {error}")
        return not error

    def value(self, name: str, value: Any) -> Any:
        option = self.app.options.get(name)
        is_size = (
            name in GRID or name == "tokens" or (option is not None and option.kinds == ("SIZE",))
        )
        return parse_size(value) if is_size and TOKENS not in str(value) else value

    # All of them

    def axis_names(self) -> set[str]:
        return {*self.axes, *(name for problem in self.problems.values() for name in problem)}

    def check_options(self) -> None:
        known = sorted(set(self.app.options) - set(RESERVED))
        for name, value in self.options.items():
            if name in RESERVED and name in self.app.options:
                self.say(f"options.{name}: gyre-study sets --{name} itself")
            elif name not in known:
                self.say(
                    f"options.{name}: {self.app.name} has no --{name}; nearest: options.{nearest(name, known)}"
                )
            elif any(name in (axis, ALIASES.get(axis)) for axis in self.axis_names()):
                self.say(f"options.{name}: it is an axis, too")
            elif error := self.app.options[name].error(value):
                self.say(f"options.{name}: {error}")

    def check_kind(self) -> None:
        kind, axes = self.study.kind, self.axes
        grid = [name for name in (self.app.grid or ("ranks",)) if len(axes.get(name, [])) > 1]
        if kind in ("strong", "weak-tokens", "weak-work") and not grid and not self.study.chosen:
            names = " or ".join(f"axes.{name}" for name in (self.app.grid or ("ranks",)))
            self.say(f"kind = {kind!r}: {names} needs two values at least")
        if kind.startswith("weak") and "tokens" not in axes:
            self.say(
                f"kind = {kind!r}: axes.tokens is needed, the tokens of {'a rank' if kind[5] == 't' else 'one rank'}"
            )
        drawn = "lengths" in self.axis_names()
        if kind.startswith("weak") and drawn and not self.is_filled:
            self.say(
                f"kind = {kind!r}: axes.lengths draws documents, which cannot be made to fit; nearest: axes.tokens,"
                f" or tokens={TOKENS} in lengths"
            )
        if kind == "network" and len(axes.get("network", [])) < 2:
            self.say(
                'kind = \'network\': axes.network needs two values at least, such as "none" and "alpha=10us,beta=5G"'
            )
        if kind == "length" and not self.problems and not any(
            len(axes.get(name, [])) > 1 for name in ("tokens", "lengths")
        ):
            self.say("kind = 'length': axes.tokens or axes.lengths needs two values at least")
        if self.is_filled and "tokens" not in axes:
            self.say(f"{TOKENS} is in a text: axes.tokens is needed, which says how many")
        for problem, table in self.problems.items():
            if self.is_filled and TOKENS not in str([table, self.study.axes]):
                self.say(f"problems.{problem}: it has no {TOKENS}, which others have")
            for name in {*table} & {*axes}:
                self.say(f"problems.{problem}.{name}: it is an axis, too")
        if "tokens" in axes and not self.is_filled and (drawn or "gen" in self.options):
            self.say(
                "axes.tokens and axes.lengths exclude each other: lengths that are drawn fill options.capacity"
            )

    def ranks_per_node(self) -> int:
        return self.study.ranks_per_node or self.site.gpus_per_node or self.site.cores_per_node

    def check_nodes(self) -> None:
        per_node, most = self.ranks_per_node(), self.site.max_nodes
        if per_node > self.site.cores_per_node:
            self.say(
                f"ranks_per_node = {per_node}: {self.site.name} has {self.site.cores_per_node} cores a node;"
                f" nearest: {self.site.cores_per_node}"
            )
        largest = math.prod(max(self.axes.get(name) or [1]) for name in (*self.app.grid, "ranks"))
        if most and math.ceil(largest / per_node) > most:
            self.say(
                f"{largest} ranks, {per_node} a node, take {math.ceil(largest / per_node)} nodes; {self.site.name} has"
                f" max_nodes = {most}; nearest: {most * per_node} ranks"
            )

    # Expansion

    def total_tokens(self, tokens: int, grid: dict[str, int]) -> int:
        """Total tokens of a run, from the value of the axis."""
        cp, dp, tp = grid.get("cp", 1), grid.get("dp", 1), grid.get("tp", 1)
        multiple = 2 * cp * parse_size(self.options.get("stripe", 1))
        if self.study.kind == "weak-tokens":
            return tokens * cp * dp
        if self.study.kind != "weak-work":
            return tokens
        if self.app.name != "gyre-attention":  # work is proportional to tokens
            return round_to(tokens * cp * tp * dp, multiple)
        mask = str(self.options.get("mask", "causal"))
        window, queries = (parse_size(self.options.get(name, 0)) for name in ("window", "queries"))
        return round_to(tokens_of_equal_work(tokens, cp, mask, window, queries), multiple)

    def expand(self) -> Expansion:
        self.check_options()
        self.check_kind()
        self.check_nodes()
        raise_all(self.messages)
        placements: dict[str, Placement] = {}
        seen: set[str] = set()
        duplicates = 0
        for problem, *values in itertools.product(self.problems.values() or [{}], *self.axes.values()):
            point = {**dict(zip(self.axes, values)), **problem}
            if "tokens" in point:
                if self.study.kind.startswith("weak"):
                    point[BASE] = point["tokens"]
                point["tokens"] = self.total_tokens(point["tokens"], point)
            if any(TOKENS in str(value) for value in point.values()):
                point = filled(point)
            common = {
                name: value for name, value in point.items() if name not in (*self.app.swept, BASE)
            }
            placement = self.placement(common)
            placement = placements.setdefault(placement.id, placement)
            case = self.case(placement, point)
            if case.id in seen:
                duplicates += 1
                continue
            seen.add(case.id)
            placement.cases.append(case)
        ordered = sorted(placements.values(), key=lambda one: (one.nodes, one.ranks))
        # All placements once, then all again: what changes with time is not taken for a difference of placements.
        again = range(1, self.study.repeat + 1)
        return Expansion([repeated(one, turn) for turn in again for one in ordered], duplicates)

    def identity(self, build: bool) -> dict[str, Any]:
        site = asdict(self.site)
        machine = {
            key: site[key]
            for key in (
                "name",
                "partition",
                "cores_per_node",
                "gpus_per_node",
                "launcher",
                "binding",
                "environment",
                "modules",
                "launcher_options",
            )
        }
        same = {"app": self.app.name, "options": self.options, "machine": machine}
        return {**same, "build": self.app.build} if build else same

    def case(self, placement: Placement, point: dict[str, Any]) -> Case:
        same = {
            "placement": [placement.nodes, placement.ranks, placement.ranks_per_node],
            "axes": point,
        }
        return Case(
            digest({**self.identity(True), **same}), digest({**self.identity(False), **same}), point
        )

    def placement(self, common: dict[str, Any]) -> Placement:
        ranks = math.prod(common.get(name, 1) for name in (*self.app.grid, "ranks"))
        per_node = min(ranks, self.ranks_per_node())
        nodes = math.ceil(ranks / per_node)
        identity = digest(
            {**self.identity(True), "common": common, "ranks": [nodes, ranks, per_node]}
        )
        grid = "-".join(f"{name}{common[name]}" for name in GRID if name in common) or "ranks1"
        return Placement(
            identity,
            f"{grid}-{identity[:8]}",
            nodes,
            ranks,
            per_node,
            common,
            self.arguments(common),
        )

    def arguments(self, common: dict[str, Any]) -> list[str]:
        words: list[str] = []
        given = {
            **{ALIASES.get(name, name): value for name, value in common.items()},
            **self.options,
        }
        for name, value in given.items():
            if name == "ranks" or value is False or (name == "emulate-network" and value == "none"):
                continue
            is_size = (
                self.app.options[name].kinds == ("SIZE",) and isinstance(value, int) and value > 0
            )
            words += (
                [f"--{name}"]
                if value is True
                else [f"--{name}", size_text(value) if is_size else str(value)]
            )
        return words


def repeated(placement: Placement, repetition: int) -> Placement:
    """The placement's next run, with rows of its own. The first keeps its ids: what is done stays done."""
    if repetition == 1:
        return placement
    cases = [replace(case, id=digest([case.id, repetition])) for case in placement.cases]
    name = f"{placement.name}-r{repetition}"
    return replace(
        placement, id=digest([placement.id, repetition]), name=name, cases=cases, repetition=repetition
    )


def expand(study: Study, site: Site, app: App, file: str) -> Expansion:
    return Expander(study, site, app, file).expand()
