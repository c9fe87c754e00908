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
from .layouts import NAMES, layout_of
from .parts import on_one_rank
from .rank import Here

KIND, USES_LAYOUT = "packed", True
SPLITS = ("cp",)
STREAMS, BOUNDS = ("ids", "labels", "positions"), ("cu_seqlens", "cu_seqlens_padded")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
IGNORED, SHIFTS = -100, range(1, 7)


def shifted(ids: np.ndarray, real: np.ndarray, slots: np.ndarray, shift: int) -> np.ndarray:
    """Labels [slots]: the id of the token `shift` places on in the same segment; without one, -100."""
    labels = np.full(len(ids), IGNORED, np.int64)
    for begin, length in zip(slots, np.diff(real)):
        kept = max(0, int(length) - shift)
        labels[begin : begin + kept] = ids[begin + shift : begin + shift + kept]
    return labels


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

    return judged(name, got, expected, tolerance, partial(_everywhere_or_once, got, expected, partial(errors, got)), places)


def _everywhere_or_once(
    got: Arrays, expected: Arrays, errors: Callable[[set[str]], Iterable[Hypothesis]], failing: set[str]
) -> Iterator[Hypothesis]:
    """Known errors of arrays [cp, ...]: of all ranks, or of one."""
    yield from errors(failing)

    def of(rank: int, array: str) -> np.ndarray:
        dims = got[array].ndim
        return np.arange(len(got[array])).reshape(-1, *[1] * (dims - 1)) == rank

    parts = [(f"on rank {r}", partial(of, r)) for r in range(len(next(iter(got.values()))))]
    yield from on_one_rank(parts if len(parts) > 1 else [], got, expected, failing, lambda: errors(failing), {})


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

    return judged(name, got, expected, tolerance, partial(_everywhere_or_once, got, expected, errors), places)


def hypotheses(got: Arrays, expected: Arrays, failing: set[str], stream: Arrays, shift: int) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    cp = len(next(iter(expected.values())))
    real, slots, ids = (stream[n].astype(np.int64) for n in ("cu_seqlens", "cu_seqlens_padded", "ids"))
    labels = shifted(ids, real, slots, shift)
    whole = {
        "ids": ids,
        "labels": labels,
        "positions": stream["positions"].astype(np.int64),
        "index": np.arange(len(ids)),
    }
    rows = {n for n in failing if n in whole}
    inside = expected["index"] if "index" in expected else None

    def known(kind: str, text: str, **changed: np.ndarray) -> Hypothesis:
        return Hypothesis(
            kind,
            text,
            lambda: {
                n: a.reshape(expected[n].shape)
                for n, a in changed.items()
                if n in expected and a.size == expected[n].size
            },
        )

    def sharded(stream_of: np.ndarray) -> np.ndarray:
        return stream_of[np.minimum(index, len(stream_of) - 1)]

    for step in range(1, cp):
        yield Hypothesis(
            "wrong-rows",
            f"rank r has the shard of rank r + {step} (mod cp)",
            lambda step=step: {n: np.roll(expected[n], -step, axis=0) for n in failing},
        )
    for name in NAMES:
        try:
            other = layout_of(name, slots, cp).index
        except ValueError:
            continue
        if other.size == len(ids):
            moved = {n: np.moveaxis(whole[n][..., other], -2, 0) for n in rows}
            yield known("layout", f"the layout is {name}", **moved)
    for text, order in _chunk_orders(slots, cp):
        moved = {n: np.moveaxis(whole[n][..., order], -2, 0) for n in whole}
        for names in (failing - {"cu_seqlens", "cu_seqlens_padded"}, {"labels"}, {"positions"}, {"ids"}):
            yield known("chunk-order", text + f" ({', '.join(names)})" * (len(names) == 1), **{n: moved[n] for n in names})
        bounds = dict(zip(("cu_seqlens", "cu_seqlens_padded"), _bounds_of(order, real, slots)))
        yield known("chunk-order", text, **{n: a for n, a in (moved | bounds).items() if n in expected})
    for rank in range(cp):

        def doubled(rank: int = rank) -> dict[str, np.ndarray]:
            found = {n: expected[n].copy() for n in failing}
            for array in found.values():
                array[:] = array[rank]
            return found

        yield Hypothesis("dropped-shard", f"dropped shards: every rank has the shard of rank {rank}", doubled)
    index = (
        inside
        if inside is not None
        else next((layout_of(n, slots, cp).index for n in NAMES if _is_layout(n, slots, cp, expected, whole)), None)
    )
    if "labels" in expected:
        if "ids" in got:
            yield known(
                "labels-of-shards", "labels are shifted after sharding", labels=np.roll(got["ids"], -shift, axis=1)
            )
            again = np.append(expected["labels"][:, shift:], np.full((cp, shift), IGNORED), axis=1)
            yield known("label-shift", "labels are shifted once more on the rank", labels=again[:, : expected["labels"].shape[1]])
        rolls = np.roll(ids, -shift)
        ends = np.concatenate([[0], slots[:-1] + np.diff(real)]) if len(slots) > 1 else slots
        if index is not None and index.size == len(ids):
            yield known("label-shift", "labels are the ids themselves: nothing is shifted", labels=sharded(ids))
            yield known(
                "labels-rolled",
                "labels are rolled over the stream: a document's last token has the next one's first",
                labels=sharded(rolls),
            )
            ends_ignored = np.append(ids[shift:], np.full(min(shift, len(ids)), IGNORED))
            text = "labels cross documents: they are the next tokens of the stream"
            yield known("labels-rolled", text, labels=sharded(ends_ignored))
            next_ones, in_document = labels.copy(), labels.copy()
            for a, n, b in zip(slots, np.diff(real), [*slots[1:-1], len(ids)]):
                last = np.arange(a + max(0, n - shift), a + n)
                in_document[last] = ids[a + (last - a + shift) % max(1, n)]
                if b < len(ids):
                    next_ones[last] = ids[np.minimum(b + last - (a + n - shift), len(ids) - 1)]
            text = "labels cross documents: the last tokens have the first ones of the next document"
            yield known("labels-rolled", text, labels=sharded(next_ones))
            text = "labels are rolled within a document: its last tokens have its first ones"
            yield known("labels-rolled", text, labels=sharded(in_document))
            padded = np.concatenate([[], *(np.roll(ids[a:b], -shift) for a, b in pairwise(slots))]).astype(np.int64)
            yield known(
                "labels-rolled",
                "labels are rolled within the slots of a document: padding has labels",
                labels=sharded(padded),
            )
            unpadded = ids.copy()
            for a, b in pairwise(real):
                unpadded[a:b] = np.roll(ids[a:b], -shift)
            yield known("labels-rolled", "labels are rolled by boundaries without padding", labels=sharded(unpadded))
            cut = np.where(np.isin(np.arange(len(ids)), ends), labels, rolls)
            yield known(
                "padding", "the labels of padding are counted", labels=sharded(np.where(labels == IGNORED, rolls, cut))
            )
            yield known(
                "padding", "labels of padding are 0, not -100", labels=sharded(np.where(labels == IGNORED, 0, labels))
            )
            kept = np.where(labels == IGNORED, IGNORED, ids)
            yield known("label-shift", "labels are the ids themselves, but for those of -100", labels=sharded(kept))
            for places_on in (0, *SHIFTS):
                if places_on != shift:
                    yield known(
                        "label-shift",
                        f"labels are those of {places_on} tokens on, not {shift}",
                        labels=sharded(shifted(ids, real, slots, places_on)),
                    )
    if "positions" in expected:
        shape, width = expected["positions"].shape, expected["positions"].shape[-1]

        def on_every_axis(of_rank: np.ndarray) -> np.ndarray:
            return np.broadcast_to(of_rank if len(shape) == 2 else of_rank[:, None], shape)

        yield known("positions", "positions begin at 1", positions=expected["positions"] + 1)
        if index is not None:
            anew_in, further = (expected["positions"].copy() for _ in range(2))
            for rank, rows in enumerate(index):
                document = np.searchsorted(slots, rows, side="right")
                for d in np.unique(document):
                    at = np.flatnonzero(document == d)
                    anew_in[rank][..., at] = np.arange(len(at))
                    further[rank][..., at] = expected["positions"][rank][..., at[:1]] + np.arange(len(at))
            yield known("positions", "positions begin anew with each document's rows on the rank", positions=anew_in)
            yield known("positions", "positions of a document's later chunk continue those of the earlier one", positions=further)
        anew = on_every_axis(np.tile(np.arange(width), (cp, 1)))
        yield known("positions", "positions begin anew on every rank", positions=anew)
        if expected["positions"].ndim == 3:
            first = np.repeat(expected["positions"][:, :1], expected["positions"].shape[1], axis=1)
            yield known("positions", "every axis has the positions of the first", positions=first)
        if index is not None:
            yield known("positions", "positions count the stream, not the document", positions=on_every_axis(index))
    for bounds in set(BOUNDS) & set(expected):
        for text, source in (("real lengths", real), ("slots", slots)):
            yield known(
                "boundaries", f"{bounds} has the {text} of the whole stream", **{bounds: np.tile(source, (cp, 1))}
            )
            yield known(
                "boundaries",
                f"{bounds} has the {text} of the whole stream over cp",
                **{bounds: np.tile(source // cp, (cp, 1))},
            )


def _chunk_orders(slots: np.ndarray, cp: int) -> Iterator[tuple[str, np.ndarray]]:
    """Other orders of the chunks of each document that dual-chunk-swap could be taken for: [cp, slots / cp] slots."""
    if (np.diff(slots) % (2 * cp)).any():
        return
    for text, early, late in (
        ("a rank's later chunks stand before the earlier ones", lambda r: 2 * cp - 1 - r, lambda r: r),
        ("the later chunk of rank r is 2 cp - 2 - r: a mirror off by one", lambda r: r, lambda r: 2 * cp - 2 - r),
        ("the later chunk of rank r is cp + r, not 2 cp - 1 - r", lambda r: r, lambda r: cp + r),
        ("the later chunk of rank r is 2 cp - r: a mirror off by one", lambda r: r, lambda r: (2 * cp - r) % (2 * cp)),
        ("the later chunk of a rank runs backwards", lambda r: r, lambda r: r - 2 * cp),
    ):
        found: list[list[int]] = [[] for _ in range(cp)]
        for a, b in pairwise(slots):
            chunks = np.arange(a, b).reshape(2 * cp, -1)
            for rank, rows in enumerate(found):
                rows += [*chunks[early(rank)]]
                rows += [*(chunks[late(rank)] if late(rank) >= 0 else chunks[2 * cp - 1 - rank][::-1])]
        yield text, np.array(found, np.int64).reshape(cp, -1)


def _bounds_of(index: np.ndarray, real: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cu_seqlens and cu_seqlens_padded of ranks that have these slots."""
    document = np.searchsorted(slots, index, side="right") - 1
    counts = [(document == d) for d in range(len(slots) - 1)]
    is_real = index < (slots[:-1] + np.diff(real))[np.minimum(document, len(slots) - 2)] if len(slots) > 1 else index < 0
    of = [np.array([(c & kept).sum(axis=1) for c in counts]).reshape(len(counts), -1).T for kept in (is_real, True)]
    return tuple(np.concatenate([np.zeros((len(a), 1), np.int64), np.cumsum(a, axis=1)], axis=1) for a in of)


def _is_layout(name: str, slots: np.ndarray, cp: int, expected: Arrays, whole: Arrays) -> bool:
    """Whether this layout is the one of the answers."""
    try:
        index = layout_of(name, slots, cp).index
    except ValueError:
        return False
    key = next((n for n in ("positions", "ids", "labels") if n in expected), "")
    if not key or index.size != whole[key].shape[-1]:
        return False
    mine = whole[key][..., index]  # [cp, width]; [axes, cp, width]
    return bool((np.moveaxis(mine, -2, 0) == expected[key]).all())
