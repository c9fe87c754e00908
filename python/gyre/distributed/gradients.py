"""gradients(weights, microbatches, config) -> {name: (gradient, placement)}

One step of a small decoder: the gradient of L = sum w nll / sum w over the labels of all microbatches of all
ranks. weights: every parameter, whole, by the name that transformers gives it. microbatches: of each, ids,
labels (shifted already; -100 is ignored), weights (0 counts nothing), positions [rows], which are the rank's
rows under the layout; cu_seqlens [segments + 1] and layout of the stream, and whole, the arrays before they were
sharded. Replicas (dp) have other documents, ranks of cp other rows, ranks of tp the same. config: sizes, as
transformers names them (gyre.distributed.decoder.Config); a model that cannot have them raises NotImplementedError.

The function returns the gradient of every parameter after all reductions: a DTensor, an array (replicated), or an
array and its placement over tp: replicated, shard(DIM) or partial; or over several axes, {"dp": "shard(0)",
"tp": "shard(1)"}, in plain names or as torch's placements. Neighbours may have copies of a shard, as KV heads that
are fewer than ranks. Further parameters, given where they are taken: dp_group, cp_group, tp_group, data_group
(dp x cp), mesh.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from .contract import Arrays, Finding, Hypothesis, Problem, Tolerance, Verdict, judged, keywords, not_numbers
from .decoder import EMBEDDING, HEAD, Config, softmax, weights_of
from .rank import Here
from .rounding import in_type
from .step import AXES, IGNORED, Step, Stream, assembled, called, dealt, documents_of, placements_of, returned_by_name, spread

USES_LAYOUT, USES_DP = True, True
SPLITS = ("dp", "cp", "tp")
TOLERANCE = {"float32": 5e-5, "bfloat16": 0.1}  # of two layers, forward and backward, as a share of the largest value
DRAWS, SIGMAS, WIDEST = 4, 3, 3.5  # of widths(); the widest still finds a gradient that is halved
MICROBATCHES = 3  # as no grid of 2, 4 or 8 ranks: a factor tells them apart
CASES: dict[str, Config] = {
    "plain": Config(),
    "tied": Config(tie_word_embeddings=True),
    "biases": Config(attention_bias=True),
    "sinks": Config(attention_sinks=True),
    "router": Config(num_experts=4),
    "one_kv_head": Config(num_key_value_heads=1),
    "weighted": Config(),
    "one_label": Config(),
    "empty_rank": Config(),
    "empty_microbatch": Config(),
    "no_label": Config(),
}


def step_of(case: str, options: Any) -> Step | None:
    """The step of a case on a grid; None: it has no such case."""
    config = CASES[case]
    if options.dtype == "bfloat16":  # rounding would decide which experts a token has
        config = replace(config, num_experts_per_tok=config.num_experts)
    documents = documents_of(len(case), config.vocab_size)
    if case in ("one_label", "no_label"):
        for document in documents:
            document["weights"][:] = 0
        documents[4]["weights"][5] = float(case == "one_label")
    if case == "weighted":
        for i, document in enumerate(documents):
            document["weights"] *= (1 + i % 3) / np.float32(2)
    streams = dealt(documents, options.layout, options.cp, options.dp, MICROBATCHES)
    if case == "empty_rank" and options.dp * options.cp == 1:
        return None
    if case in ("empty_rank", "empty_microbatch"):
        streams[-1] = [_emptied(s, None if case == "empty_microbatch" else s.layout.index[-1]) if
                       case == "empty_rank" or m == MICROBATCHES - 1 else s for m, s in enumerate(streams[-1])]
    weights = {n: in_type(w, options.dtype).astype(np.float64) for n, w in weights_of(config, len(case)).items()}
    return Step(config, weights, streams, options.cp, options.tp)


def _emptied(stream: Stream, rows: np.ndarray | None) -> Stream:
    """A stream whose labels do not count, in some rows or in all."""
    weights = stream.weights.copy()
    weights[slice(None) if rows is None else rows] = 0
    return replace(stream, weights=weights)


def problems(case: str, options: Any) -> Iterator[Problem]:
    """The case of this name."""
    step = step_of(case, options)
    if step is None:
        return
    pieces = []
    for d, c, _ in np.ndindex(options.dp, options.cp, options.tp):
        batches = [stream.of_rank(c) for stream in step.streams[d]]
        pieces.append({"weights": step.weights, "microbatches": batches, "config": step.config})
    yield Problem(case, pieces, {}, partial(_judge, case, step, options.dtype == "bfloat16"))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank."""
    weights = {name: here.array(w) for name, w in piece["weights"].items()}
    batches = [batch_of(batch, here) for batch in piece["microbatches"]]
    offers = {f"{name}_group": here.group(name) for name in ("dp", "cp", "tp", "data")} | {"mesh": here.mesh}
    found = function(weights, batches, piece["config"], **keywords(function, offers, needs))
    shapes = {name: w.shape for name, w in piece["weights"].items()}
    return returned_by_name(found, shapes, [here.kind, "float32", "float64"])


def batch_of(batch: Mapping[str, Any], here: Here) -> dict[str, Any]:
    """A microbatch in the arrays of a rank."""

    def rows(arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {n: here.ids(arrays[n]) for n in ("ids", "labels", "positions")} | {
            "weights": here.array(arrays["weights"])
        }

    return rows(batch) | {
        "cu_seqlens": here.integers(batch["cu_seqlens"]), "layout": batch["layout"], "whole": rows(batch["whole"])
    }


def widths(step: Step, one: np.ndarray, answers: Arrays, tolerance: Tolerance) -> dict[str, float]:
    """By how much the tolerance of each gradient is wider in bfloat16: as far as roundings of the weights change it.

    That is SIGMAS times the rms, over DRAWS of relative errors of 2^-9 in all weights, of the largest change.
    """
    changes: dict[str, list[float]] = {n: [] for n in answers}
    for seed in range(DRAWS):
        errors = np.random.default_rng(seed)
        weights = {n: w * (1 + 2**-9 * errors.standard_normal(w.shape)) for n, w in step.weights.items()}
        rounded = replace(step, weights=weights, memo={})
        others = rounded.folded(rounded.parts(one))
        for n, change in changes.items():
            largest = np.abs(answers[n]).max(initial=0)
            change.append(float(np.abs(spread(others[n]) - answers[n]).max(initial=0) / largest) if largest else 0.0)
    shares = {n: SIGMAS * float(np.sqrt(np.mean(np.square(change)))) for n, change in changes.items()}
    return {n: min(WIDEST, max(1.0, share / tolerance.atol)) for n, share in shares.items()}


def _judge(
    name: str, step: Step, is_narrow: bool, arrays: list[dict[str, np.ndarray]], tolerance: Tolerance
) -> Verdict:
    sizes = step.sizes
    grid = (sizes["dp"], sizes["cp"], sizes["tp"])
    shapes = {n: w.shape for n, w in step.weights.items()}
    broken = not_numbers(arrays, lambda rank, array, values: values)
    if broken:
        return Verdict(name).fail(*(replace(f, text=f.text[:300]) for f in broken))
    placements, findings = placements_of(arrays)
    if findings:
        return Verdict(name).fail(*findings)
    whole, findings = assembled(arrays, grid, shapes, placements)
    missing = shapes.keys() - whole.keys() if not findings else set()
    if missing:
        text = "no gradient is returned: it is left out of the graph"
        findings.append(Finding("missing-parameter", text, called(missing, shapes)))
    if not whole:
        return Verdict(name).fail(*findings)
    total = step.counts().sum()
    one = np.full(step.counts().shape, 1 / total if total else 0.0)
    answers = step.folded(step.parts(one))
    answers = {n: spread(answers[n]) for n in whole}
    split = {n: {axis: int(p[6:-1]) for axis, p in placements[n].items() if p.startswith("shard")} for n in whole}
    wider = widths(step, one, answers, tolerance) if is_narrow else {}
    verdict = judge_parameters(name, whole, answers, tolerance, sizes, partial(_hypotheses, step, one, split), wider=wider)
    return verdict.fail(*findings) if findings else verdict


def judge_parameters(
    name: str, got: Arrays, expected: Arrays, tolerance: Tolerance, sizes: Mapping[str, int],
    hypotheses: Callable[[set[str], set[str]], Iterable[Hypothesis]], floor: float = 1e-3,
    wider: Mapping[str, float] = MappingProxyType({}),
) -> Verdict:
    """The verdict of arrays by parameter, [dp, cp, tp, *shape]; the tolerance is a share of the largest of each,
    at least the floor times the largest of all, and wider by a factor for some.

    hypotheses(failing, zero): known errors, of the arrays that fail, some of which are 0.
    """
    largest = {n: float(np.abs(a).max(initial=0)) for n, a in expected.items()}
    least = floor * max((x for n, x in largest.items() if expected[n].ndim > 3), default=0.0)
    scales = {n: (max(x, least) or 1.0) * wider.get(n, 1.0) for n, x in largest.items()}
    mine, wanted = ({n: a[n] / scales[n] for n in scales} for a in (got, expected))

    def places(array: str, bad: np.ndarray) -> str:
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        rank = int(np.ravel_multi_index(first[:3], bad.shape[:3]))
        of_ranks = int(bad.reshape(*bad.shape[:3], -1).any(axis=3).sum())
        return (
            f"{int(bad.any(axis=(0, 1, 2)).sum())} of {bad[0, 0, 0].size} differ, on {of_ranks} of "
            f"{np.prod(bad.shape[:3])} ranks; first {list(first[3:])} of rank {rank}: "
            f"{float(got[array][first]):.6g}, should be {float(expected[array][first]):.6g}"
        )

    def errors(failing: set[str]) -> Iterator[Hypothesis]:
        zero = {n for n in failing if not mine[n].any()}
        yield from of_factors(mine, wanted, failing, sizes, tolerance)
        yield Hypothesis("sign", "the sign is the other one", lambda: {n: -wanted[n] for n in failing})
        least = {n: 2**-8 * np.abs(wanted[n]) + tolerance.atol for n in failing}
        stored = {n: mine[n] for n in failing if (np.abs(mine[n] - wanted[n]) <= least[n]).all()}
        text = "it is the right one, rounded to bfloat16"
        yield Hypothesis("rounding", text, lambda: stored)
        for h in hypotheses(failing, zero):
            yield replace(h, arrays=lambda h=h: {n: np.asarray(a) / scales[n] for n, a in h.arrays().items()})

    verdict = judged(name, mine, wanted, tolerance, errors, places)
    if len(verdict.places) > 4:
        verdict.places = [*verdict.places[:3], f"{len(verdict.places) - 3} more parameters differ"]
    verdict.findings = [replace(f, arrays=called(f.arrays, expected)) for f in verdict.findings]
    return verdict


def of_factors(
    got: Arrays, expected: Arrays, failing: set[str], sizes: Mapping[str, int], tolerance: Tolerance
) -> Iterator[Hypothesis]:
    """Factors that are sizes of the grid, or products of two, of the arrays that have them."""
    known = dict(sizes) | {f"{a} x {b}": sizes[a] * sizes[b] for a, b in itertools.combinations(sizes, 2)
                           if min(sizes[a], sizes[b]) > 1}
    for size in sorted(set(known.values()) - {1}):
        names = [n for n, value in known.items() if value == size]
        for front, factor, why in (("", size, "summed again"), ("1/", 1 / size, "averaged")):
            arrays = {n: factor * np.asarray(expected[n]) for n in failing}
            mine = {n: a for n, a in arrays.items() if tolerance.near(n, got[n], a)}
            if mine:
                text = f"a factor {front}{size} = {front}{' or '.join(names)}: {why}"
                yield Hypothesis(f"factor-{front}{names[0]}", text, lambda mine=mine: mine)


def _hypotheses(
    step: Step, one: np.ndarray, split: Mapping[str, Mapping[str, int]], failing: set[str], zero: set[str]
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first. split: the dimension that each parameter is split by, by axis."""
    sizes, parts = step.sizes, step.parts(one)
    folded = step.folded(parts)
    right = {n: spread(folded[n]) for n in failing}

    def known(kind: str, text: str, change: Callable[[str], np.ndarray]) -> Hypothesis:
        return Hypothesis(kind, text, lambda: {n: change(n) for n in failing})

    if zero:
        text = "it is 0 everywhere: left out of the graph, or not written"
        yield Hypothesis("zero-gradient", text, lambda: {n: 0 * right[n] for n in zero})
    for axes in (("cp",), ("dp",), ("tp",), ("dp", "cp"), ("cp", "tp")):
        if all(sizes[axis] > 1 for axis in axes):
            text = f"not reduced over {' and '.join(axes)}: every rank has the part of its own tokens"
            kind = f"not-reduced-{'-'.join(axes)}"
            yield known(kind, text, lambda n, axes=axes: spread(folded[n], axes))
    yield from _microbatches(step, folded, failing)
    if step.config.tie_word_embeddings:
        for name, text in ((HEAD, "head: the embedding's"), (EMBEDDING, "embedding: the tied head's")):
            yield Hypothesis("tied", f"it is that of the {text} contribution is missing",
                             lambda name=name: {EMBEDDING: spread(parts[name])})
    yield from _kv_copies(step, one, failing)
    yield from _wrong_shards(step, right, split)
    yield from _normalisations(step, failing)
    yield from _other_steps(step, one, failing)
    yield from _other_backward(step, one, split, failing)


def _microbatches(step: Step, folded: Arrays, failing: set[str]) -> Iterator[Hypothesis]:
    last = step.sizes["microbatches"] - 1
    for index, which in ((last, "last"), (0, "first")):
        text = f"it is that of the {which} microbatch alone: gradients are not accumulated"
        yield Hypothesis("microbatch-lost", text,
                         lambda index=index: {n: spread(folded[n], microbatch=index) for n in failing})
    ranks = step.sizes["dp"] * step.cp
    weights = [ranks ** (last - m) for m in range(last + 1)]
    text = "the accumulated gradient is reduced after every microbatch: earlier ones are summed again"
    yield Hypothesis("reduced-again", text, lambda: {
        n: sum(w * spread(folded[n], microbatch=m) for m, w in enumerate(weights)) for n in failing})


def _kv_copies(step: Step, one: np.ndarray, failing: set[str]) -> Iterator[Hypothesis]:
    """KV weights that several ranks of tp have: each has the part of its own query heads."""
    tp, heads, kv_heads = step.tp, step.config.num_attention_heads, step.config.num_key_value_heads
    if tp <= kv_heads or heads % tp or tp % kv_heads:
        return
    copies, share = tp // kv_heads, heads // tp
    text = "weights of KV heads that several ranks have are not summed over these"

    def of(ranks: Callable[[int], list[int]]) -> Arrays:
        found = {}
        for name, of_head in step.by_head(one).items():
            by_rank = of_head.reshape(tp, share, *of_head.shape[1:]).sum(axis=1)
            wanted = np.stack([by_rank[ranks(t)].sum(axis=0) for t in range(tp)])
            found[name] = np.broadcast_to(wanted, (step.sizes["dp"], step.cp, *wanted.shape))
        return {n: a for n, a in found.items() if n in failing}

    yield Hypothesis("kv-not-summed", text, lambda: of(lambda t: list(range(t % copies, tp, copies))))
    yield Hypothesis("kv-not-summed", text, lambda: of(lambda t: [t]))


def _wrong_shards(step: Step, right: Arrays, split: Mapping[str, Mapping[str, int]]) -> Iterator[Hypothesis]:
    """Every rank has the shard of another one."""
    for axis in AXES:
        size = step.sizes[axis]
        for by in range(1, size):
            moved = {n: np.roll(a, -by * (a.shape[3 + split[n][axis]] // size), axis=3 + split[n][axis])
                     for n, a in right.items() if axis in split[n]}
            yield Hypothesis("wrong-shards", f"shards are those of the rank {by} further on in {axis}",
                             lambda moved=moved: moved)


def _normalisations(step: Step, failing: set[str]) -> Iterator[Hypothesis]:
    """Every rank, replica or microbatch divides by its own count; the sum of what comes of it, or a mean."""
    counts, names = step.counts(), {"dp": 0, "microbatches": 1, "cp": 2}
    called_so = {"dp": "replica", "microbatches": "microbatch", "cp": "rank of cp"}

    def by(total: Any, divisor: float) -> Arrays:
        total = np.broadcast_to(total, counts.shape)
        scale = np.divide(1.0, total * divisor, out=np.zeros(counts.shape), where=total > 0)
        found = step.folded(step.parts(scale))
        return {n: spread(found[n]) for n in failing}

    for size in (1, 2, 3):
        for axes in itertools.combinations(names, size):
            if any(step.sizes[axis] == 1 for axis in axes):
                continue
            gone = tuple(i for axis, i in names.items() if axis not in axes)
            own = counts.sum(axis=gone, keepdims=True)
            who = f"every {' and '.join(called_so[axis] for axis in axes)} divides by its own count"
            means = int(np.prod([step.sizes[axis] for axis in axes]))
            for divisor, what in ((means, "and the means are averaged"), (1, "and the means are summed")):
                yield Hypothesis("own-count", f"{who}, {what}", lambda own=own, divisor=divisor: by(own, divisor))
            if "microbatches" in axes and len(axes) > 1:
                yield Hypothesis("own-count", f"{who}, the means are averaged over microbatches, and summed over ranks",
                                 lambda own=own: by(own, step.sizes["microbatches"]))
    tokens = step.counts(lambda s: np.isin(np.arange(s.layout.slots), s.layout.tokens))
    slots = step.counts(lambda s: np.ones(s.layout.slots))
    labels = step.counts(lambda s: s.labels != IGNORED)
    for text, total in (("labels whose weight is 0", labels), ("tokens without a label", tokens),
                        ("padding", slots)):
        yield Hypothesis("count", f"{text} are in the count", lambda total=total: by(total.sum(), 1))
    yield Hypothesis("count", "a sum, not a mean", lambda: by(1.0, 1))
    number = step.counts(lambda s: s.counted() > 0).sum()
    yield Hypothesis("count", "the count is the number of labels, not the sum of their weights", lambda: by(number, 1))


def _other_steps(step: Step, one: np.ndarray, failing: set[str]) -> Iterator[Hypothesis]:
    """Errors of the forward pass: another mask, other positions, other labels."""

    def known(kind: str, text: str, change: Callable[[Stream], Stream], **more: Any) -> Hypothesis:
        def arrays() -> Arrays:
            other = step.changed(change, **more)
            total = other.counts().sum()
            found = other.folded(other.parts(np.full(one.shape, 1 / total if total else 0.0)))
            return {n: spread(found[n]) for n in failing}

        return Hypothesis(kind, text, arrays)

    def row_of(stream: Stream) -> np.ndarray:
        row = np.empty(stream.layout.slots, np.int64)
        row[stream.layout.index] = np.arange(stream.layout.index.shape[1])
        return row

    yield known("weights", "weights are ignored",
                lambda s: replace(s, weights=np.isin(np.arange(s.layout.slots), s.layout.tokens).astype(float)))
    yield known("documents", "tokens see earlier documents of their stream",
                lambda s: replace(s, pairs=np.tri(s.layout.slots, dtype=bool)))
    yield known("positions", "positions count the rows of the rank",
                lambda s: replace(s, positions=row_of(s)))
    yield known("label-shift", "labels are shifted again",
                lambda s: replace(s, labels=np.append(s.labels[1:], IGNORED)))
    if step.cp > 1:
        yield known("dropped-shard", "tokens see the keys of their own rank alone",
                    lambda s: replace(s, pairs=s.pairs & _of_same_rank(s)))
    if step.tp > 1 and step.config.attention_bias:
        biased = {n: w * (step.tp if n.endswith("o_proj.bias") else 1) for n, w in step.weights.items()}
        yield known("bias-repeated", "every rank of tp adds the bias of a row-parallel layer", lambda s: s, weights=biased)


def _of_same_rank(stream: Stream) -> np.ndarray:
    return stream.layout.owner[:, None] == stream.layout.owner


def _other_backward(
    step: Step, one: np.ndarray, split: Mapping[str, Mapping[str, int]], failing: set[str]
) -> Iterator[Hypothesis]:
    """Errors of the backward pass."""
    tp = step.tp

    def known(**how: Callable[..., np.ndarray]) -> Arrays:
        found = step.folded(step.parts(one, **how))
        return {n: spread(found[n]) for n in failing}

    def own_columns(rank: int, width: int) -> np.ndarray:
        return np.arange(width) * tp // width == rank

    def input_gradients() -> Arrays:
        by_rank = [known(columns=partial(own_columns, t)) for t in range(tp)]
        found = {}
        for name in failing:
            parts = [a[name][:, :, t] for t, a in enumerate(by_rank)]
            if "tp" in split[name]:
                dim = 2 + split[name]["tp"]
                whole = np.concatenate([np.array_split(p, tp, axis=dim)[t] for t, p in enumerate(parts)], axis=dim)
                parts = [whole] * tp
            found[name] = np.stack(parts, axis=2)
        return found

    if step.cp > 1:
        text = "keys and values get no gradient from other ranks' queries"
        yield Hypothesis("gradient-dropped", text, lambda: known(kept=_of_same_rank))
    if tp > 1:
        text = "gradients of the inputs of column-parallel layers are not summed over tp"
        yield Hypothesis("input-gradient", text, input_gradients)
        text = "the softmax of the loss is over the columns of one rank of tp"
        yield Hypothesis("local-softmax", text, lambda: known(softmax=lambda logits: np.concatenate(
            [softmax(part) for part in np.array_split(logits, tp, axis=1)], axis=1)))
