"""Training steps that contracts share: documents in streams, placements of parameters, gradients part by part."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..arrays import is_bfloat16, to_numpy
from .contract import Finding, Malformed
from .decoder import EMBEDDING, HEAD, Config, Decoder, softmax
from .layouts import Layout, layout_of, segment_of

IGNORED = -100
LENGTHS = (7, 5, 9, 4, 11, 6, 3, 8, 2, 10, 5, 1)  # of the documents of a step
AXES = ("dp", "cp", "tp")
PLACEMENTS = "it must be replicated, partial or shard(DIM), of tp or in a mapping by dp, cp and tp"


@dataclass(frozen=True)
class Stream:
    """Documents one behind the other, under a layout: of one microbatch of one replica. Arrays are [slots]."""

    layout: Layout
    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    pairs: np.ndarray  # [slots, slots]: which keys a query sees

    def counted(self) -> np.ndarray:
        """[slots]: weights of the labels that count."""
        return np.where(self.labels == IGNORED, 0, self.weights).astype(np.float64)

    def of_rank(self, rank: int) -> dict[str, Any]:
        """What a rank of cp gets, and the whole."""
        rows, whole = self.layout.index[rank], {n: getattr(self, n) for n in ("ids", "labels", "weights", "positions")}
        return {n: a[rows] for n, a in whole.items()} | {
            "cu_seqlens": self.layout.cu_seqlens, "layout": self.layout, "whole": whole,
        }


def stream_of(documents: Sequence[Mapping[str, np.ndarray]], layout: str, cp: int) -> Stream:
    """The stream of some documents; padding has the id 0 and no label."""
    place = layout_of(layout, np.cumsum([0] + [len(d["ids"]) for d in documents]), cp)
    whole = {"ids": np.zeros(place.slots, np.int64), "labels": np.full(place.slots, IGNORED),
             "weights": np.zeros(place.slots, np.float32)}
    for name, array in whole.items():
        array[place.tokens] = np.concatenate([d[name] for d in documents] or [array[:0]])
    segment = segment_of(place)
    pairs = (segment[:, None] == segment) & np.tri(place.slots, dtype=bool)
    return Stream(place, **whole, positions=np.arange(place.slots) - place.cu_seqlens[segment], pairs=pairs)


def documents_of(seed: int, vocab: int, lengths: Iterable[int] = LENGTHS) -> list[dict[str, np.ndarray]]:
    """Random documents: ids, the label of each (the next id) and weights of 0 and 1."""
    rng, found = np.random.default_rng(seed), []
    for length in lengths:
        ids = rng.integers(0, vocab, length)
        weights = (rng.random(length) < 0.7).astype(np.float32)
        found.append({"ids": ids, "labels": np.append(ids[1:], IGNORED), "weights": weights})
    return found


def dealt(documents: Sequence[Any], layout: str, cp: int, dp: int, microbatches: int) -> list[list[Stream]]:
    """[dp][microbatches]: every stream has each dp x microbatches-th document."""
    count = dp * microbatches
    streams = [stream_of(documents[s::count], layout, cp) for s in range(count)]
    return [streams[d * microbatches : (d + 1) * microbatches] for d in range(dp)]


@dataclass
class Step:
    """A decoder, and the streams [dp][microbatches] of one step on dp x cp x tp ranks."""

    config: Config
    weights: Mapping[str, np.ndarray]
    streams: list[list[Stream]]
    cp: int
    tp: int
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        return {"dp": len(self.streams), "microbatches": len(self.streams[0]), "cp": self.cp, "tp": self.tp}

    def counts(self, of: Callable[[Stream], np.ndarray] = Stream.counted) -> np.ndarray:
        """[dp, microbatches, cp]: the weight of each rank's labels in each microbatch."""
        return np.array([[[of(s)[rows].sum() for rows in s.layout.index] for s in row] for row in self.streams])

    def changed(self, change: Callable[[Stream], Stream], **more: Any) -> "Step":
        return replace(self, streams=[[change(s) for s in row] for row in self.streams], memo={}, **more)

    def _groups(self, stream: Stream) -> np.ndarray:
        """[slots]: cp rank x tp + the tp rank that has the row under sequence parallelism."""
        found = np.empty(stream.layout.slots, np.int64)
        for c, rows in enumerate(stream.layout.index):
            for t, block in enumerate(np.array_split(rows, self.tp)):
                found[block] = c * self.tp + t
        return found

    def _passes(self, d: int, m: int) -> tuple[Decoder, np.ndarray, Callable[..., Any]]:
        if (d, m) not in self.memo:
            stream = self.streams[d][m]
            decoder = Decoder(self.config, self.weights, self._groups(stream), self.cp * self.tp)
            self.memo[d, m] = (decoder, *decoder.run(stream.ids, stream.positions, stream.pairs))
        return self.memo[d, m]

    def parts(self, scale: np.ndarray, **how: Callable[..., np.ndarray]) -> dict[str, np.ndarray]:
        """[dp, microbatches, cp, tp, *shape] of each parameter: what the tokens of each rank add to its gradient.

        scale [dp, microbatches, cp]: a label of a rank counts its weight times this. how, of a wrong step: kept of
        a stream and columns of a width, as of Decoder; softmax of logits.
        """
        key = (scale.tobytes(), *how.items())
        if key not in self.memo:
            found = [[self._of_stream(d, m, scale[d, m], **how) for m in range(len(row))]
                     for d, row in enumerate(self.streams)]
            self.memo[key] = {name: np.array([[one[name] for one in row] for row in found]) for name in found[0][0]}
        return self.memo[key]

    def _of_stream(
        self, d: int, m: int, scale: np.ndarray, kept: Any = None, columns: Any = None, softmax: Any = softmax
    ) -> dict[str, np.ndarray]:
        stream, (decoder, logits, backward) = self.streams[d][m], self._passes(d, m)
        weight = stream.counted() * scale[stream.layout.owner]
        known = np.eye(self.config.vocab_size)[np.where(stream.labels == IGNORED, 0, stream.labels)]
        decoder.kept, decoder.columns = None if kept is None else kept(stream), columns
        found = backward(weight[:, None] * (softmax(logits) - known))
        return {n: a.reshape(self.cp, self.tp, *a.shape[1:]) for n, a in found.items()}

    def by_head(self, scale: np.ndarray) -> dict[str, np.ndarray]:
        """[query heads, *shape] of k_proj and v_proj: what each head adds to the gradient."""
        found: dict[str, Any] = {}
        for d, row in enumerate(self.streams):
            for m in range(len(row)):
                self._of_stream(d, m, scale[d, m])
                for name, of_heads in self._passes(d, m)[0].by_head.items():
                    if name in self.weights:
                        found[name] = found.get(name, 0) + of_heads()
        return found

    def folded(self, parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Parts of the parameters that there are: a head that is the embedding adds to it."""
        found = dict(parts)
        if self.config.tie_word_embeddings:
            found[EMBEDDING] = found[EMBEDDING] + found.pop(HEAD)
        return found


def spread(part: np.ndarray, kept: Iterable[str] = (), microbatch: int | None = None) -> np.ndarray:
    """[dp, cp, tp, *shape]: the sum over the axes that are not kept, on every rank, of all microbatches or one."""
    part = part if microbatch is None else part[:, [microbatch]]
    gone = tuple(i for i, axis in enumerate(("dp", "microbatches", "cp", "tp")) if axis not in set(kept))
    total = part.sum(axis=gone, keepdims=True)[:, 0]
    return np.broadcast_to(total, (part.shape[0], *part.shape[2:]))


def shard_of(whole: np.ndarray, placement: Mapping[str, str], sizes: Mapping[str, int], at: Mapping[str, int],
             copies: int = 1) -> np.ndarray:
    """What a rank has of a parameter; of the ranks of tp, so many neighbours have the same."""
    for axis in AXES:
        if placement[axis].startswith("shard"):
            each = copies if axis == "tp" else 1
            whole = np.array_split(whole, sizes[axis] // each, axis=int(placement[axis][6:-1]))[at[axis] // each]
    return whole


def megatron_placement(name: str) -> str:
    """The placement over tp that Megatron-LM gives a parameter: columns, rows, or all on every rank."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return "shard(1)"
    by_rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head", "sinks")
    return "shard(0)" if any(part in name for part in by_rows) else "replicated"


def placement_of(given: Any, name: str) -> dict[str, str]:
    """A placement by axis, in plain names, of one in plain names or of torch's objects."""
    by_axis = given if isinstance(given, Mapping) else {"tp": given}
    found = dict.fromkeys(AXES, "replicated")
    for axis, one in by_axis.items():
        text = one if isinstance(one, str) else ""
        for kind, plain in (("is_replicate", "replicated"), ("is_partial", "partial"), ("is_shard", "shard")):
            if hasattr(one, kind) and getattr(one, kind)():
                text = f"shard({one.dim})" if plain == "shard" else plain
        is_shard = text.startswith("shard(") and text.endswith(")") and text[6:-1].isdigit()
        if axis not in AXES or text not in ("replicated", "partial") and not is_shard:
            raise Malformed("placement", f"the placement of {name} is {given!r}; {PLACEMENTS}")
        found[axis] = text
    return found


def returned_by_name(
    found: Any, shapes: Mapping[str, tuple[int, ...] | None] | None, kinds: Sequence[str]
) -> dict[str, np.ndarray]:
    """What a rank returned of each parameter, and the placements as JSON; one that lacks is not in it.

    shapes: of the whole parameters; None: any parameters of any shape.
    """
    if not isinstance(found, Mapping):
        raise Malformed("other-type", f"{type(found).__name__} was returned; it must be a mapping by parameter")
    shapes = dict.fromkeys(sorted(found)) if shapes is None else shapes
    strange = sorted(set(found) - set(shapes))
    if strange:
        raise Malformed("unknown-parameter", f"there is no parameter {strange[0]!r}; there are {', '.join(shapes)}")
    arrays: dict[str, np.ndarray] = {}
    placements = {}
    for name, shape in shapes.items():
        entry = found.get(name)
        array, given = entry if isinstance(entry, tuple) else (entry, "replicated")
        if array is None:
            continue
        if hasattr(array, "full_tensor"):  # a DTensor; every rank comes here in the same order
            array = array.full_tensor()
        placements[name] = placement_of(given, name)
        arrays[name] = _checked(name, array, shape, placements[name], kinds)
    return arrays | {"placements": np.array(json.dumps(placements, sort_keys=True))}


def _checked(
    name: str, array: Any, shape: tuple[int, ...] | None, placement: Mapping[str, str], kinds: Sequence[str]
) -> np.ndarray:
    """An array of float64, if type and shape are those of its placement."""
    if not hasattr(array, "dtype"):
        raise Malformed("other-type", f"{name} is {type(array).__name__}; it must be an array")
    kind = "bfloat16" if is_bfloat16(array) else str(array.dtype).removeprefix("torch.")
    if kind not in kinds:
        raise Malformed("other-type", f"{name} is {kind}; it must be {' or '.join(kinds)}")
    split = {int(p[6:-1]) for p in placement.values() if p.startswith("shard")}
    if shape is not None and (len(array.shape) != len(shape) or any(n != m and i not in split
                                                                    for i, (n, m) in enumerate(zip(array.shape, shape)))):
        said = "replicated" if not split else f"a shard of {list(shape)} by {', '.join(map(str, sorted(split)))}"
        raise Malformed("other-shape", f"{name} is {list(array.shape)}; it must be {list(shape)}, {said}")
    return to_numpy(array).astype(np.float64)


def placements_of(arrays: list[dict[str, np.ndarray]]) -> tuple[dict[str, dict[str, str]], list[Finding]]:
    """The placements that the ranks returned, and that they disagree."""
    for rank, mine in enumerate(arrays):
        if str(mine["placements"]) != str(arrays[0]["placements"]):
            text = f"ranks 0 and {rank} return other parameters, or have other placements of them"
            return {}, [Finding("ranks-disagree", text, (), (0, rank))]
    return json.loads(str(arrays[0]["placements"])), []


def assembled(
    arrays: list[dict[str, np.ndarray]], grid: tuple[int, int, int], shapes: Mapping[str, tuple[int, ...] | None],
    placements: Mapping[str, Mapping[str, str]],
) -> tuple[dict[str, np.ndarray], list[Finding]]:
    """[dp, cp, tp, *shape] of each parameter: the whole, as each rank has it; and what hinders that."""
    findings, found = [], {}
    for name, placement in placements.items():
        parts = np.empty(grid, object)
        for rank, mine in enumerate(arrays):
            parts[np.unravel_index(rank, grid)] = mine[name]
        whole = _whole(parts, placement, shapes[name])
        sizes = {p.shape for p in whole.flat}
        shape = shapes[name] or min(sizes)
        if sizes != {shape}:
            text = f"shards of {name} make {list(min(sizes))}; they must make {list(shape)}"
            findings.append(Finding("other-shape", text, (name,)))
        else:
            found[name] = np.stack(list(whole.flat)).reshape(*grid, *shape)
    return found, findings


def _whole(parts: np.ndarray, placement: Mapping[str, str], shape: tuple[int, ...] | None) -> np.ndarray:
    """Shards put together, and partial sums added, tp first. Neighbours may have copies of a shard."""
    for axis in (2, 1, 0):
        kind = placement[AXES[axis]]
        if kind == "replicated":
            continue
        lines = np.moveaxis(parts, axis, 2)
        new = np.empty(lines.shape, object)
        for i, j in np.ndindex(*lines.shape[:2]):
            line = list(lines[i, j])
            if kind == "partial":
                line = [sum(line)] * len(line)
            else:
                dim = int(kind[6:-1])
                copies = max(1, sum(p.shape[dim] for p in line) // max(1, shape[dim])) if shape else 1
                line = [np.concatenate(line[at % copies :: copies], axis=dim) for at in range(len(line))]
            for at, part in enumerate(line):
                new[i, j, at] = part
        parts = np.moveaxis(new, 2, axis)
    return parts


def called(names: Iterable[str], of: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Names of parameters for people: all, or the first few and a number."""
    names, of = sorted(names), list(of)
    if len(names) == len(of) > 1:
        return (f"all {len(of)} parameters",)
    return (*names[:most], f"{len(names) - most} more") if len(names) > most else tuple(names)
