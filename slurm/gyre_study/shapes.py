"""What JSON files must look like, so that one of another shape is refused where it is read.

A shape is a type (or a union of types); a list of one shape: of all elements; a list of more: of as many elements;
a dict: keys and shapes, where "key?" may be missing and "*" stands for all other keys; a tuple: one of these shapes;
None: null. ANY: whatever it is.
"""

import json
from pathlib import Path
from typing import Any

from .errors import RUNTIME, StudyError

ANY = object
NUMBER = int | float


def misfit(value: Any, shape: Any, place: str = "the file") -> str:
    """What does not fit, with its place, or ""."""
    if isinstance(shape, tuple):
        found = [misfit(value, one, place) for one in shape]
        return "" if "" in found else found[-1]
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{place} is no object"
        own = {name.removesuffix("?"): (name, inner) for name, inner in shape.items()}
        missing = [key for key, (name, _) in own.items() if key == name and key not in ("*", *value)]
        if missing:
            return f"{place} has no '{missing[0]}'"
        for key, one in value.items():
            if key not in own and "*" not in own:
                return f"{place} has the unknown key '{key}'"
            if found := misfit(one, own.get(key, own.get("*"))[1], f"{place}: {key}"):
                return found
        return ""
    if isinstance(shape, list):
        if not isinstance(value, list) or len(shape) not in (1, len(value)):
            return f"{place} is no list" + (f" of {len(shape)}" if len(shape) > 1 else "")
        shapes = shape if len(shape) > 1 else shape * len(value)
        wrong = (misfit(*pair, f"{place}[{i}]") for i, pair in enumerate(zip(value, shapes)))
        return next(filter(None, wrong), "")
    fits = value is None if shape is None else isinstance(value, shape)
    if fits and not (isinstance(value, bool) and shape not in (bool, ANY)):
        return ""
    return f"{place} is {json.dumps(value)[:60]}, of another kind"


def parse_json(path: Path, text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{path}: it is no JSON: {error}", RUNTIME) from error


def read_json(path: Path, shape: Any) -> Any:
    """A file of this shape. Raises a StudyError that names the file and the place."""
    value = parse_json(path, path.read_bytes())
    if wrong := misfit(value, shape):
        raise StudyError(f"{path}: {wrong}; wanted: a file that gyre-study wrote", RUNTIME)
    return value
