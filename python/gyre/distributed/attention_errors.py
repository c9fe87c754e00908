"""Errors of distributed attention that are known by name, and what the arrays would be with each."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ..attention import split_gradient, whole_keys
from .attention_places import LARGEST, Answered, Places
from .contract import Arrays, Hypothesis, factors
from .layouts import Layout, halves_exchanged, segment_of

HUGE = 30.0  # a sink in whose place a smaller one does not count


class Weights:
    """Scores, weights and lse, heads first, for any pairs [slots, slots] of queries and keys, in float64.

    head_of [heads]: the KV head that each query head reads. softcap c: scores x become c tanh(x / c) before the mask; 0:
    they stay. hidden: the score of pairs that are hidden. has_slope: whether gradients of x have that of tanh.
    """

    def __init__(
        self,
        streams: Arrays,
        pairs: np.ndarray,
        scale: float,
        sinks: np.ndarray | None,
        head_of: np.ndarray | None = None,
        softcap: float = 0.0,
        hidden: float = -np.inf,
        has_slope: bool = True,
    ) -> None:
        self.q, self.v, self.d_out = (streams[n].astype(np.float64) for n in ("q", "v", "d_out"))
        self.k, self.own, self.scale = whole_keys(streams).astype(np.float64), streams["k"].shape[2], scale
        heads, self.kv_heads = self.q.shape[1], self.k.shape[1]
        self.reads = np.arange(heads) * self.kv_heads // heads if head_of is None else head_of
        x = scale * np.einsum("qhd,khd->hqk", self.q, self.k[:, self.reads])
        self.slope = np.ones(1)
        if softcap:
            x = np.tanh(x / softcap)
            self.slope = np.where(pairs, 1 - x**2 if has_slope else 1, 0)
            x *= softcap
        self.x = x = np.where(pairs, x, hidden)
        self.z = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float64)
        top = np.maximum(x.max(axis=2, initial=-np.inf), self.z[:, None])
        top[top == -np.inf] = 0
        p = np.exp(x - top[:, :, None])
        total = p.sum(axis=2) + np.exp(self.z[:, None] - top)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.lse = top + np.log(total)
            self.p = np.where(total[:, :, None] > 0, p / total[:, :, None], 0)
        self.out = np.einsum("hqk,khd->qhd", self.p, self.v[:, self.reads])

    @property
    def largest(self) -> float:
        """The largest size of a score that counts, or of a log-sum-exp."""
        return max(float(np.abs(x[np.isfinite(x)]).max(initial=0)) for x in (self.x, self.lse))

    def by_kv_head(self, terms: np.ndarray) -> np.ndarray:
        """Terms [heads, ...] summed over the heads that read each KV head."""
        found = np.zeros((self.kv_heads, *terms.shape[1:]))
        np.add.at(found, self.reads, terms)
        return found

    def of_sinks(self) -> np.ndarray:
        """[heads, queries]: the weights of sinks."""
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(np.exp(self.z[:, None] - self.lse), posinf=0)

    def sizes(self) -> dict[str, float]:
        """The size of the terms that each gradient is a sum of, at its largest, as src/attention/attention_reference.hpp
        has it: the root of the sum of their squares, as an rms over a row of one head."""
        lengths = {n: (getattr(self, n) ** 2).sum(axis=2) for n in ("q", "k", "v", "d_out", "out")}
        wide, narrow = self.k.shape[2], self.v.shape[2]
        p_squared = self.p**2 * lengths["d_out"].T[:, :, None] / narrow
        terms = (self.scale * self.slope) ** 2 * p_squared * lengths["v"].T[self.reads][:, None] / wide
        of_keys = self.by_kv_head(np.einsum("hqk,qh->hk", terms, lengths["q"]))
        squares = {
            "d_q": np.einsum("hqk,kh->hq", terms, lengths["k"][:, self.reads]),
            "d_k": of_keys,
            "d_k_shared": of_keys.sum(axis=0),
            "d_v": self.by_kv_head(p_squared.sum(axis=1)),
            "d_sinks": (self.of_sinks() ** 2 * (lengths["out"] * lengths["d_out"]).T / narrow).sum(axis=1),
        }
        return {name: float(array.max(initial=0)) ** 0.5 for name, array in squares.items()}


def answers(
    streams: Arrays,
    pairs: np.ndarray,
    scale: float,
    sinks: np.ndarray | None,
    *,
    shares: np.ndarray | None = None,
    shared_shares: np.ndarray | None = None,
    delta: bool = True,
    kept: np.ndarray | None = None,
    **how: Any,
) -> dict[str, np.ndarray]:
    """out, lse and gradients in slots, for any pairs [slots, slots] of queries and keys, in float64.

    how: what Weights takes. shares [heads]: the factor that the gradients of keys and values have of each query head;
    shared_shares [KV heads]: the one that d_k_shared has of each KV head. delta: whether <out, d_out> is subtracted.
    kept: pairs that count in the gradients of keys and values; without, all.
    """
    of = Weights(streams, pairs, scale, sinks, **how)
    part = np.ones(of.q.shape[1]) if shares is None else shares
    gone = (of.out * of.d_out).sum(axis=2).T
    d_x = of.slope * of.p * (
        np.einsum("qhd,khd->hqk", of.d_out, of.v[:, of.reads]) - (gone[:, :, None] if delta else 0)
    )
    d_k, d_v = np.zeros(of.k.shape), np.zeros(of.v.shape)
    counted = 1 if kept is None else kept
    for head, reads in enumerate(of.reads):
        d_k[:, reads] += part[head] * scale * (counted * d_x[head]).T @ of.q[:, head]
        d_v[:, reads] += part[head] * (counted * of.p[head]).T @ of.d_out[:, head]
    if shared_shares is not None:
        d_k[..., of.own :] *= shared_shares[:, None]
    found = {
        "out": of.out,
        "lse": of.lse.T,
        "d_q": scale * np.einsum("hqk,khd->qhd", d_x, of.k[:, of.reads]),
        "d_v": d_v,
    } | split_gradient(d_k, of.own)
    if sinks is not None:
        found["d_sinks"] = -(of.of_sinks() * gone).sum(axis=1)
    return found


class Pairs:
    """Pairs of queries and keys [slots, slots] that known errors would compute: kind, what is said, the pairs."""

    def __init__(self, pairs: np.ndarray, attributes: Mapping[str, Any], layout: Layout) -> None:
        self.pairs, self.layout = pairs, layout
        self.mask, self.window = attributes["mask"], int(attributes["window"])
        self.i, self.j = np.ogrid[: layout.slots, : layout.slots]
        self.real = np.zeros(layout.slots, bool)
        self.real[layout.tokens] = True
        self.both = self.real[:, None] & self.real[None, :]
        segment = segment_of(layout)
        self.together = segment[:, None] == segment[None, :]
        self.own = layout.owner[:, None] == layout.owner[None, :]

    def rule(self, keys: np.ndarray, later: int = 0, width: int | None = None) -> np.ndarray:
        """The keys that the mask shows, without regions, to queries that are so many tokens later; width: of the window."""
        return self.by_mask(keys, self.i - self.j + later, width)

    def by_mask(self, keys: np.ndarray, behind: np.ndarray, width: int | None = None) -> np.ndarray:
        width = self.window if width is None else width
        return keys if self.mask == "full" else keys & (behind >= 0) & ((behind < width) | (width == 0))

    def everywhere(self) -> Iterator[tuple[str, str, np.ndarray]]:
        """Errors that do not tell ranks apart."""
        leak = "a key of another document: documents are not told apart"
        yield "leak", leak, self.rule(self.both)
        yield "leak", f"{leak}, padding is read too", self.rule(self.real[:, None] & True)
        yield from self._of_masks()
        yield from self._of_windows(self.both & self.together)
        yield "padding", "padding is read as keys", self.rule(self.real[:, None] & self.together)
        for text, bounds in (("are those without padding", np.cumsum([0, *self.layout.lengths])),
                             ("are one token late", self.layout.cu_seqlens + 1)):
            other = np.searchsorted(bounds[1:], np.arange(self.layout.slots), side="right")
            yield "boundaries", f"boundaries of documents {text}", self.rule(self.both & (other[:, None] == other))

    def _of_masks(self) -> Iterator[tuple[str, str, np.ndarray]]:
        inside = self.both & self.together
        causal = inside & (self.i >= self.j)
        if self.mask != "full":
            yield "mask-lost", "the causal mask is lost: keys of the future are seen", inside
            yield "mask-lost", "the mask is lost: every key of every document is seen", self.both
            yield "shifted-mask", "the mask is shifted by one: a query sees the next key", self.rule(inside, 1)
            text = "the mask is shifted by one: a query does not see its own key"
            yield "own-key", text, self.rule(inside, -1, max(0, self.window - 1))
        else:
            yield "causal", "a causal mask where there is none", causal
        yield "own-key", "a query does not see its own key", self.pairs & (self.i != self.j)
        if self.mask != "full":
            next_keys = np.append(np.zeros((self.layout.slots, 1), bool), self.pairs[:, :-1], axis=1) & inside
            yield "shifted-mask", "the mask is wider by one: a query sees the next key, too", self.pairs | next_keys
        if self.mask == "regions":
            yield "mask-lost", "the regions are lost: the mask is causal", causal

    def _of_windows(self, inside: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
        if self.window:
            yield "window-lost", "the window is lost", self.rule(inside, width=0)
            yield "window-off-by-one", "the window is wider by one", self.rule(inside, width=self.window + 1)
        if self.window > 1:
            yield "window-off-by-one", "the window is narrower by one", self.rule(inside, width=self.window - 1)

    def of_ranks(self) -> Iterator[tuple[str, str, np.ndarray]]:
        """Errors that tell ranks apart."""
        if self.layout.cp == 1:
            return
        inside, owner, row = self.both & self.together, self.layout.owner, np.empty(self.layout.slots, np.int64)
        row[self.layout.index] = np.arange(self.layout.index.shape[1])
        yield "local-keys", "a dropped shard: a rank sees its own keys alone", self.pairs & self.own
        text = "rows of a rank are taken for positions: its mask is by row"
        yield "local-positions", text, self.by_mask(inside, row[:, None] - row[None, :])
        text = "the mask is lost for keys of other ranks"
        yield "mask-lost-under-cp", text, np.where(self.own, self.pairs, inside)
        text = "a key of another document: documents are told apart among a rank's own keys alone"
        yield "leak", text, np.where(self.own, self.pairs, self.rule(self.both))
        if self.window:
            text = "the window is lost for keys of other ranks"
            yield "window-lost", text, np.where(self.own, self.pairs, self.rule(inside, width=0))
        yield from self._uneven()
        for rank in range(self.layout.cp):
            keys = owner[None, :] == rank
            text = f"a dropped shard: other ranks do not see the keys of rank {rank}"
            yield "dropped-shard", text, self.pairs & (~keys | self.own)
            yield "dropped-shard", f"a dropped shard: nobody sees the keys of rank {rank}", self.pairs & ~keys
        for step in range(1, self.layout.cp):
            lost = owner[None, :] == (owner[:, None] + step) % self.layout.cp
            text = f"a dropped shard: rank r does not see the keys of rank r + {step} (mod cp)"
            yield "dropped-shard", text, self.pairs & ~lost

    def _uneven(self) -> Iterator[tuple[str, str, np.ndarray]]:
        """Every rank takes the same share of a document."""
        for text, counted in shares_of_lengths(self.layout):
            kept = self.pairs & counted
            seen = self.rule(self.real[:, None] & self.together & counted) if self.mask != "regions" else kept
            yield "uneven-lengths", f"{text}, as keys", kept
            yield "uneven-lengths", f"{text}, as keys, and padding among these", seen
            yield "uneven-lengths", f"{text}, as keys and as queries", kept & counted[:, None]
            yield "uneven-lengths", f"{text}, as keys and as queries, and padding among these", seen & counted[:, None]


def shares_of_lengths(layout: Layout) -> Iterator[tuple[str, np.ndarray]]:
    """Slots [slots] that count if every rank takes the same share of a document's tokens, whatever it has of them."""
    for text, up in (("length // cp", 0), ("length / cp, rounded up,", layout.cp - 1)):
        found = np.zeros(layout.slots, bool)
        for (begin, end), length in zip(pairwise(layout.cu_seqlens), layout.lengths):
            for rows in layout.index:
                mine = np.sort(rows[(rows >= begin) & (rows < end)])
                found[mine[: (length + up) // layout.cp]] = True
        yield f"documents are uneven over ranks: a rank takes {text} of its rows of a document for real", found


def hypotheses(answered: Answered) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    errors = _Errors(answered)
    yield from errors.first_guesses()
    yield from errors.of_softcap()
    for kind, text, other in (*errors.other.everywhere(), *errors.other.of_ranks()):
        yield errors.known(kind, text, pairs=other)
    yield from errors.of_scales()
    yield from errors.of_sinks()
    yield from errors.of_heads()
    yield errors.known("delta-lost", "gradients lack <out, d_out>", delta=False)
    yield from _rank_gradients(errors.known, answered.layout)
    yield from errors.of_lse()
    yield from _moved(answered)
    yield from errors.in_one_place()


class _Errors:
    """Hypotheses of one problem. asked: those that answers() computes, so far."""

    def __init__(self, answered: Answered) -> None:
        self.of, self.asked = answered, list[tuple[str, str, dict[str, Any]]]()
        self.other = Pairs(answered.pairs, answered.attributes, answered.layout)
        self.right = {"pairs": answered.pairs, "scale": answered.scale, "sinks": answered.streams.get("sinks"),
                      "softcap": answered.softcap}
        self.heads, self.kv_heads = (answered.streams[n].shape[1] for n in ("q", "k"))
        self.reads = np.arange(self.heads) * self.kv_heads // self.heads

    def real(self, found: Arrays) -> dict[str, np.ndarray]:
        return {n: a if n == "d_sinks" else a[self.of.layout.tokens] for n, a in found.items()}

    def known(self, kind: str, text: str, **changed: Any) -> Hypothesis:
        how = self.right | changed
        self.asked.append((kind, text, how))
        return Hypothesis(kind, text, lambda: self.real(answers(self.of.streams, **how)))

    def first_guesses(self) -> Iterator[Hypothesis]:
        """Rows without a key, zeros, factors."""
        got, expected, failing = self.of.got, self.of.expected, self.of.failing
        blind = ~np.asarray(self.of.pairs.any(axis=1))[self.of.layout.tokens]
        if blind.any() and failing & {"out", "lse", "d_q"}:
            yield Hypothesis("no-key", "rows that see no key have an output, an lse or a gradient", lambda: {
                n: np.where(blind.reshape(-1, *[1] * (got[n].ndim - 1)), got[n], expected[n])
                for n in failing & {"out", "lse", "d_q"}})
        if zero := {n for n in failing if not got[n].any()}:
            kind = "zero-gradient" if all(n.startswith("d_") for n in zero) else "zero"
            text = f"{', '.join(sorted(zero))} is 0 everywhere"
            yield Hypothesis(kind, text, lambda: {n: np.zeros(got[n].shape) for n in zero})
        if self.of.scale != 1:
            yield Hypothesis("scale-lost", "gradients of q and k lack the scale", lambda: {
                n: np.asarray(expected[n]) / self.of.scale for n in ("d_q", "d_k", "d_k_shared") if n in expected})
        known = {"cp": self.of.layout.cp, "tp": self.of.tp, "the heads of a group": self.heads // self.kv_heads}
        yield from factors(got, expected, failing, known)

    def of_scales(self) -> Iterator[Hypothesis]:
        scale, width = self.of.scale, self.of.streams["q"].shape[2]
        for text, wrong in (
            ("1 / sqrt(D)", width**-0.5), ("1", 1.0), ("1 / D", 1 / width), ("the scale twice", scale**2),
            ("the root of the scale", scale**0.5), ("sqrt(D)", width**0.5),
            ("1 / sqrt(D) of values", self.of.streams["v"].shape[2] ** -0.5),
            ("times log 2: exp2 in place of exp", scale * np.log(2)),
        ):
            if not np.isclose(wrong, scale):
                yield self.known("scale", f"a wrong scale: {text}", scale=wrong)

    def of_softcap(self) -> Iterator[Hypothesis]:
        cap, scale = self.of.softcap, self.of.scale
        for text, changed in (
            ("is ignored", {"softcap": 0.0}),
            ("comes before the scale: scale c tanh(<q, k> / c)", {"softcap": scale * cap}),
            ("comes after the mask: hidden keys have the score -c", {"hidden": -cap}),
            ("lacks the factor c: tanh(x / c)", {"softcap": 1.0, "scale": scale / cap}),
            ("lacks the divisor c: c tanh(x)", {"scale": scale * cap}),
            ("has no slope: gradients lack 1 - tanh(x / c)^2", {"has_slope": False}),
        ) if cap else ():
            yield self.known("softcap", f"the softcap {text}", **changed)

    def of_sinks(self) -> Iterator[Hypothesis]:
        sinks = self.right["sinks"]
        if sinks is None:
            return
        yield self.known("sinks-ignored", "sinks are ignored", sinks=None)
        yield self.known("sinks-repeated", "every rank adds the sink", sinks=sinks + np.log(self.of.layout.cp))
        if np.abs(sinks).max(initial=0) < HUGE:  # smaller ones would be as good as none
            for text, wrong in (("are scaled like scores", sinks * self.of.scale), ("count to the base 2", sinks * np.log(2)),
                                ("are those of the KV heads", sinks[self.reads])):
                yield self.known("sinks-changed", f"sinks {text}", sinks=wrong)

    def of_heads(self) -> Iterator[Hypothesis]:
        """KV heads that are mixed up, gradients that are no sums over heads."""
        heads, kv_heads, reads = self.heads, self.kv_heads, self.reads
        if heads > kv_heads > 1:
            text = "KV heads are mixed up: head h reads h mod K"
            yield self.known("kv-heads", text, head_of=np.arange(heads) % kv_heads)
        if kv_heads > 1:
            yield self.known("kv-heads", "all query heads read KV head 0", head_of=np.zeros(heads, np.int64))
        if heads > kv_heads:
            changes = reads[1:] != reads[:-1]
            for which, shares in (("of the first query head alone", np.append(True, changes).astype(float)),
                                  ("of the last query head alone", np.append(changes, True).astype(float)),
                                  ("a mean over the query heads", np.full(heads, kv_heads / heads))):
                text = f"gradients of a KV head are no sum over its query heads: {which}"
                yield self.known("group-gradient", text, shares=shares)
        if "k_shared" in self.of.streams:
            for which, alone in (("the first head alone", np.arange(kv_heads) == 0),
                                 ("the last head alone", np.arange(kv_heads) == kv_heads - 1),
                                 ("a mean over the heads", np.full(kv_heads, 1 / kv_heads))):
                text = f"d_k_shared is no sum over the heads: {which}"
                yield self.known("shared-gradient", text, shared_shares=alone.astype(float))

    def of_lse(self) -> Iterator[Hypothesis]:
        if "lse" not in self.of.expected:
            return
        lse = np.asarray(self.of.expected["lse"])
        yield Hypothesis("lse-base", "lse is a logarithm to the base 2", lambda: {"lse": lse / np.log(2)})
        yield Hypothesis("lse-base", "lse is multiplied by log 2", lambda: {"lse": lse * np.log(2)})
        if self.right["sinks"] is not None:
            without = self.right | {"sinks": None}
            yield Hypothesis("lse-sinks", "lse lacks the sink",
                             lambda: {"lse": self.real(answers(self.of.streams, **without))["lse"]})

    def in_one_place(self) -> Iterator[Hypothesis]:
        """Errors of one step of a ring or of one block, then those of all on one rank alone."""
        a, layout = self.of, self.of.layout
        masks = {(kind, text): other for kind, text, other in self.other.everywhere()}
        masks |= {("chunk-order", text): other for text, other in _other_chunks(a.pairs, a.attributes, layout)}
        places = Places(a, masks)
        if not a.softcap:
            yield from places.all()
        ranks, of_gradients = places.queries, a.failing <= {"d_k", "d_v", "d_k_shared", "d_sinks"}
        if layout.cp == 1 or layout.slots > LARGEST or not of_gradients and len(ranks) != 1:
            return
        for rank in range(layout.cp) if of_gradients else ranks:
            mine = layout.owner == rank
            for kind, text, how in list(self.asked):
                if of_gradients and not how.keys() & {"shares", "shared_shares", "kept"}:
                    continue  # values would be wrong, too
                yield Hypothesis(kind, f"{text}; on rank {rank} alone", lambda how=how, mine=mine: self.real(
                    _of_rank(a.streams, mine, how, self.right)))


def _of_rank(streams: Arrays, mine: np.ndarray, how: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """answers() of queries [slots] that are computed in one way, and of others in another."""
    one, other = (answers({**streams, "d_out": np.where(rows[:, None, None], streams["d_out"], 0)}, **chosen)
                  for rows, chosen in ((mine, how), (~mine, right)))

    def mixed(name: str, array: np.ndarray) -> np.ndarray:
        if name.startswith("d_"):
            return one.get(name, 0) + array
        return np.where(mine.reshape(-1, *[1] * (array.ndim - 1)), one[name], array)

    return {name: mixed(name, array) for name, array in other.items()}


def _other_chunks(pairs: np.ndarray, attributes: Mapping[str, Any], layout: Layout) -> Iterator[tuple[str, np.ndarray]]:
    """Pairs of ranks that take their rows of a document for those of other places in it."""
    if attributes["mask"] != "causal":
        return
    swapped, early = np.arange(layout.slots), np.arange(layout.slots)
    swapped[layout.index] = halves_exchanged(layout.index, layout.cu_seqlens)
    for rows in layout.index:
        for a, b in pairwise(layout.cu_seqlens):
            mine = rows[(rows >= a) & (rows < b)]
            late = mine[len(mine) // 2 :]
            early[late] = np.maximum(late - len(late), a)
    for text, place in (("the earlier and the later chunk of a document are exchanged", swapped),
                        ("the later chunk of a document is taken for the one before it: a mirror off by one", early)):
        yield text, pairs[place]


def _rank_gradients(known: Callable[..., Hypothesis], layout: Layout) -> Iterator[Hypothesis]:
    """Gradients of keys and values that lack those of some ranks' queries."""
    owner = layout.owner
    yield known(
        "gradient-dropped",
        "gradients of keys and values lack those of other ranks' queries",
        kept=owner[:, None] == owner[None, :],
    )
    for rank in range(layout.cp if layout.cp > 1 else 0):
        yield known(
            "gradient-dropped",
            f"gradients of keys and values lack those of the queries of rank {rank}",
            kept=owner[:, None] != rank,
        )


def _moved(answered: Answered) -> Iterator[Hypothesis]:
    """Right rows at wrong places."""
    got, expected, layout = answered.got, answered.expected, answered.layout
    rows = [n for n in answered.failing if n != "d_sinks"]
    for step in (1, -1):
        yield Hypothesis(
            "shifted-row",
            f"shifted rows: row i has what belongs to row i {'+' if step > 0 else '-'} 1",
            lambda step=step: {n: np.roll(np.asarray(expected[n]), -step, axis=0) for n in rows},
        )
    real = np.full(layout.slots, -1)
    real[layout.tokens] = np.arange(len(layout.tokens))
    orders = {
        f"rank r has the rows of rank r + {s} (mod cp)": np.roll(layout.index, -s, axis=0) for s in range(1, layout.cp)
    }
    orders["rows are in the order of the stream, not of the layout"] = np.arange(layout.slots).reshape(
        layout.index.shape
    )
    for text, index in orders.items():
        where = np.empty(layout.slots, np.int64)
        where[layout.index] = index
        source = real[where[layout.tokens]]
        if 2 * (source < 0).sum() < len(source):  # rows of padding have no answer
            yield Hypothesis(
                "wrong-rows",
                text,
                lambda source=source: {
                    n: np.where(
                        (source < 0).reshape(-1, *[1] * (got[n].ndim - 1)), got[n], np.asarray(expected[n])[source]
                    )
                    for n in rows
                },
            )
