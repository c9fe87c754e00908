#!/usr/bin/env python3
"""Every leaf of the recorded official results, changed by itself: gyre-study check refuses the result, or the leaf is one of
FREE and the table of results stays the same.

Usage: test_study_official_mutations.py SOURCE_DIR BUILD_DIR [all]   (all: every leaf, which takes minutes)
"""

import json
import re
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SOURCE, EVERY = Path(sys.argv[1]).resolve(), sys.argv[3:] == ["all"]
sys.dont_write_bytecode = True
sys.path[:0] = [str(SOURCE / "slurm")]
from gyre_study.errors import StudyError  # noqa: E402
from gyre_study.official import opened_entry  # noqa: E402
from gyre_study.official_judge import judge  # noqa: E402
from gyre_study.official_report import row_text  # noqa: E402

# What cannot be known from one file, and is not printed: kinds of leaves, and what they are.
FREE = {
    r"plan\.study\.(title|minutes|tunable\[\])": "texts and limits of the study's file of that time",
    r"plan\.site\..*": "what the site's file says; the runs themselves say where they ran",
    r"plan\.app\.options": "what the program of that time said of its options",
    r"plan\.predicted": "predictions",
    r"plan\.placements\[\]\.cases\[\]\.(id|kin)": "hashes that folders of the host are part of",
    r"rows\[\]\.(libraries|environment)\.\w+": "names, of one run alone",
    r"rows\[\]\.machine\.(hosts\[\]\.(?!cpu$|cores$|names)|mpi\.(device|transport|inside|between)|slurm).*": "the same",
    r"rows\[\]\.(run|ranks\[\])\.(launcher|job|numa)": "names",
    r"rows\[\]\.build\.compiler": "the compiler's name, in a plan of the same name",
    r"rows\[\]\.memory\.\w+": "bytes",
    r"rows\[\]\.foreign_load\.cores": "below the bound of the run rules",
    r"rows\[\]\.samples_ms\[\]\[\]": "the order of samples",
    r"rows\[\]\.verification\.checks\[\]\.(where|count)": "where the largest error was; how many counters were compared",
    r"rows\[\]\.measurements\.(buffers|compute_only|extra|imbal|imb_pair|imb_time|exposed|msgs|balance)":
        "measured beside the figure",
    r"rows\[\]\.measurements\.(communication_only|exposed_time|exposed_noise)":
        "the same; of one rank, which sends nothing, nothing follows from them",
}
# Printed texts that cannot be known either: their other values, but not their absence, are accepted in a result of one run.
NAMES = r"rows\[\]\.machine\.hosts\[\]\.cpu"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path, container and key of each leaf; objects and lists that are empty are leaves."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        place = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"
        if isinstance(one, (dict, list)) and one:
            yield from leaves(one, place)
        else:
            yield place, value, key


def pattern(path: str) -> str:
    """The path without indices and names of placements: the leaves with one pattern are of one kind."""
    place = re.sub(r"^\.rows\.[^\[]+", ".rows", re.sub(r"\[\d+\]", "[]", path)).strip(".")
    return re.sub(r"(plan\.app\.options)\..*", r"\1", place)


def other(value: Any) -> Any:
    """Negated."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return -value
    return {"": 1} if value == {} else ["x"] if value == [] else 1 if value is None else f"{value}x"


def larger(value: Any) -> Any:
    return 10 * value if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def neighbour(container: Any, key: Any) -> Any:
    keys = list(container) if isinstance(container, dict) else range(len(container))
    at = list(keys).index(key)
    return keys[at + 1] if at + 1 < len(keys) else keys[at - 1]


class Mutations(unittest.TestCase):
    def outcome(self, entry: Any) -> str | None:
        """The row of the table; None: refused."""
        try:
            with opened_entry(Path("entry.json"), entry) as result:
                judgement = judge(result, Path("entry.json"))
                return None if judgement.refused else row_text(judgement, "entry.json")
        except StudyError:
            return None

    def changes(self, container: Any, key: Any) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names of changes and how to make each; the container is restored between them."""
        value = container[key]

        def put(new: Any) -> Callable[[], None]:
            return lambda: container.__setitem__(key, new)

        def swap() -> None:
            beside = neighbour(container, key)
            container[key], container[beside] = container[beside], container[key]

        yield "deleted", lambda: container.__delitem__(key)
        for name, new in (("negated", other(value)), ("x10", larger(value))):
            if new != value or type(new) is not type(value):
                yield name, put(new)
        if len(container) > 1 and container[neighbour(container, key)] != value:
            yield "swapped", swap

    def mutate(self, entry: Any, usual: str, path: str, container: Any, key: Any) -> list[str]:
        """The changes that are neither refused nor allowed."""
        found = []
        whole = dict(container) if isinstance(container, dict) else list(container)
        for name, change in self.changes(container, key):
            change()
            row = self.outcome(entry)
            if isinstance(container, dict):
                container.clear()
                container.update(whole)
            else:
                container[:] = whole
            free = any(re.fullmatch(one, pattern(path)) for one in FREE)
            named = name == "negated" and re.fullmatch(NAMES, pattern(path))
            if row is not None and not (free and row == usual) and not named:
                found.append(f"{name} {path} = {json.dumps(whole[key])[:60]}" + ("" if row == usual else f": {row}"))
        return found

    def test_every_leaf(self) -> None:
        for file in sorted((SOURCE / "results/official").glob("*.json")):
            with self.subTest(file.name):
                entry = json.loads(file.read_text(encoding="utf-8"))
                usual = self.outcome(entry)
                self.assertIsNotNone(usual)
                groups: dict[str, list[tuple[str, Any, Any]]] = {}
                for leaf in leaves(entry):
                    groups.setdefault(pattern(leaf[0]), []).append(leaf)
                # Both sizes of a program have the same kinds of leaves: of the larger one a sample is enough.
                kinds = [*groups.values()][:: 1 if EVERY or "tiny" in file.name else 7]
                wrong = [one for group in kinds for leaf in (group if EVERY else group[len(file.name) % len(group):][:1])
                         for one in self.mutate(entry, str(usual), *leaf)]
                self.assertEqual(wrong, [], f"{len(wrong)} changes are accepted:\n" + "\n".join(wrong))


unittest.main(argv=sys.argv[:1])
