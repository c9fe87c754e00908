"""shard(batch, rank, size) -> batch of the rank

batch: a packed stream, ids, labels, positions [slots], cu_seqlens and cu_seqlens_padded [segments + 1].
Positions of several axes are [axes, slots]. The function returns a mapping of what the rank has of them
under the layout, any of ids, labels, positions [slots / size] or [axes, slots / size], cu_seqlens and
cu_seqlens_padded (the rank's own tokens and slots, running sums), or index (the slot of each row).
Further parameters, given where they are taken: layout (its name), group, mesh.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .. import reading
from .contract import Arrays, Finding, Hypothesis, Malformed, Problem, Tolerance, Verdict, judged, keywords, returned
from .parts import on_one_rank
from .rank import Here
from .shard_errors import BOUNDS, hypotheses

KIND, USES_LAYOUT = "packed", True
SPLITS = ("cp",)
STREAMS = ("ids", "labels", "positions")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def bins_of(path: Path, options: Any) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Name, stream and shards of each bin; nothing, if the file has no answers for this layout and cp."""
    file, place = reading.read(path), f"cp{options.cp}/{options.layout}"
    packed, held = file.inputs, file.reference
    if f"{place}/index" not in held:
        return
    first = 0
    bins = np.asarray(packed["bin_offsets"])
    for b, (begin, end) in enumerate(pairwise(bins)):
        segments = slice(int(begin) + b, int(end) + b + 1)
        stream = {name: np.asarray(packed[name][segments]) for name in BOUNDS}
        slots = slice(first, first + int(stream["cu_seqlens_padded"][-1]))
        stream |= {name: np.asarray(packed[name])[..., slots] for name in STREAMS}
        mine = slice(*(int(x) for x in held[f"{place}/slot_offsets"][b : b + 2]))
        answers = {name: np.asarray(held[f"{place}/{name}"])[..., mine] for name in (*STREAMS, "index")}
        answers |= {name: np.asarray(held[f"{place}/{name}"])[:, segments] for name in BOUNDS}
        first = slots.stop
        yield path.stem + (f" bin {b}" if len(bins) > 2 else ""), stream, answers


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """Each bin of a packed file that has answers for this layout and cp."""
    for name, stream, answers in bins_of(path, options):
        shapes = {n: a.shape[1:] for n, a in answers.items()}
        pieces = [{"batch": stream, "layout": options.layout, "shapes": shapes}] * (options.cp * options.tp)
        yield Problem(name, pieces, {}, partial(judge, name, stream, answers, options.tp, 1))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank."""
    more = keywords(function, {"layout": piece["layout"], "mesh": here.mesh, "group": here.group("cp")}, needs)
    batch = {name: here.ids(array) for name, array in piece["batch"].items()}
    return checked(function(batch, here.rank // here.tp, here.cp, **more), piece["shapes"])


def checked(answer: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays of a returned mapping."""
    if not isinstance(answer, Mapping):
        raise Malformed("other-type", f"{type(answer).__name__} was returned; it must be a mapping of arrays")
    unknown = sorted(set(answer) - set(shapes))
    if unknown or not answer:
        raise Malformed(
            "other-type", f"{unknown[0] if unknown else 'nothing'} was returned; it may be {', '.join(shapes)}"
        )
    return {name: returned(name, array, shapes[name], INTEGERS).astype(np.int64) for name, array in answer.items()}


def judge_shards(
    name: str,
    answers: Arrays,
    tp: int,
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
    axes: Sequence[str],
    errors: Callable[[Arrays, set[str]], Iterable[Hypothesis]],
) -> Verdict:
    """The verdict of arrays [cp, ...] of integers; axes: what indices are called, of ranks first and of slots last."""
    mine = arrays[::tp]
    if any(set(m) != set(mine[0]) for m in mine):
        return Verdict(name).fail(Finding("ranks-disagree", "ranks return different arrays"))
    got = {n: np.stack([m[n] for m in mine]) for n in mine[0]}
    expected = {n: answers[n] for n in got}

    def places(array: str, bad: np.ndarray) -> str:
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, place if len(axes) == len(place) else (place[0], place[-1])))
        values = f"{got[array][place]}, should be {expected[array][place]}"
        return f"{int(bad.sum())} of {bad.size} differ; first [{where}]: {values}"

    known = partial(_everywhere_or_once, got, expected, tolerance, partial(errors, got))
    return judged(name, got, expected, tolerance, known, places)


def _everywhere_or_once(
    got: Arrays, expected: Arrays, tolerance: Tolerance, errors: Callable[[set[str]], Iterable[Hypothesis]],
    failing: set[str],
) -> Iterator[Hypothesis]:
    """Known errors of arrays [cp, ...]: of all ranks, or of one."""
    yield from errors(failing)

    def of(rank: int, array: str) -> np.ndarray:
        dims = got[array].ndim
        return np.arange(len(got[array])).reshape(-1, *[1] * (dims - 1)) == rank

    parts = [(f"on rank {r}", partial(of, r)) for r in range(len(next(iter(got.values()))))]
    yield from on_one_rank(parts if len(parts) > 1 else [], got, expected, failing, lambda: errors(failing), {},
                           tolerance)


def judge(
    name: str,
    stream: Arrays,
    wanted: Arrays,
    tp: int,
    shift: int,
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    """The verdict of what the ranks have of a stream, whose labels are those `shift` tokens on."""
    mine = arrays[::tp]
    if any(set(m) != set(mine[0]) for m in mine):
        return Verdict(name).fail(Finding("ranks-disagree", "ranks return different arrays"))
    got = {n: np.stack([m[n] for m in mine]) for n in mine[0]}
    expected = {n: a.astype(np.int64) for n, a in wanted.items() if n in got}

    def places(array: str, bad: np.ndarray) -> str:
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        where = f"rank {place[0]}, " + "".join(f"axis {i}, " for i in place[1:-1]) + f"row {place[-1]}"
        counts = ", ".join(f"rank {r}: {int(b.sum())}" for r, b in enumerate(bad) if b.any())
        return (
            f"{int(bad.sum())} of {bad.size} differ ({counts}); first [{where}]: {got[array][place]}, "
            f"should be {expected[array][place]}"
        )

    def errors(failing: set[str]) -> Iterator[Hypothesis]:
        return hypotheses(got, expected, failing, stream, shift)

    return judged(name, got, expected, tolerance, partial(_everywhere_or_once, got, expected, tolerance, errors), places)
