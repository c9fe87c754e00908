"""invariant(microbatches) -> {name: (gradient, placement)}

The gradient of a model of yours, held against itself: of the mean loss over all labels of all microbatches of all ranks,
which must be the same on every grid dp x cp x tp, for every number of microbatches, packing and layout. There are no
answers; a disagreement is reported with the most similar run that disagrees. The first run is of one rank alone.

microbatches: as in the contract gradients, with ids below 24. The function returns gradients of the same parameters every
time, placed as in the contract gradients. It must begin with the same weights every time. FUNCTION.layouts names layouts
that it can have beside the one of --layout. Further parameters, given where they are taken: dp_group, cp_group, tp_group,
data_group (dp x cp), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from .contract import Finding, Problem, Tolerance, Verdict, keywords, not_numbers
from .decoder import Config
from .gradients import batch_of
from .layouts import NAMES
from .rank import Here
from .step import AXES, assembled, called, dealt, documents_of, placements_of, returned_by_name

USES_LAYOUT, USES_DP = True, True
FROM_ONE_RANK = True  # the first grid is of one rank
SPLITS = ("dp", "cp", "tp")
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
CASES = ("base", "microbatches", "single_documents", "reversed", *(f"layout_{n}" for n in NAMES), "other_documents")


def problems(case: str, options: Any) -> Iterator[Problem]:
    """The run of this name."""
    vocabulary = Config().vocab_size
    documents = documents_of(7 if case != "other_documents" else 8, vocabulary)
    documents = documents[::-1] if case == "reversed" else documents
    layout = case.removeprefix("layout_") if case.startswith("layout_") else options.layout
    if case == f"layout_{options.layout}":
        return
    count = {"microbatches": 3, "single_documents": -(-len(documents) // options.dp)}.get(case, 1)
    streams = dealt(documents, layout, options.cp, options.dp, count)
    pieces = [{"microbatches": [s.of_rank(c) for s in streams[d]], "usual": options.layout}
              for d, c, _ in np.ndindex(options.dp, options.cp, options.tp)]
    run = {axis: getattr(options, axis) for axis in AXES} | {
        "microbatches": count, "order of documents": "reversed" if case == "reversed" else "given", "layout": layout}
    yield Problem(case, pieces, {}, partial(_judge, case, run, options.memory))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank."""
    name = piece["microbatches"][0]["layout"].name
    if name not in (piece["usual"], *getattr(function, "layouts", ())):
        raise NotImplementedError(f"layout {name}: FUNCTION.layouts does not name it")
    batches = [batch_of(batch, here) for batch in piece["microbatches"]]
    offers = {f"{axis}_group": here.group(axis) for axis in (*AXES, "data")} | {"mesh": here.mesh}
    found = function(batches, **keywords(function, offers, needs))
    return returned_by_name(found, None, [here.kind, "float32", "float64"])


def _judge(
    name: str, run: dict[str, Any], memory: dict[str, Any], arrays: list[dict[str, np.ndarray]], tolerance: Tolerance
) -> Verdict:
    verdict = Verdict(name)
    broken = not_numbers(arrays, lambda rank, array, values: values)
    placements, findings = placements_of(arrays)
    if broken or findings:
        return verdict.fail(*broken[:1], *findings)
    runs = memory.setdefault("runs", [])
    shapes = runs[0][1] if runs else {}
    whole, findings = assembled(
        arrays, (run["dp"], run["cp"], run["tp"]), {n: shapes[n].shape if n in shapes else None for n in placements},
        placements)
    if findings:
        return verdict.fail(*findings)
    mine = {n: a[0, 0, 0] for n, a in whole.items()}
    verdict.values = sum(a.size for a in whole.values())
    spread = [n for n, a in whole.items() if not _same({n: a}, {n: np.broadcast_to(a[0, 0, 0], a.shape)}, tolerance)[1]]
    if spread:
        text = "replicas on other ranks are not the same"
        return verdict.fail(Finding("ranks-disagree", text, called(spread, whole)))
    if not any(a.any() for a in mine.values()):
        return verdict.fail(Finding("zero", "all gradients are 0: nothing was verified", called(mine, mine)))
    if name == "other_documents":
        return _constant(verdict, mine, runs, tolerance)
    others = [(sum(run[k] != other[k] for k in run), i) for i, (other, theirs) in enumerate(runs)
              if not all(_same(mine, theirs, tolerance))]
    if others and not all(_same(mine, runs[0][1], tolerance)):
        _disagree(verdict, run, mine, *runs[min(others)[1]], tolerance)
    runs.append((run, mine))
    return verdict


def _same(mine: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], tolerance: Tolerance) -> tuple[bool, bool]:
    """Whether parameters, and their gradients, are the same; the tolerance is a share of the largest of each."""
    if mine.keys() != theirs.keys():
        return False, False
    return True, all(np.abs(a - theirs[n]).max(initial=0) <= tolerance.atol * np.abs(theirs[n]).max(initial=0)
                     for n, a in mine.items())


def _constant(
    verdict: Verdict, mine: Mapping[str, np.ndarray], runs: list[Any], tolerance: Tolerance
) -> Verdict:
    """Of other documents: gradients that are the same do not depend on their input."""
    same = [n for n, a in mine.items() if runs and n in runs[0][1] and a.any()
            and all(_same({n: a}, {n: runs[0][1][n]}, tolerance))]
    if same:
        text = "gradients of other documents are the same: they do not depend on the input"
        verdict.fail(Finding("constant", text, called(same, mine)))
    return verdict


def _disagree(
    verdict: Verdict, run: Mapping[str, Any], mine: Mapping[str, np.ndarray], other: Mapping[str, Any],
    theirs: Mapping[str, np.ndarray], tolerance: Tolerance
) -> None:
    """The finding of two runs that disagree."""
    axes = [k for k in run if run[k] != other[k]]
    change = ", ".join(f"{k} {run[k]} and {other[k]}" for k in axes)
    kept = ", ".join(f"{k} {run[k]}" for k in run if run[k] == other[k])
    if lacking := sorted(mine.keys() ^ theirs.keys()):
        text = f"runs of {change} return gradients of other parameters ({kept})"
        verdict.fail(Finding("parameters", text, called(lacking, [])))
        return
    wrong = [n for n in mine if not all(_same({n: mine[n]}, {n: theirs[n]}, tolerance))]
    verdict.fail(Finding(f"depends-on-{'-'.join(axes).replace(' ', '-')}", f"gradients of {change} disagree ({kept})",
                         called(wrong, mine)))
    for n in wrong[:3]:
        a, b = mine[n], theirs[n]
        factor = float((a * b).sum() / max(1e-300, (b * b).sum()))
        is_factor = np.abs(a - factor * b).max() <= 4 * tolerance.atol * np.abs(a).max() and abs(factor) > 1e-3
        why = f"a factor {factor:.6g}" if is_factor else f"up to {np.abs(a - b).max() / np.abs(b).max():.3g} of the largest"
        verdict.places.append(f"{n}: {why}")
