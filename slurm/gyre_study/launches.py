"""The launches that measure some cases of a placement: few of them, and no case that is not asked for."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .app import App
from .cases import Case, Placement
from .sizes import sweeps


@dataclass
class Launch:
    """`arguments`: the program's arguments except output and --resume."""

    cases: list[str]
    arguments: list[str]


def covers(
    combinations: set[tuple[str, ...]], all_of: Sequence[Sequence[str]]
) -> list[tuple[str, ...]]:
    """The combinations as blocks: in a block a word stands for itself, "all" for every word of its place.

    Takes the block of most "all" that is still there as a whole, then the next.
    """
    left, blocks = set(combinations), []
    places = range(len(all_of))
    for count in range(len(all_of), -1, -1):
        for wide in itertools.combinations(places, count):
            if any(len(all_of[place]) < 2 for place in wide):
                continue
            for one in sorted(left):
                block = tuple("all" if place in wide else one[place] for place in places)
                inside = set(
                    itertools.product(*(all_of[p] if p in wide else [one[p]] for p in places))
                )
                if one in left and inside <= left:
                    left -= inside
                    blocks.append(block)
    return blocks


def inside(block: tuple[str, ...], combination: tuple[str, ...]) -> bool:
    return all(word in ("all", own) for word, own in zip(block, combination))


def launches_of(placement: Placement, cases: Iterable[Case], app: App) -> list[Launch]:
    """Launches whose cases are exactly these."""
    wanted = list(cases)
    if not wanted:
        return []
    names = [name for name in app.swept if name != "tokens" and name in wanted[0].axes]
    all_of = [app.options[name].choices for name in names]
    sizes_of: dict[tuple[str, ...], set[Any]] = {}
    for case in wanted:
        sizes_of.setdefault(tuple(case.axes[name] for name in names), set()).add(
            case.axes.get("tokens")
        )
    # Combinations that lack the same sizes go together.
    together: dict[tuple[Any, ...], set[tuple[str, ...]]] = {}
    every = set.intersection(*sizes_of.values())
    for combination, sizes in sizes_of.items():
        for part in (every, sizes - every):
            if part:
                together.setdefault(tuple(sorted(part, key=str)), set()).add(combination)
    launches = []
    for group, same in together.items():
        for block in covers(same, all_of):
            choice = [word for name, value in zip(names, block) for word in (f"--{name}", value)]
            for some, sweep in sweeps_of(group, app):
                own = [
                    case.id
                    for case in wanted
                    if case.axes.get("tokens") in some
                    and inside(block, tuple(case.axes[name] for name in names))
                ]
                launches.append(Launch(own, [*placement.arguments, *choice, *sweep]))
    return launches


def sweeps_of(sizes: tuple[Any, ...], app: App) -> list[tuple[list[Any], list[str]]]:
    if (
        sizes == (None,) or "tokens" not in app.swept
    ):  # then tokens are among the placement's arguments
        return [(list(sizes), [])]
    return [(list(some), options) for some, options in sweeps(sorted(sizes))]
