"""The cases of packing and sharding of inputs/golden/: documents, the streams that they become, and
what each context-parallel rank holds of those, under every layout that has a formula.

Packed streams are the answers of packing, and hold those of sharding: /reference/cp<N>/<layout> has
the datasets of /shards (SCHEMA.md), and the attributes layout, cp and, where it matters, stripe or
chunk. `balanced-joint` and `hybrid` are missing: they are results of a search, not of a formula.

Shapes below use: S = slots of a bin, N = its segments, L = slots of a rank.
"""

import functools

import numpy as np

import golden_files

CASES = []
VOCAB, IGNORED = 101, -100
ODD = [7, 1, 0, 9, 13, 2, 5, 16, 3, 31, 0, 8]
SHORT = [3, 1, 1, 2, 0, 5, 1]
HALF = [9, 10, 9, 17, 9, 9, 10, 9, 9, 2]  # two of 9 are more than a bin of 17
MANY = [(7 * i) % 19 + 1 for i in range(80)]


def add(name, kind, edge, guards, tags, write, run, more=()):
    """Adds a case."""
    commands = tuple(run), tags, tuple(more)
    CASES.append(golden_files.Case(name, kind, edge, guards, write, *commands))


def running(lengths):
    """int32 [N + 1]: 0 and the running sums."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def rounded(length, multiple):
    """The next multiple."""
    return -(-length // multiple) * multiple


def documents(lengths):
    """Tokens of each document: the same for the same lengths. Id 0, which pads, is content, too."""
    rng = golden_files.generator(f"documents {lengths}")
    tokens = [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
    for t in tokens[::3]:
        t[-2:] = 0
    return tokens


def next_fit(lengths, multiple, capacity):
    """Bins as lists of documents, in order; one is closed by the first that does not fit."""
    bins, room = [], -1
    for i, length in enumerate(lengths):
        slots = rounded(length, multiple)
        if slots > room:
            bins.append([])
            room = capacity
        bins[-1].append(i)
        room -= slots
    return bins


def multimodal_positions(tokens, slots):
    """[3, slots]: time, height, width of a document as in Qwen2-VL: two tokens of text, an image of 2
    x 3 patches, text again; each axis counts on in padding."""
    image = np.array([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]) + 2
    text = np.arange(slots)
    found = np.concatenate([np.tile(text[:2], (3, 1)), image, np.tile(text + 5, (3, 1))], axis=1)
    found = found[:, :slots]
    for i in range(max(1, tokens), slots):
        found[:, i] = found[:, i - 1] + 1
    return found


def packed_bin(tokens, multiple, axes=1):
    """One bin of documents: each in the first of as many slots as a multiple needs."""
    real = running([t.size for t in tokens])
    slots = running([rounded(t.size, multiple) for t in tokens])
    ids, labels = np.zeros(slots[-1], np.int32), np.full(slots[-1], IGNORED, np.int32)
    positions = np.zeros((axes, slots[-1]) if axes > 1 else slots[-1], np.int32)
    for t, begin, end in zip(tokens, slots[:-1], slots[1:]):
        ids[begin : begin + t.size] = t
        labels[begin : begin + max(0, t.size - 1)] = t[1:]
        places = multimodal_positions(t.size, end - begin)
        positions[..., begin:end] = places if axes == 3 else np.arange(end - begin)
    return {
        "cu_seqlens": real,
        "cu_seqlens_padded": slots,
        "ids": ids,
        "labels": labels,
        "positions": positions,
    }


def joined(parts):
    """Arrays of bins, one behind the other along their last axis."""
    return {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}


def chunks(slots, count):
    """[count, slots of a chunk]: slots in equal consecutive chunks, the row padded on the right."""
    return np.arange(rounded(slots, count)).reshape(count, -1)


def head_and_tail(slots, cp):
    """[cp, slots / cp]: chunks r and 2 cp - 1 - r of the slots, for rank r."""
    parts = chunks(slots, 2 * cp)
    return np.concatenate([parts[:cp], parts[: cp - 1 : -1]], axis=1)


def dealt(bin_, cp, chunk):
    """[cp, L]: chunks by descending causal pairs, each to the rank with the fewest that has room;
    ties: the lower chunk, the lower rank."""
    slots = int(bin_["cu_seqlens_padded"][-1])
    pairs = np.zeros(rounded(slots, chunk * cp), np.int64)
    for begin, length in zip(bin_["cu_seqlens_padded"], np.diff(bin_["cu_seqlens"])):
        pairs[begin : begin + length] = 1 + np.arange(length)
    cost = pairs.reshape(-1, chunk).sum(axis=1)
    load, held = np.zeros(cp, np.int64), [[] for _ in range(cp)]
    for c in np.argsort(-cost, kind="stable"):
        room = [r for r in range(cp) if len(held[r]) < cost.size // cp]
        rank = min(room, key=lambda r: (load[r], r))
        load[rank] += cost[c]
        held[rank].append(c)
    every = np.arange(pairs.size).reshape(-1, chunk)
    return np.array([every[sorted(mine)].reshape(-1) for mine in held])


def index_of(layout, bin_, cp, option):
    """[cp, L] int32: slots of the bin's stream that each rank holds; those past its end are padding
    of the layout."""
    bounds = bin_["cu_seqlens_padded"]
    slots = int(bounds[-1])
    if layout == "dual-chunk-swap":
        parts = [b + head_and_tail(e - b, cp) for b, e in zip(bounds[:-1], bounds[1:])]
        index = np.concatenate([np.zeros((cp, 0), np.int64), *parts], axis=1)
    elif layout == "contiguous":
        index = chunks(slots, cp)
    elif layout == "contiguous-documents":
        parts = [b + chunks(e - b, cp) for b, e in zip(bounds[:-1], bounds[1:])]
        index = np.concatenate([np.zeros((cp, 0), np.int64), *parts], axis=1)
    elif layout == "zigzag":
        index = head_and_tail(slots, cp)
    elif layout == "striped":
        stripes = np.arange(rounded(slots, cp * option)).reshape(-1, cp, option)
        index = stripes.swapaxes(0, 1).reshape(cp, -1)
    else:
        index = dealt(bin_, cp, option)
    return index.astype(np.int32)


def shards_of_bin(layout, bin_, cp, option):
    """What each rank holds of a bin: index and contents [cp, L], positions of axes [cp, axes, L],
    boundaries [cp, N + 1]."""
    index = index_of(layout, bin_, cp, option)
    bounds = bin_["cu_seqlens_padded"]
    inside = index < bounds[-1]
    found = {"index": index}
    for name, padding in (("ids", 0), ("labels", IGNORED), ("positions", 0)):
        blank = np.full((*bin_[name].shape[:-1], 1), padding, np.int32)
        array = np.concatenate([bin_[name], blank], axis=-1)
        found[name] = np.moveaxis(array[..., np.where(inside, index, -1)], -2, 0)
    segment = np.searchsorted(bounds, index, side="right") - 1
    ends = bounds[:-1] + np.diff(bin_["cu_seqlens"])
    real = inside & (index < np.append(ends, 0)[segment])
    for name, counted in (("cu_seqlens", real), ("cu_seqlens_padded", inside)):
        counts = [np.bincount(s[c], minlength=ends.size) for s, c in zip(segment, counted)]
        found[name] = np.array([running(count) for count in counts])
    return found


def extras_of(rng, slots):
    """Name, alignment, array of what goes along with a stream."""
    return [
        ("attention_mask", "slots", rng.integers(0, 2, slots).astype("u1")),
        ("image", "slots", (rng.integers(-99, 100, (slots, 3)) / 2).astype("f4")),
        ("loss_mask", "slots", rng.integers(0, 2, slots).astype("u1")),
        ("weight", "rows", rng.integers(-99, 100, (4, 2)).astype("i2")),
        ("scale", "none", np.array(0.75)),
    ]


def labels_ahead(tokens, multiple, depth):
    """[S] int32: of each slot of a stream the token so many places on in its document, or -100."""
    parts = []
    for t in tokens:
        part = np.full(rounded(t.size, multiple), IGNORED, np.int32)
        part[: max(0, t.size - depth)] = t[depth:]
        parts.append(part)
    return np.concatenate(parts)


def put_extras(group, extras):
    """Writes extras: name, alignment, array; labels also what is in their padding."""
    group = group.create_group("extras")
    for name, aligned, array in extras:
        golden_files.put(group, name, array)
        group[name].attrs["aligned"] = aligned
        if is_labels(name):
            group[name].attrs["padding"] = np.int64(IGNORED)


def is_labels(name):
    """Whether an extra holds labels of further tokens."""
    return name.startswith("labels_")


def shards_of_extras(extras, bins, layout, cp, option):
    """What each rank holds of extras, [cp, L, ...] of slots: zeros in padding of the layout, of
    labels -100; no mask of attention."""
    found, begin, index = [], 0, []
    for bin_ in bins:
        slots = int(bin_["cu_seqlens_padded"][-1])
        mine = index_of(layout, bin_, cp, option)
        index.append(np.where(mine < slots, begin + mine, -1))
        begin += slots
    index = np.concatenate(index, axis=1)
    for name, aligned, array in extras:
        if aligned == "slots" and name != "attention_mask":
            blank = np.zeros((1, *array.shape[1:]), array.dtype)
            blank += IGNORED if is_labels(name) else 0
            found.append((name, aligned, np.concatenate([array, blank])[index]))
        elif aligned != "slots":
            found.append((name, aligned, array))
    return found


def put_shards(group, bins, bin_offsets, layout, cp, option):
    """Writes the answers of one layout: the datasets of /shards."""
    group.attrs["layout"], group.attrs["cp"] = layout, np.int64(cp)
    if layout in ("striped", "balanced"):
        group.attrs["stripe" if layout == "striped" else "chunk"] = np.int64(option)
    parts = [shards_of_bin(layout, b, cp, option) for b in bins]
    locals_ = [0, *np.cumsum([part["index"].shape[1] for part in parts])]
    arrays = {"bin_offsets": bin_offsets, "slot_offsets": np.array(locals_, np.int64)}
    golden_files.put_all(group, arrays | joined(parts))


def write_documents(path, lengths):
    """Writes a gyre/documents file."""
    tokens = documents(lengths)

    def fill(file):
        group = file.create_group("documents")
        group.attrs["vocab_size"], group.attrs["tokenizer"] = np.int64(VOCAB), "numbers"
        golden_files.put(group, "tokens", np.concatenate(tokens))
        golden_files.put(group, "offsets", running(lengths).astype(np.int64))

    golden_files.write_case(path, "documents", fill)


def place_of(layout, cp, option):
    """Where below /reference the shards of a layout are."""
    return f"cp{cp}/{layout}" + (f"-{option}" if option > 1 else "")


def shard_commands(file, layout, cp, option):
    """Sharding by Gyre's program, and the comparison."""
    name = {"striped": f" --stripe {option}", "balanced": f" --chunk {option}"}.get(layout, "")
    place = place_of(layout, cp, option)
    return [f"gyre-shard --input {file} --cp {cp} --layout {layout}{name} -o shards.h5",
            f"gyre-compare shards.h5:/shards {file}:/reference/{place}"]


def write_packed(path, lengths, multiple, capacity, layouts, extras=False, mtp=1, axes=1):
    """Writes a gyre/packed file with the answers of sharding it; layouts: (name, cp, option)."""
    tokens = documents(lengths)
    packing = next_fit(lengths, multiple, capacity)
    bins = [packed_bin([tokens[i] for i in some], multiple, axes) for some in packing]
    offsets = np.array([0, *np.cumsum([len(some) for some in packing])], np.int64)
    slots = sum(int(b["cu_seqlens_padded"][-1]) for b in bins)
    beside = extras_of(golden_files.generator(f"extras {lengths}"), slots) if extras else []
    for depth in range(2, mtp + 1):
        ahead = [labels_ahead([tokens[i] for i in some], multiple, depth) for some in packing]
        beside.append((f"labels_{depth}", "slots", np.concatenate(ahead)))

    def fill(file):
        group = file.create_group("packed")
        for name, value in (("bin_capacity", capacity), ("slot_multiple", multiple),
                            ("documents", len(lengths)), ("vocab_size", VOCAB), ("hidden_size", 0)):
            group.attrs[name] = np.int64(value)
        group.attrs["tokenizer"], group.attrs["algorithm"] = "numbers", "next-fit"
        document = np.array([i for some in packing for i in some], np.int64)
        golden_files.put_all(group, {"bin_offsets": offsets, "document": document} | joined(bins))
        if beside:
            put_extras(group, beside)
        reference = golden_files.reference_group(file)
        for layout, cp, option in layouts:
            group = reference.create_group(place_of(layout, cp, option))
            put_shards(group, bins, offsets, layout, cp, option)
            if beside:
                put_extras(group, shards_of_extras(beside, bins, layout, cp, option))

    golden_files.write_case(path, "packed", fill)


def add_packed(name, edge, guards, tags, source, lengths, multiple, layouts, capacity=0,
               extras=False, mtp=1, axes=1):
    """Adds a stream; `source` is the file of its documents, or None."""
    capacity = capacity or sum(rounded(n, multiple) for n in lengths)
    shape = {"lengths": lengths, "multiple": multiple, "capacity": capacity, "layouts": layouts,
             "extras": extras, "mtp": mtp, "axes": axes}
    write = functools.partial(write_packed, **shape)
    file, run = f"inputs/golden/packed_{name}.h5", []
    if source:
        cp = max(1, multiple // 2)
        run += [f"gyre-pack --input inputs/golden/{source}.h5 --algorithm next-fit "
                f"--capacity {capacity} --cp {cp}{f' --mtp {mtp}' if mtp > 1 else ''} -o packed.h5",
                f"gyre-compare packed.h5:/packed {file}:/packed"]
    run += shard_commands(file, *layouts[0])
    more = [line for layout in layouts[1:] for line in shard_commands(file, *layout)]
    add(f"packed_{name}", "packed", edge, guards, tags, write, run, more)


def layouts_for(cp, options=True):
    """Every layout with a formula; stripes of 1 and 3 slots, chunks of 4."""
    plain = [("dual-chunk-swap", cp, 1), ("contiguous", cp, 1), ("zigzag", cp, 1),
             ("striped", cp, 1)]
    return plain + ([("striped", cp, 3), ("balanced", cp, 4)] if options else [])


def add_all():
    """Adds the cases."""
    pack = ("gyre-pack --input inputs/golden/{}.h5 --capacity 256 --cp 4 -o packed.h5",
            "gyre-pack --input packed.h5 --unpack -o again.h5",
            "gyre-compare again.h5:/documents inputs/golden/{}.h5:/documents")
    by_id, packed = "padding that is found by its id (NVIDIA-NeMo/Automodel #3223)", "; what becomes of them is in packed_*.h5"
    for name, lengths, edge, guards in (
        ("documents_odd", ODD, "documents of odd lengths, and empty ones; id 0 is content" + packed, by_id),
        ("documents_short", SHORT, "documents that are shorter than 2 cp" + packed, by_id),
        ("documents_half", HALF, "documents just longer than half of a bin of 17 tokens, and one as long as it",
         "as many bins as the sum of lengths needs, so that one of them is too full (volcengine/verl #7553)"),
        ("documents_many", MANY, "80 documents", "more documents than a mask of 64 bits has places"),
    ):
        add(name, "documents", edge, guards, ("packing",), functools.partial(write_documents, lengths=lengths),
            [line.format(name) for line in pack])
    tight = [x for cp in (3, 1, 2, 4, 8) for x in layouts_for(cp) if x[0] != "dual-chunk-swap"]
    add_packed("odd_cp1", "no slot of padding in the stream: layouts append theirs, cp 1, 2, 3, 4 "
               "and 8", "tails that are dropped where cp does not divide the stream "
               "(fla-org/flash-linear-attention #1092)",
               ("packing", "sharding", "tail"), "documents_odd", ODD, 1, tight)
    guards = {
        2: "real lengths of a rank taken for the document's by cp (NVIDIA/TransformerEngine #1929, "
        "#1930)",
        3: "a chunk without a token (NVIDIA/TransformerEngine #2186); boundaries that are sharded "
        "like tokens (NVIDIA-NeMo/Megatron-Bridge #1964)",
        4: "positions that begin anew on every rank (NVIDIA/Megatron-LM #5243)",
        8: "labels that are shifted after sharding (NVIDIA/Megatron-LM #4495)",
    }
    for cp, guard in guards.items():
        more = [("dual-chunk-swap", 1, 1)] if cp == 2 else []
        add_packed(f"odd_cp{cp}", f"segments in multiples of {2 * cp} slots, over {cp} ranks",
                   guard, ("packing", "sharding"), "documents_odd", ODD, 2 * cp,
                   layouts_for(cp) + more)
    for cp in (4, 8):
        add_packed(f"short_cp{cp}", f"documents shorter than 2 cp = {2 * cp}: ranks without a "
                   "token of them", "an empty part that ends a copy (ISEEKYAN/mbridge #158); "
                   "indices of a document shorter than its chunks", ("packing", "sharding"),
                   "documents_short", SHORT, 2 * cp, layouts_for(cp, False))
    add_packed("bins_cp2", "several streams, each sharded by itself",
               "boundaries of one stream that are used for all",
               ("packing", "sharding", "bins"), "documents_odd", ODD, 4, layouts_for(2), 40)
    add_packed("parts_of_documents", "segments in multiples of 24 slots, in consecutive parts over 1, 2, 3, "
               "4 and 8 ranks", "consecutive parts of the stream taken for parts of each document",
               ("packing", "sharding"), "documents_odd", ODD, 24,
               [("contiguous-documents", cp, 1) for cp in (8, 1, 2, 3, 4)])
    add_packed("long_cp4", "one document of 698 tokens in 704 slots: 170, 176, 176 and 176 tokens "
               "a rank", "698 / 4 real tokens on every rank (NVIDIA/TransformerEngine #3331)",
               ("packing", "sharding", "long"), None, [698], 8, layouts_for(4, False)[:1])
    add_packed("extras_cp2", "two streams with arrays that go along unread; a layout that pads",
               "a mask of attention by slots that a rank takes for its own; extras of another "
               "stream", ("sharding", "bins", "extras"), None, SHORT, 4,
               [("dual-chunk-swap", 2, 1), ("striped", 2, 3)], 16, extras=True)
    add_packed("labels_ahead_cp2", "labels of the 2nd to the 6th token ahead, for multi-token "
               "prediction; documents that are shorter; a layout that pads",
               "labels that leave their document, or come from the next rank's shard "
               "(NVIDIA/Megatron-LM #4495); 0 as the label of padding",
               ("packing", "sharding", "bins", "labels-ahead"), "documents_odd", ODD, 4,
               [("dual-chunk-swap", 2, 1), ("zigzag", 2, 1), ("striped", 2, 3)], 40, mtp=6)
    add_packed("positions_cp2", "positions of three axes (time, height, width), as of a model of "
               "text and images; two streams; a layout that pads",
               "positions that are cut along their axes, not their slots; the first axis for all",
               ("sharding", "bins", "positions"), None, ODD, 4,
               [("dual-chunk-swap", 2, 1), ("contiguous", 2, 1), ("striped", 2, 3)], 80, axes=3)


add_all()
