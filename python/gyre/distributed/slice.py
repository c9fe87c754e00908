"""slice(batch, rank, size) -> batch of the rank

The slices of Ulysses: batch has documents in one row, ids and positions [1, slots] and cu_seqlens
[documents + 1]. The row is padded on the right to the next multiple of size, and the rank has the ids of
block rank of it. Positions are of the whole row on every rank, since rotary embedding runs after heads
are exchanged; those of padding are 0, 1, ... The function returns a mapping of any of ids [1, padded
slots / size], positions [1, padded slots], cu_seqlens (tokens) and cu_seqlens_padded (slots); padding has
id 0, and is a segment without tokens at the end of both. Further parameters, given where they are taken:
group, mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import reading
from .contract import Arrays, Hypothesis, Problem, Tolerance, Verdict, keywords
from .rank import Here
from .shard import checked, judge_shards

KIND, USES_LAYOUT = "documents", False
SPLITS = ("cp",)


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """The documents of a file in one row; without the last token, too, which the ranks divide otherwise."""
    file = reading.read(path).inputs
    tokens, bounds = np.asarray(file["tokens"], np.int64), np.asarray(file["offsets"], np.int64)
    for name, count in ((path.stem, len(tokens)), (f"{path.stem} less a token", len(tokens) - 1)):
        if count < 1:
            continue
        cu = np.minimum(bounds, count)
        positions = np.arange(count) - np.repeat(cu[:-1], np.diff(cu))
        batch = {"ids": tokens[None, :count], "positions": positions[None], "cu_seqlens": cu}
        pad = -count % options.cp
        whole = {
            "ids": np.pad(batch["ids"], ((0, 0), (0, pad))),
            "positions": np.concatenate([positions, np.arange(pad)])[None],
            "cu_seqlens": np.append(cu, cu[-1:]) if pad else cu,
            "cu_seqlens_padded": np.append(cu, count + pad) if pad else cu,
        }
        answers = {n: np.stack([a] * options.cp) for n, a in whole.items()}
        answers["ids"] = np.stack(np.split(whole["ids"], options.cp, axis=1))
        shapes = {n: a.shape[1:] for n, a in answers.items()}
        pieces = [{"batch": batch, "shapes": shapes}] * (options.cp * options.tp)
        yield Problem(name, pieces, {}, partial(_judge, name, whole, answers, pad, options.tp))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank."""
    more = keywords(function, {"mesh": here.mesh, "group": here.group("cp")}, needs)
    batch = {name: here.ids(array) for name, array in piece["batch"].items()}
    return checked(function(batch, here.rank // here.tp, here.cp, **more), piece["shapes"])


def _judge(
    name: str,
    whole: Arrays,
    answers: Arrays,
    pad: int,
    tp: int,
    arrays: list[dict[str, np.ndarray]],
    tolerance: Tolerance,
) -> Verdict:
    def errors(got: Arrays, failing: set[str]) -> Iterator[Hypothesis]:
        cp, ids, positions = len(arrays) // tp, whole["ids"], whole["positions"]
        for step in range(1, cp):
            text = f"rank r has the block of rank r + {step} (mod size)"
            yield Hypothesis("wrong-rows", text, lambda step=step: {"ids": np.roll(answers["ids"], -step, axis=0)})
        striped = np.stack([ids[:, rank::cp] for rank in range(cp)])
        yield Hypothesis("layout", "ids are dealt out by turns, not in blocks", lambda: {"ids": striped})
        for text, row in (
            ("positions count the row, not the document", np.arange(positions.size)),
            ("positions of padding go on from the last token", _counted_on(positions[0], pad)),
            ("positions of padding are 0", np.where(np.arange(positions.size) < positions.size - pad, positions[0], 0)),
        ):
            yield Hypothesis("positions", text, lambda row=row: {"positions": np.stack([row[None]] * cp)})
        real = whole["cu_seqlens_padded"]
        yield Hypothesis("boundaries", "padding is counted as tokens", lambda: {"cu_seqlens": np.stack([real] * cp)})
        other = whole["cu_seqlens"]
        yield Hypothesis("boundaries", "padding has no slots", lambda: {"cu_seqlens_padded": np.stack([other] * cp)})
        if pad:
            last = np.where(np.arange(ids.size) < ids.size - pad, ids[0], ids[0, -pad - 1])
            text = "padding repeats the last id"
            yield Hypothesis("padding", text, lambda: {"ids": np.stack(np.split(last[None], cp, axis=1))})

    return judge_shards(name, answers, tp, arrays, tolerance, ("rank", "place"), errors)


def _counted_on(positions: np.ndarray, pad: int) -> np.ndarray:
    kept = positions[: positions.size - pad]
    return np.concatenate([kept, kept[-1] + 1 + np.arange(pad)])
