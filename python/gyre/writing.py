"""Writes inputs of Gyre's programs from arrays of NumPy or tensors (inputs/SCHEMA.md)."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from . import attention, checks, logprobs
from .arrays import is_bfloat16, to_numpy
from .storage import new_file, put
from .version import __version__

FilePath = str | os.PathLike[str]
Provenance = Mapping[str, object]

IGNORED = -100  # a label that no loss counts


def _provenance(given: Provenance | None) -> dict[str, object]:
    return {"generator": f"gyre {__version__}, the Python package"} | dict(given or {})


def write_logprobs(
    path: FilePath,
    *,
    reference: Mapping[str, Any] | None = None,
    provenance: Provenance | None = None,
    **inputs: Any,
) -> None:
    """Writes a gyre/logprobs file, which gyre-logprobs --input reads.

    inputs: logits [T, C] and targets [T]; optional: vocab_size, temperature, top_k, top_p
    and min_p (numbers or [T]), offsets [n + 1], d_value [T], d_logprobs [T, V], d_entropies [T],
    ids [T, K], d_ids [T, K], teacher [T, C], teacher_values [T, K], teacher_logprobs [T, K] and
    teacher_target_logprobs [T], hidden [T, D] and head [V, D],
    sampling_mask_offsets [T + 1] and sampling_mask_ids, projection_width, projection_offsets [V + 1],
    projection_columns, projection_weights and d_projected [T, projection_width].
    gyre.logprob_problem says what each means.

    reference: answers by the names of the schema, any of them; gyre.reference.logprobs(**inputs)
    computes all that the inputs define. provenance: texts that say where the arrays come from.

    Reals keep their type, bfloat16 too; integers become int32. Raises ValueError or TypeError when
    an array breaks a rule; nothing is written then.
    """
    problem = logprobs.logprob_problem(**inputs)
    answers = logprobs.check_reference(problem, reference or {})
    origin = _provenance(provenance)
    with new_file(path, "gyre/logprobs", origin) as file:
        group = file.create_group("logprobs")
        group.attrs["vocab_size"] = np.int64(problem.vocab_size)
        if problem.projection_width is not None:
            group.attrs["projection_width"] = np.int64(problem.projection_width)
        for name, value in problem.filters.items():
            if np.ndim(value) > 0:
                put(group, name, value.astype(np.int32) if name == "top_k" else value)
            else:
                group.attrs[name] = np.int64(value) if name == "top_k" else np.float64(value)
        for name, number in problem.parameters.items():
            group.attrs[name] = np.float64(number)
        for name, array in problem.arrays.items():
            if array.dtype == np.int64 and not name.endswith("offsets"):
                array = array.astype(np.int32)
            put(group, name, array, as_bfloat16=name in problem.bfloat16)
        _put_reference(file, answers, origin)


def write_attention(
    path: FilePath,
    *,
    reference: Mapping[str, Any] | None = None,
    provenance: Provenance | None = None,
    **inputs: Any,
) -> None:
    """Writes a gyre/attention file, which gyre-attention --input reads.

    inputs: q [T, H, D], k [T, K, D], v [T, K, E]; optional: k_shared [T, R], with which k is
    [T, K, D - R], d_out [T, H, E], sinks [H], offsets and query_offsets [documents + 1], mask, window, regions,
    selected_keys, scale.
    gyre.attention_problem says what each means.

    reference: any of out, lse, d_q, d_k, d_v and, with their inputs, d_sinks and d_k_shared;
    gyre.reference.attention(**inputs) computes all of them. provenance: texts that say where the
    arrays come from.

    Reals keep their type, bfloat16 too. Raises ValueError or TypeError when an array breaks a rule;
    nothing is written then.
    """
    problem = attention.attention_problem(**inputs)
    answers = attention.check_reference(problem, reference or {})
    origin = _provenance(provenance)
    with new_file(path, "gyre/attention", origin) as file:
        group = file.create_group("attention")
        group.attrs["mask"] = problem.mask
        group.attrs["window"] = np.int64(problem.window)
        group.attrs["scale"] = np.float64(problem.scale)
        for name, array in problem.arrays.items():
            put(group, name, array, as_bfloat16=name in problem.bfloat16)
        _put_reference(file, answers, origin)


def _put_reference(file: h5py.File, answers: Mapping[str, np.ndarray], origin: Provenance) -> None:
    if not answers:
        return
    group = file.create_group("reference")
    group.attrs["generator"] = str(origin["generator"])
    for name, array in answers.items():
        put(group, name, array)


def write_documents(
    path: FilePath,
    documents: Sequence[Any],
    *,
    vocab_size: int,
    tokenizer: str = "unknown",
    names: Sequence[str] | None = None,
    text_bytes: Any = None,
    unscored: Any = None,
    reference: Mapping[str, Any] | None = None,
    provenance: Provenance | None = None,
) -> None:
    """Writes a gyre/documents file, which gyre-pack and gyre-pipeline --input read.

    documents: arrays, tensors or lists of tokens, 0 to vocab_size - 1; one may be empty.
    tokenizer: how text became tokens; gyre-pipeline refuses another one than its model's. names: of
    each document. text_bytes: bytes of text in each document's tokens after the first, from which
    gyre-pipeline computes bits per byte. unscored: so many first predictions of each document are
    context, and no part of its score. reference: what a model says, any of logprob [P] and
    entropy [P], in nats, and hidden [layers + 1, T, elements]: T tokens, and P predictions, of all
    but each document's first.

    Raises ValueError or TypeError when one of them breaks a rule; nothing is written then.
    """
    vocab_size = checks.size("vocab_size", vocab_size, 1)
    tokens = []
    for i, document in enumerate(documents):
        array = checks.integers(f"documents[{i}]", document, None)
        good = (array >= 0) & (array < vocab_size)
        checks.every(f"documents[{i}]", array, good, f"0 to {vocab_size - 1}")
        tokens.append(array.astype(np.int32))
    if not tokenizer:
        raise ValueError("tokenizer is empty; it must say how text became tokens")
    if names is not None and len(names) != len(tokens):
        raise ValueError(f"there are {len(names)} names; there must be {len(tokens)}")
    if text_bytes is not None:
        text_bytes = checks.integers("text_bytes", text_bytes, len(tokens))
        checks.every("text_bytes", text_bytes, text_bytes >= 0, "at least 0")
    if unscored is not None:
        unscored = checks.integers("unscored", unscored, len(tokens))
        most = np.array([max(0, len(array) - 1) for array in tokens])
        good = (unscored >= 0) & (unscored <= most)
        checks.every("unscored", unscored, good, "0 to the predictions of the document")
    answers = _predictions(list(map(len, tokens)), reference) if reference else {}
    origin = _provenance(provenance)
    with new_file(path, "gyre/documents", origin) as file:
        group = file.create_group("documents")
        group.attrs["vocab_size"] = np.int64(vocab_size)
        group.attrs["tokenizer"] = tokenizer
        put(group, "tokens", np.concatenate([np.empty(0, np.int32), *tokens]))
        put(group, "offsets", np.cumsum([0, *map(len, tokens)], dtype=np.int64))
        if names is not None:
            group.create_dataset("names", data=list(names), dtype=h5py.string_dtype("utf-8"))
        if text_bytes is not None:
            put(group, "text_bytes", text_bytes)
        if unscored is not None:
            put(group, "unscored", unscored)
        _put_reference(file, answers, origin)


def _predictions(lengths: list[int], reference: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a reference of documents of these lengths, with their offsets."""
    bounds = np.cumsum([0, *(max(0, length - 1) for length in lengths)], dtype=np.int64)
    each: tuple[int | None, ...] = (int(bounds[-1]),)
    shapes = {"logprob": each, "entropy": each, "hidden": (None, sum(lengths), None)}
    arrays = {"offsets": bounds}
    for name, value in reference.items():
        label = f"reference[{name!r}]"
        array = checks.answer(label, value, *shapes[checks.known(name, shapes)])
        arrays[name] = checks.finite(label, array)
    return arrays


def write_rows(
    path: FilePath,
    *,
    vocab_size: int,
    labels: Any,
    seq_lens: Any = None,
    seq_lens_padded: Any = None,
    input_ids: Any = None,
    inputs_embeds: Any = None,
    position_ids: Any = None,
    sentinel: int = -1000,
    pad_id: int | None = None,
    extras: Mapping[str, tuple[str, Any]] | None = None,
    provenance: Provenance | None = None,
) -> None:
    """Writes a gyre/bshd file, rows of packed segments, which gyre-pack and gyre-shard read.

    B rows of S slots with up to M segments: input_ids [B, S] or inputs_embeds [B, S, H]; labels
    [B, S], shifted already, -100 where nothing is predicted; seq_lens, seq_lens_padded [B, M]: real
    tokens and slots of each segment, or the sentinel where there is none; position_ids [B, S],
    [axes, B, S] or [1, S]; a row that holds two documents needs its own.

    Without seq_lens_padded the slots of a segment are its real length. Without seq_lens each row of
    ids is one document, and pad_id the id in slots of padding, at the ends of rows alone.

    extras: what goes along unread, by name: (alignment, numbers of any type), slots [B, S, ...],
    rows [B, ...] or none.

    Raises ValueError or TypeError when an array breaks a rule; nothing is written then.
    """
    vocab_size = checks.size("vocab_size", vocab_size, 1)
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("one of input_ids and inputs_embeds is needed, and not both")
    attributes = {"vocab_size": vocab_size}
    arrays: dict[str, np.ndarray] = {}
    if input_ids is not None:
        ids = checks.integers("input_ids", input_ids, None, None)
        good = (ids >= 0) & (ids < vocab_size)
        checks.every("input_ids", ids, good, f"0 to {vocab_size - 1}")
        arrays["input_ids"] = ids
    else:
        embeds = checks.reals("inputs_embeds", inputs_embeds, None, None, None)
        checks.finite("inputs_embeds", embeds)
        arrays["inputs_embeds"] = checks.float32("inputs_embeds", embeds)
    rows, slots = next(iter(arrays.values())).shape[:2]
    arrays["labels"] = checks.integers("labels", labels, rows, slots)
    good = (arrays["labels"] >= 0) & (arrays["labels"] < vocab_size)
    good |= arrays["labels"] == IGNORED
    checks.every("labels", arrays["labels"], good, f"0 to {vocab_size - 1}, or {IGNORED}")
    if pad_id is not None:
        attributes["pad_id"] = checks.size("pad_id", pad_id, 0, vocab_size - 1)
    if seq_lens is not None:
        attributes["sentinel"] = sentinel
        arrays |= _lengths(seq_lens, seq_lens_padded, rows, slots, sentinel)
    else:
        _check_rows_without_tables(arrays, seq_lens_padded, pad_id)
    if position_ids is not None:
        arrays["position_ids"] = _positions(position_ids, rows, slots)
    shared = position_ids is None or arrays["position_ids"].shape[-2] != rows
    if shared and seq_lens is not None:
        documents = ((arrays["seq_lens"] > 0) & (arrays["seq_lens"] != sentinel)).sum(axis=1)
        alone = "at most 1, without position_ids of the row's own"
        checks.every("the number of documents of row", documents, documents <= 1, alone)
    fronts = {"slots": (rows, slots), "rows": (rows,), "none": ()}
    beside = {name: _extra(name, *extra, fronts) for name, extra in (extras or {}).items()}
    with new_file(path, "gyre/bshd", _provenance(provenance)) as file:
        group = file.create_group("bshd")
        for name, value in attributes.items():
            group.attrs[name] = np.int64(value)
        for name, array in arrays.items():
            put(group, name, array)
        for name, array in beside.items():
            aligned, given = (extras or {})[name]
            put(group, f"extras/{name}", array, as_bfloat16=is_bfloat16(given))
            group[f"extras/{name}"].attrs["aligned"] = aligned


def write_salm(
    path: FilePath,
    *,
    vocab_size: int,
    pad_id: int,
    placeholder_id: int,
    input_ids: Any,
    inputs_embeds: Any,
    target_ids: Any,
    audio: Sequence[Any],
    encoder: Any,
    provenance: Provenance | None = None,
) -> None:
    """Writes a gyre/salm file, rows of text with places for audio, which gyre-pack --input reads.

    B rows of S slots, padded on the left with pad_id: input_ids [B, S]; inputs_embeds [B, S, H], of the
    text; target_ids [B, S], not shifted, -100 where nothing is supervised. audio: the samples of each
    placeholder_id, in row-major order, arrays [samples]. encoder [window, H]: a frame is that many samples
    times it.

    Raises ValueError or TypeError when an array breaks a rule; nothing is written then.
    """
    attributes = {"vocab_size": checks.size("vocab_size", vocab_size, 1)}
    for name, value in (("pad_id", pad_id), ("placeholder_id", placeholder_id)):
        attributes[name] = checks.size(name, value, int(checks.INT32.min))
    if pad_id == placeholder_id:
        raise ValueError(f"pad_id and placeholder_id are both {pad_id}; they must be different ones")
    ids = checks.integers("input_ids", input_ids, None, None)
    good = (ids >= 0) & (ids < vocab_size) | (ids == pad_id) | (ids == placeholder_id)
    checks.every("input_ids", ids, good, f"0 to {vocab_size - 1}, {pad_id} or {placeholder_id}")
    targets = checks.integers("target_ids", target_ids, *ids.shape)
    good = (targets >= 0) & (targets < vocab_size) | (targets == IGNORED)
    checks.every("target_ids", targets, good, f"0 to {vocab_size - 1}, or {IGNORED}")
    embeds = checks.finite("inputs_embeds", checks.reals("inputs_embeds", inputs_embeds, *ids.shape, None))
    matrix = checks.finite("encoder", checks.reals("encoder", encoder, None, embeds.shape[2]))
    for extent, size in zip(("rows", "columns"), matrix.shape):
        checks.size(f"the number of {extent} of encoder", size, 1)
    samples = [checks.finite(f"audio[{i}]", checks.reals(f"audio[{i}]", item, None)) for i, item in enumerate(audio)]
    places = int((ids == placeholder_id).sum())
    if len(samples) != places:
        raise ValueError(f"there are {len(samples)} audio items; there must be {places}, one of each placeholder")
    joined = np.concatenate([np.empty(0, np.float32), *samples])
    reals = {"inputs_embeds": embeds, "audio": joined, "encoder": matrix}
    arrays = {"input_ids": ids, "target_ids": targets}
    arrays |= {name: checks.float32(name, array) for name, array in reals.items()}
    arrays["audio_offsets"] = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    with new_file(path, "gyre/salm", _provenance(provenance)) as file:
        group = file.create_group("salm")
        for name, value in attributes.items():
            group.attrs[name] = np.int64(value)
        for name, array in arrays.items():
            put(group, name, array)


def _extra(
    name: str, aligned: str, value: Any, fronts: Mapping[str, tuple[int, ...]]
) -> np.ndarray:
    """The array of an extra, checked."""
    if aligned not in fronts:
        wanted = "it must be slots, rows or none"
        raise ValueError(f"extras[{name!r}] is aligned to {aligned!r}; {wanted}")
    return checks.numbers(f"extras[{name!r}]", value, *fronts[aligned])


def _check_rows_without_tables(
    arrays: Mapping[str, np.ndarray], seq_lens_padded: Any, pad_id: int | None
) -> None:
    """Rows of ids, whose padding is at their ends."""
    needy = {"seq_lens_padded": seq_lens_padded, "inputs_embeds": arrays.get("inputs_embeds")}
    for name, given in needy.items():
        if given is not None:
            raise ValueError(f"{name} needs seq_lens, which was not given")
    if pad_id is None:
        raise ValueError("one of seq_lens and pad_id is needed: padding is unknown")
    ids = arrays["input_ids"]
    content = ids != pad_id
    seen = np.logical_or.accumulate(content, axis=1)
    coming = np.logical_or.accumulate(content[:, ::-1], axis=1)[:, ::-1]
    wanted = "another id than pad_id between other ids of a row"
    checks.every("input_ids", ids, content | ~seen | ~coming, wanted)


def _lengths(
    seq_lens: Any, seq_lens_padded: Any, rows: int, slots: int, sentinel: int
) -> dict[str, np.ndarray]:
    """The tables, checked; without slot lengths the real ones are these."""
    real = checks.integers("seq_lens", seq_lens, rows, None)
    name, room, tables = "seq_lens", real, {"seq_lens": real}
    if seq_lens_padded is not None:
        name = "seq_lens_padded"
        room = tables[name] = checks.integers(name, seq_lens_padded, *real.shape)
    there = real != sentinel
    same = (room != sentinel) == there
    checks.every(name, room, same, f"{sentinel} where seq_lens is, and only there")
    fits = ~there | ((real >= 0) & (real <= room))
    checks.every("seq_lens", real, fits, "at least 0, and at most the cell of seq_lens_padded")
    used, sums = there.any(axis=1), np.where(there, room, 0).sum(axis=1)
    right = ~used | (sums == slots)
    checks.every(f"the sums of the rows of {name}", sums, right, f"{slots}, the slots")
    last = np.logical_and.accumulate(used)
    checks.every("seq_lens", real[:, :1], (used == last)[:, None], "in a row before rows of none")
    return tables


def _positions(position_ids: Any, rows: int, slots: int) -> np.ndarray:
    given = to_numpy(position_ids)
    axes = [None] if given.ndim == 3 else []
    shared = given.shape[:1] == (1,) and given.ndim == 2
    array = checks.integers("position_ids", given, *axes, 1 if shared else rows, slots)
    checks.every("position_ids", array, array >= 0, "0 or more")
    return array
