"""Errors of distributed recurrences that are known by name, and what the arrays would be with each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from .contract import ROUNDED_16, Arrays, Hypothesis, Tolerance, factors
from .layouts import NAMES, Layout, layout_of, segment_of
from .parts import on_one_rank

LEAVES = ("q", "k", "v", "g", "beta", "conv_weight")
CONVOLVED = ("q", "k", "v")
Runs = Sequence[np.ndarray]  # slots, in the order in which a state or a convolution passes them


@dataclass(frozen=True)
class Rule:
    """The formula of a layer. write, erase: what v and what the state holds for k are multiplied by."""

    write: str = "beta"  # or "one"
    erase: str = "beta"  # or "one", "zero"
    decays: str = "before"  # or "behind" the update, or "never"
    scale: str = "given"  # or "one", "usual": 1 / sqrt(elements of k)
    heads: str = "blocks"  # or "turns": head h reads head h mod K
    silu: bool = True
    normalised: bool = True
    taps: int = 1  # -1: the last weight is of the first token
    cut_gradients: bool = False  # gradients of states do not cross ranks
    own_states: bool = False  # d_g is of states that begin with 0 on every rank
    one_neighbour: bool = False  # a history is of the part before alone
    cut_histories: str = ""  # of "x" or "weight" or both: gradients through tokens of other ranks are lost


@dataclass(frozen=True)
class Stream:
    """Inputs of a case in slots, and who has them."""

    arrays: Mapping[str, np.ndarray]
    layout: Layout
    scale: float

    @cached_property
    def documents(self) -> list[np.ndarray]:
        return [np.arange(a, b) for a, b in pairwise(self.layout.cu_seqlens)]

    def cut(self, runs: Runs) -> list[np.ndarray]:
        """Runs that end where the next slot is on another rank."""
        owner = self.layout.owner
        return [part for run in runs for part in np.split(run, np.flatnonzero(np.diff(owner[run])) + 1)]


def _convolved(stream: Stream, runs: Runs, rule: Rule) -> tuple[dict[str, np.ndarray], Any]:
    """What the convolution makes of q, k and v, and its way back: from their gradients to those of x and of the weights."""
    weights, owner, first = stream.arrays["conv_weight"].astype(np.float64), stream.layout.owner, 0
    width, found, ways = weights.shape[1], {}, []
    before = np.full((stream.layout.slots, width), -1)  # the slot that each tap reads; -1: none
    for run in runs:
        for j in range(width):
            back = width - 1 - j
            before[run[back:], j] = run[: max(0, len(run) - back)]
        if rule.one_neighbour and len(run):
            part = np.zeros(stream.layout.slots, np.int64)
            part[run] = np.cumsum(np.append(0, np.diff(owner[run]) != 0))
            before[run] = np.where(part[before[run]] < part[run][:, None] - 1, -1, before[run])
    for name in CONVOLVED:
        x = stream.arrays[name].astype(np.float64)
        taps = np.where((before >= 0)[:, :, None, None], x[before], 0)
        mine = weights[first : first + x[:1].size].reshape(*x.shape[1:], width)[..., :: rule.taps]
        first += x[:1].size
        z = np.einsum("sjhc,hcj->shc", taps, mine)
        sigmoid = 1 / (1 + np.exp(-z)) if rule.silu else np.ones(z.shape)
        s = z * sigmoid
        root = np.sqrt((s * s).sum(axis=2, keepdims=True) + 1e-6) if name != "v" and rule.normalised else np.ones((1, 1, 1))
        found[name] = s / root
        slope = sigmoid * (1 + z * (1 - sigmoid)) / root
        ways.append((name, found[name], slope, taps, mine, name != "v" and rule.normalised))

    def backward(gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        d_weights = []
        other = (before >= 0) & (owner[before] != owner[:, None])
        for name, y, slope, taps, mine, normalised in ways:
            d_y = gradients[name]
            d_z = slope * (d_y - y * (y * d_y).sum(axis=2, keepdims=True) if normalised else d_y)
            kept = [np.where(other, part not in rule.cut_histories.split(), True)[:, :, None, None] for part in ("x", "weight")]
            d_x, terms = np.zeros(d_y.shape), kept[0] * np.einsum("shc,hcj->sjhc", d_z, mine)
            np.add.at(d_x, before[before >= 0], terms[before >= 0])
            gradients = {**gradients, name: d_x}
            d_weight = np.einsum("shc,sjhc->hcj", d_z, kept[1] * taps)
            d_weights.append(d_weight[..., :: rule.taps].reshape(-1, width))
        return {**gradients, "conv_weight": np.concatenate(d_weights)}

    return found, backward


def answers(
    stream: Stream, runs: Runs | None = None, rule: Rule = Rule(), histories: Runs | None = None
) -> dict[str, np.ndarray]:
    """out and gradients in slots, in float64. runs: what a state passes, from 0 on; histories: the same of the
    convolution. Without them, documents."""
    runs = stream.documents if runs is None else runs
    x = {n: a.astype(np.float64) for n, a in stream.arrays.items()}
    back = None
    if "conv_weight" in x:
        y, back = _convolved(stream, runs if histories is None else histories, rule)
        x |= y
    found = {"out": np.zeros(x["v"].shape)}
    gradients = {n: np.zeros(x[n].shape) for n in ("q", "k", "v", "g", "beta") if n in x}
    own = _decayed(stream, x, stream.cut(runs), rule) if rule.own_states else None
    for run in runs:
        _run(stream, x, run, rule, found, gradients, own)
    if back:
        gradients = back(gradients)
    return found | {f"d_{n}": a for n, a in gradients.items()}


class _Step:
    """One token of all heads: a state [heads, D, E] before and behind it."""

    def __init__(self, stream: Stream, x: Arrays, slot: int, rule: Rule, state: np.ndarray) -> None:
        heads, keys = x["v"].shape[1], x["q"].shape[1]
        self.reads = np.arange(heads) * keys // heads if rule.heads == "blocks" else np.arange(heads) % keys
        self.q, self.k, self.v = x["q"][slot, self.reads], x["k"][slot, self.reads], x["v"][slot]
        beta = x["beta"][slot] if "beta" in x else None
        strength = {"beta": beta, "one": np.ones(heads), "zero": np.zeros(heads)}
        self.write = strength[rule.write] if beta is not None else strength["one"]
        self.erase = strength[rule.erase] if beta is not None else strength["zero"]
        g = x["g"][slot].reshape(heads, -1, 1)
        self.decay = np.ones(g.shape) if rule.decays == "never" else np.exp(g)
        self.behind = rule.decays == "behind"
        self.scale = {"given": stream.scale, "one": 1.0, "usual": x["k"].shape[2] ** -0.5}[rule.scale]
        self.decayed = state if self.behind else self.decay * state
        self.read = np.einsum("hde,hd->he", self.decayed, self.k)
        self.u = self.write[:, None] * self.v - self.erase[:, None] * self.read
        self.state = self.decayed + self.k[:, :, None] * self.u[:, None, :]
        if self.behind:
            self.state = self.decay * self.state
        self.out = self.scale * np.einsum("hde,hd->he", self.state, self.q)


def _decayed(stream: Stream, x: Arrays, runs: Runs, rule: Rule) -> dict[int, np.ndarray]:
    """The decayed state of each slot."""
    found = {}
    for run in runs:
        state = np.zeros((x["v"].shape[1], x["k"].shape[2], x["v"].shape[2]))
        for slot in run:
            step = _Step(stream, x, slot, rule, state)
            found[slot], state = step.decayed, step.state
    return found


def _run(
    stream: Stream,
    x: Arrays,
    run: np.ndarray,
    rule: Rule,
    found: dict[str, np.ndarray],
    gradients: dict[str, np.ndarray],
    own: Mapping[int, np.ndarray] | None,
) -> None:
    """One run of slots, forward and backward."""
    state, steps = np.zeros((x["v"].shape[1], x["k"].shape[2], x["v"].shape[2])), []
    for slot in run:
        steps.append(_Step(stream, x, slot, rule, state))
        state = steps[-1].state
        found["out"][slot] = steps[-1].out
    gradient, owner = np.zeros(state.shape), stream.layout.owner
    for i in reversed(range(len(run))):
        slot, s = run[i], steps[i]
        if rule.cut_gradients and i + 1 < len(run) and owner[slot] != owner[run[i + 1]]:
            gradient = np.zeros(state.shape)
        d_out = s.scale * x["d_out"][slot]
        np.add.at(gradients["q"][slot], s.reads, np.einsum("hde,he->hd", s.state, d_out))
        gradient = gradient + s.q[:, :, None] * d_out[:, None, :]
        d_g = gradient * s.state
        if s.behind:
            gradient = s.decay * gradient
        d_u = np.einsum("hde,hd->he", gradient, s.k)
        d_read = -s.erase[:, None] * d_u
        d_k = np.einsum("hde,he->hd", gradient, s.u) + np.einsum("hde,he->hd", s.decayed, d_read)
        np.add.at(gradients["k"][slot], s.reads, d_k)
        gradients["v"][slot] = s.write[:, None] * d_u
        if "beta" in gradients:
            terms = ((rule.write, s.v), (rule.erase, -s.read))
            gradients["beta"][slot] = sum((d_u * by).sum(axis=1) for name, by in terms if name == "beta")
        gradient = gradient + s.k[:, :, None] * d_read[:, None, :]
        if not s.behind:
            d_g = gradient * (own[slot] if own else s.decayed)
            gradient = s.decay * gradient
        if rule.decays != "never":
            g = gradients["g"]
            g[slot] = d_g.sum(axis=2) if g.ndim == 3 else d_g.sum(axis=(1, 2))


def _merged_at_ranks(stream: Stream) -> list[np.ndarray]:
    """Documents, joined where one ends with a rank's last slot and the next begins on another rank."""
    owner, joined = stream.layout.owner, []
    for document in stream.documents:
        if not len(document):
            continue
        if joined and owner[joined[-1][-1]] != owner[document[0]]:
            joined[-1] = np.append(joined[-1], document)
        else:
            joined.append(document)
    return joined


def _of_boundaries(stream: Stream) -> Iterator[tuple[str, str, Runs]]:
    """Runs that known errors would take for documents: kind, what is said, the runs."""
    layout = stream.layout
    everything = np.arange(layout.slots)
    leak = "the state is not 0 where a document begins"
    yield "leak", leak, [everything]
    yield "leak", f"{leak}; padding is left out", [layout.tokens]
    if layout.cp == 1:
        return
    yield "identity", "a rank whose last document ends with it passes its state on to the next document", _merged_at_ranks(stream)
    yield "local-state", "a rank begins every document with the state 0", stream.cut(stream.documents)
    yield "leak", f"{leak}, and none comes from another rank", list(layout.index)
    for name in NAMES:
        try:
            other = layout_of(name, layout.cu_seqlens, layout.cp).index
        except ValueError:
            continue
        if other.size == layout.index.size and not np.array_equal(other, layout.index):
            taken = np.empty(layout.slots, np.int64)
            taken[other] = layout.index
            yield "layout", f"rows are taken for those of {name}", [taken[d] for d in stream.documents]
    local = [np.split(rows, np.asarray(layout.cu_seqlens[1:-1]) // layout.cp) for rows in layout.index]
    yield "boundaries", "boundaries of a rank are cu_seqlens // cp", [part for parts in local for part in parts]
    chained: list[np.ndarray] = []
    for parts in local:
        filled = [part for part in parts if len(part)]
        if chained and filled:
            chained[-1] = np.append(chained[-1], filled.pop(0))
        chained += filled
    yield "boundaries", "boundaries of a rank are cu_seqlens // cp; the first goes on from the rank before", chained
    yield "layout", "rows are taken for a block of every document", [np.concatenate(parts) for parts in zip(*local)]

RULES = (
    ("scale", "the scale is 1", Rule(scale="one")),
    ("scale", "the scale is 1 / sqrt(D), whatever was asked for", Rule(scale="usual")),
    ("decay-late", "the decay is applied behind the update", Rule(decays="behind")),
    ("decay-lost", "there is no decay", Rule(decays="never")),
    ("beta-write", "beta is missing where v is written", Rule(write="one")),
    ("beta-lost", "beta is ignored", Rule(write="one", erase="one")),
    ("delta-lost", "the delta rule is lost: what the state holds is not replaced", Rule(erase="zero")),
    ("heads", "head h reads head h mod K of the keys", Rule(heads="turns")),
    ("silu-lost", "there is no SiLU", Rule(silu=False)),
    ("not-normalised", "queries and keys are not normalised", Rule(normalised=False)),
    ("taps", "weights of the convolution are in reverse order", Rule(taps=-1)),
    ("history-short", "a history is of the part before alone, which is shorter", Rule(one_neighbour=True)),
)
OF_CONVOLUTIONS = ("silu", "normalised", "taps", "one_neighbour", "cut_histories")
OF_GRADIENTS = (
    ("state-gradient", "gradients of states do not cross ranks", Rule(cut_gradients=True)),
    ("decay-gradient", "d_g lacks what the state from other ranks adds", Rule(own_states=True)),
    ("history-gradient", "gradients of histories are not added on the ranks that they came from", Rule(cut_histories="x")),
    ("weight-gradient", "d_conv_weight lacks the tokens of histories", Rule(cut_histories="weight")),
    ("history-gradient", "histories from other ranks have no gradient", Rule(cut_histories="x weight")),
)


def _of_histories(stream: Stream) -> Iterator[tuple[str, str, Runs]]:
    """The same of convolutions alone."""
    layout, text = stream.layout, "a history is of another document"
    yield "history-leak", text, [np.arange(layout.slots)]
    yield "history-leak", f"{text}; padding is left out", [layout.tokens]
    if layout.cp > 1:
        yield "history-leak", f"{text}, on another rank", _merged_at_ranks(stream)
        yield "history-lost", "a rank begins with no history", stream.cut(stream.documents)
        yield "history-leak", f"{text}, of rows of a rank", list(layout.index)


def hypotheses(
    stream: Stream, got: Arrays, expected: Arrays, failing: set[str], tolerance: Tolerance
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    has = stream.arrays.keys()

    def known(kind: str, text: str, **what: Any) -> Hypothesis:
        return Hypothesis(kind, text, partial(_in_tokens, stream, what))

    def of_rule(rules: Sequence[tuple[str, str, Rule]]) -> Iterator[Hypothesis]:
        plain = Rule()
        for kind, text, rule in rules:
            convolution = any(getattr(rule, n) != getattr(plain, n) for n in OF_CONVOLUTIONS)
            delta = rule.write != plain.write or rule.erase != plain.erase
            if convolution and "conv_weight" not in has or delta and "beta" not in has:
                continue
            yield known(kind, text, rule=rule)

    def everywhere() -> Iterator[Hypothesis]:
        yield from of_rule(RULES)
        for kind, text, runs in _of_boundaries(stream):
            yield known(kind, text, runs=runs, histories=stream.documents)
            if "conv_weight" in has:
                yield known(kind, f"{text}, and so are histories", runs=runs)
        if "conv_weight" in has:
            for kind, text, runs in _of_histories(stream):
                yield known(kind, text, histories=runs)
        if stream.layout.cp > 1:
            yield from of_rule(OF_GRADIENTS)
        for name in sorted(failing):
            if name.startswith("d_"):
                yield Hypothesis("zero", f"{name} is 0", lambda name=name: {name: np.zeros(expected[name].shape)})

    yield from everywhere()
    yield from factors(got, expected, failing, {"cp": stream.layout.cp})
    yield from _of_one_rank(stream, got, expected, failing, tolerance)
    yield from _rounded_states(stream, got, expected, failing, tolerance)


def _in_tokens(stream: Stream, what: Mapping[str, Any]) -> dict[str, np.ndarray]:
    found = answers(stream, **what)
    return {n: a if n == "d_conv_weight" else a[stream.layout.tokens] for n, a in found.items()}


def _of_one_rank(
    stream: Stream, got: Arrays, expected: Arrays, failing: set[str], tolerance: Tolerance
) -> Iterator[Hypothesis]:
    """Gradients that are lost on one rank, or have a factor there."""
    layout = stream.layout
    if layout.cp == 1 or not all(n.startswith("d_") for n in failing):
        return
    owner = layout.owner[layout.tokens]

    def part(rank: int, name: str) -> np.ndarray | None:
        return None if name == "d_conv_weight" else (owner == rank).reshape(-1, *[1] * (np.ndim(expected[name]) - 1))

    def errors() -> Iterator[Hypothesis]:
        zeros = {n: np.zeros(expected[n].shape) for n in failing if n != "d_conv_weight"}
        yield Hypothesis("zero", f"{' and '.join(sorted(zeros))} is 0", lambda: zeros)
        if failing == {"d_g"}:
            text = "d_g lacks what the state from other ranks adds"
            yield Hypothesis("decay-gradient", text, partial(_in_tokens, stream, {"rule": Rule(own_states=True)}))

    parts = [(f"on rank {rank}", partial(part, rank)) for rank in range(layout.cp)]
    yield from on_one_rank(parts, got, expected, failing, errors, {"cp": layout.cp}, tolerance)


def _rounded_states(
    stream: Stream, got: Arrays, expected: Arrays, failing: set[str], tolerance: Tolerance
) -> Iterator[Hypothesis]:
    """States or maps between ranks that are rounded: small differences of both signs, in documents that are on several
    ranks, and in outputs behind their first part alone. How they are rounded cannot be told."""
    layout = stream.layout
    owner, document = layout.owner, segment_of(layout)
    first = np.asarray([owner[int(layout.cu_seqlens[d])] if d < len(layout.lengths) else 0 for d in document])
    behind = np.zeros(layout.slots, bool)
    for run in stream.documents:
        behind[run] = np.cumsum(np.append(0, np.diff(owner[run]) != 0)[: len(run)]) > 0
    crosses = np.zeros(layout.slots, bool)
    for run in stream.documents:
        crosses[run] = len(run) > 0 and bool((owner[run] != first[run]).any())
    for name in failing:
        if name == "d_conv_weight":
            continue
        gap = got[name].astype(np.float64) - expected[name]
        wrong = tolerance.wrong(name, got[name], np.asarray(expected[name])).reshape(len(gap), -1).any(axis=1)
        allowed = (behind if name == "out" else crosses)[layout.tokens]
        size = float(np.abs(expected[name]).max(initial=0))
        signs = (gap[np.abs(gap) > 0] > 0).mean() if gap.any() else 0
        if (wrong & ~allowed).any() or np.abs(gap).max() > 2 * ROUNDED_16 * size or not 0.2 < signs < 0.8:
            return
    text = "states between ranks are rounded to bfloat16: differences are as small, and begin behind the first rank of a document"
    yield Hypothesis("narrow-states", text, lambda: {n: np.asarray(got[n], np.float64) for n in failing})
