"""Errors of distributed attention that are known by name, and what the arrays would be with each."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ..attention import split_gradient, whole_keys
from .attention_places import LARGEST, Places
from .contract import Arrays, Hypothesis, factors
from .layouts import Layout, segment_of

HUGE = 30.0  # a sink in whose place a smaller one does not count


def answers(
    streams: Arrays,
    pairs: np.ndarray,
    scale: float,
    sinks: np.ndarray | None,
    *,
    head_of: np.ndarray | None = None,
    shares: np.ndarray | None = None,
    shared_shares: np.ndarray | None = None,
    delta: bool = True,
    kept: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """out, lse and gradients in slots, for any pairs [slots, slots] of queries and keys, in float64.

    head_of [heads]: the KV head that each query head reads. shares [heads]: the factor that the
    gradients of keys and values have of each query head; shared_shares [KV heads]: the one that
    d_k_shared has of each KV head. delta: whether <out, d_out> is subtracted.
    kept: pairs that count in the gradients of keys and values; without, all.
    """
    q, v, d_out = (streams[n].astype(np.float64) for n in ("q", "v", "d_out"))
    k, own = whole_keys(streams).astype(np.float64), streams["k"].shape[2]
    heads, kv_heads = q.shape[1], k.shape[1]
    reads = np.arange(heads) * kv_heads // heads if head_of is None else head_of
    part = np.ones(heads) if shares is None else shares
    x = np.where(pairs, scale * np.einsum("qhd,khd->hqk", q, k[:, reads]), -np.inf)
    z = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    top = np.maximum(x.max(axis=2, initial=-np.inf), z[:, None])
    top[top == -np.inf] = 0
    p = np.exp(x - top[:, :, None])
    total = p.sum(axis=2) + np.exp(z[:, None] - top)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = top + np.log(total)
        p = np.where(total[:, :, None] > 0, p / total[:, :, None], 0)
    out = np.einsum("hqk,khd->qhd", p, v[:, reads])
    gone = (out * d_out).sum(axis=2).T
    d_x = p * (np.einsum("qhd,khd->hqk", d_out, v[:, reads]) - (gone[:, :, None] if delta else 0))
    d_k, d_v = np.zeros(k.shape), np.zeros(v.shape)
    counted = 1 if kept is None else kept
    for head in range(heads):
        d_k[:, reads[head]] += part[head] * scale * (counted * d_x[head]).T @ q[:, head]
        d_v[:, reads[head]] += part[head] * (counted * p[head]).T @ d_out[:, head]
    if shared_shares is not None:
        d_k[..., own:] *= shared_shares[:, None]
    found = {
        "out": out,
        "lse": lse.T,
        "d_q": scale * np.einsum("hqk,khd->qhd", d_x, k[:, reads]),
        "d_v": d_v,
    } | split_gradient(d_k, own)
    if sinks is not None:
        with np.errstate(invalid="ignore"):
            found["d_sinks"] = -(np.exp(z[:, None] - lse) * gone).sum(axis=1)
    return found


def other_pairs(
    pairs: np.ndarray, attributes: Mapping[str, Any], layout: Layout, of_ranks: bool = True
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Pairs of queries and keys that a known error would compute: its kind, what is said, the pairs.

    of_ranks: with errors that tell ranks apart.
    """
    slots, mask, window = layout.slots, attributes["mask"], int(attributes["window"])
    i, j = np.ogrid[:slots, :slots]
    real = np.zeros(slots, bool)
    real[layout.tokens] = True
    both = real[:, None] & real[None, :]
    segment, owner = segment_of(layout), layout.owner
    together = segment[:, None] == segment[None, :]
    own = owner[:, None] == owner[None, :]
    row = np.empty(slots, np.int64)
    row[layout.index] = np.arange(layout.index.shape[1])

    def rule(keys: np.ndarray, behind: np.ndarray, width: int = window, full: bool = mask == "full") -> np.ndarray:
        return keys if full else keys & (behind >= 0) & ((behind < width) | (width == 0))

    leak = rule(both, i - j)
    yield "leak", "a key of another document: documents are not told apart", leak
    yield (
        "leak",
        "a key of another document: documents are not told apart, padding is read too",
        rule(real[:, None] & True, i - j),
    )
    if mask != "full":
        yield "mask-lost", "the causal mask is lost: keys of the future are seen", both & together
        yield "mask-lost", "the mask is lost: every key of every document is seen", both
        yield "shifted-mask", "the mask is shifted by one: a query sees the next key", rule(both & together, i - j + 1)
        yield (
            "own-key",
            "the mask is shifted by one: a query does not see its own key",
            rule(both & together, i - j - 1, max(0, window - 1)),
        )
    else:
        yield "causal", "a causal mask where there is none", both & together & (i >= j)
    yield "own-key", "a query does not see its own key", pairs & (i != j)
    if mask != "full":
        next_keys = np.append(np.zeros((slots, 1), bool), pairs[:, :-1], axis=1) & both & together
        yield "shifted-mask", "the mask is wider by one: a query sees the next key, too", pairs | next_keys
    if mask == "regions":
        yield "mask-lost", "the regions are lost: the mask is causal", both & together & (i >= j)
    if window:
        yield "window-lost", "the window is lost", rule(both & together, i - j, 0)
        yield "window-off-by-one", "the window is wider by one", rule(both & together, i - j, window + 1)
        if window > 1:
            yield "window-off-by-one", "the window is narrower by one", rule(both & together, i - j, window - 1)
    yield "padding", "padding is read as keys", rule(real[:, None] & together, i - j)
    for text, bounds in (
        ("are those without padding", np.cumsum([0, *layout.lengths])), ("are one token late", layout.cu_seqlens + 1),
    ):
        other = np.searchsorted(bounds[1:], np.arange(slots), side="right")
        yield "boundaries", f"boundaries of documents {text}", rule(both & (other[:, None] == other), i - j)
    if layout.cp == 1 or not of_ranks:
        return
    yield "local-keys", "a dropped shard: a rank sees its own keys alone", pairs & own
    yield (
        "local-positions",
        "rows of a rank are taken for positions: its mask is by row",
        rule(both & together, row[:, None] - row[None, :]),
    )
    yield "mask-lost-under-cp", "the mask is lost for keys of other ranks", np.where(own, pairs, both & together)
    yield (
        "leak",
        "a key of another document: documents are told apart among a rank's own keys alone",
        np.where(own, pairs, leak),
    )
    if window:
        yield (
            "window-lost",
            "the window is lost for keys of other ranks",
            np.where(own, pairs, rule(both & together, i - j, 0)),
        )
    for text, counted in shares_of_lengths(layout):
        seen = rule(real[:, None] & together & counted[None, :], i - j) if mask != "regions" else pairs & counted
        yield "uneven-lengths", f"{text}, as keys", pairs & counted
        yield "uneven-lengths", f"{text}, as keys, and padding among these", seen
        yield "uneven-lengths", f"{text}, as keys and as queries", pairs & counted & counted[:, None]
        yield "uneven-lengths", f"{text}, as keys and as queries, and padding among these", seen & counted[:, None]
    for rank in range(layout.cp):
        keys = owner[None, :] == rank
        yield "dropped-shard", f"a dropped shard: other ranks do not see the keys of rank {rank}", pairs & (~keys | own)
        yield "dropped-shard", f"a dropped shard: nobody sees the keys of rank {rank}", pairs & ~keys
    for step in range(1, layout.cp):
        lost = owner[None, :] == (owner[:, None] + step) % layout.cp
        yield (
            "dropped-shard",
            f"a dropped shard: rank r does not see the keys of rank r + {step} (mod cp)",
            pairs & ~lost,
        )


def shares_of_lengths(layout: Layout) -> Iterator[tuple[str, np.ndarray]]:
    """Slots [slots] that count if every rank takes the same share of a document's tokens, whatever it has of them."""
    for text, up in (("length // cp", 0), ("length / cp, rounded up,", layout.cp - 1)):
        found = np.zeros(layout.slots, bool)
        for (begin, end), length in zip(pairwise(layout.cu_seqlens), layout.lengths):
            for rows in layout.index:
                mine = np.sort(rows[(rows >= begin) & (rows < end)])
                found[mine[: (length + up) // layout.cp]] = True
        yield f"documents are uneven over ranks: a rank takes {text} of its rows of a document for real", found


def hypotheses(
    got: Arrays,
    expected: Arrays,
    failing: set[str],
    streams: Arrays,
    pairs: np.ndarray,
    attributes: Mapping[str, Any],
    layout: Layout,
    tp: int,
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    scale, sinks, tokens = float(attributes["scale"]), streams.get("sinks"), layout.tokens
    width, heads, kv_heads = streams["q"].shape[2], streams["q"].shape[1], streams["k"].shape[1]

    def real(found: Arrays) -> dict[str, np.ndarray]:
        return {n: a if n == "d_sinks" else a[tokens] for n, a in found.items()}

    asked: list[tuple[str, str, dict[str, Any]]] = []

    def known(
        kind: str,
        text: str,
        pairs: np.ndarray = pairs,
        scale: float = scale,
        sinks: np.ndarray | None = sinks,
        **more: Any,
    ) -> Hypothesis:
        asked.append((kind, text, {"pairs": pairs, "scale": scale, "sinks": sinks} | more))
        return Hypothesis(kind, text, lambda: real(answers(streams, pairs, scale, sinks, **more)))

    blind = ~np.asarray(pairs.any(axis=1))[tokens]
    if blind.any() and failing & {"out", "lse", "d_q"}:

        def elsewhere() -> dict[str, np.ndarray]:
            return {
                n: np.where(blind.reshape(-1, *[1] * (got[n].ndim - 1)), got[n], expected[n])
                for n in failing & {"out", "lse", "d_q"}
            }

        yield Hypothesis("no-key", "rows that see no key have an output, an lse or a gradient", elsewhere)
    zero = {n for n in failing if not got[n].any()}
    if zero:
        yield Hypothesis(
            "zero-gradient" if all(n.startswith("d_") for n in zero) else "zero",
            f"{', '.join(sorted(zero))} is 0 everywhere",
            lambda: {n: np.zeros(got[n].shape) for n in zero},
        )
    if scale != 1:
        yield Hypothesis(
            "scale-lost",
            "gradients of q and k lack the scale",
            lambda: {n: np.asarray(expected[n]) / scale for n in ("d_q", "d_k", "d_k_shared") if n in expected},
        )
    yield from factors(got, expected, failing, {"cp": layout.cp, "tp": tp, "the heads of a group": heads // kv_heads})
    for kind, text, other in other_pairs(pairs, attributes, layout):
        yield known(kind, text, pairs=other)
    for text, wrong in (
        ("1 / sqrt(D)", width**-0.5),
        ("1", 1.0),
        ("1 / D", 1 / width),
        ("the scale twice", scale**2),
        ("the root of the scale", scale**0.5),
        ("sqrt(D)", width**0.5),
        ("1 / sqrt(D) of values", streams["v"].shape[2] ** -0.5),
        ("times log 2: exp2 in place of exp", scale * np.log(2)),
    ):
        if not np.isclose(wrong, scale):
            yield known("scale", f"a wrong scale: {text}", scale=wrong)
    if sinks is not None:
        yield known("sinks-ignored", "sinks are ignored", sinks=None)
        yield known("sinks-repeated", "every rank adds the sink", sinks=sinks + np.log(layout.cp))
        kv_sinks = sinks[np.arange(heads) * kv_heads // heads]
        for text, wrong_sinks in (("are scaled like scores", sinks * scale), ("count to the base 2", sinks * np.log(2)),
                                  ("are those of the KV heads", kv_sinks)):
            if np.abs(sinks).max(initial=0) < HUGE:  # smaller ones would be as good as none
                yield known("sinks-changed", f"sinks {text}", sinks=wrong_sinks)
    reads = np.arange(heads) * kv_heads // heads
    if heads > kv_heads > 1:
        yield known("kv-heads", "KV heads are mixed up: head h reads h mod K", head_of=np.arange(heads) % kv_heads)
    if kv_heads > 1:
        yield known("kv-heads", "all query heads read KV head 0", head_of=np.zeros(heads, np.int64))
    if heads > kv_heads:
        first = np.append(True, reads[1:] != reads[:-1]).astype(float)
        last = np.append(reads[1:] != reads[:-1], True).astype(float)
        for text, shares in (
            ("of the first query head alone", first),
            ("of the last query head alone", last),
            ("a mean over the query heads", np.full(heads, kv_heads / heads)),
        ):
            yield known(
                "group-gradient", f"gradients of a KV head are no sum over its query heads: {text}", shares=shares
            )
    if "k_shared" in streams:
        for text, alone in (
            ("the first head alone", np.arange(kv_heads) == 0),
            ("the last head alone", np.arange(kv_heads) == kv_heads - 1),
            ("a mean over the heads", np.full(kv_heads, 1 / kv_heads)),
        ):
            yield known(
                "shared-gradient", f"d_k_shared is no sum over the heads: {text}", shared_shares=alone.astype(float)
            )
    yield known("delta-lost", "gradients lack <out, d_out>", delta=False)
    yield from _rank_gradients(known, layout)
    yield from _lse(expected, known)
    yield from _moved(got, expected, failing, layout)
    masks = {(kind, text): other for kind, text, other in other_pairs(pairs, attributes, layout, False)}
    masks |= {("chunk-order", text): other for text, other in _other_chunks(pairs, attributes, layout)}
    places = Places(got, expected, failing, streams, pairs, scale, layout, masks)
    yield from places.all()
    ranks, of_gradients = places.queries, failing <= {"d_k", "d_v", "d_k_shared", "d_sinks"}
    if layout.cp == 1 or layout.slots > LARGEST or not of_gradients and len(ranks) != 1:
        return
    right = {"pairs": pairs, "scale": scale, "sinks": sinks}
    for rank in range(layout.cp) if of_gradients else ranks:
        for kind, text, how in asked:
            if of_gradients and not how.keys() & {"shares", "shared_shares", "kept"}:
                continue  # values would be wrong, too
            yield Hypothesis(
                kind,
                f"{text}; on rank {rank} alone",
                lambda how=how, rank=rank: real(_of_rank(streams, layout.owner == rank, how, right)),
            )


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
    for rows in layout.index:
        for a, b in pairwise(layout.cu_seqlens):
            mine = rows[(rows >= a) & (rows < b)]
            swapped[mine] = np.roll(mine, len(mine) // 2)
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


def _lse(expected: Arrays, known: Callable[..., Hypothesis]) -> Iterator[Hypothesis]:
    if "lse" not in expected:
        return
    lse = np.asarray(expected["lse"])
    yield Hypothesis("lse-base", "lse is a logarithm to the base 2", lambda: {"lse": lse / np.log(2)})
    yield Hypothesis("lse-base", "lse is multiplied by log 2", lambda: {"lse": lse * np.log(2)})
    yield Hypothesis("lse-sinks", "lse lacks the sink", lambda: {"lse": known("", "", sinks=None).arrays()["lse"]})


def _moved(got: Arrays, expected: Arrays, failing: set[str], layout: Layout) -> Iterator[Hypothesis]:
    """Right rows at wrong places."""
    rows = [n for n in failing if n != "d_sinks"]
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
