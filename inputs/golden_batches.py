"""The cases of batches of inputs/golden/: rectangular rows of packed segments, and rows of text
with places for audio, with the packed streams that they become.

/reference/<tail> of rows, for the ways in which padding at the end of a row is treated, and
/reference/cp<N> of text with audio have the datasets of /packed (SCHEMA.md), and of rows, too,
padding_mask, uint8 [B S]: 1 where a slot holds no token. Their attributes are tail, slot_multiple
and chunks (streams of the rows; 1 if missing), and cp. Shapes: B = rows, S = slots of a row, M =
most segments of a row, N = segments of the stream.
"""

import functools

import numpy as np

import golden_files
from golden_packing import IGNORED, add, multimodal_positions, rounded, running

NONE = -1000  # a cell without a segment
MULTIPLE, CP = 4, 2  # what the slots of segments are multiples of, and what for
EOS = 100  # ends documents, and pads
TAILS = ("keep", "own-segment", "absorb")


def tables(lengths):
    """[B, M] int64 of lists of lengths."""
    most = max(len(row) for row in lengths)
    return np.array([row + [NONE] * (most - len(row)) for row in lengths], np.int64)


def row_arrays(rng, width, real, slots, axes):
    """Rows of `width` slots with segments of these real lengths in so many slots; positions of several
    axes are [axes, B, S]."""
    arrays = {
        "input_ids": np.full((len(real), width), EOS),
        "labels": np.full((len(real), width), IGNORED),
        "position_ids": np.zeros((*[axes] * (axes > 1), len(real), width), np.int64),
        "seq_lens": tables(real),
        "seq_lens_padded": tables(slots),
    }
    for row, (lengths, rooms) in enumerate(zip(real, slots)):
        for n, room, begin in zip(lengths, rooms, running(rooms)):
            tokens = rng.integers(0, EOS, n)
            tokens[-1:] = EOS
            arrays["input_ids"][row, begin : begin + n] = tokens
            arrays["labels"][row, begin : begin + max(0, n - 1)] = tokens[1:]
            places = multimodal_positions(n, room) if axes == 3 else np.arange(room)
            arrays["position_ids"][..., row, begin : begin + room] = places
    return arrays


def boundaries(real, slots, width, tail):
    """Real and slot boundaries of the stream, int32 [N + 1] each."""
    segments = [list(zip(lengths, rooms)) for lengths, rooms in zip(real, slots)]
    if tail == "own-segment":
        for row in segments:
            for n, room in row[-1:]:
                kept = rounded(n, MULTIPLE)
                row[-1:] = [(n, kept)] + [(0, room - kept)] * (room > kept)
    pairs = [pair for row in segments for pair in row]
    cu, padded = (running([pair[i] for pair in pairs]) for i in (0, 1))
    total = len(real) * width
    if tail == "absorb" and (cu[:-1] == padded[:-1]).all() and cu[-1] < total:
        cu[-1] = total
        return cu, cu
    if padded[-1] < total:  # rows of padding
        cu, padded = np.append(cu, cu[-1:]), np.append(padded, np.int32(total))
    return cu, padded


def ids_alone(rng, width, real):
    """Rows without tables: documents of these lengths, which do not hold the id that pads."""
    ids = np.full((len(real), width), EOS)
    labels = np.full((len(real), width), IGNORED)
    for row, n in enumerate(real):
        ids[row, :n] = rng.integers(0, EOS, n)
        labels[row, : max(0, n - 1)] = ids[row, 1:n]
    return {"input_ids": ids, "labels": labels}


def extras_of(rng, rows, width):
    """Name, alignment, array, type of what goes along; all are exact in their types."""
    some = lambda *shape: rng.integers(-99, 100, shape)  # noqa: E731
    return (
        ("attention_mask", "slots", some(rows, width) % 2, "u1"),
        ("grid", "none", some(2, 3), ">i4"),
        ("image", "slots", some(rows, width, 2) / 2, "f2"),
        ("weight", "rows", some(rows) / 4, golden_files.BFLOAT16),
        ("word", "rows", some(rows, 2) / 4, golden_files.BFLOAT16_WORDS),
    )


def tails_for(extras):
    """The tails that a file of rows has streams for: extras are the same under all."""
    return TAILS[:1] if extras else TAILS


def put_extras(group, extras):
    """Writes extras: name, alignment, array, type."""
    group = group.create_group("extras")
    for name, aligned, array, store in extras:
        golden_files.put(group, name, array, store)
        group[name].attrs["aligned"] = aligned


def joined_boundaries(real, slots, width, tail, chunks):
    """Boundaries of each of so many streams, one behind the other, and bin_offsets."""
    each = len(real) // chunks
    found = [boundaries(real[i : i + each], slots[i : i + each], width, tail)
             for i in range(0, len(real), each)]
    offsets = np.array([0, *np.cumsum([cu.size - 1 for cu, _ in found])], np.int64)
    return *(np.concatenate(parts) for parts in zip(*found)), offsets


def write_rows(path, name, width, real, slots, extras=False, chunks=1, axes=1):
    """Writes a gyre/bshd file with its streams. Without `slots` the rows, documents of `real`
    tokens, have no tables."""
    rng, tables_too = golden_files.generator(name), slots is not None
    if tables_too:
        arrays = row_arrays(rng, width, real, slots, axes)
    else:
        arrays = ids_alone(rng, width, real)
        real = [[n] if n else [] for n in real]
        slots = [[width] if row else [] for row in real]
    beside = extras_of(rng, len(real), width) if extras else ()
    mask = np.ones((len(real), width), np.uint8)
    for row, (lengths, rooms) in enumerate(zip(real, slots)):
        for n, begin in zip(lengths, running(rooms)):
            mask[row, begin : begin + n] = 0
    positions = arrays.get("position_ids", np.tile(np.arange(width), (len(real), 1)))

    def fill(file):
        group = file.create_group("bshd")
        group.attrs["vocab_size"] = np.int64(EOS + 1)
        group.attrs["sentinel" if tables_too else "pad_id"] = np.int64(NONE if tables_too else EOS)
        golden_files.put_all(group, arrays)
        if extras:
            put_extras(group, beside)
        reference = golden_files.reference_group(file)
        for tail in tails_for(extras):
            how = "keep" if tail == "absorb" and not tables_too else tail
            cu, padded, offsets = joined_boundaries(real, slots, width, how, chunks)
            stream = {
                "bin_offsets": offsets,
                "document": np.arange(offsets[-1]),
                "cu_seqlens": cu,
                "cu_seqlens_padded": padded,
                "ids": arrays["input_ids"].reshape(-1).astype(np.int32),
                "labels": arrays["labels"].reshape(-1).astype(np.int32),
                "positions": positions.reshape(*positions.shape[:-2], -1).astype(np.int32),
                "padding_mask": mask.reshape(-1),
            }
            group = reference.create_group(tail)
            group.attrs["tail"], group.attrs["slot_multiple"] = tail, np.int64(MULTIPLE)
            if chunks > 1:
                group.attrs["chunks"] = np.int64(chunks)
            golden_files.put_all(group, stream)
            if extras:
                put_extras(group, [(n, aligned, x.reshape(-1, *x.shape[2:]), store)
                                   if aligned == "slots" else (n, aligned, x, store)
                                   for n, aligned, x, store in beside])

    golden_files.write_case(path, "bshd", fill)


def add_rows(name, edge, guards, tags, width, real, slots, extras=False, chunks=1, axes=1, more=()):
    """Adds a batch of rows."""
    name = "rows_" + name
    write = functools.partial(write_rows, name=name, width=width, real=real, slots=slots,
                              extras=extras, chunks=chunks, axes=axes)
    file, option = f"inputs/golden/{name}.h5", f" --chunks {chunks}" if chunks > 1 else ""
    runs = [[f"gyre-pack --input {file} --cp {CP}{option} --tail {tail} -o packed.h5",
             f"gyre-compare --common packed.h5:/packed {file}:/reference/{tail}"]
            for tail in tails_for(extras)]
    if extras:
        runs[0].append(f"gyre-compare packed.h5:/packed/extras {file}:/reference/keep/extras")
    rest = [line for run in runs[1:] for line in run] + [line.format(file) for line in more]
    add(name, "bshd", edge, guards, ("rows", *tags), write, runs[0], rest)


# Text with audio: 0 pads, A stands for audio.
A, WINDOW = 50, 4
TEXT = np.array([
    [0, 0, 5, A, 6, 7, 8],
    [A, 1, 2, 0, 3, A, 4],  # the id that pads, inside a row: content without a label
    [9, 8, 7, 6, 5, 4, 3],  # no audio
    [0, 0, 0, 0, 0, A, 2],  # of no frame, see below
    [0, 0, 0, 0, 0, 0, 1],
])
SUPERVISED = np.array([[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0, 1], [0, 0, 0, 1, 0, 1, 1],
                       [0] * 7, [0] * 6 + [1]], bool)
SAMPLES = [5 * WINDOW, 2 * WINDOW + 3, WINDOW, WINDOW - 1]


def audio_stream(arrays, audio, cp):
    """The packed stream of a batch of text with audio."""
    pending, rows = list(audio), []
    names = ("input_ids", "target_ids", "inputs_embeds")
    for ids, targets, text in zip(*(arrays[name] for name in names)):
        vectors, labels = [], []
        for i in range(np.flatnonzero(ids != 0)[0], ids.size):
            if ids[i] == A:
                samples = pending.pop(0)
                frames = samples[: samples.size // WINDOW * WINDOW].reshape(-1, WINDOW)
                vectors += list(frames @ arrays["encoder"])
                labels += [IGNORED] * len(frames)
            else:
                vectors.append(text[i])
                labels.append(IGNORED if ids[i] == 0 else targets[i])
        rows.append((np.array(vectors), labels[1:] + [IGNORED]))
    cu = running([len(labels) for _, labels in rows])
    padded = running([rounded(len(labels), 2 * cp if cp > 1 else 1) for _, labels in rows])
    embeddings = np.zeros((padded[-1], text.shape[1]), np.float32)
    targets = np.full(padded[-1], IGNORED, np.int32)
    for (vectors, labels), begin in zip(rows, padded):
        embeddings[begin : begin + len(labels)] = vectors
        targets[begin : begin + len(labels)] = labels
    return {
        "bin_offsets": np.array([0, len(rows)], np.int64),
        "document": np.arange(len(rows)),
        "cu_seqlens": cu,
        "cu_seqlens_padded": padded,
        "embeddings": embeddings,
        "labels": targets,
        "positions": np.concatenate([np.arange(n) for n in np.diff(padded)]).astype(np.int32),
    }


def write_audio(path, name):
    """Writes a gyre/salm file with its streams for several numbers of ranks."""
    rng = golden_files.generator(name)
    whole = lambda *shape: rng.integers(-8, 9, shape).astype(np.float32)  # noqa: E731
    arrays = {
        "input_ids": TEXT,
        "target_ids": np.where(SUPERVISED, TEXT, IGNORED),
        "inputs_embeds": whole(*TEXT.shape, 3),
        "encoder": whole(WINDOW, 3),
    }
    audio = [whole(n) for n in SAMPLES]

    def fill(file):
        group = file.create_group("salm")
        for key, value in (("vocab_size", A), ("pad_id", 0), ("placeholder_id", A)):
            group.attrs[key] = np.int64(value)
        samples = {"audio": np.concatenate(audio), "audio_offsets": running(SAMPLES).astype("i8")}
        golden_files.put_all(group, arrays | samples)
        reference = golden_files.reference_group(file)
        for cp in (1, 2, 4):
            group = reference.create_group(f"cp{cp}")
            group.attrs["cp"] = np.int64(cp)
            golden_files.put_all(group, audio_stream(arrays, audio, cp))

    golden_files.write_case(path, "salm", fill)


def audio_commands(cp):
    """Packing by Gyre's program, and the comparison."""
    return (f"gyre-pack --input inputs/golden/audio.h5 --cp {cp} -o packed.h5",
            f"gyre-compare packed.h5:/packed inputs/golden/audio.h5:/reference/cp{cp}")


ABSORBED = "padding that is counted as tokens after the last segment has absorbed it"
add_rows("padding", "padding between segments; cells without a segment; a segment of no token; the "
         "id that pads ends documents, too", "padding that is found by its id "
         "(NVIDIA-NeMo/Automodel #3223); boundaries that ignore it (NVIDIA/cudnn-frontend #737)",
         ("padding",), 12, [[3, 8], [12], [1, 0, 2], [2, 5]], [[4, 8], [12], [4, 4, 4], [4, 8]])
add_rows("tail", "padding at the end of the stream alone, which may be absorbed", ABSORBED,
         ("tail",), 24, [[24], [8, 5]], [[24], [8, 16]])
add_rows("of_padding", "a last row of nothing but padding", ABSORBED, ("tail",), 8, [[8], []],
         [[8], []])
IDS = "padding that is found by its id (NVIDIA-NeMo/Automodel #3223)"
SHARD = "gyre-shard --input {} --cp 2"
add_rows("without_tables", "ids alone: rows are documents, padding is at the end of the stream, a "
         "row of it, too", IDS, ("tail", "without-tables"), 12, [12, 12, 7, 0], None, more=(SHARD,))
add_rows("padded", "ids alone, every row padded on the right: a stream of each", IDS,
         ("tail", "without-tables"), 12, [12, 5, 9, 3], None, chunks=4,
         more=(SHARD + " --chunks 4", SHARD + " --format bshd"))
add_rows("extras", "arrays that go along unread, of several types and shapes, aligned to slots, "
         "rows or nothing", "arrays that are cut by their shape, or as tokens of another type",
         ("extras",), 12, [[3, 8], [12], [2, 5]], [[4, 8], [12], [4, 8]], extras=True,
         more=(SHARD,))
add_rows("positions", "positions of three axes (time, height, width), as of a model of text and "
         "images; streams of two rows each", "positions that are cut into streams along their axes, "
         "or of one axis for all", ("positions",), 16, [[11, 3], [16], [0, 9], [14]],
         [[12, 4], [16], [4, 12], [16]], chunks=2, axes=3,
         more=(SHARD + " --chunks 2",))
add("audio", "salm",
    "text with audio: none, some, and less than a frame of it; padding on the left",
    "labels that are shifted after rows were joined, or sharded", ("packing", "audio"),
    functools.partial(write_audio, name="audio"), audio_commands(2),
    audio_commands(1) + audio_commands(4))
