"""Official problems: studies official-*.toml whose results can be compared everywhere. docs/official.md has the rules.

A result is the folder of a study, or one JSON file of the same content:

    schema     "gyre-official/1"
    problem    hash of the problem (Problem.hash)
    plan       the folder's plan.json
    rows       by placement: the lines of rows/PLACEMENT.jsonl

official_judge.py says what is wrong with one, official_report.py what is accepted.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .cases import digest
from .errors import RUNTIME, StudyError, nearest
from .files import Study, load_study
from .folder import Folder, write_whole
from .official_setting import ROOT
from .results import objects, portable
from .shapes import ANY, misfit, parse_json

STUDIES = ROOT / "slurm/studies"
PREFIX = "official-"
SCHEMA = "gyre-official/1"
STUDY = "name kind app axes title minutes accept ranks_per_node options problems tunable size chosen"
SITE = """name cores_per_node gpus_per_node max_nodes partition account launcher binding apps mpiexec modules
    sbatch_options launcher_options environment model"""
PLAN = {
    "study": {**dict.fromkeys(STUDY.split(), ANY), "*": ANY},
    "site": {**dict.fromkeys(SITE.split(), ANY), "*": ANY},
    "*": ANY,
}
ENTRY = {"schema": str, "problem": str, "plan": PLAN, "rows": {"*": [{"*": ANY}]}}
# SHA-256 of a study's file, and the hashes of its problems. docs/official.md has them, too.
OFFICIAL: dict[str, tuple[str, dict[str, str]]] = {
    "official-attention": (
        "5e0efe123f16534ab2492e861e1ca9a06f356f669d9ca05a29a1d94f4eb78d45",
        {"tiny": "381ea69fe353", "small": "d8a690aba67c", "base": "a27ac7e848ed", "large": "ead09ed23404"},
    ),
    "official-logprobs": (
        "9708d3efbcd884633b8c0c447f6d80309f8a06c450ca1f27c3da4de2ab337d50",
        {"tiny": "19a909ff1958", "small": "dd666e972f9f", "base": "b1ce7c71d951", "large": "dcccce3634b7"},
    ),
    "official-pack": (
        "5952516fe4126d126b404cd4a7c13baa0c219009285a042e0e400343b35d4c37",
        {"tiny": "9bcf1912519f", "small": "6c1f38018abd", "base": "df98afcf0937", "large": "9ccd7b3825b9"},
    ),
    "official-pipeline": (
        "105ad2d13f3cc008c2aa5e9bb0ec1cdb6202f5a7795da45c9783e6bd6627f25d",
        {"tiny": "8a81898c52c9", "small": "c78fdc732462", "base": "06f2f7e32831", "large": "845375f18ba6"},
    ),
}


def files_of(study: Study) -> list[Path]:
    """The files that the study's problem names."""
    tables = [study.options, study.axes, *study.problems.values()]
    texts = [str(value) for table in tables for value in table.values()]
    return sorted({Path(word) for text in texts for word in re.findall(r"(?:(?<==)|^)/[^=,]+", text)})


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def definition(study: Study) -> dict[str, Any]:
    """What may not be changed, by the name that it has in the study's file."""
    fixed = {"study": study.name, "size": study.size, "kind": study.kind, "app": study.app}
    for name in ("options", "axes"):
        fixed |= {
            f"{name}.{key}": value
            for key, value in getattr(study, name).items()
            if key not in study.tunable
        }
    for problem, table in study.problems.items():
        fixed |= {f"problems.{problem}.{key}": value for key, value in table.items()}
    return {key: portable(value) for key, value in fixed.items()}


@dataclass
class Problem:
    """An official problem of this clone. `inputs`: SHA-256 of its files, by name."""

    study: Study
    inputs: dict[str, str]

    @property
    def hash(self) -> str:
        return digest({"definition": definition(self.study), "inputs": self.inputs})


def problem_of(given: Study) -> Problem:
    """The official problem that a study says it is, with the same choices."""
    if given.name not in OFFICIAL:
        raise StudyError(f"{given.name} is no official problem; nearest: {nearest(given.name, OFFICIAL)}")
    words = tuple(f"{name}={','.join(map(str, value))}" for name, value in given.chosen.items())
    return read_problem(given.name, given.size, words)


@lru_cache(maxsize=None)
def read_problem(name: str, size: str, chosen: tuple[str, ...]) -> Problem:
    file = STUDIES / f"{name}.toml"
    study = load_study(file, size, chosen)
    problem = Problem(study, {one.name: sha256(one) for one in files_of(study)})
    of_file, hashes = OFFICIAL[name]
    for what, got, wanted in (
        (f"{file}: SHA-256", sha256(file), of_file),
        (f"{name} {study.size}: problem", problem.hash, hashes[study.size]),
    ):
        if got != wanted:
            raise StudyError(f"{what} {got}; the official one: {wanted}; the study or an input of it was edited")
    return problem


def is_result(path: Path) -> bool:
    """Whether a file is of SCHEMA."""
    value = parse_json(path, path.read_bytes())
    return isinstance(value, dict) and value.get("schema") == SCHEMA


NumberedLines = list[tuple[int, dict[str, Any]]]
Lines = dict[str, NumberedLines]  # by placement


@dataclass
class Opened:
    """A result: its plan, numbered lines by placement, and the hash that a file states."""

    folder: Folder
    lines: Lines
    stated: str = ""


@contextmanager
def opened(path: Path) -> Iterator[tuple[Folder, str]]:
    """The folder of a result, with its rows, and the hash that its file states, if it is a file."""
    with opened_result(path) as result:
        for placement in result.folder.placements if path.is_file() else ():
            lines = [json.dumps(line) + "\n" for _, line in result.lines[placement.name]]
            file = result.folder.rows_file(placement)
            file.parent.mkdir(exist_ok=True)
            write_whole(file, "".join(lines))
        yield result.folder, result.stated


@contextmanager
def opened_result(path: Path) -> Iterator[Opened]:
    if path.is_dir():
        folder = Folder(path)
        yield Opened(folder, {one.name: numbered(folder.rows_file(one)) for one in folder.placements})
        return
    if not path.is_file():
        raise StudyError(f"{path}: no such file or folder")
    with opened_entry(path, parse_json(path, path.read_bytes())) as result:
        yield result


def numbered(file: Path) -> NumberedLines:
    return list(objects(file)) if file.exists() else []


@contextmanager
def opened_entry(path: Path, entry: Any) -> Iterator[Opened]:
    """The content of a file. `path`: its name in messages."""
    schema = entry.get("schema") if isinstance(entry, dict) else None
    if schema != SCHEMA:
        raise StudyError(f"{path}: schema {schema!r}; wanted: {SCHEMA}", RUNTIME)
    if reason := misfit(entry, ENTRY):
        raise StudyError(f"{path}: {reason}; wanted: {SCHEMA}", RUNTIME)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "plan.json").write_text(json.dumps(entry["plan"]), encoding="utf-8")
        try:
            folder = Folder(Path(place))
        except StudyError as error:
            said = str(error).replace(f"{Path(place).resolve()}/plan.json", f"{path}: plan")
            raise StudyError(said, error.code) from error
        names = [one.name for one in folder.placements]
        if bad := [name for name in names if not re.fullmatch(r"[\w-]+", name)]:  # it becomes the name of a file
            raise StudyError(f"{path}: placement {bad[0]!r}; wanted: a name such as cp2-0123abcd", RUNTIME)
        if unknown := [name for name in entry["rows"] if name not in names]:
            raise StudyError(f"{path}: rows of {unknown[0]!r}; the plan has no such placement", RUNTIME)
        yield Opened(folder, {name: [*enumerate(entry["rows"].get(name, []), 1)] for name in names}, entry["problem"])
