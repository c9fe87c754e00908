"""Errors of distributed attention in one place: on one step of a ring, on one rank, or of one rank's keys for another.

Blocks computes forward and backward passes whose pairs of queries and keys differ in a scope, a mask over them. A ring is
taken to go so that rank r has the keys of rank r - s in step s; one that goes the other way has other numbers of steps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attention import split_gradient, whole_keys
from .contract import Arrays, Hypothesis, Tolerance
from .layouts import Layout

LARGEST = 1024  # slots of a stream that is searched
NEAR = 0.02  # of the largest value: an output that is farther away is not that of a known error


@dataclass(frozen=True)
class Answered:
    """A problem of attention in slots, and what ranks returned of it, whose arrays `failing` differ from the expected."""

    got: Arrays
    expected: Arrays
    failing: set[str]
    streams: Arrays
    pairs: np.ndarray
    attributes: Mapping[str, Any]
    layout: Layout
    tp: int
    tolerance: Tolerance

    @property
    def scale(self) -> float:
        return float(self.attributes["scale"])

    @property
    def softcap(self) -> float:
        return float(self.attributes["softcap"])


@dataclass(frozen=True)
class Scope:
    """Pairs of queries and keys [slots, slots] by their ranks."""

    text: str
    pairs: np.ndarray


def steps_of(layout: Layout) -> Iterator[Scope]:
    """Steps of a ring, of all ranks."""
    owner = layout.owner
    ring = (owner[:, None] - owner[None, :]) % layout.cp
    for step in range(layout.cp):
        text = (
            "the rank's own keys (step 0 of a ring)"
            if step == 0
            else f"keys of rank r - {step} (step {step} of a ring)"
        )
        yield Scope(f"for {text}", ring == step)


def blocks_of(layout: Layout, rank: int) -> Iterator[Scope]:
    """All pairs of a rank's queries, and those with the keys of each rank."""
    mine, owner = layout.owner[:, None] == rank, layout.owner[None, :]
    yield Scope(f"on rank {rank}", np.broadcast_to(mine, (layout.slots, layout.slots)))
    for other in range(layout.cp):
        yield Scope(f"for the queries of rank {rank} and the keys of rank {other}", mine & (owner == other))


class Blocks:
    """One problem; arrays are heads first: [heads, queries, keys]."""

    def __init__(self, streams: Arrays, pairs: np.ndarray, scale: float, layout: Layout) -> None:
        self.streams, self.pairs, self.scale, self.layout = streams, pairs, scale, layout
        self.sinks = streams.get("sinks")
        q, v, d_out = (streams[n].astype(np.float64) for n in ("q", "v", "d_out"))
        k = whole_keys(streams).astype(np.float64)
        self.heads, self.kv_heads, self.own = q.shape[1], k.shape[1], streams["k"].shape[2]
        self.reads = np.arange(self.heads) * self.kv_heads // self.heads
        self.q, self.d_out = (x.transpose(1, 0, 2) for x in (q, d_out))
        self.k, self.v = (x[:, self.reads].transpose(1, 0, 2) for x in (k, v))
        self.z = np.full(self.heads, -np.inf) if self.sinks is None else self.sinks.astype(np.float64)
        self.x = scale * self.q @ self.k.swapaxes(1, 2)
        self.last: dict[str, Any] = {}

    def masked(self, pairs: np.ndarray | None = None, x: np.ndarray | None = None) -> np.ndarray:
        return np.where(self.pairs if pairs is None else pairs, self.x if x is None else x, -np.inf)

    def forward(
        self, x: np.ndarray, v: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """out and lse of masked scores; v: what weights are multiplied with."""
        top = np.maximum(x.max(axis=2, initial=-np.inf), self.z[:, None])
        top = np.where(np.isfinite(top), top, 0)
        p = np.exp(x - top[:, :, None])
        total = p.sum(axis=2) + np.exp(self.z[:, None] - top)
        with np.errstate(divide="ignore"):
            lse = top + np.log(total)
        p /= np.where(total == 0, 1, total)[:, :, None]
        return (p @ self.v if v is None else v(p)), lse

    def backward(
        self,
        x: np.ndarray,
        out: np.ndarray,
        lse: np.ndarray,
        *,
        delta: np.ndarray | float = 1.0,
        of_q: np.ndarray | float = 1.0,
        of_k: np.ndarray | float = 1.0,
        of_v: np.ndarray | float = 1.0,
        scale: np.ndarray | float | None = None,
        exchanged: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Gradients in slots. delta, of_q, of_k, of_v [queries, keys]: factors of <out, d_out>, and of what pairs add to
        gradients; exchanged: pairs for which keys are values and values keys."""
        p = np.exp(x - np.where(np.isfinite(lse), lse, 0)[:, :, None])
        gone = (out * self.d_out).sum(axis=2)
        d_p = self.d_out @ self.v.swapaxes(1, 2)
        if exchanged is not None:
            d_p = np.where(exchanged, self.d_out @ self.k.swapaxes(1, 2), d_p)
        d_x = p * (d_p - delta * gone[:, :, None]) * (self.scale if scale is None else scale)
        weights = of_q * d_x
        d_q = weights @ self.k
        if exchanged is not None:
            d_q = np.where(exchanged, 0, weights) @ self.k + np.where(exchanged, weights, 0) @ self.v
        d_k, d_v = (of_k * d_x).swapaxes(1, 2) @ self.q, (of_v * p).swapaxes(1, 2) @ self.d_out
        found = {"d_q": d_q.transpose(1, 0, 2), "d_v": self.of_kv(d_v)} | split_gradient(self.of_kv(d_k), self.own)
        if self.sinks is not None:
            with np.errstate(invalid="ignore"):
                found["d_sinks"] = -(np.exp(self.z[:, None] - np.where(np.isfinite(lse), lse, 0)) * gone).sum(axis=1)
        return found

    def of_kv(self, gradient: np.ndarray) -> np.ndarray:
        found = np.zeros((gradient.shape[1], self.kv_heads, gradient.shape[2]))
        for head, kv in enumerate(self.reads):
            found[:, kv] += gradient[head]
        return found

    def right(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores, out and lse without an error."""
        if not self.last:
            x = self.masked()
            self.last["right"] = (x, *self.forward(x))
        return self.last["right"]

    def partials(self) -> tuple[np.ndarray, np.ndarray]:
        """[cp, heads, queries, ...]: out and lse over the keys of each rank, in the order of a ring's steps; no sinks."""
        if "partials" not in self.last:
            outs, lses = [], []
            z, self.z = self.z, np.full(self.heads, -np.inf)
            for step in range(self.layout.cp):
                source = (self.layout.owner - step) % self.layout.cp
                out, lse = self.forward(self.masked(self.pairs & (self.layout.owner == source[:, None])))
                outs, lses = [*outs, out], [*lses, lse]
            self.z = z
            self.last["partials"] = np.array(outs), np.array(lses)
        return self.last["partials"]

    def merged(self, kind: str, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """out and lse of a ring whose merges are wrong in some steps of some queries: where [steps, queries]."""
        outs, lses = self.partials()
        out, lse = outs[0], lses[0]
        for step in range(1, len(outs)):
            bad, more, one = where[step], outs[step], lses[step]
            whole = np.logaddexp(lse, one)
            safe = np.where(np.isfinite(whole), whole, 0)
            a, b, new = np.exp(lse - safe), np.exp(one - safe), whole
            wrong = {
                "lse": (a, b, lse),
                "rescale": (np.ones_like(a), b, whole),
                "weight": (a, np.ones_like(b), whole),
                "larger": (a, b, np.maximum(lse, one)),
                "mean": (np.full_like(a, 0.5), np.full_like(a, 0.5), whole),
                "swapped": (b, a, whole),
            }[kind]
            a, b, new = (np.where(bad, w, r) for w, r in zip(wrong, (a, b, new)))
            out, lse = out * a[:, :, None] + more * b[:, :, None], new
        whole = np.logaddexp(lse, self.z[:, None])
        return out * np.exp(lse - np.where(np.isfinite(whole), whole, 0))[:, :, None], whole


MERGES = {
    "lse": ("lse-not-updated", "a merge of two blocks does not update lse"),
    "rescale": ("not-rescaled", "a merge of two blocks does not rescale the output that it has"),
    "weight": ("not-weighted", "a merge of two blocks adds the new one's output without its weight"),
    "larger": ("lse-not-updated", "a merge of two blocks takes the larger lse"),
    "mean": ("not-weighted", "a merge of two blocks takes the mean of outputs"),
    "swapped": ("not-weighted", "a merge of two blocks gives each output the weight of the other"),
}


class Places:
    """Hypotheses of one problem, held against what was got. masks: pairs of errors of a mask, by kind and text."""

    def __init__(self, answered: Answered, masks: Mapping[tuple[str, str], np.ndarray]) -> None:
        a, self.masks, self.tolerance = answered, masks, answered.tolerance
        self.layout, self.blocks = a.layout, Blocks(a.streams, a.pairs, a.scale, a.layout)
        self.got, self.expected, self.failing, self.pairs, self.tokens = a.got, a.expected, a.failing, a.pairs, a.layout.tokens
        self.queries = {r for n in ("out", "lse", "d_q") if n in a.failing for r in self.ranks_of(n)}
        self.wrong_keys = {r for n in ("d_k", "d_v") if n in a.failing for r in self.ranks_of(n)}

    def ranks_of(self, name: str) -> set[int]:
        """Ranks with a wrong row of an array."""
        bad = self.tolerance.wrong(name, self.got[name], np.asarray(self.expected[name]))
        return set(self.layout.owner[self.tokens][bad.reshape(len(bad), -1).any(axis=1)].tolist())

    def real(self, found: Arrays) -> dict[str, np.ndarray]:
        return {n: a if n == "d_sinks" else a[self.tokens] for n, a in found.items()}

    def is_near(self, out: np.ndarray, lse: np.ndarray) -> bool:
        """Whether outputs may be those of the error, so that its gradients are worth their time."""
        for name, array in self.real({"out": out.transpose(1, 0, 2), "lse": lse.T}).items():
            if name in self.got and name in self.expected:
                known = np.isfinite(array) & np.isfinite(self.got[name])
                gap = np.abs(np.where(known, array, 0) - np.where(known, self.got[name], 0))
                if gap.max(initial=0) > NEAR * np.abs(np.where(known, array, 0)).max(initial=1e-3):
                    return False
        return True

    def forward(
        self, kind: str, text: str, x: np.ndarray, found: tuple[np.ndarray, np.ndarray] | None = None, **how: Any
    ) -> Iterator[Hypothesis]:
        """An error of the forward pass, whose gradients follow from it."""
        out, lse = self.blocks.forward(x) if found is None else found
        if self.is_near(out, lse):
            values = {"out": out.transpose(1, 0, 2), "lse": lse.T}
            yield Hypothesis(kind, text, lambda: self.real(values | self.blocks.backward(x, out, lse, **how)))

    def backward(self, kind: str, text: str, change: Callable[[dict], dict] = dict, **how: Any) -> Hypothesis:
        """An error of the backward pass alone; how: parameters of Blocks.backward other than the right ones."""
        right = dict(zip(("x", "out", "lse"), self.blocks.right()))
        return Hypothesis(kind, text, lambda: self.real(change(self.blocks.backward(**(right | how)))))

    def all(self) -> Iterator[Hypothesis]:
        if self.layout.cp == 1 or self.layout.slots > LARGEST:
            return
        if self.failing & {"out", "lse"}:
            for scope in self.scopes(self.queries if len(self.queries) == 1 else ()):
                yield from self.of_pairs(scope)
                yield from self.of_operands(scope)
            yield from self.of_merges()
        elif "d_q" in self.failing:
            for scope in self.scopes(self.queries if len(self.queries) == 1 else ()):
                yield from self.of_queries(scope)
                yield from self.of_gradients(scope)
            yield from self.of_saved()
        else:
            for scope in self.scopes(range(self.layout.cp)):
                yield from self.of_keys(scope)
            yield from self.of_home()

    def scopes(self, ranks: Iterable[int]) -> Iterator[Scope]:
        """Steps of a ring, then some ranks and their blocks."""
        yield from steps_of(self.layout)
        for rank in ranks:
            yield from blocks_of(self.layout, rank)

    def of_pairs(self, scope: Scope) -> Iterator[Hypothesis]:
        """Masks, blocks that are lost or come twice."""
        for (kind, text), other in self.masks.items():
            yield from self.forward(
                kind, f"{text}, {scope.text}", self.blocks.masked(np.where(scope.pairs, other, self.pairs))
            )
        lost = self.blocks.masked(self.pairs & ~scope.pairs)
        yield from self.forward("dropped-shard", f"a dropped block: keys are not seen {scope.text}", lost)
        x = self.blocks.masked() + np.where(scope.pairs, np.log(2), 0)
        yield from self.forward("repeated", f"a block counts twice {scope.text}", x)

    def of_operands(self, scope: Scope) -> Iterator[Hypothesis]:
        """Scales, exchanged or stale keys and values."""
        blocks, scale = self.blocks, self.blocks.scale
        for text, factor in (("no scale", 1 / scale), ("the scale twice", scale)):
            if not np.isclose(factor, 1):
                x = blocks.masked(x=np.where(scope.pairs, factor, 1) * blocks.x)
                for of_gradient in (factor, 1):
                    steps = scale * np.where(scope.pairs, of_gradient, 1)
                    yield from self.forward("scale", f"a wrong scale, {text}, {scope.text}", x, scale=steps)
        if blocks.k.shape == blocks.v.shape:
            other = scale * blocks.q @ blocks.v.swapaxes(1, 2)
            x = blocks.masked(x=np.where(scope.pairs, other, blocks.x))
            found = blocks.forward(
                x, lambda p: np.where(scope.pairs, 0, p) @ blocks.v + np.where(scope.pairs, p, 0) @ blocks.k
            )
            yield from self.forward("exchanged", f"K and V are exchanged {scope.text}", x, found, exchanged=scope.pairs)
        for step in range(1, self.layout.cp):
            place = self.moved(step)
            stale = scale * blocks.q @ blocks.k[:, place].swapaxes(1, 2)
            for what, scores in (("keys and values", np.where(scope.pairs, stale, blocks.x)), ("values", blocks.x)):
                x = blocks.masked(x=scores)
                found = blocks.forward(
                    x,
                    lambda p: np.where(scope.pairs, 0, p) @ blocks.v + np.where(scope.pairs, p, 0) @ blocks.v[:, place],
                )
                text = f"stale {what}: those of rank s + {step} in place of rank s, {scope.text}"
                yield from self.forward("stale", text, x, found)
        if blocks.heads > blocks.kv_heads > 1:
            reads = np.arange(blocks.heads) % blocks.kv_heads
            k, v = (
                np.asarray(a)[:, reads].transpose(1, 0, 2) for a in (whole_keys(blocks.streams), blocks.streams["v"])
            )
            x = blocks.masked(x=np.where(scope.pairs, scale * blocks.q @ k.swapaxes(1, 2), blocks.x))
            found = blocks.forward(
                x, lambda p: np.where(scope.pairs, 0, p) @ blocks.v + np.where(scope.pairs, p, 0) @ v
            )
            yield from self.forward("kv-heads", f"KV heads are mixed up, {scope.text}: head h reads h mod K", x, found)

    def moved(self, step: int) -> np.ndarray:
        """[slots]: the slot of the same row of the rank `step` on."""
        index, found = self.layout.index, np.arange(self.layout.slots)
        found[index] = np.roll(index, -step, axis=0)
        return found

    def of_merges(self) -> Iterator[Hypothesis]:
        """Wrong merges in one step of all ranks, or in all steps of one; a ring in either direction."""
        cp, owner = self.layout.cp, self.layout.owner
        steps, everywhere = np.arange(cp)[:, None], np.ones(len(owner), bool)
        places = [(f"in step {s}", (steps == s) & everywhere) for s in range(1, cp)] if cp > 2 else []
        places += [("in every step", (steps > 0) & everywhere)]
        places += [(f"on rank {r}", (steps > 0) & (owner == r)) for r in self.queries if len(self.queries) == 1]
        x = self.blocks.right()[0]
        for name, (kind, text) in MERGES.items():
            for where, bad in places:
                yield from self.forward(kind, f"{text}, {where}", x, self.blocks.merged(name, bad))

    def of_gradients(self, scope: Scope) -> Iterator[Hypothesis]:
        """Masks of the backward pass, <out, d_out>."""
        for (kind, text), other in self.masks.items():
            x = self.blocks.masked(np.where(scope.pairs, other, self.pairs))
            yield self.backward("backward-mask", f"of the backward pass alone: {text}, {scope.text}", x=x)
        lost = np.where(scope.pairs, 0.0, 1.0)
        yield self.backward("delta-lost", f"gradients lack <out, d_out> {scope.text}", delta=lost)
        yield self.backward(
            "gradient-dropped", f"gradients of q, k and v are not added {scope.text}", of_q=lost, of_k=lost, of_v=lost
        )

    def of_queries(self, scope: Scope) -> Iterator[Hypothesis]:
        if "d_k" not in self.failing and "d_v" not in self.failing:
            for text, factor in (("added twice", 2.0), ("not added", 0.0)):
                kind = "repeated-gradient" if factor else "gradient-dropped"
                yield self.backward(kind, f"d_q is {text} {scope.text}", of_q=np.where(scope.pairs, factor, 1.0))
            yield self.backward(
                "other-half", f"d_q is added to the other half of the rank's rows {scope.text}", self.halves(scope)
            )

    def halves(self, scope: Scope) -> Callable[[dict], dict]:
        """Adds the gradients of q of a scope to the other half of each rank's rows."""
        half, index = np.arange(self.layout.slots), self.layout.index
        half[index] = np.roll(index, index.shape[1] // 2, axis=1)

        def change(found: dict) -> dict:
            part = self.blocks.backward(*self.blocks.right(), of_q=np.where(scope.pairs, 1.0, 0.0))["d_q"]
            return found | {"d_q": found["d_q"] - part + part[half]}

        return change

    def of_saved(self) -> Iterator[Hypothesis]:
        """A backward pass that has the output or the lse of one block alone."""
        outs, lses = self.blocks.partials()
        owner = self.layout.owner
        for step in range(self.layout.cp):
            for where, bad in [("", np.ones(len(owner), bool))] + [(f" on rank {r}", owner == r) for r in self.queries]:
                out, lse = self.blocks.right()[1:]
                o = np.where(bad[:, None], outs[step], out)
                block = np.where(bad, lses[step], lse)
                for what, one, other in (("output", o, lse), ("lse", out, block), ("output and lse", o, block)):
                    text = f"the backward pass has the {what} of the block of step {step} alone{where}"
                    yield self.backward("saved-block", text, out=one, lse=other)

    def of_keys(self, scope: Scope) -> Iterator[Hypothesis]:
        """What a scope adds to gradients of keys and values."""
        for kind, text, factor in (("repeated-gradient", "added twice", 2.0), ("gradient-dropped", "not added", 0.0)):
            some = np.where(scope.pairs, factor, 1.0)
            for names, how in (
                ("d_k and d_v are", {"of_k": some, "of_v": some}),
                ("d_k is", {"of_k": some}),
                ("d_v is", {"of_v": some}),
            ):
                yield self.backward(kind, f"{names} {text} {scope.text}", **how)
        if not np.isclose(self.blocks.scale, 1):
            for text, factor in (
                ("lacks the scale", 1 / self.blocks.scale),
                ("has the scale twice", self.blocks.scale),
            ):
                yield self.backward("scale-lost", f"d_k {text} {scope.text}", of_k=np.where(scope.pairs, factor, 1.0))

    def of_home(self) -> Iterator[Hypothesis]:
        """Gradients that are wrong where they arrive."""
        index, wrong = self.layout.index, self.wrong_keys
        for rank in sorted(wrong) if len(wrong) == 1 else ():
            rows, half = index[rank], np.roll(index[rank], index.shape[1] // 2)

            def changed(change: Callable[[np.ndarray], np.ndarray], names: tuple[str, ...]) -> Callable[[dict], dict]:
                def of(found: dict, rows: np.ndarray = rows) -> dict:
                    new = {n: found[n].copy() for n in names if n in found}
                    for array in new.values():
                        array[rows] = change(array)
                    return found | new

                return of

            both = ("d_k", "d_v", "d_k_shared")
            for names in (both, ("d_k",), ("d_v",)):
                what = " and ".join(n for n in names if n != "d_k_shared")
                for factor in dict.fromkeys((2.0, float(self.layout.cp))):
                    change = changed(lambda a, factor=factor, rows=rows: factor * a[rows], names)
                    yield self.backward(
                        "repeated-gradient", f"{what} of the keys of rank {rank} times {factor:g}", change
                    )
                change = changed(lambda a, half=half: a[half], names)
                yield self.backward(
                    "other-half", f"{what} of the keys of rank {rank}: their halves are exchanged", change
                )
            if self.blocks.k.shape == self.blocks.v.shape:

                def exchanged(found: dict, rows: np.ndarray = rows) -> dict:
                    d_k, d_v = found["d_k"].copy(), found["d_v"].copy()
                    d_k[rows], d_v[rows] = found["d_v"][rows], found["d_k"][rows]
                    return found | {"d_k": d_k, "d_v": d_v}

                yield self.backward("exchanged", f"d_k and d_v of the keys of rank {rank} are exchanged", exchanged)
