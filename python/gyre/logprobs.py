"""Log-probability problems: what a file of the kind gyre/logprobs holds, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import checks, operations
from .arrays import is_bfloat16, to_numpy
from .operations import Answer

ROWS = "rows are tokens, all sequences one after another; offsets says where each begins"
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-15, 1e30
LARGEST_GRADIENT = float(np.float32(1e31))


_OF_TEACHER = ("ids", "teacher or teacher_values")
_OF_DIVERGENCE = ("ids", "teacher or teacher_logprobs")
ANSWERS = {
    "logprob": Answer("T"),
    "entropy": Answer("T"),
    "log_softmax": Answer("TV"),
    "softmax": Answer("TV"),
    "filtered_logprob": Answer("T"),
    "kept_logprob": Answer("T", ("sampling_mask_ids",)),
    "next_token_logprob": Answer("nU"),
    "next_token_filtered_logprob": Answer("nU"),
    "rollout_logprob": Answer("T"),
    "gathered": Answer("TK", ("ids",)),
    "gathered_logits": Answer("TK", ("ids",)),
    "top_values": Answer("TL"),
    "top_ids": Answer("TL"),
    "argmax_value": Answer("T"),
    "argmax_id": Answer("T"),
    "soft_cross_entropy": Answer("T", ("teacher",)),
    "distilled_logprob": Answer("TK", _OF_TEACHER),
    "distilled_teacher_logprob": Answer("TK", _OF_TEACHER),
    "distilled_entropy": Answer("T", _OF_TEACHER),
    "distilled_renormalised_logprob": Answer("TK", _OF_TEACHER),
    "distilled_renormalised_teacher_logprob": Answer("TK", _OF_TEACHER),
    "projected_probability": Answer("TC", ("projection_columns",)),
    "topk_kl": Answer("T", _OF_DIVERGENCE),
    "linear_logprob": Answer("T", ("hidden",)),
    "linear_entropy": Answer("T", ("hidden",)),
    "d_logprob": Answer("TV"),
    "d_entropy": Answer("TV"),
    "d_logprob_entropy": Answer("TV"),
    "d_filtered_logprob": Answer("TV"),
    "d_kept_logprob": Answer("TV", ("sampling_mask_ids",)),
    "d_next_token_logprob": Answer("TV"),
    "d_next_token_filtered_logprob": Answer("TV"),
    "d_rollout_logprob": Answer("TV"),
    "d_gathered": Answer("TV", ("ids",)),
    "d_gathered_logits": Answer("TV", ("ids",)),
    "d_soft_cross_entropy": Answer("TV", ("teacher",)),
    "d_distilled": Answer("TV", _OF_TEACHER),
    "d_distilled_renormalised": Answer("TV", _OF_TEACHER),
    "d_projected_probability": Answer("TV", ("projection_columns",)),
    "d_topk_kl": Answer("TV", _OF_DIVERGENCE),
    "d_topk_kl_advantage": Answer("TV", _OF_DIVERGENCE),
    "d_log_softmax": Answer("TV"),
    "d_hidden": Answer("TD", ("hidden",)),
    "d_head": Answer("VD", ("hidden",)),
} | operations.ARRAYS
INTEGERS = ("top_ids", "argmax_id")


@dataclass(frozen=True)
class LogprobProblem:
    """Checked inputs; `arrays` has those that were given, `bfloat16` names those of that type."""

    arrays: dict[str, np.ndarray]
    bfloat16: frozenset[str]
    vocab_size: int
    filters: dict[str, float | int | np.ndarray]  # temperature, top_k, top_p, min_p: of all tokens, or [T]
    projection_width: int | None = None
    parameters: dict[str, float] = field(default_factory=dict)  # of single operations, those that were given

    @property
    def offsets(self) -> np.ndarray:
        """[n + 1] boundaries of the sequences; one sequence if none were given."""
        return self.arrays.get("offsets", np.array([0, len(self.arrays["logits"])]))

    def lacks(self, answer: str) -> str | None:
        """An input that defines this answer and was not given."""
        for need in ANSWERS[answer].needs:
            if not any(name in self.arrays for name in need.split(" or ")):
                return need
        return None

    def shape_of(self, answer: str) -> tuple[int | None, ...]:
        """Shape of an answer whose inputs are all given; the number of largest is unknown without ids."""
        longest = int(np.diff(self.offsets).max(initial=0))
        ids = self.arrays["ids"].shape[1] if "ids" in self.arrays else 0
        extents = {
            "T": len(self.arrays["logits"]),
            "V": self.vocab_size,
            "K": ids,
            "L": min(ids, self.vocab_size) or None,
            "n": len(self.offsets) - 1,
            "U": max(0, longest - 1),
            "C": self.projection_width,
            "D": self.arrays["hidden"].shape[1] if "hidden" in self.arrays else 0,
        }
        return tuple(extents[letter] for letter in ANSWERS[answer].extents)


def logprob_problem(
    *,
    logits: Any,
    targets: Any,
    offsets: Any = None,
    d_value: Any = None,
    d_logprobs: Any = None,
    d_entropies: Any = None,
    ids: Any = None,
    d_ids: Any = None,
    teacher: Any = None,
    teacher_values: Any = None,
    teacher_logprobs: Any = None,
    teacher_target_logprobs: Any = None,
    hidden: Any = None,
    head: Any = None,
    sampling_mask_offsets: Any = None,
    sampling_mask_ids: Any = None,
    projection_width: int | None = None,
    projection_offsets: Any = None,
    projection_columns: Any = None,
    projection_weights: Any = None,
    d_projected: Any = None,
    vocab_size: int | None = None,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    **of_operations: Any,
) -> LogprobProblem:
    """Checks the inputs. T tokens, V ids in C columns, n sequences, K ids of a token, D elements.

    logits [T, C]: finite or -inf; columns from V on are padding. targets [T]: one below 0, or not
    below V, is nobody's. offsets [n + 1]: without, all rows are one sequence. d_value [T]: gradient
    of every value of a token; without, 1. d_logprobs [T, V]: gradient of every log-probability of
    log-softmax, d_entropies [T]: of the entropy, d_ids [T, K]: of the value of each id; without,
    d_value of the token. ids [T, K]: 0 to V - 1. teacher [T, C]: its logits.
    teacher_values [T, K]: its logits of ids, where whole rows are not known. teacher_logprobs [T, K]
    and teacher_target_logprobs [T]: its log-probabilities, over the vocabulary, of ids, which then
    carry a divergence, and of targets. hidden [T, D] and head
    [V, D]: factors of logits, for the fused linear layer. sampling_mask_offsets [T + 1] and
    sampling_mask_ids: the ids that a sampler kept in row t are those from sampling_mask_offsets[t]
    to sampling_mask_offsets[t + 1] - 1. projection_width, projection_offsets [V + 1],
    projection_columns and projection_weights: a sparse matrix; id v has these columns, 0 to
    projection_width - 1, and weights, at least 0, from projection_offsets[v] to
    projection_offsets[v + 1] - 1. d_projected [T, projection_width]: gradients of the projected
    probabilities; without, d_value of the token. vocab_size: V; without, C. temperature,
    top_k, top_p and min_p are numbers, or [T], one of each token. Inputs and parameters of single
    operations are those of gyre.operations.

    Reals are float16, bfloat16, float32 or float64, integers of any type with values of 32 bits.
    ValueError and TypeError name the array, the place, the value, and what would be right.
    """
    reals = {
        "logits": logits,
        "teacher": teacher,
        "teacher_values": teacher_values,
        "teacher_logprobs": teacher_logprobs,
        "teacher_target_logprobs": teacher_target_logprobs,
        "d_value": d_value,
        "d_logprobs": d_logprobs,
        "d_entropies": d_entropies,
        "d_ids": d_ids,
        "hidden": hidden,
        "head": head,
        "projection_weights": projection_weights,
        "d_projected": d_projected,
    }
    bfloat16 = frozenset(name for name, value in reals.items() if is_bfloat16(value))
    rows = checks.reals("logits", logits, None, None, hint=ROWS)
    tokens, columns = rows.shape
    vocab = checks.size("vocab_size", columns if vocab_size is None else vocab_size, 1, columns)
    checks.logits("logits", rows[:, :vocab])
    arrays = {"logits": rows, "targets": checks.integers("targets", targets, tokens, hint=ROWS)}
    if offsets is not None:
        arrays["offsets"] = checks.offsets("offsets", offsets, tokens, "the rows of logits")
    if d_value is not None:
        arrays["d_value"] = checks.finite("d_value", checks.reals("d_value", d_value, tokens))
    if d_logprobs is not None:
        above = checks.reals("d_logprobs", d_logprobs, tokens, vocab)
        arrays["d_logprobs"] = checks.finite("d_logprobs", above)
    if d_entropies is not None:
        arrays["d_entropies"] = checks.finite("d_entropies", checks.reals("d_entropies", d_entropies, tokens))
    if ids is not None:
        arrays["ids"] = _ids(ids, tokens, vocab)
    if d_ids is not None:
        if ids is None:
            raise ValueError("d_ids are gradients of values of ids; there are no ids")
        arrays["d_ids"] = checks.finite("d_ids", checks.reals("d_ids", d_ids, *arrays["ids"].shape))
    if teacher is not None:
        arrays["teacher"] = checks.reals("teacher", teacher, tokens, columns)
        checks.logits("teacher", arrays["teacher"][:, :vocab])
    if teacher_values is not None:
        if ids is None:
            raise ValueError("teacher_values are logits of ids; there are no ids")
        values = checks.reals("teacher_values", teacher_values, *arrays["ids"].shape)
        checks.logits("teacher_values", values)
        arrays["teacher_values"] = values
    if (teacher_logprobs is None) != (teacher_target_logprobs is None):
        raise ValueError("teacher_logprobs and teacher_target_logprobs go together; one of them is missing")
    if teacher_logprobs is not None:
        if ids is None:
            raise ValueError("teacher_logprobs are of ids; there are no ids")
        shapes = {"teacher_logprobs": arrays["ids"].shape, "teacher_target_logprobs": (tokens,)}
        for name, shape in shapes.items():
            values = checks.reals(name, reals[name], *shape)
            checks.every(name, values, values <= 0, "at most 0, as log-probabilities are")
            arrays[name] = values
        _check_different(arrays["ids"])
    if (hidden is None) != (head is None):
        raise ValueError("hidden and head are factors of logits; one of them is missing")
    if hidden is not None:
        x = checks.finite("hidden", checks.reals("hidden", hidden, tokens, None))
        arrays["hidden"] = x
        arrays["head"] = checks.finite("head", checks.reals("head", head, vocab, x.shape[1]))
        checks.size("the number of elements of a hidden state", x.shape[1], 1)
    if (sampling_mask_offsets is None) != (sampling_mask_ids is None):
        raise ValueError("sampling_mask_offsets and sampling_mask_ids are one list of ids; one of them is missing")
    if sampling_mask_ids is not None:
        arrays |= _kept(sampling_mask_offsets, sampling_mask_ids, tokens, vocab)
    projection = {"width": projection_width, "offsets": projection_offsets, "columns": projection_columns,
                  "weights": projection_weights}
    if lacking := [name for name, value in projection.items() if value is None]:
        if len(lacking) < len(projection) or d_projected is not None:
            missing = f"projection_{lacking[0]} is missing"
            raise ValueError(f"a projection has width, offsets, columns and weights; {missing}")
    else:
        arrays |= _projection(projection, d_projected, tokens, vocab)
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    filters = {name: _filter(name, value, tokens, vocab) for name, value in filters.items()}
    for name in ("d_value", "d_logprobs", "d_entropies", "d_ids", "d_projected"):
        if name in arrays:
            _check_gradients(name, arrays[name], filters["temperature"])
    parameters = {}
    for name, value in of_operations.items():
        if name in operations.PARAMETERS:
            _, least, most = operations.PARAMETERS[name]
            parameters[name] = checks.number(name, value, least, most)
            continue
        if name not in operations.INPUTS:
            raise TypeError(f"logprob_problem() got an unexpected keyword argument {name!r}")
        arrays[name] = operations.INPUTS[name](value, arrays.get("ids", np.empty((tokens, 0), np.int64)))
    return LogprobProblem(arrays, bfloat16, vocab, filters, projection_width, parameters)


def _filter(name: str, value: Any, tokens: int, vocab_size: int) -> float | int | np.ndarray:
    """A number of all tokens, or an array [T] with one of each, within its range."""
    ranges = {
        "temperature": (LEAST_TEMPERATURE, MOST_TEMPERATURE),
        "top_k": (0, vocab_size),
        "top_p": (np.nextafter(0, 1), 1),  # above 0
        "min_p": (0, 1),
    }
    least, most = ranges[name]
    whole = name == "top_k"
    if np.ndim(value) == 0 and name == "top_p" and not 0 < checks.real(name, value) <= 1:
        raise ValueError(f"top_p is {value}; it must be above 0 and at most 1, which is no limit")
    if np.ndim(value) == 0:
        return checks.size(name, value, least, most) if whole else checks.number(name, value, least, most)
    given = to_numpy(value)
    if whole:
        array = checks.integers(name, given, tokens)
    else:
        array = checks.reals(name, given.astype(np.float64), tokens)
    within = "above 0 and at most 1" if name == "top_p" else f"{least} to {most}"
    checks.every(name, array, (array >= least) & (array <= most), within)
    return array


def _kept(offsets: Any, ids: Any, tokens: int, vocab_size: int) -> dict[str, np.ndarray]:
    """The sets of ids that a sampler kept, different ones in a row."""
    array = checks.integers("sampling_mask_ids", ids, None)
    checks.every("sampling_mask_ids", array, (array >= 0) & (array < vocab_size), f"0 to {vocab_size - 1}")
    bounds = checks.offsets("sampling_mask_offsets", offsets, len(array), "sampling_mask_ids")
    if len(bounds) != tokens + 1:
        raise ValueError(f"sampling_mask_offsets are {len(bounds)}; {tokens} rows need {tokens + 1}")
    for row, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if len(np.unique(array[begin:end])) < end - begin:
            raise ValueError(f"sampling_mask_ids of row {row} have an id twice")
    return {"sampling_mask_offsets": bounds, "sampling_mask_ids": array}


def _projection(given: Mapping[str, Any], above: Any, tokens: int, vocab_size: int) -> dict[str, np.ndarray]:
    """A sparse matrix of weights, different columns in a row, and the gradients of what it gives."""
    width = checks.size("projection_width", given["width"], 1)
    columns = checks.integers("projection_columns", given["columns"], None)
    checks.every("projection_columns", columns, (columns >= 0) & (columns < width), f"0 to {width - 1}")
    weights = checks.reals("projection_weights", given["weights"], len(columns))
    checks.every("projection_weights", weights, np.isfinite(weights) & (weights >= 0), "finite and at least 0")
    bounds = checks.offsets("projection_offsets", given["offsets"], len(columns), "projection_columns")
    if len(bounds) != vocab_size + 1:
        raise ValueError(f"projection_offsets are {len(bounds)}; {vocab_size} ids need {vocab_size + 1}")
    for row, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if len(np.unique(columns[begin:end])) < end - begin:
            raise ValueError(f"projection_columns of row {row} have a column twice")
    arrays = {"projection_offsets": bounds, "projection_columns": columns, "projection_weights": weights}
    if above is not None:
        arrays["d_projected"] = checks.finite("d_projected", checks.reals("d_projected", above, tokens, width))
    return arrays


def _check_gradients(name: str, array: np.ndarray, temperature: float | np.ndarray) -> None:
    """Refuses gradients so large that float32, in which programs read them, cannot hold those of the logits."""
    of_row = np.reshape(temperature, (-1, *[1] * (array.ndim - 1)))
    most = np.broadcast_to(LARGEST_GRADIENT * np.minimum(1, of_row**2), array.shape)
    with np.errstate(over="ignore"):
        bad = np.argwhere(np.abs(array.astype(np.float32)) > most)
    if len(bad):
        index = tuple(bad[0])
        heat, limit = np.broadcast_to(of_row, array.shape)[index], most[index]
        raise ValueError(
            f"{name}[{', '.join(map(str, index))}] is {array[index]}; a gradient at a temperature of {heat:g} is from "
            f"{-limit:g} to {limit:g}"
        )


def _check_different(ids: np.ndarray) -> None:
    for row, own in enumerate(ids):
        if len(np.unique(own)) < len(own):
            raise ValueError(f"ids of row {row} have an id twice; teacher_logprobs are of different ids")


def _ids(ids: Any, tokens: int, vocab_size: int) -> np.ndarray:
    array = checks.integers("ids", ids, tokens, None)
    checks.size("the number of ids of a token", array.shape[1], 1)
    checks.every("ids", array, (array >= 0) & (array < vocab_size), f"0 to {vocab_size - 1}")
    return array


def check_reference(problem: LogprobProblem, reference: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a reference, as a file holds them: any of ANSWERS, without NaN."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in reference.items():
        if need := problem.lacks(checks.known(name, ANSWERS)):
            raise ValueError(f"reference[{name!r}] needs {need}, which was not given")
        shape, label = problem.shape_of(name), f"reference[{name!r}]"
        if name in INTEGERS:
            arrays[name] = checks.integers(label, value, *shape).astype(np.int32)
        else:
            arrays[name] = checks.answer(label, value, *shape)
    lengths = {name: arrays[name].shape[1] for name in ("top_values", "top_ids") if name in arrays}
    for name, length in lengths.items():
        checks.size(f"the length of the rows of {name}", length, 1, problem.vocab_size)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"top_values and top_ids differ in the lengths of their rows: {lengths}")
    return arrays
