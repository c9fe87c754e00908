"""Known errors of shards: what a function returns that has one of them, of the streams of the contract shard."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from .contract import Arrays, Hypothesis
from .layouts import NAMES, layout_of

IGNORED, SHIFTS = -100, range(1, 7)
BOUNDS = ("cu_seqlens", "cu_seqlens_padded")


def shifted(ids: np.ndarray, real: np.ndarray, slots: np.ndarray, shift: int) -> np.ndarray:
    """Labels [slots]: the id of the token `shift` places on in the same segment; without one, -100."""
    labels = np.full(len(ids), IGNORED, np.int64)
    for begin, length in zip(slots, np.diff(real)):
        kept = max(0, int(length) - shift)
        labels[begin : begin + kept] = ids[begin + shift : begin + shift + kept]
    return labels


def hypotheses(got: Arrays, expected: Arrays, failing: set[str], stream: Arrays, shift: int) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    shards = _Shards(got, expected, failing, stream, shift)
    yield from shards.rows()
    if "labels" in expected:
        yield from shards.labels_of_ranks()
        if shards.index is not None and shards.index.size == len(shards.ids):
            yield from shards.labels_of_streams()
    if "positions" in expected:
        yield from shards.positions()
    yield from shards.bounds()


class _Shards:
    """Right shards of a stream, and wrong ones."""

    def __init__(self, got: Arrays, expected: Arrays, failing: set[str], stream: Arrays, shift: int) -> None:
        self.got, self.expected, self.failing, self.shift = got, expected, failing, shift
        self.cp = len(next(iter(expected.values())))
        names = ("cu_seqlens", "cu_seqlens_padded", "ids")
        self.real, self.slots, self.ids = (stream[n].astype(np.int64) for n in names)
        self.labels = shifted(self.ids, self.real, self.slots, shift)
        positions = stream["positions"].astype(np.int64)
        self.whole = {"ids": self.ids, "labels": self.labels, "positions": positions, "index": np.arange(len(self.ids))}
        layouts = (n for n in NAMES if "index" not in expected and _is_layout(n, self.slots, self.cp, expected, self.whole))
        name = next(layouts, None)
        self.index = expected.get("index") if name is None else layout_of(name, self.slots, self.cp).index

    def known(self, kind: str, text: str, **changed: np.ndarray) -> Hypothesis:
        def arrays() -> dict[str, np.ndarray]:
            expected = self.expected
            fitting = {n: a for n, a in changed.items() if n in expected and a.size == expected[n].size}
            return {n: a.reshape(expected[n].shape) for n, a in fitting.items()}

        return Hypothesis(kind, text, arrays)

    def sharded(self, kind: str, text: str, labels: np.ndarray) -> Hypothesis:
        """Labels of the stream."""
        return self.known(kind, text, labels=labels[np.minimum(self.index, len(labels) - 1)])

    def rows(self) -> Iterator[Hypothesis]:
        """Rows of another rank, layout or chunk."""
        expected, failing, slots, cp = self.expected, self.failing, self.slots, self.cp
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
            if other.size == len(self.ids):
                moved = {n: np.moveaxis(self.whole[n][..., other], -2, 0) for n in failing & self.whole.keys()}
                yield self.known("layout", f"the layout is {name}", **moved)
        for text, order in _chunk_orders(slots, cp):
            moved = {n: np.moveaxis(a[..., order], -2, 0) for n, a in self.whole.items()}
            for names in (failing - {*BOUNDS}, {"labels"}, {"positions"}, {"ids"}):
                of = f" ({', '.join(names)})" * (len(names) == 1)
                yield self.known("chunk-order", text + of, **{n: moved[n] for n in names})
            bounds = dict(zip(BOUNDS, _bounds_of(order, self.real, slots), strict=True))
            yield self.known("chunk-order", text, **{n: a for n, a in (moved | bounds).items() if n in expected})
        for rank in range(cp):
            yield Hypothesis(
                "dropped-shard",
                f"dropped shards: every rank has the shard of rank {rank}",
                lambda rank=rank: {n: np.repeat(expected[n][rank : rank + 1], cp, axis=0) for n in failing},
            )

    def labels_of_ranks(self) -> Iterator[Hypothesis]:
        """Labels made on the rank, of the ids or labels that it has."""
        if "ids" not in self.got:
            return
        shift, labels = self.shift, self.expected["labels"]
        moved = np.roll(self.got["ids"], -shift, axis=1)
        yield self.known("labels-of-shards", "labels are shifted after sharding", labels=moved)
        again = np.append(labels[:, shift:], np.full((self.cp, shift), IGNORED), axis=1)
        yield self.known("label-shift", "labels are shifted once more on the rank", labels=again[:, : labels.shape[1]])

    def labels_of_streams(self) -> Iterator[Hypothesis]:
        """Shards of wrong labels of the stream."""
        ids, labels, shift = self.ids, self.labels, self.shift
        rolls = np.roll(ids, -shift)
        yield self.sharded("label-shift", "labels are the ids themselves: nothing is shifted", ids)
        text = "labels are rolled over the stream: a document's last token has the next one's first"
        yield self.sharded("labels-rolled", text, rolls)
        text = "labels cross documents: they are the next tokens of the stream"
        yield self.sharded("labels-rolled", text, np.append(ids[shift:], np.full(min(shift, len(ids)), IGNORED)))
        yield from self.labels_by_documents()
        ends = self.slots
        if len(ends) > 1:
            ends = np.concatenate([[0], ends[:-1] + np.diff(self.real)])
        counted = np.where(labels == IGNORED, rolls, np.where(np.isin(np.arange(len(ids)), ends), labels, rolls))
        yield self.sharded("padding", "the labels of padding are counted", counted)
        yield self.sharded("padding", "labels of padding are 0, not -100", np.where(labels == IGNORED, 0, labels))
        kept = np.where(labels == IGNORED, IGNORED, ids)
        yield self.sharded("label-shift", "labels are the ids themselves, but for those of -100", kept)
        for on in (n for n in (0, *SHIFTS) if n != shift):
            others = shifted(ids, self.real, self.slots, on)
            yield self.sharded("label-shift", f"labels are those of {on} tokens on, not {shift}", others)

    def labels_by_documents(self) -> Iterator[Hypothesis]:
        """Labels that take the end of a document for another place."""
        ids, real, slots, shift = self.ids, self.real, self.slots, self.shift
        next_ones, in_document = self.labels.copy(), self.labels.copy()
        for a, n, b in zip(slots, np.diff(real), [*slots[1:-1], len(ids)], strict=False):
            last = np.arange(a + max(0, n - shift), a + n)
            in_document[last] = ids[a + (last - a + shift) % max(1, n)]
            if b < len(ids):
                next_ones[last] = ids[np.minimum(b + last - (a + n - shift), len(ids) - 1)]
        text = "labels cross documents: the last tokens have the first ones of the next document"
        yield self.sharded("labels-rolled", text, next_ones)
        text = "labels are rolled within a document: its last tokens have its first ones"
        yield self.sharded("labels-rolled", text, in_document)
        padded = np.concatenate([[], *(np.roll(ids[a:b], -shift) for a, b in pairwise(slots))]).astype(np.int64)
        text = "labels are rolled within the slots of a document: padding has labels"
        yield self.sharded("labels-rolled", text, padded)
        unpadded = ids.copy()
        for a, b in pairwise(real):
            unpadded[a:b] = np.roll(ids[a:b], -shift)
        yield self.sharded("labels-rolled", "labels are rolled by boundaries without padding", unpadded)

    def positions(self) -> Iterator[Hypothesis]:
        expected, index = self.expected["positions"], self.index
        shape, width = expected.shape, expected.shape[-1]

        def on_every_axis(of_rank: np.ndarray) -> np.ndarray:
            return np.broadcast_to(of_rank if len(shape) == 2 else of_rank[:, None], shape)

        def positions(text: str, wrong: np.ndarray) -> Hypothesis:
            return self.known("positions", text, positions=wrong)

        yield positions("positions begin at 1", expected + 1)
        if index is not None:
            anew, further = expected.copy(), expected.copy()
            for rank, rows in enumerate(index):
                document = np.searchsorted(self.slots, rows, side="right")
                for d in np.unique(document):
                    at = np.flatnonzero(document == d)
                    anew[rank][..., at] = np.arange(len(at))
                    further[rank][..., at] = expected[rank][..., at[:1]] + np.arange(len(at))
            yield positions("positions begin anew with each document's rows on the rank", anew)
            yield positions("positions of a document's later chunk continue those of the earlier one", further)
        yield positions("positions begin anew on every rank", on_every_axis(np.tile(np.arange(width), (self.cp, 1))))
        if expected.ndim == 3:
            first = np.repeat(expected[:, :1], shape[1], axis=1)
            yield positions("every axis has the positions of the first", first)
        if index is not None:
            yield positions("positions count the stream, not the document", on_every_axis(index))

    def bounds(self) -> Iterator[Hypothesis]:
        for bounds in {*BOUNDS} & {*self.expected}:
            for text, source in (("real lengths", self.real), ("slots", self.slots)):
                for over, scale in (("", 1), (" over cp", self.cp)):
                    whole = np.tile(source // scale, (self.cp, 1))
                    text_of = f"{bounds} has the {text} of the whole stream{over}"
                    yield self.known("boundaries", text_of, **{bounds: whole})


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
