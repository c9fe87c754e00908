"""Reads site and study files (TOML) and refuses what they should not hold."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import StudyError, nearest, raise_all, refuse_unknown
from .slurm import MAX_ARRAY_SIZE

SLURM = Path(__file__).resolve().parent.parent
IS_SOURCE_TREE = (SLURM.parent / "CMakeLists.txt").exists()  # else SLURM is PREFIX/share/gyre/slurm
APPS = SLURM.parent / "build/cpu/apps" if IS_SOURCE_TREE else SLURM.parents[2] / "bin"

KINDS = ("strong", "weak-tokens", "weak-work", "network", "length")
BINDINGS = {
    "cores": ["--cpu-bind=cores"],
    "sockets": ["--cpu-bind=sockets"],
    "none": ["--cpu-bind=none"],
}
MPIEXEC_BINDINGS: dict[str, list[str]] = {
    "cores": ["-bind-to", "core"],
    "sockets": ["-bind-to", "socket"],
    "none": [],
}


@dataclass
class Site:
    """A machine. All of it but `name` is in the file; docs in slurm/README.md."""

    name: str
    cores_per_node: int
    gpus_per_node: int = 0
    max_nodes: int = 0
    max_array_size: int = MAX_ARRAY_SIZE
    partition: str = ""
    account: str = ""
    launcher: str = "srun"
    binding: str = "cores"
    apps: str = ""
    size: str = ""
    mpiexec: str = "mpiexec"
    modules: list[str] = field(default_factory=list)
    sbatch_options: list[str] = field(default_factory=list)
    launcher_options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    model: dict[str, float] = field(default_factory=dict)


@dataclass
class Study:
    """A set of cases: `axes`, `options` and `problems` as the file has them, with those of one of its sizes.

    `repeat`: runs of each case, for gyre-study compare. `problems`: by name, axes whose values go together. `chosen`:
    what --set has changed, of what is `tunable`.
    """

    name: str
    kind: str
    app: str
    axes: dict[str, Any]
    title: str = ""
    minutes: int = 30
    accept: str = "measured"
    ranks_per_node: int = 0
    repeat: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, Any] = field(default_factory=dict)
    tunable: list[str] = field(default_factory=list)
    size: str = ""
    chosen: dict[str, Any] = field(default_factory=dict)


SITE_KEYS: dict[str, type] = {
    "cores_per_node": int,
    "gpus_per_node": int,
    "max_nodes": int,
    "max_array_size": int,
    "partition": str,
    "account": str,
    "launcher": str,
    "binding": str,
    "apps": str,
    "size": str,
    "mpiexec": str,
    "modules": list,
    "sbatch_options": list,
    "launcher_options": list,
    "environment": dict,
    "model": dict,
}
STUDY_KEYS: dict[str, type] = {
    "kind": str,
    "app": str,
    "axes": dict,
    "title": str,
    "minutes": int,
    "accept": str,
    "ranks_per_node": int,
    "repeat": int,
    "options": dict,
    "problems": dict,
    "tunable": list,
    "size": str,
    "chosen": dict,
}
FILE_KEYS = {**{key: kind for key, kind in STUDY_KEYS.items() if key not in ("size", "chosen")}, "sizes": dict}
SIZE_KEYS = {key: FILE_KEYS[key] for key in ("kind", "minutes", "repeat", "axes", "options", "problems")}
ABOVE_ZERO = ("cores_per_node", "max_array_size", "minutes", "repeat")
MODEL_KEYS = ("tflops", "gbps", "latency_us")
# Options of sbatch and srun that the shape of a placement sets, and their short forms.
SHAPE_OPTIONS = {
    "--nodes": "-N",
    "--ntasks": "-n",
    "--ntasks-per-node": "",
    "--cpus-per-task": "-c",
    "--gpus-per-node": "",
    "--array": "-a",
    "--time": "-t",
    "--dependency": "-d",
    "--output": "-o",
    "--chdir": "-D",
}
WORDS = {int: "a whole number", str: "a text", list: "a list of texts", dict: "a table"}


def find_file(word: str, folder: Path) -> Path:
    """A path, or the name of a file of the folder."""
    path = Path(word)
    if path.suffix != ".toml" and not path.is_file():  # a study's folder may have the study's name
        path = folder / f"{word}.toml"
    if not path.is_file():
        there = sorted(one.stem for one in folder.glob("*.toml"))
        raise StudyError(
            f"{word}: no such file; {folder.name} that are there: {', '.join(there) or 'none'}"
        )
    return path


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StudyError(f"{path}: {error}") from error


def wrong_values(file: str, table: dict[str, Any], kinds: dict[str, type]) -> list[str]:
    """Unknown keys, values of another type, whole numbers below 0 (or 1, where 0 says nothing)."""
    messages = refuse_unknown(file, "", table, kinds)
    for key, value in table.items():
        wanted = kinds.get(key)
        if wanted is None:
            continue
        is_right = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
        if wanted is list:
            is_right = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if not is_right:
            messages.append(f"{file}: {key} = {value!r}: wanted: {WORDS[wanted]}")
        elif wanted is int and value < (least := int(key in ABOVE_ZERO)):
            messages.append(f"{file}: {key} = {value}: wanted: at least {least}")
    return messages


def wrong_words(file: str, table: dict[str, Any], words: dict[str, Any]) -> list[str]:
    """Texts that are not one of a few words."""
    return [
        f"{file}: {key} = {table[key]!r}: not one of {', '.join(allowed)}; nearest: {nearest(table[key], allowed)}"
        for key, allowed in words.items()
        if isinstance(table.get(key), str) and table[key] not in allowed
    ]


def words_of_shape(file: str, key: str, words: Any) -> list[str]:
    """A message for each word that would override what the study sets."""
    messages = []
    for word in words if isinstance(words, list) else []:
        for long, short in SHAPE_OPTIONS.items():
            if word.split("=")[0] == long or (short and re.match(rf"{short}(\d|$)", word)):
                messages.append(f"{file}: {key}: {word}: the study sets {long} itself; leave it out")
    return messages


def load_site(path: Path) -> Site:
    table = read_toml(path)
    file = path.name
    messages = wrong_values(file, table, SITE_KEYS)
    messages += wrong_words(
        file, table, {"launcher": ("srun", "mpiexec"), "binding": tuple(BINDINGS)}
    )
    messages += [f"{file}: {key} is needed" for key in ("cores_per_node",) if key not in table]
    messages += words_of_shape(file, "sbatch_options", table.get("sbatch_options"))
    if table.get("launcher", "srun") == "srun":
        messages += words_of_shape(file, "launcher_options", table.get("launcher_options"))
    environment, model = table.get("environment", {}), table.get("model", {})
    if isinstance(environment, dict):
        messages += [
            f"{file}: environment.{key} = {value!r}: wanted: a text"
            for key, value in environment.items()
            if not isinstance(value, str)
        ]
    if isinstance(model, dict):
        messages += refuse_unknown(file, "model", model, MODEL_KEYS)
        messages += [
            f"{file}: model.{key} = {value!r}: wanted: a number above 0"
            for key, value in model.items()
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0
        ]
        missing = [key for key in MODEL_KEYS if key not in model]
        if model and missing:
            messages.append(
                f"{file}: model has no {missing[0]}; a prediction needs {', '.join(MODEL_KEYS)}"
            )
    raise_all(messages)
    return Site(path.stem, **table)


def load_study(path: Path, size: str = "", chosen: Sequence[str] = (), usual: str = "") -> Study:
    """The study of a file. `size`: of its sizes; "": `usual` if it has that, else the first. `chosen`:
    "NAME=VALUE[,VALUE ...]", of what is tunable."""
    table = read_toml(path)
    file = path.name
    messages = wrong_values(file, table, FILE_KEYS)
    sizes = table.get("sizes", {})
    for key in ("sizes", "problems"):
        inner = table.get(key, {})
        for name, one in inner.items() if isinstance(inner, dict) else ():
            if not isinstance(one, dict):
                messages.append(f"{file}: {key}.{name} = {one!r}: wanted: a table")
            elif key == "sizes":
                messages += wrong_values(f"{file}: sizes.{name}", one, SIZE_KEYS)
    raise_all(messages)
    if size and size not in sizes:
        near = f"nearest: {nearest(size, sizes)}; there are {', '.join(sizes)}" if sizes else "it has one size"
        raise StudyError(f"{file}: --size {size}: no such size; {near}")
    table.pop("sizes", None)
    if sizes:
        table["size"] = size or (usual if usual in sizes else next(iter(sizes)))
        for key, value in sizes[table["size"]].items():
            table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    messages += wrong_words(file, table, {"kind": KINDS, "accept": ("measured", "finished")})
    messages += [f"{file}: {key} is needed" for key in ("kind", "app", "axes") if key not in table]
    raise_all(messages)
    choose(file, table, chosen)
    table["options"] = found_in(path.parent, table.get("options", {}))
    table["axes"] = found_in(path.parent, table["axes"])
    table["problems"] = {
        name: found_in(path.parent, one) for name, one in table.get("problems", {}).items()
    }
    return Study(path.stem, **table)


def choose(file: str, table: dict[str, Any], chosen: Sequence[str]) -> None:
    """Puts the values of --set in the place of those of the file."""
    tunable: list[str] = table.get("tunable", [])
    messages = []
    for word in chosen:
        name, equals, text = word.partition("=")
        name = name.replace("-", "_")
        if not equals or not text:
            messages.append(f"--set {word}: wanted: NAME=VALUE, or NAME=VALUE,VALUE for an axis")
        elif name not in tunable:
            more = f"nearest: {nearest(name, tunable)}; " if tunable else ""
            more += f"tunable: {', '.join(tunable) or 'nothing'}"
            messages.append(f"{file}: --set {name}: it is part of the problem; {more}")
        else:
            values = [int(one) if one.isdecimal() else one for one in text.split(",")]
            table.setdefault("chosen", {})[name] = values
            if name in table["axes"] or len(values) > 1:
                table.get("options", {}).pop(name, None)  # several values are an axis
                table["axes"][name] = "all" if values == ["all"] else values
            else:
                table.setdefault("options", {})[name] = text == "true" if text in ("true", "false") else values[0]
    raise_all(messages)


def found_in(folder: Path, table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: [found(folder, one) for one in value] if isinstance(value, list) else found(folder, value)
        for key, value in table.items()
    }


def found(folder: Path, value: Any) -> Any:
    """A value that names a file from the folder on, maybe behind "file=": its whole path, since jobs start elsewhere."""
    if not isinstance(value, str) or "/" not in value:
        return value
    if (folder / value).is_file():
        return str((folder / value).resolve())
    return re.sub(r"(?<=\bfile=)[^,]*", lambda match: found(folder, match[0]), value)
