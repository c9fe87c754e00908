"""relayout(rows, rank, size, group) -> rows

rows [slots / size, width]: what the rank has of a stream under the layout of --layout. The function
returns what it has under the layout contiguous: slots rank slots / size to (rank + 1) slots / size.
Rows are permuted, so the gradient of each is that of the row that it becomes, once. If the function takes
target, the name of the layout to produce, the relayout from contiguous back is tested, too; source is the
name of the layout of rows. Gradients: of tensors by autograd;
of NumPy arrays, a second value is returned, a function of the gradient that returns that of rows.
Further parameters, given where they are taken: cu_seqlens_padded (boundaries of the stream), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .contract import (
    Arrays,
    Hypothesis,
    LeftOut,
    Problem,
    Tolerance,
    Verdict,
    factors,
    judged,
    keywords,
    not_numbers,
)
from .layouts import NAMES, layout_of
from .rank import Here, differentiated
from .rounding import in_type
from .shard import bins_of

KIND, USES_LAYOUT = "packed", True
SPLITS = ("cp",)
NEEDS = ("target",)
TARGET, WIDTH = "contiguous", 3


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """Each bin of a packed file that both layouts cut without padding of their own, there and back."""
    if options.layout == TARGET:
        raise LeftOut(f"rows are {TARGET} already: --layout must be another one")
    for name, stream, answers in bins_of(path, options):
        bounds, slots = stream["cu_seqlens_padded"], len(stream["ids"])
        layouts = {options.layout: answers["index"], TARGET: layout_of(TARGET, bounds, options.cp).index}
        if any(index.size != slots for index in layouts.values()):
            continue
        rng = np.random.default_rng(slots)
        whole, d_whole = in_type(rng.normal(size=(2, slots, WIDTH)).astype(np.float32), options.dtype)
        for source, target in ((options.layout, TARGET), (TARGET, options.layout)):
            old, new = layouts[source], layouts[target]
            pieces = [
                {
                    "rows": whole[old[r // options.tp]],
                    "d_rows": d_whole[new[r // options.tp]],
                    "bounds": bounds,
                    "names": {"source": source, "target": target},
                }
                for r in range(options.cp * options.tp)
            ]
            needs = {} if target == TARGET else {"target": f"rows become {target}"}
            label = name if target == TARGET else f"{name} back"
            judge = partial(_judge, label, whole, d_whole, old, new, bounds, options.tp)
            yield Problem(label, pieces, needs, judge)


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank, forward and backward."""
    offers = dict(piece["names"], mesh=here.mesh, cu_seqlens_padded=here.ids(piece["bounds"]))
    taken = keywords(function, offers, needs)
    return differentiated(
        lambda rows: function(rows, here.rank // here.tp, here.cp, here.group("cp"), **taken),
        {"d_rows": ("rows", piece["rows"])}, "rows", piece["rows"].shape, piece["d_rows"], [here.kind], here,
    )


def _judge(
    name: str,
    whole: np.ndarray,
    d_whole: np.ndarray,
    old: np.ndarray,
    new: np.ndarray,
    bounds: np.ndarray,
    tp: int,
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    broken = not_numbers(arrays, lambda rank, array, values: values)
    if broken:
        return Verdict(name).fail(*broken)
    got = {n: np.stack([mine[n] for mine in arrays[::tp]]) for n in arrays[0]}
    expected = {"rows": whole[new], "d_rows": d_whole[old]}

    def places(array: str, bad: np.ndarray) -> str:
        rows = bad.any(axis=2)
        counts = ", ".join(f"rank {r}: {int(b.sum())}" for r, b in enumerate(rows) if b.any())
        rank, row = (int(i) for i in np.argwhere(rows)[0])
        return f"{int(rows.sum())} of {rows.size} rows differ ({counts}); first [rank {rank}, row {row}]"

    def errors(failing: set[str]) -> Iterator[Hypothesis]:
        return _hypotheses(got, expected, failing, whole, d_whole, old, new, bounds)

    verdict = judged(name, got, expected, tolerance, errors, places)
    verdict.note = "" if "d_rows" in got else "not returned: the gradient"
    return verdict


def _hypotheses(
    got: Arrays,
    expected: Arrays,
    failing: set[str],
    whole: np.ndarray,
    d_whole: np.ndarray,
    old: np.ndarray,
    new: np.ndarray,
    bounds: np.ndarray,
) -> Iterator[Hypothesis]:
    """Known errors, the likeliest first."""
    cp, owner = len(old), np.empty(old.size, int)
    owner[new] = np.arange(cp)[:, None]
    stays = (owner[old] == np.arange(cp)[:, None])[:, :, None]
    yield Hypothesis("layout", "no row moves", lambda: {"rows": whole[old], "d_rows": d_whole[new]})
    yield Hypothesis("zero", "the gradient is 0", lambda: {"d_rows": np.zeros(expected["d_rows"].shape)})
    yield Hypothesis(
        "gradient-dropped",
        "rows that went to another rank have no gradient",
        lambda: {"d_rows": np.where(stays, expected["d_rows"], 0)},
    )
    yield from factors(got, expected, failing, {"cp": cp})
    for step in range(1, cp):
        text = f"rank r has the rows of rank r + {step} (mod cp)"
        yield Hypothesis("wrong-rows", text, lambda step=step: {"rows": np.roll(expected["rows"], -step, axis=0)})
    for name in NAMES:
        try:
            other = layout_of(name, bounds, cp).index
        except ValueError:
            continue
        if other.size == old.size:
            taken = np.empty_like(whole)
            taken[other] = whole[old]
            yield Hypothesis("layout", f"rows are taken for those of {name}", lambda taken=taken: {"rows": taken[new]})
