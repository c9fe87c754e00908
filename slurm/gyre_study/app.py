"""What a program can do: its build and its options, as it says itself (--version, --help)."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import RUNTIME, StudyError, nearest
from .sizes import parse_size

# Options whose product is the number of ranks of a run. Other programs take any number.
GRIDS = {
    "gyre-attention": ("cp",),
    "gyre-logprobs": ("cp", "tp"),
    "gyre-pipeline": ("dp", "cp", "tp"),
}
# Those that a program runs over by itself, where it has the choice "all"; they are in the key of a row.
SWEPT = ("schedule", "layout", "op", "method", "algorithm")
# gyre-study gives these itself, or they make one file of many cases.
RESERVED = (
    "json csv resume config quiet verbose output trace svg explain help version min max factor step columns progress "
    "dry-run list cycles"
).split()
# What a launcher and MPI need is set in the environment of the study, not here; only noise is turned off.
QUIET = {"UCX_MEM_EVENTS": "n", "HWLOC_COMPONENTS": "-pci,-linux:pci"}
LINE = re.compile(
    r"^  (?:-\w,)?--(?P<name>[\w-]+)(?:,--[\w-]+\{false\})?(?: (?P<kind>[A-Za-z][\w|-]*)(?:=(?P<usual>\S+))?)?(?:\s|$)"
)


@dataclass(frozen=True)
class Option:
    """`kinds`: INT, SIZE, FLOAT, TEXT or words; none of a flag. `usual`: the default, or ""."""

    name: str
    kinds: tuple[str, ...]
    usual: str

    @property
    def choices(self) -> tuple[str, ...]:
        """Words that it takes, but for "all"."""
        return tuple(kind for kind in self.kinds if not kind.isupper() and kind != "all")

    def error(self, value: object) -> str:
        """What is wrong with a value, or ""."""
        if not self.kinds:
            return "" if isinstance(value, bool) else f"{value!r} is not true or false"
        text = str(value)
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            return f"{value!r} is no value of --{self.name}"
        if any(is_of_kind(value, kind) for kind in self.kinds):
            return ""
        if self.choices:
            return f"{text!r} is not one of {', '.join(self.kinds)}; nearest: {nearest(text, self.kinds)}"
        return f"{text!r} is no {self.kinds[0]}"


def is_of_kind(value: object, kind: str) -> bool:
    if not kind.isupper():
        return value == kind
    try:
        if kind == "SIZE":
            parse_size(value)
        elif kind in ("INT", "FLOAT"):
            (int if kind == "INT" else float)(str(value))
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class App:
    """`build`: version, git, git_state, type, compiler, as rows of results name them."""

    name: str
    path: str
    build: dict[str, str]
    options: dict[str, Option]

    @property
    def grid(self) -> tuple[str, ...]:
        return GRIDS.get(self.name, ())

    @property
    def swept(self) -> tuple[str, ...]:
        """Axes inside one launch."""
        names = [
            name for name in SWEPT if name in self.options and "all" in self.options[name].kinds
        ]
        return (*names, "tokens") if "min" in self.options else tuple(names)


def options_of(help_text: str) -> dict[str, Option]:
    found = {}
    for line in help_text.splitlines():
        match = LINE.match(line)
        if match:
            kinds = tuple((match["kind"] or "").split("|")) if match["kind"] else ()
            if kinds == ("Excludes",):
                kinds = ()
            found[match["name"]] = Option(match["name"], kinds, match["usual"] or "")
    return found


def build_of(version_text: str) -> dict[str, str]:
    """Parses "gyre-attention 0.2.0 / git 022e938d (clean) / Release build by GNU 12.2.0, ...", below what MPI's
    libraries may print."""
    match = re.search(
        r"^gyre-\S+ (\S+)\ngit (\S+) \((.+?)\)\n(\S+) build by ([^,\n]+)", version_text, re.MULTILINE
    )
    if match is None:
        raise StudyError(f"unexpected answer to --version: {version_text[:200]!r}", RUNTIME)
    return dict(zip(("version", "git", "git_state", "type", "compiler"), match.groups()))


def ask(program: Path, question: str) -> str:
    environment = {**os.environ, **QUIET}
    try:
        done = subprocess.run(
            [program, question],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StudyError(f"{program} {question}: {error}", RUNTIME) from error
    if done.returncode != 0:
        raise StudyError(
            f"{program} {question}: exit code {done.returncode}: {done.stderr.strip()[:500]}",
            RUNTIME,
        )
    return done.stdout


def load_app(folder: Path, name: str) -> App:
    """`folder`: the folder of the programs (build/cpu/apps)."""
    program = folder.resolve() / name
    if not program.is_file():
        there = sorted(
            path.name
            for path in folder.glob("gyre-*")
            if os.access(path, os.X_OK) and path.is_file()
        )
        hint = (
            f"nearest: {nearest(name, there)}"
            if there
            else "no program is there; ./run build makes them in build/cpu/apps"
        )
        raise StudyError(f"{program}: no such program; {hint}")
    options = options_of(re.sub(r"\|\n +", "|", ask(program, "--help")))  # a list continues after "|"
    if "json" not in options or "resume" not in options:
        raise StudyError(f"{program}: it has no --json and --resume, and cannot be studied")
    return App(name, str(program), build_of(ask(program, "--version")), options)
