"""The cases of what ranks hold and exchange together of inputs/golden/: shards of rows, heads
exchanged for tokens, encodings of audio and their gradients. SCHEMA.md has their forms. They are
made of other files of the suite, which must be there.
"""

import functools
import os

import h5py
import numpy as np

import golden_files
from golden_batches import WINDOW
from golden_packing import IGNORED, add, rounded, running


def beside(path, name):
    """Another file of the suite, open."""
    return h5py.File(os.path.join(os.path.dirname(path), name), "r")


def filled(path, kind, attributes, arrays):
    """Writes a case with one group of attributes and arrays."""

    def fill(file):
        group = file.create_group(kind.replace("-", "_"))
        for name, value in attributes.items():
            group.attrs[name] = np.int64(value) if isinstance(value, int) else value
        group.attrs["input_sha256"] = ""
        golden_files.put_all(group, arrays)

    golden_files.write_case(path, kind, fill)


def write_row_shards(path, source, cp, tp):
    """Shards of rows of ids without tables; positions of padding count on."""
    with beside(path, source) as file:
        ids, labels = (file["bshd"][name][()] for name in ("input_ids", "labels"))
        pad = file["bshd"].attrs["pad_id"]
    rows, slots = ids.shape
    width = rounded(slots, 2 * cp * tp)
    real = np.zeros((rows, width), np.int32)
    for row in range(rows):
        tokens = np.flatnonzero(ids[row] != pad)
        if tokens.size:
            real[row, tokens[0] : tokens[-1] + 1] = 1
    add_padding = lambda x, fill: np.pad(x, ((0, 0), (0, width - slots)), constant_values=fill)  # noqa: E731
    chunk = width // (2 * cp)
    index = np.array([[*range(r * chunk, (r + 1) * chunk),
                       *range(width - (r + 1) * chunk, width - r * chunk)] for r in range(cp)])
    cut = lambda x: np.stack([x[..., own] for own in index])  # noqa: E731
    filled(path, "row-shards",
           {"cp": cp, "tp": tp, "hidden_size": 0, "pad_positions": "counting"},
           {"index": index.astype(np.int32), "input_ids": cut(add_padding(ids, 0)),
            "key_mask": cut(real), "labels": cut(add_padding(labels, IGNORED)),
            "position_ids": cut(np.tile(np.arange(width), (1, rows, 1)))})


def elements(heads, slots, dim):
    """[heads, slots, dim]: what SCHEMA.md says that tensors hold."""
    h, t, d = np.arange(heads)[:, None, None], slots[None, :, None], np.arange(dim)
    return ((7919 * h + 31 * t + 3 * d) % 2**16).astype(np.float32)


def swapped(bounds, ranks):
    """[ranks, slots]: the slots of dual-chunk-swap over segments with these boundaries."""
    own = [[] for _ in range(ranks)]
    for begin, end in zip(bounds[:-1], bounds[1:]):
        chunks = np.split(np.arange(begin, end), 2 * ranks)
        for r in range(ranks):
            own[r] += [*chunks[r], *chunks[2 * ranks - 1 - r]]
    return np.array(own, np.int32)


def exchanged(x, ranks, copies):
    """Tensors [heads, N, D] of whole streams as each rank has its heads: [ranks, heads', N, D]."""
    return np.stack(np.split(np.repeat(x, copies, axis=0), ranks))


def exchange_of_bin(ids, positions, bounds, ranks, heads, kv_heads, dim):
    """The arrays of one bin with segments of these boundaries, in slots."""
    n = ids.size
    pad = -n % ranks
    slots = np.arange(n + pad)
    q, kv = elements(heads, slots, dim), elements(kv_heads, slots, dim)
    cut = lambda x: np.stack(np.split(x, ranks, axis=1))  # noqa: E731
    copies = max(1, ranks // kv_heads)
    end = bounds[-1:] + pad if pad else bounds[:0]
    arrays = {
        "ids": np.pad(ids, (0, pad)).reshape(ranks, -1).astype(np.int64),
        "positions": np.concatenate([positions, np.arange(pad)])[None].astype(np.int64),
        "cu_seqlens": np.concatenate([bounds, end - pad]).astype(np.int32),
        "cu_seqlens_padded": np.concatenate([bounds, end]).astype(np.int32),
        "q": cut(q), "kv": cut(kv), "d_kv": copies * cut(kv),
        "q_exchanged": exchanged(q, ranks, 1), "kv_exchanged": exchanged(kv, ranks, copies),
        "out_token_major": cut(q).transpose(0, 2, 1, 3),
    }
    if any(bound % (2 * ranks) for bound in bounds):
        return arrays
    own = swapped(bounds, ranks)
    return arrays | {
        "swapped_index": own,
        "swapped_q": np.stack([elements(heads, mine, dim) for mine in own]),
        "swapped_q_exchanged": exchanged(elements(heads, own.ravel(), dim), ranks, 1),
        "swapped_q_ordered": exchanged(q, ranks, 1),
    }


TOKENS = {"ids": 1, "positions": 1, "cu_seqlens": 0, "cu_seqlens_padded": 0, "out_token_major": 1,
          "swapped_index": 1}  # axes of tokens; 2 of tensors


def write_exchange(path, source, ranks, heads, kv_heads, dim):
    """Slices and exchanges of packed streams of ids."""
    with beside(path, source) as file:
        packed = {name: file["packed"][name][()] for name in
                  ("bin_offsets", "cu_seqlens_padded", "ids", "positions")}
    bins, first, offsets = [], 0, [0]
    for b, (begin, end) in enumerate(zip(packed["bin_offsets"][:-1], packed["bin_offsets"][1:])):
        bounds = packed["cu_seqlens_padded"][begin + b : end + b + 1]
        mine = slice(first, first + bounds[-1])
        bins.append(exchange_of_bin(packed["ids"][mine], packed["positions"][mine], bounds, ranks,
                                    heads, kv_heads, dim))
        first += bounds[-1]
        offsets.append(offsets[-1] + -(-int(bounds[-1]) // ranks))
    names = [name for name in bins[0] if all(name in arrays for arrays in bins)]
    arrays = {name: np.concatenate([x[name] for x in bins], axis=TOKENS.get(name, 2))
              for name in names}
    filled(path, "ulysses",
           {"ranks": ranks, "heads": heads, "kv_heads": kv_heads, "head_dim": dim},
           arrays | {"slot_offsets": np.array(offsets, np.int64)})


def write_encoder(path, source, ranks):
    """Encodings of the audio of a batch, and gradients of small integers."""
    with beside(path, source) as file:
        salm = {name: file["salm"][name][()] for name in ("audio", "audio_offsets", "encoder")}
    hidden, items, each = salm["encoder"].shape[1], [], -(-(salm["audio_offsets"].size - 1) // ranks)
    for begin, end in zip(salm["audio_offsets"][:-1], salm["audio_offsets"][1:]):
        samples = salm["audio"][begin:end]
        frames = samples[: samples.size // WINDOW * WINDOW].reshape(-1, WINDOW)
        items.append(frames @ salm["encoder"])
    rank_of = np.arange(len(items)) // each
    gradients = [((31 * i + np.arange(x.size)) % 97 + 1).reshape(x.shape)
                 for i, x in enumerate(items)]
    whole = np.concatenate(gradients).astype(np.float32)
    factors = np.repeat(rank_of + 1, [len(x) for x in items])[:, None]
    filled(path, "encoder", {"ranks": ranks, "hidden_size": hidden}, {
        "frame_offsets": running([len(x) for x in items]).astype(np.int64),
        "encoder_rank": rank_of.astype(np.int32),
        "frames": np.concatenate(items).astype(np.float32),
        "d_frames": np.stack([(r + 1) * whole for r in range(ranks)]),
        "d_sum": ranks * (ranks + 1) // 2 * whole,
        "d_split": (factors * whole).astype(np.float32),
        "d_none": 0 * whole,
    })


def add_case(name, kind, edge, guards, tags, write, command):
    """Adds a case that `--yours` compares."""
    add(name, kind, edge, guards, tags, write, (f"{command} --yours inputs/golden/{name}.h5",))


add_case("row_shards_cp2_tp2", "row-shards", "rows of ids of 12 slots over 2 times 2 ranks: 4 slots "
         "of padding that the key mask hides, as it does that of the rows",
         "padding that is seen under a causal mask; positions that count by the shard",
         ("rows", "without-tables"),
         functools.partial(write_row_shards, source="rows_padded.h5", cp=2, tp=2),
         "gyre-shard --input inputs/golden/rows_padded.h5 --cp 2 --tp 2 --format bshd "
         "--pad-positions counting")
add_case("ulysses_ranks2", "ulysses", "heads exchanged for tokens between 2 ranks, which share one "
         "head of keys; shards of dual-chunk-swap, too",
         "tokens that stay in the order of ranks; gradients of copies that are not summed",
         ("ulysses",),
         functools.partial(write_exchange, source="packed_odd_cp2.h5", ranks=2, heads=4, kv_heads=1,
                           dim=3),
         "mpirun -n 2 gyre-shard --input inputs/golden/packed_odd_cp2.h5 --ulysses --heads 4 "
         "--kv-heads 1 --head-dim 3")
add_case("ulysses_ranks3", "ulysses", "a stream that 3 ranks do not divide",
         "boundaries that are inferred from the positions of padding (LightRFT's helper)",
         ("ulysses",),
         functools.partial(write_exchange, source="packed_odd_cp1.h5", ranks=3, heads=6, kv_heads=3,
                           dim=2),
         "mpirun -n 3 gyre-shard --input inputs/golden/packed_odd_cp1.h5 --ulysses --heads 6 "
         "--kv-heads 3 --head-dim 2")
add_case("encoder_ranks3", "encoder", "4 audio items over 3 ranks, one of which has none; an item "
         "of no frame", "gradients that do not reach the rank that encoded, or several times",
         ("audio",), functools.partial(write_encoder, source="audio.h5", ranks=3),
         "mpirun -n 3 gyre-pack --input inputs/golden/audio.h5 --cp 2")
