"""optimizer_step(parameters, gradients, placements, settings) -> {name: (parameter, exp_avg, exp_avg_sq)}

Some steps of AdamW, in this order: reduce, norm, clip, update. parameters: what the rank has of each, by name;
placements: by parameter, of dp, cp and tp: replicated or shard(DIM). gradients: of each step, by name, whole over dp
and split over tp as the parameter; their sum over dp and cp is the gradient. settings: lr, beta1, beta2, eps,
weight_decay, max_norm, and decayed, names of the parameters that the weight decay is for. The gradient is clipped by the
norm of all, as in the contract grad_norm; then, in step t = 1, 2, ...

    parameter -= lr weight_decay parameter              (of those that are decayed)
    exp_avg = beta1 exp_avg + (1 - beta1) g,  exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g g
    parameter -= lr (exp_avg / (1 - beta1^t)) / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)

The function returns parameters and states after the last step, placed as the parameter was given, as a DTensor, or
each as an array and its placement, as in the contract gradients: states may be split where the parameter is not.
Further parameters, given where they are taken: copies, by parameter, how many neighbours of tp have the same shard,
dp_group, cp_group, tp_group, data_group (dp x cp), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .contract import Hypothesis, Malformed, Problem, Tolerance, Verdict, keywords, not_numbers
from .decoder import Config, weights_of
from .grad_norm import Shards, shards_of, whole_of
from .gradients import judge_parameters
from .rank import Here
from .rounding import in_type
from .step import AXES, assembled, placements_of, returned_by_name

USES_LAYOUT, USES_DP = False, True
SPLITS = ("dp", "cp", "tp")
NEEDS = ("copies",)
TOLERANCE = {"bfloat16": 5e-2}
PARTS = ("", " exp_avg", " exp_avg_sq")
SETTINGS = {"lr": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.2, "max_norm": 10.0}
CASES: dict[str, tuple[Config, int, dict[str, float]]] = {  # steps, and settings of their own
    "plain": (Config(num_hidden_layers=1), 3, {}),
    "one_step": (Config(num_hidden_layers=1), 1, {}),
    "sharded": (Config(num_hidden_layers=1), 3, {}),
    "kv_copies": (Config(num_hidden_layers=1, num_key_value_heads=1), 2, {}),
    "sinks": (Config(num_hidden_layers=1, attention_sinks=True, attention_bias=True), 2, {}),
    "small": (Config(num_hidden_layers=1), 2, {"max_norm": 1e6}),
    "zero": (Config(num_hidden_layers=1), 2, {}),
}


@dataclass(frozen=True)
class Rules:
    """How a step is made: as it should be, but for what a known error changes."""

    over: tuple[str, ...] = ("dp", "cp")  # what gradients are summed over
    mean: bool = False
    norm: str = "whole"  # partial: before the reduction; first: and clipped by it before; shards: of the rank alone; replicated: counted tp times; none
    decay: str = "decayed"  # all, none, gradient (L2), after (the update), without lr
    correction: int = 0  # added to t; -1: none in the first step
    corrected: bool = True
    eps_inside: bool = False
    carried: bool = True
    swapped: bool = False
    unclipped_square: bool = False


@dataclass
class Run:
    """Parameters on ranks, their partial gradients by step and rank, and the settings."""

    shards: Shards
    gradients: list[list[dict[str, np.ndarray]]]
    settings: dict[str, Any]


def problems(case: str, options: Any) -> Iterator[Problem]:
    """The case of this name."""
    config, steps, more = CASES[case]
    if config.num_attention_heads % options.tp:
        return
    weights = {n: in_type(w, options.dtype).astype(np.float64) for n, w in weights_of(config, len(case)).items()}
    shards = shards_of(weights, config, case == "sharded", options)
    partial_sums = replace_dp(shards)
    rng, gradients = np.random.default_rng(len(case)), []
    for _ in range(steps):
        of_ranks = []
        for d, c in np.ndindex(options.dp, options.cp):
            whole = {n: in_type((rng.normal(size=w.shape) * (case != "zero")).astype(np.float32), options.dtype)
                     for n, w in weights.items()}
            local = Shards(whole, partial_sums, shards.copies, shards.sizes).local
            of_ranks += local[(d * options.cp + c) * options.tp :][: options.tp]
        gradients.append([{n: g.astype(np.float64) for n, g in mine.items()} for mine in of_ranks])
    settings = SETTINGS | more | {"decayed": tuple(n for n, w in weights.items() if w.ndim > 1)}
    run = Run(shards, gradients, settings)
    pieces = [{"parameters": shards.local[r], "gradients": [g[r] for g in gradients], "placements": shards.placements,
               "copies": shards.copies, "settings": settings, "shapes": {n: w.shape for n, w in weights.items()}}
              for r in range(len(shards.ranks))]
    needs = {"copies": "ranks of tp have copies of KV heads"} if max(shards.copies.values()) > 1 else {}
    yield Problem(case, pieces, needs, partial(_judge, case, run))


def replace_dp(shards: Shards) -> dict[str, dict[str, str]]:
    """Placements of partial gradients: whole over dp."""
    return {n: placement | {"dp": "replicated"} for n, placement in shards.placements.items()}


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank."""
    offers = {f"{name}_group": here.group(name) for name in ("dp", "cp", "tp", "data")}
    offers |= {"mesh": here.mesh, "copies": piece["copies"]}
    found = function(
        {n: here.array(p) for n, p in piece["parameters"].items()},
        [{n: here.array(g) for n, g in one.items()} for one in piece["gradients"]],
        piece["placements"], dict(piece["settings"]), **keywords(function, offers, needs),
    )
    if not isinstance(found, Mapping):
        raise Malformed("other-type", f"{type(found).__name__} was returned; it must be a mapping by parameter")
    flat: dict[str, Any] = {}
    for name, parts in found.items():
        if not isinstance(parts, (tuple, list)) or len(parts) != len(PARTS):
            raise Malformed("other-type", f"of {name} there must be a parameter, exp_avg and exp_avg_sq")
        for part, entry in zip(PARTS, parts):
            is_placed = isinstance(entry, tuple) or hasattr(entry, "full_tensor")
            flat[name + part] = entry if is_placed else (entry, piece["placements"].get(name, "replicated"))
    shapes = {n + part: shape for n, shape in piece["shapes"].items() for part in PARTS}
    arrays = returned_by_name(flat, shapes, [here.kind, "float32", "float64"])
    if missing := [n for n in shapes if n not in arrays]:
        raise Malformed("missing-parameter", f"{missing[0]} is not returned")
    return arrays


def steps_of(run: Run, rules: Rules = Rules()) -> dict[str, np.ndarray]:
    """[dp, cp, tp, *shape] of each parameter and state after the last step, in float64."""
    shards, s = run.shards, run.settings
    local = [dict(mine) for mine in shards.local]
    states: list[dict[str, Any]] = [{} for _ in local]
    for t, gradients in enumerate(run.gradients, 1):
        if rules.norm == "first":
            norms = _norms(shards, gradients, gradients, replace(rules, norm="partial"))
            gradients = [{n: min(1.0, s["max_norm"] / (norm + 1e-6)) * g for n, g in mine.items()}
                         for norm, mine in zip(norms, gradients)]
        reduced = _reduced(shards, gradients, rules)
        norms = _norms(shards, gradients, reduced, rules)
        for r, mine in enumerate(local):
            factor = min(1.0, s["max_norm"] / (norms[r] + 1e-6))
            for name in mine:
                _update(mine, states[r], name, reduced[r][name], factor, t, s, rules)
    found = {}
    for part, of in (("", local), *((p, states) for p in PARTS[1:])):
        whole = whole_of(shards, [{n: mine[n + part] for n in shards.arrays} for mine in of])
        found |= {n + part: a for n, a in whole.items()}
    return found


def _reduced(shards: Shards, gradients: list[dict[str, np.ndarray]], rules: Rules) -> list[dict[str, np.ndarray]]:
    """What each rank has of the sums of partial gradients."""
    grid = [shards.sizes[axis] for axis in AXES]
    count = int(np.prod([shards.sizes[axis] for axis in rules.over])) if rules.mean else 1
    found: list[dict[str, np.ndarray]] = [{} for _ in gradients]
    gone = tuple(i for i, axis in enumerate(AXES) if axis in rules.over)
    for name in shards.arrays:
        stacked = np.stack([g[name] for g in gradients]).reshape(*grid, *gradients[0][name].shape)
        total = np.broadcast_to(stacked.sum(axis=gone, keepdims=True) / count, stacked.shape)
        for r, at in enumerate(shards.ranks):
            mine, over_dp = total[at["dp"], at["cp"], at["tp"]], shards.placements[name]["dp"]
            found[r][name] = mine if over_dp == "replicated" else np.array_split(mine, grid[0])[at["dp"]]
    return found


def _norms(
    shards: Shards, gradients: list[dict[str, np.ndarray]], reduced: list[dict[str, np.ndarray]], rules: Rules
) -> np.ndarray:
    """[ranks]: the norm that each rank clips by."""
    if rules.norm in ("none", "first"):
        return np.zeros(len(reduced))
    parts = gradients if rules.norm == "partial" else reduced
    times = {n: shards.sizes["tp"] if rules.norm == "replicated" and shards.placements[n]["tp"] == "replicated" else 1
             for n in shards.arrays}
    own = rules.norm == "shards"
    squares = np.array([
        sum(times[n] * float((a**2).sum()) / (1 if own else shards.copies[n]) for n, a in mine.items() if own or not
            _is_copy(shards, n, at, rules)) for mine, at in zip(parts, shards.ranks)
    ]).reshape([shards.sizes[axis] for axis in AXES])
    if not own:
        gone = (2,) if rules.norm == "partial" else (0, 2)
        squares = np.broadcast_to(squares.sum(axis=gone, keepdims=True), squares.shape)
    return np.sqrt(squares).reshape(-1)


def _is_copy(shards: Shards, name: str, at: Mapping[str, int], rules: Rules) -> bool:
    """Whether a rank's part is another rank's, too, which counts."""
    axes = ("tp",) if rules.norm == "partial" else ("dp", "tp")
    return any(shards.placements[name][axis] == "replicated" and at[axis] > 0 for axis in axes)


def _update(
    mine: dict[str, np.ndarray], states: dict[str, Any], name: str, gradient: np.ndarray, factor: float, t: int,
    s: Mapping[str, Any], rules: Rules,
) -> None:
    """One step of one parameter."""
    beta1, beta2 = (s["beta2"], s["beta1"]) if rules.swapped else (s["beta1"], s["beta2"])
    is_decayed = rules.decay == "all" or rules.decay != "none" and name in s["decayed"]
    decay = s["weight_decay"] * is_decayed
    g = factor * gradient + (decay * mine[name] if rules.decay == "gradient" else 0)
    shrink = {"gradient": 1.0, "without lr": 1 - decay}.get(rules.decay, 1 - s["lr"] * decay)
    if rules.decay != "after":
        mine[name] = shrink * mine[name]
    first, second = ((states.get(name + part, 0.0) if rules.carried else 0.0) for part in PARTS[1:])
    first = beta1 * first + (1 - beta1) * g
    second = beta2 * second + (1 - beta2) * (gradient if rules.unclipped_square else g) ** 2
    at = t + rules.correction
    c1, c2 = (1 - beta1**at, 1 - beta2**at) if rules.corrected and at > 0 else (1.0, 1.0)
    root = np.sqrt(second / c2 + s["eps"]) if rules.eps_inside else np.sqrt(second / c2) + s["eps"]
    mine[name] = mine[name] - s["lr"] * (first / c1) / root
    if rules.decay == "after":
        mine[name] = shrink * mine[name]
    states[name + PARTS[1]], states[name + PARTS[2]] = first, second


def _judge(name: str, run: Run, arrays: list[dict[str, np.ndarray]], tolerance: Tolerance) -> Verdict:
    broken = not_numbers(arrays, lambda rank, array, values: values)
    if broken:
        return Verdict(name).fail(*broken[:1])
    expected = steps_of(run)
    grid = tuple(run.shards.sizes[axis] for axis in AXES)
    placements, findings = placements_of(arrays)
    shapes = {n: a.shape[3:] for n, a in expected.items()}
    got, more = assembled(arrays, (grid[0], grid[1], grid[2]), shapes, placements)
    if findings or more:
        return Verdict(name).fail(*findings, *more)
    return judge_parameters(name, got, expected, tolerance, run.shards.sizes, partial(_hypotheses, run), floor=0.0)


def _hypotheses(run: Run, failing: set[str], zero: set[str]) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""

    def known(kind: str, text: str, **changes: Any) -> Hypothesis:
        return Hypothesis(kind, text, lambda: steps_of(run, replace(Rules(), **changes)))

    yield known("mean", "gradients are averaged over dp x cp, not summed", mean=True)
    for over in (("dp",), ("cp",), ()):
        lost = " and ".join(axis for axis in ("dp", "cp") if axis not in over and run.shards.sizes[axis] > 1)
        if lost:
            yield known("not-reduced", f"gradients are not reduced over {lost}", over=over)
    yield known("order", "the norm is that of the rank's gradients before they are reduced", norm="partial")
    yield known("clipped-first", "every rank clips its own gradients, and then they are reduced", norm="first")
    yield known("own-clip", "every rank clips by the norm of its own shards", norm="shards")
    yield known("replicated", "parameters that all ranks of tp have count tp times in the norm", norm="replicated")
    yield known("not-clipped", "gradients are not clipped", norm="none")
    yield known("unclipped-square", "exp_avg_sq is that of the gradients before they are clipped", unclipped_square=True)
    yield known("decay", "the weight decay is added to the gradient: Adam with L2, not AdamW", decay="gradient")
    yield known("decay", "all parameters are decayed", decay="all")
    yield known("decay", "no parameter is decayed", decay="none")
    yield known("decay", "the weight decay lacks the factor lr", decay="without lr")
    yield known("decay", "the weight decay comes after the update", decay="after")
    yield known("bias-correction", "there is no bias correction", corrected=False)
    yield known("bias-correction", "the bias correction is that of the step before", correction=-1)
    yield known("bias-correction", "the bias correction is that of the next step", correction=1)
    yield known("eps", "eps is under the root", eps_inside=True)
    yield known("state-lost", "states are not carried from step to step", carried=False)
    yield known("betas", "beta1 and beta2 are exchanged", swapped=True)
    given = run.shards.arrays
    start = whole_of(run.shards, run.shards.local)
    yield Hypothesis("not-updated", "parameters are those before the first step", lambda: {n: start[n] for n in given})
