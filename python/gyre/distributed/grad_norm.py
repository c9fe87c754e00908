"""grad_norm(gradients, placements, max_norm) -> norm, clipped

gradients: by parameter, what the rank has of them, after all reductions. placements: by parameter, of dp, cp and
tp: replicated or shard(DIM). The function returns the norm of all gradients, of which each element counts once,
the same on every rank; and the gradients by parameter, times min(1, max_norm / (norm + 1e-6)). Further parameters,
given where they are taken: copies, by parameter, how many neighbours of tp have the same shard (KV heads that are
fewer than ranks), dp_group, cp_group, tp_group, data_group (dp x cp), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .contract import Finding, Hypothesis, Malformed, Problem, Tolerance, Verdict, keywords, not_numbers, returned
from .decoder import Config
from .gradients import judge_parameters
from .rank import Here
from .rounding import in_type
from .step import AXES, assembled, megatron_placement, returned_by_name, shard_of

USES_LAYOUT, USES_DP = False, True
SPLITS = ("dp", "cp", "tp")
NEEDS = ("copies",)
CASES: dict[str, tuple[Config, float]] = {  # and the largest norm
    "plain": (Config(), 1.0),
    "sinks": (Config(attention_sinks=True), 0.5),
    "biases": (Config(attention_bias=True), 2.0),
    "experts": (Config(num_experts=4), 1.0),
    "kv_copies": (Config(num_key_value_heads=1), 1.0),
    "sharded": (Config(), 1.0),
    "small": (Config(), 1e3),
    "zero": (Config(), 1.0),
}


@dataclass
class Shards:
    """Parameters on the ranks of a grid. arrays: whole; local: of each rank, by name."""

    arrays: Mapping[str, np.ndarray]
    placements: dict[str, dict[str, str]]
    copies: dict[str, int]
    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        self.ranks = [dict(zip(AXES, at)) for at in np.ndindex(*(self.sizes[axis] for axis in AXES))]
        self.local = [{n: shard_of(a, self.placements[n], self.sizes, at, self.copies[n])
                       for n, a in self.arrays.items()} for at in self.ranks]

    def holders(self, name: str, axes: tuple[str, ...] = AXES) -> int:
        """How many ranks that differ in these axes have the same of a parameter."""
        of_axis = {axis: 1 if self.placements[name][axis].startswith("shard") else self.sizes[axis] for axis in AXES}
        if "shard" in self.placements[name]["tp"]:
            of_axis["tp"] = self.copies[name]
        return int(np.prod([of_axis[axis] for axis in axes]))


def shards_of(arrays: Mapping[str, np.ndarray], config: Config, over_dp: bool, options: Any) -> Shards:
    """Parameters of a decoder on a grid, as Megatron-LM splits them; over_dp: and over dp, as FSDP does."""
    copies = {n: max(1, options.tp // config.num_key_value_heads) if "k_proj" in n or "v_proj" in n else 1
              for n in arrays}
    placements = {n: {"dp": "shard(0)" if over_dp else "replicated", "cp": "replicated", "tp": megatron_placement(n)}
                  for n in arrays}
    return Shards(arrays, placements, copies, {axis: getattr(options, axis) for axis in AXES})


def problems(case: str, options: Any) -> Iterator[Problem]:
    """The case of this name."""
    config, most = CASES[case]
    rng = np.random.default_rng(len(case))
    arrays = {}
    for name, shape in config.shapes().items():
        size = (case != "zero") * (4.0 if len(shape) == 1 else 1.0)
        arrays[name] = in_type((size * rng.normal(size=shape)).astype(np.float32), options.dtype).astype(np.float64)
    if config.num_attention_heads % options.tp or max(options.tp, config.num_key_value_heads) % min(
        options.tp, config.num_key_value_heads
    ):
        return
    shards = shards_of(arrays, config, case == "sharded", options)
    has_copies = max(shards.copies.values()) > 1
    needs = {"copies": "ranks of tp have copies of KV heads"} if has_copies else {}
    pieces = [{"gradients": mine, "placements": shards.placements, "copies": shards.copies, "max_norm": most}
              for mine in shards.local]
    yield Problem(case, pieces, needs, partial(_judge, case, shards, most))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank."""
    gradients = {name: here.array(g) for name, g in piece["gradients"].items()}
    offers = {f"{name}_group": here.group(name) for name in ("dp", "cp", "tp", "data")}
    offers |= {"mesh": here.mesh, "copies": piece["copies"]}
    found = function(gradients, piece["placements"], piece["max_norm"], **keywords(function, offers, needs))
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise Malformed("other-type", f"{type(found).__name__} was returned; it must be a norm and a mapping")
    kinds = [here.kind, "float32", "float64"]
    norm = np.asarray(found[0], here.kind) if isinstance(found[0], float) else found[0]
    arrays = returned_by_name(found[1], {n: g.shape for n, g in piece["gradients"].items()}, kinds)
    if missing := sorted(piece["gradients"].keys() - arrays.keys()):
        raise Malformed("missing-parameter", f"no gradient of {missing[0]} is returned")
    return arrays | {"norm": returned("norm", norm, (), kinds).astype(np.float64)}


def whole_of(shards: Shards, local: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """[dp, cp, tp, *shape] of each parameter, from what ranks have."""
    shapes = {n: a.shape for n, a in shards.arrays.items()}
    grid = tuple(shards.sizes[axis] for axis in AXES)
    return assembled(local, (grid[0], grid[1], grid[2]), shapes, shards.placements)[0]


def _judge(
    name: str, shards: Shards, most: float, arrays: list[dict[str, np.ndarray]], tolerance: Tolerance
) -> Verdict:
    broken = not_numbers(arrays, lambda rank, array, values: values)
    if broken:
        return Verdict(name).fail(*broken[:1])
    grid = [shards.sizes[axis] for axis in AXES]
    norms = np.array([mine["norm"] for mine in arrays])
    got = {"norm": norms.reshape(grid)} | whole_of(shards, arrays)
    verdict = judge_parameters(name, got, outcome(shards, most, _norms(shards)), tolerance, shards.sizes,
                               partial(_hypotheses, shards, most))
    if verdict.status == "failed" and np.ptp(norms) > 1e-3 * norms.max():
        pair = (int(norms.argmin()), int(norms.argmax()))
        text = f"ranks {pair[0]} and {pair[1]} return norms {norms[pair[0]]:.6g} and {norms[pair[1]]:.6g}"
        verdict.findings.append(Finding("ranks-disagree", text, ("norm",), pair))
    return verdict


def clip(norm: float, most: float) -> float:
    return min(1.0, most / (norm + 1e-6))


def outcome(
    shards: Shards, most: float, norms: np.ndarray, clipped: Callable[[float, float], float] = clip
) -> dict[str, np.ndarray]:
    """norm and clipped gradients, of ranks that have these norms [ranks]."""
    local = [{n: clipped(norm, most) * a for n, a in mine.items()} for norm, mine in zip(norms, shards.local)]
    return {"norm": norms.reshape([shards.sizes[axis] for axis in AXES])} | whole_of(shards, local)


def _norms(shards: Shards, times: Callable[[str, int], float] = lambda name, rank: 1.0,
           over: tuple[str, ...] = AXES) -> np.ndarray:
    """[ranks]: the norm, of which a rank's part of a parameter counts so many times, summed over some axes."""
    parts = np.array([
        sum(times(n, rank) / shards.holders(n, over) * float((a**2).sum()) for n, a in mine.items())
        for rank, mine in enumerate(shards.local)
    ]).reshape([shards.sizes[axis] for axis in AXES])
    gone = tuple(i for i, axis in enumerate(AXES) if axis in over)
    return np.sqrt(np.broadcast_to(parts.sum(axis=gone, keepdims=True), parts.shape)).reshape(-1)


def _hypotheses(shards: Shards, most: float, failing: set[str], zero: set[str]) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""

    def known(kind: str, text: str, norms: Callable[[], np.ndarray], **more: Any) -> Hypothesis:
        return Hypothesis(kind, text, lambda: outcome(shards, most, norms(), **more))

    right = _norms(shards)
    yield from _multiplicities(shards, known)
    yield from _other_clips(shards, most, right, failing)
    for axes in (("dp", "cp"), ("tp",), ()):
        who = f"the sum is over {' x '.join(axes)} alone" if axes else "every rank has the norm of its own shards"
        yield known("not-reduced", who, lambda axes=axes: _norms(shards, over=axes))
    totals = [np.sqrt(float((a**2).sum())) for a in shards.arrays.values()]
    for kind, text, value in (
        ("square", "the square of the norm", float(right[0] ** 2)),
        ("sum-of-norms", "the sum of the norms of the parameters", float(sum(totals))),
        ("largest", "the largest element, not the norm", max(float(np.abs(a).max()) for a in shards.arrays.values())),
        ("other-norm", "the sum of absolute values", sum(float(np.abs(a).sum()) for a in shards.arrays.values())),
    ):
        yield known(kind, text, lambda value=value: np.full(len(right), value))
    own = _norms(shards, over=())
    yield known("norms-summed", "the sum of the ranks' norms, not of their squares", lambda: np.full(len(own), own.sum()))
    for axis in AXES:
        text = f"squares are averaged over {axis}, not summed"
        mean = _norms(shards, lambda name, rank, axis=axis: shards.holders(name, (axis,)))
        yield known("averaged", text, lambda axis=axis, mean=mean: mean / np.sqrt(shards.sizes[axis]))


def _multiplicities(shards: Shards, known: Callable[..., Hypothesis]) -> Iterator[Hypothesis]:
    """Elements that count more or less than once."""

    def is_whole(name: str) -> bool:
        return shards.placements[name]["tp"] == "replicated"

    copied = [n for n, count in shards.copies.items() if count > 1]

    def over_tp(name: str, rank: int) -> float:
        return shards.sizes["tp"] if is_whole(name) else 1

    def of_copies(name: str, rank: int) -> float:
        return shards.copies[name]

    def both(name: str, rank: int) -> float:
        return over_tp(name, rank) * of_copies(name, rank)

    yield known("replicated", "parameters that all ranks of tp have count tp times", lambda: _norms(shards, over_tp))
    if copied:
        text = "KV weights that several ranks have count once for each"
        yield known("kv-copies", text, lambda: _norms(shards, of_copies))
        yield known("replicated", "what several ranks of tp have counts once for each", lambda: _norms(shards, both))
    for axes in (("dp",), ("cp",), ("dp", "cp"), AXES):
        text = f"what ranks of {' x '.join(axes)} have in common counts once for each"
        yield known("replicated", text, lambda axes=axes: _norms(shards, lambda n, r: shards.holders(n, axes)))
    yield known("replicated-lost", "parameters that all ranks of tp have are left out",
                lambda: _norms(shards, lambda n, r: not is_whole(n)))
    yield known("shards-lost", "parameters that are split over tp are left out",
                lambda: _norms(shards, lambda n, r: is_whole(n)))
    for part in ("sinks", ".bias", "norm", "mlp.gate.", ".experts.", "embed_tokens", "lm_head"):
        mine = [n for n in shards.arrays if part in n]
        if not mine:
            continue
        text = f"of {part.strip('.')}, the shard of tp rank 0 alone counts"
        yield known("shard-lost", text, lambda mine=mine: _norms(
            shards, lambda n, r: n not in mine or is_whole(n) or shards.ranks[r]["tp"] == 0))
        yield known("left-out", f"{part.strip('.')} is left out",
                    lambda mine=mine: _norms(shards, lambda n, r: n not in mine))
        yield known("replicated", f"{part.strip('.')} counts tp times",
                    lambda mine=mine: _norms(shards, lambda n, r: shards.sizes["tp"] if n in mine else 1))
    text = "shards of tp rank 0 alone count"
    yield known("shard-lost", text, lambda: _norms(
        shards, lambda n, r: is_whole(n) or shards.ranks[r]["tp"] == 0))


def _other_clips(shards: Shards, most: float, right: np.ndarray, failing: set[str]) -> Iterator[Hypothesis]:
    """The norm is right, and what is done with it is not."""

    def known(kind: str, text: str, clipped: Callable[[float, float], float]) -> Hypothesis:
        return Hypothesis(kind, text, lambda: outcome(shards, most, right, clipped))

    yield known("not-clipped", "gradients are not clipped", lambda norm, most: 1.0)
    yield known("scaled-up", "gradients whose norm is smaller are scaled up", lambda norm, most: most / (norm + 1e-6))
    yield known("clipped-twice", "gradients are clipped twice: the factor is squared",
                lambda norm, most: clip(norm, most) ** 2)
    yield known("by-value", "the factor is 1 / norm, without the largest norm", lambda norm, most: clip(norm, 1.0))
    after = np.minimum(right, most)
    yield Hypothesis("norm-after", "the norm is that of the clipped gradients",
                     lambda: outcome(shards, most, right) | {"norm": after.reshape([shards.sizes[a] for a in AXES])})

    def each() -> dict[str, np.ndarray]:
        alone = {n: clip(float(np.sqrt((a**2).sum())), most) for n, a in shards.arrays.items()}
        local = [{n: alone[n] * a for n, a in mine.items()} for mine in shards.local]
        return {"norm": right.reshape([shards.sizes[a] for a in AXES])} | whole_of(shards, local)

    yield Hypothesis("per-parameter", "every parameter is clipped by its own norm", each)
    values = {n: np.clip(a, -most, most) for n, a in shards.arrays.items()}
    yield Hypothesis("by-value", "elements are clipped, not the norm", lambda: {"norm": outcome(
        shards, most, right)["norm"]} | whole_of(shards, [{n: shard_of(values[n], shards.placements[n], shards.sizes, at,
                                                                    shards.copies[n]) for n in values}
                                                         for at in shards.ranks]))
    own = _norms(shards, over=())
    yield Hypothesis("own-clip", "every rank clips by the norm of its own shards", lambda: outcome(
        shards, most, own) | {"norm": right.reshape([shards.sizes[a] for a in AXES])})
