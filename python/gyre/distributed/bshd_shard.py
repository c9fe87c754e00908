"""bshd_shard(batch, rank, size) -> batch of the rank

batch: rows of a data loader, ids, labels (shifted already) and key_mask (true: a token, false: padding)
[rows, slots]. Rows are padded on the right to the next multiple of 2 size (of 2 size tp, if tp ranks
share a rank's slots), and the rank has chunks rank and 2 size - 1 - rank of every row. The function
returns a mapping of any of ids, labels, key_mask [rows, padded slots / size]; new padding has id 0,
label -100 and no key. A causal mask hides padding on the right alone, so key_mask goes with the keys.
Further parameters, given where they are taken: tp, group, mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .. import reading
from ..reference import dual_chunk_swap
from .contract import Arrays, Hypothesis, Malformed, Problem, Tolerance, Verdict, keywords, returned
from .rank import Here
from .shard import INTEGERS, judge_shards

KIND, USES_LAYOUT = "bshd", False
SPLITS = ("cp",)
PADDING = {"ids": 0, "labels": -100, "key_mask": 0}


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """Rows of ids as they are, and turned round without their last slot: padding on the left, and new padding."""
    inputs = reading.read(path).inputs
    if "input_ids" not in inputs:
        return
    rows = {"ids": inputs["input_ids"], "labels": inputs["labels"], "key_mask": real_slots(inputs)}
    turned = {name: array[:, :0:-1] for name, array in rows.items()}
    for name, batch in ((path.stem, rows), (f"{path.stem} turned round", turned)):
        whole = {n: padded(a, PADDING[n], 2 * options.cp * options.tp) for n, a in batch.items()}
        index = dual_chunk_swap(np.array([0, whole["ids"].shape[1]]), options.cp)
        answers = {n: np.moveaxis(a[:, index], 1, 0) for n, a in whole.items()}
        shape = answers["ids"].shape[1:]
        pieces = [{"batch": batch, "shape": shape, "tp": options.tp}] * (options.cp * options.tp)
        yield Problem(name, pieces, {}, partial(_judge, name, whole, answers, index, options.tp))


def real_slots(inputs: reading.Group) -> np.ndarray:
    """[rows, slots] of 0 and 1: slots with a token, of tables of lengths, or of the id that pads."""
    ids = np.asarray(inputs["input_ids"])
    if "seq_lens" not in inputs:
        return (ids != inputs.attributes["pad_id"]).astype(np.int64)
    found = np.zeros(ids.shape, np.int64)
    for row, lengths, slots in zip(found, inputs["seq_lens"], inputs.get("seq_lens_padded", inputs["seq_lens"])):
        there = lengths != inputs.attributes["sentinel"]
        for (begin, _), length in zip(pairwise(np.cumsum([0, *slots[there]])), lengths[there]):
            row[begin : begin + length] = 1
    return found


def padded(array: np.ndarray, value: int, multiple: int) -> np.ndarray:
    """Rows, padded on the right."""
    return np.pad(array.astype(np.int64), ((0, 0), (0, -array.shape[1] % multiple)), constant_values=value)


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank."""
    more = keywords(function, {"tp": piece["tp"], "mesh": here.mesh, "group": here.group("cp")}, needs)
    batch = {n: here.ids(piece["batch"][n]) for n in ("ids", "labels")}
    batch["key_mask"] = here.booleans(piece["batch"]["key_mask"])
    answer = function(batch, here.rank // here.tp, here.cp, **more)
    if not isinstance(answer, Mapping) or not answer or set(answer) - set(PADDING):
        wanted = f"it must be a mapping of {', '.join(PADDING)}"
        raise Malformed("other-type", f"{type(answer).__name__} was returned; {wanted}")
    return {n: returned(n, a, piece["shape"], (*INTEGERS, "bool")).astype(np.int64) for n, a in answer.items()}


def _judge(
    name: str,
    whole: Arrays,
    answers: Arrays,
    index: np.ndarray,
    tp: int,
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    def errors(got: Arrays, failing: set[str]) -> Iterator[Hypothesis]:
        def cut(rows: Arrays, other: np.ndarray) -> dict[str, np.ndarray]:
            return {n: np.moveaxis(a[:, other], 1, 0) for n, a in rows.items() if n in got}

        cp, width = len(index), index.size
        every = np.arange(width)
        orders = {"contiguous": every.reshape(cp, -1), "striped": every.reshape(-1, cp).T}
        for layout, other in orders.items():
            text = f"rows are cut as the layout {layout} does"
            yield Hypothesis("layout", text, lambda other=other: cut(whole, other))
        for step in range(1, cp):
            other = np.roll(index, -step, axis=0)
            text = f"rank r has the slots of rank r + {step} (mod cp)"
            yield Hypothesis("wrong-rows", text, lambda other=other: cut(whole, other))
        keys = np.ones(answers["key_mask"].shape, np.int64)
        yield Hypothesis("mask-lost", "every slot is a key: padding is not hidden", lambda: {"key_mask": keys})
        causal = np.moveaxis(np.maximum.accumulate(whole["key_mask"][:, ::-1], axis=1)[:, ::-1][:, index], 1, 0)
        text = "padding on the left is taken for keys: only what follows the last token is hidden"
        yield Hypothesis("mask-lost", text, lambda: {"key_mask": causal})
        if "ids" in got:
            rolled = np.roll(got["ids"], -1, axis=2)
            yield Hypothesis("labels-of-shards", "labels are shifted after sharding", lambda: {"labels": rolled})
        zero = {"labels": np.maximum(answers["labels"], 0)}
        yield Hypothesis("padding", "labels of padding are 0, not -100", lambda: zero)

    return judge_shards(name, answers, tp, arrays, tolerance, ("rank", "row", "slot"), errors)
