"""Reads gyre-result/1, the JSON files that the programs write, and says what is wrong with one that is not."""

import difflib
import json
import math

SCHEMA = "gyre-result/1"


class Malformed(Exception):
    """One line: the file, the place in it, what is there and what is wanted."""


def is_number(value):
    """JSON has whole numbers of any length; those beyond double precision are refused."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)


# What a place may hold: its name in a message, and the test.
OBJECT = ("an object", lambda value: isinstance(value, dict))
LIST = ("a list of at least one", lambda value: isinstance(value, list) and len(value) > 0)
TEXT = ("a text of one line", lambda value: isinstance(value, str) and value.isprintable())
TIME = ("a number above 0", lambda value: is_number(value) and value > 0)
CELL = ("a number, a text of one line, true, false or null",
        lambda value: value is None or isinstance(value, bool) or is_number(value) or TEXT[1](value))


def shown(value):
    """In a message: as JSON, of at most 40 characters."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):  # thousands of digits or levels
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 40 else text[:37] + "..."


def check(file, place, value, kind):
    wanted, is_right = kind
    if not is_right(value):
        raise Malformed(f"{file}: {place or 'the file'} is {shown(value)}; wanted: {wanted}")


def get(file, value, *way, kind):
    """value[way[0]][way[1]]..., an index of a list or a name of an object each; the last is of the kind."""
    place = ""
    for step in way:
        check(file, place, value, LIST if isinstance(step, int) else OBJECT)
        if isinstance(step, int):
            value, place = value[step], f"{place}[{step}]"
            continue
        if step not in value:
            near = difflib.get_close_matches(step, value, 1, 0.5) or sorted(value)[:1]
            hint = f"nearest: '{near[0]}'" if near else "wanted: an object with it"
            raise Malformed(f"{file}: {place or 'the file'} has no '{step}'; {hint}")
        value, place = value[step], f"{place}.{step}" if place else step
    check(file, place, value, kind)
    return value


def refuse_constant(name):
    raise ValueError(f"{name} is no number of JSON")


def load_json(path, file, wanted):
    """The document of a JSON file. `file`: its name in messages."""
    try:
        with open(path, "rb") as stream:
            return json.loads(stream.read(), parse_constant=refuse_constant)
    except OSError as error:
        raise Malformed(f"{file}: {error.strerror}; wanted: a file of {wanted}") from error
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{file}: {error}; wanted: JSON, {wanted}") from error


def load(path, file=None):
    """The document of a file whose schema is gyre-result/1. `file`: its name in messages."""
    file = file or path
    document = load_json(path, file, SCHEMA)
    get(file, document, "schema", kind=(f'"{SCHEMA}"', lambda value: value == SCHEMA))
    get(file, document, "results", kind=LIST)
    return document
