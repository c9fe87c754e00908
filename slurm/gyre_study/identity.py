"""What a row of results is of, and what its run was made with: rows of different experiments are never one row."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .results import Run, portable
from .sizes import parse_size

# Options that do not tell experiments apart: how long and how carefully is measured, where output goes, and how much is
# said. Those of a sweep are in the key of a row.
NOT_COMPARED = frozenset(
    "iters warmup max_seconds check cycles min max factor step "
    "json csv svg trace output resume columns progress timeout quiet verbose machine at_least config".split()
)
INPUTS = ("input", "model")  # files whose checksums are the identity
# Words of compiler flags between which a comparison of times says nothing of the code.
TELLING = re.compile(r"-O\S*|-f(?:no-)?(?:fast|unsafe|finite)-math\S*|-fsanitize\S*")


@dataclass
class Experiment:
    """What must be equal for two rows to be compared. `settings`: configuration, and options that it does not hold."""

    program: str
    ranks: int
    nodes: int
    key: dict[str, Any]
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        own = " ".join(f"{name}={value}" for name, value in self.key.items())
        other = " ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.program} {own} | {self.ranks} ranks on {self.nodes} nodes | {other}"

    @property
    def variables(self) -> dict[str, str]:
        """What rows may have in common, by name."""
        own = {name: str(value) for name, value in self.key.items()}
        return {"program": self.program, "ranks": str(self.ranks), **self.settings, **own}


def as_text(value: Any) -> str:
    """A value as it is compared: sizes as numbers, files without their folders."""
    text = str(portable(value))
    return str(parse_size(text)) if re.fullmatch(r"\d+[KMG]", text) else text


def given_options(argv: Sequence[str]) -> dict[str, str]:
    """The long options of a command line, in snake_case; a flag is "true".

    Short ones are left out: what they say has always been in the configuration, or is NOT_COMPARED.
    """
    found: dict[str, str] = {}
    name = ""
    for word in argv[1:]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = as_text(value) if equals else "true"
            name = "" if equals else name
        elif word.startswith("-") and not re.match(r"-[\d.]", word):
            name = ""
        elif name:
            found[name] = as_text(word)
            name = ""
    return found


def contradicts(run: Run, arguments: Sequence[str], others: Collection[str]) -> str:
    """The first option that a run was given with another value than in these arguments, or more than them: "--heads 2";
    else "". `others`: options that may differ."""
    given, wanted = (given_options(words) for words in (run.head.get("run", {}).get("argv", []), ["", *arguments]))
    free = NOT_COMPARED | {name.replace("-", "_") for name in others}
    found = (f"--{name.replace('_', '-')} {value}" for name, value in given.items()
             if name not in free and wanted.get(name) != value)
    return next(found, "")


def recorded_settings(run: Run) -> dict[str, str]:
    """What the run says of itself: its configuration and the checksums of its inputs."""
    found = {name: as_text(value) for name, value in run.head.get("configuration", {}).items()}
    if re.fullmatch(r"\d+ x \d+ tokens", found.get("source", "")):
        del found["source"]  # documents, and the key's tokens, say it
    if inputs := run.head.get("inputs"):
        found["inputs"] = " ".join(one["sha256"] or as_text(one["file"]) for one in inputs)
    return found


def settings_of(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Settings of runs of one program, which can be compared with one another.

    A name that every run records has the recorded value. One that some do not record, because their program is older or
    because it is an option of the command line alone, has the value that was given there, or "default".
    """
    recorded = [recorded_settings(run) for run in runs]
    given = [given_options(run.head.get("run", {}).get("argv", [])) for run in runs]
    for own, options in zip(recorded, given):
        for name in INPUTS if "inputs" in own else ():
            options.pop(name, None)
    names = [name for name in dict.fromkeys(name for one in (*recorded, *given) for name in one)]
    settings: list[dict[str, str]] = [{} for _ in runs]
    for name in names:
        if name in NOT_COMPARED:
            continue
        is_recorded = all(name in one for one in recorded)
        values = [one[name] for one in recorded] if is_recorded else [one.get(name, "default") for one in given]
        if is_recorded or {*values} != {"default"}:
            for one, value in zip(settings, values):
                one[name] = value
    return settings


def experiments(runs: Sequence[Run]) -> list[list[Experiment]]:
    """Of each run, the experiments of its rows."""
    found: list[list[Experiment]] = [[] for _ in runs]
    for program in dict.fromkeys(run.head["suite"]["program"] for run in runs):
        own = [place for place, run in enumerate(runs) if run.head["suite"]["program"] == program]
        for place, settings in zip(own, settings_of([runs[place] for place in own])):
            ranks = runs[place].head.get("ranks", [])
            nodes = len({rank.get("host") for rank in ranks})
            for row in runs[place].rows:
                key = {name: value for name, value in row.key.items() if name != "cycle"}
                others = {name: value for name, value in settings.items() if name not in key}
                found[place].append(Experiment(program, len(ranks), nodes, key, others))
    return found


def setting_differences(before: Iterable[Experiment], after: Iterable[Experiment]) -> list[str]:
    """How experiments of the same program and key differ: "collectives: messages before, library after"."""
    others: dict[str, list[Experiment]] = {}
    for one in after:
        others.setdefault(f"{one.program} {one.key}", []).append(one)
    found: dict[str, list[set[str]]] = {}
    for one in before:
        for other in others.get(f"{one.program} {one.key}", []):
            pairs = [({"ranks": str(side.ranks), "nodes": str(side.nodes), **side.settings}) for side in (one, other)]
            for name in dict.fromkeys([*pairs[0], *pairs[1]]):
                values = [pair.get(name, "none") for pair in pairs]
                if values[0] != values[1]:
                    sets = found.setdefault(name, [set(), set()])
                    for side, value in zip(sets, values):
                        side.add(value)
    return [difference(name, *sides) for name, sides in found.items()]


def difference(name: str, before: Iterable[str], after: Iterable[str]) -> str:
    return f"{name}: {' or '.join(sorted(before))} before, {' or '.join(sorted(after))} after"


# What the runs were made with


def facts_of(run: Run) -> dict[str, str]:
    """Build, libraries, environment, processors and binding of a run; what it does not say is left out."""
    head = run.head
    build, libraries = head.get("build", {}), head.get("libraries") or {}
    facts = {f"build {name}": build.get(name) for name in ("type", "compiler", "flags")}
    facts |= {f"library {name}": value for name, value in libraries.items()}
    facts |= {f"environment {name}": value for name, value in (head.get("environment") or {}).items()}
    facts["CPUs of ranks"] = run.binding
    facts["processor"] = " and ".join(
        sorted({host.get("cpu") or "unknown" for host in (head.get("machine") or {}).get("hosts", [])})
    )
    return {name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in facts.items() if value not in (None, "")}


def fact_differences(before: Sequence[Run], after: Sequence[Run]) -> tuple[list[str], list[str]]:
    """A line for each fact that differs, and those between which times cannot be compared."""
    sides = [[facts_of(run) for run in runs] for runs in (before, after)]
    lines, grave = [], []
    for name in dict.fromkeys(name for side in sides for facts in side for name in facts):
        absent = "not set" if name.startswith("environment ") else "not recorded"
        values = [{facts.get(name, absent) for facts in side} for side in sides]
        if values[0] == values[1] or (absent == "not recorded" and {absent} in values):
            continue
        lines.append(difference(name, *values))
        told = [{" ".join(sorted(TELLING.findall(value))) for value in side} for side in values]
        if name == "build type" or (name == "build flags" and told[0] != told[1]):
            grave.append(lines[-1])
    return lines, grave
