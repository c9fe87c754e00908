"""Holds JSON values against a JSON Schema. Only the keywords that gyre-result-1.schema.json has are known, so that
gyre-study needs no package; tests/python/test_study_official.py compares it with jsonschema."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import nearest

# Returns "" or one line: the place of what does not fit, its value and what is wanted.
Check = Callable[[Any, str], str]
NO_RULES = {"$schema", "title", "description", "$defs"}
KINDS: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: is_number(value),
    "integer": lambda value: is_number(value) and value == int(value),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def is_number(value: Any) -> bool:
    """Python reads NaN and Infinity, which JSON has not, and whole numbers beyond double precision."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def misfit_text(place: str, value: Any, wanted: str) -> str:
    return f"{place} {shown(value)}; wanted: {wanted}"


def whole(pattern: str) -> re.Pattern[str]:
    """A pattern of JSON Schema: "$" is the end, where Python's also stands before a last newline."""
    return re.compile(pattern[:-1] + r"\Z" if pattern.endswith("$") else pattern)


class Schema:
    """A schema whose definitions become functions when they are first used."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.known: dict[str, Check] = {}

    def definition(self, name: str) -> Check:
        if name not in self.known:
            self.known[name] = lambda value, place: self.known[name](value, place)  # for one that names itself
            self.known[name] = self.compile(self.document["$defs"][name])
        return self.known[name]

    def compile(self, schema: dict[str, Any]) -> Check:
        rules = {word.strip("$"): rule for word, rule in schema.items() if word not in NO_RULES}
        checks = [getattr(self, f"of_{word}")(rule, schema) for word, rule in rules.items()]

        def all_of(value: Any, place: str) -> str:
            for check in checks:
                if found := check(value, place):
                    return str(found)
            return ""

        return checks[0] if len(checks) == 1 else all_of

    def of_ref(self, rule: str, _: Any) -> Check:
        return self.definition(rule.removeprefix("#/$defs/"))

    def of_type(self, rule: Any, _: Any) -> Check:
        names = [rule] if isinstance(rule, str) else rule
        first, *others = (KINDS[name] for name in names)
        wanted = " or ".join(names)

        def check(value: Any, place: str) -> str:
            fits = first(value) or any(kind(value) for kind in others)
            return "" if fits else misfit_text(place, value, wanted)

        return check

    def of_const(self, rule: Any, _: Any) -> Check:
        return self.of_enum([rule], _)

    def of_enum(self, rule: list[Any], _: Any) -> Check:
        wanted = ", ".join(map(str, rule))
        return lambda value, place: "" if value in rule else misfit_text(place, value, wanted)

    def of_pattern(self, rule: str, _: Any) -> Check:
        pattern = whole(rule)
        return lambda value, place: (
            "" if not isinstance(value, str) or pattern.search(value) else misfit_text(place, value, f"a text like {rule}"))

    def of_minLength(self, rule: int, _: Any) -> Check:
        return lambda value, place: (
            "" if not isinstance(value, str) or len(value) >= rule else misfit_text(place, value, "a text"))

    def bound(self, fits: Callable[[Any], bool], wanted: str) -> Check:
        return lambda value, place: "" if not is_number(value) or fits(value) else misfit_text(place, value, wanted)

    def of_minimum(self, rule: float, _: Any) -> Check:
        return self.bound(lambda value: value >= rule, f"at least {rule}")

    def of_exclusiveMinimum(self, rule: float, _: Any) -> Check:
        return self.bound(lambda value: value > rule, f"above {rule}")

    def of_maximum(self, rule: float, _: Any) -> Check:
        return self.bound(lambda value: value <= rule, f"at most {rule}")

    def of_minItems(self, rule: int, _: Any) -> Check:
        return lambda value, place: (
            "" if not isinstance(value, list) or len(value) >= rule else misfit_text(place, value, f"{rule} items at least"))

    def of_items(self, rule: dict[str, Any], _: Any) -> Check:
        item = self.compile(rule)

        def check(value: Any, place: str) -> str:
            for index, one in enumerate(value if isinstance(value, list) else ()):
                if item(one, place):
                    return item(one, f"{place}[{index}]")
            return ""

        return check

    def of_required(self, rule: list[str], _: Any) -> Check:
        def check(value: Any, place: str) -> str:
            missing = [name for name in rule if isinstance(value, dict) and name not in value]
            return f"{place} has no {missing[0]}" if missing else ""

        return check

    def of_properties(self, rule: dict[str, Any], _: Any) -> Check:
        checks = {name: self.compile(one) for name, one in rule.items()}

        def check(value: Any, place: str) -> str:
            for name, one in value.items() if isinstance(value, dict) else ():
                if name in checks and (found := checks[name](one, f"{place}.{name}")):
                    return found
            return ""

        return check

    def of_additionalProperties(self, rule: Any, schema: dict[str, Any]) -> Check:
        own = schema.get("properties", {})
        one_of_more = None if rule is False else self.compile(rule)

        def check(value: Any, place: str) -> str:
            for name, one in value.items() if isinstance(value, dict) else ():
                if name in own:
                    continue
                if one_of_more is None:
                    return f"{place} has the unknown field {name!r}; nearest: {nearest(name, own)}"
                if found := one_of_more(one, f"{place}.{name}"):
                    return found
            return ""

        return check

    def of_propertyNames(self, rule: dict[str, Any], _: Any) -> Check:
        fits = self.compile(rule)

        def check(value: Any, place: str) -> str:
            unknown = [name for name in value if fits(name, place)] if isinstance(value, dict) else []
            return f"{place} has the unknown field {unknown[0]!r}" if unknown else ""

        return check

    def of_allOf(self, rule: list[Any], _: Any) -> Check:
        checks = [self.compile(one) for one in rule]
        return lambda value, place: next(filter(None, (check(value, place) for check in checks)), "")

    def of_anyOf(self, rule: list[Any], _: Any) -> Check:
        checks = [self.compile(one) for one in rule]

        def check(value: Any, place: str) -> str:
            found = [one(value, place) for one in checks]
            return "" if "" in found else found[-1]

        return check

    def of_oneOf(self, rule: list[Any], _: Any) -> Check:
        checks = [self.compile(one) for one in rule]

        def check(value: Any, place: str) -> str:
            found = [one(value, place) for one in checks]
            return "" if found.count("") == 1 else next(filter(None, found), f"{place} is several of oneOf")

        return check


def read_schema(path: Path) -> Schema:
    return Schema(json.loads(path.read_text(encoding="utf-8")))
