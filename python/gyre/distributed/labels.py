"""labels(batch, shift, rank, size) -> labels of the rank

batch: a packed stream, ids, labels (of the next token), positions [slots], cu_seqlens and
cu_seqlens_padded [segments + 1]. The function returns what the rank has [slots / size] of the labels of
multi-token prediction: the id of the token `shift` places on in the same document; -100 where there is
none, and in padding. Shifts are 1 to 6. Further parameters, given where they are taken: layout (its
name), group, mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .contract import Problem, keywords, returned
from .rank import Here
from .shard import INTEGERS, bins_of, judge
from .shard_errors import SHIFTS, shifted

KIND, USES_LAYOUT = "packed", True
SPLITS = ("cp",)


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """Each bin of a packed file that has answers for this layout and cp, for each shift."""
    for name, stream, answers in bins_of(path, options):
        index = answers["index"]
        for shift in SHIFTS:
            labels = np.append(shifted(stream["ids"], stream["cu_seqlens"], stream["cu_seqlens_padded"], shift), -100)
            wanted = {
                "labels": labels[np.minimum(index, len(labels) - 1)]
            }  # a layout's own padding is behind the stream
            piece = {"batch": stream, "layout": options.layout, "shift": shift, "shape": index.shape[1:]}
            label = f"{name} shift {shift}"
            yield Problem(
                label, [piece] * (options.cp * options.tp), {}, partial(judge, label, stream, wanted, options.tp, shift)
            )


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank."""
    more = keywords(function, {"layout": piece["layout"], "mesh": here.mesh, "group": here.group("cp")}, needs)
    batch = {name: here.ids(array) for name, array in piece["batch"].items()}
    found = function(batch, piece["shift"], here.rank // here.tp, here.cp, **more)
    return {"labels": returned("labels", found, piece["shape"], INTEGERS).astype(np.int64)}
