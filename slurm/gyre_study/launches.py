"""The launches that measure some cases of a placement: few of them, and no case that is not asked for."""

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


def covers(combinations: set[tuple[str, ...]], all_of: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The combinations as few blocks: of each place a block has words, and each word goes with each of the others.

    A block's text of a place is what the programs take: "all", or words with commas between them.
    """
    blocks = {tuple(frozenset([word]) for word in one) for one in combinations}
    for place in sorted(range(len(all_of)), key=lambda place: -len(all_of[place])):
        joined: dict[tuple[frozenset[str], ...], set[str]] = {}
        for block in blocks:
            joined.setdefault((*block[:place], *block[place + 1 :]), set()).update(block[place])
        blocks = {(*rest[:place], frozenset(words), *rest[place:]) for rest, words in joined.items()}

    def text(words: frozenset[str], every: Sequence[str]) -> str:
        chosen = [word for word in every if word in words]
        return "all" if len(chosen) == len(every) > 1 else ",".join(chosen)

    return sorted(tuple(map(text, block, all_of)) for block in blocks)


def inside(block: tuple[str, ...], combination: tuple[str, ...]) -> bool:
    return all(words == "all" or own in words.split(",") for words, own in zip(block, combination))


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
