"""Writing Gyre's HDF5 files: models and collections of documents, schema version 1.

Every file carries the root attributes `schema` and `schema_version` and a group `/provenance`
of free string attributes. Numbers are stored with a Fletcher-32 checksum, so that a damaged file
is noticed when it is read. A file is written under a temporary name and then renamed, so a reader
never sees half of one. The same contents give the same bytes: no time stamps are stored. The root
attribute `content_sha256` is a digest of all that the file says (SCHEMA.md, Digest of contents).

Shapes below use: V = vocab_size (the ids that exist), VP = vocab_padded (the columns stored),
C = hidden_size, H = query heads, K = key/value heads, D = head_dim, I = intermediate_size,
T = tokens in all documents together, n = documents.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import sys

import h5py
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))

from gyre import digest  # noqa: E402

SCHEMA_VERSION = 1

BYTE_IDS = 256  # ids 0..255 are the bytes themselves
BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259
VOCAB_PADDED = 264
TOKENIZER = "byte-bos-eos"

CONFIG_INTEGERS = (
    "vocab_size",
    "vocab_padded",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)
CONFIG_FLOATS = ("rope_theta", "rms_norm_eps")
CONFIG_RECURRENT = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def attention_shapes(config):
    """Name -> shape of the weights of softmax attention."""
    c = config["hidden_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    return {"wq": (c, q), "wk": (c, kv), "wv": (c, kv), "wo": (q, c)}


def recurrent_shapes(config):
    """Name -> shape of the weights of a recurrent layer between its norms."""
    c = config["hidden_size"]
    key_heads, heads, key_dim, value_dim, width = (config[name] for name in CONFIG_RECURRENT)
    keys, values = key_heads * key_dim, heads * value_dim
    return {
        "wq": (c, keys),
        "wk": (c, keys),
        "wv": (c, values),
        "wz": (c, values),
        "wb": (c, heads),
        "wa": (c, heads),
        "conv_q": (width, keys),
        "conv_k": (width, keys),
        "conv_v": (width, values),
        "a_log": (heads,),
        "dt_bias": (heads,),
        "o_norm": (value_dim,),
        "wo": (values, c),
    }


def is_recurrent(config, layer):
    """Whether a layer is recurrent."""
    return config.get("layer_types", [""] * (layer + 1))[layer] == "linear_attention"


def layer_shapes(config, layer):
    """Name -> shape of the weights of one layer; matrices are [in, out], applied as y = x @ W."""
    c, i = config["hidden_size"], config["intermediate_size"]
    mixing = recurrent_shapes(config) if is_recurrent(config, layer) else attention_shapes(config)
    return {
        "attn_norm": (c,),
        **mixing,
        "mlp_norm": (c,),
        "w_gate": (c, i),
        "w_up": (c, i),
        "w_down": (i, c),
    }


def model_shapes(config):
    """Path below /model -> shape, for every weight of a model."""
    c, vp = config["hidden_size"], config["vocab_padded"]
    shapes = {"embed": (vp, c), "head": (c, vp), "final_norm": (c,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config, layer).items():
            shapes[f"layers/{layer}/{name}"] = shape
    return shapes


def fill_padding(weights, config, seed):
    """Overwrites the padded vocabulary, ids V..VP-1, with large random values, in place.

    No token has these ids and no softmax may include them. Values that dwarf the trained ones make
    a program that uses them by mistake loudly wrong instead of slightly wrong.
    """
    rng = np.random.default_rng(seed)
    c, extra = config["hidden_size"], config["vocab_padded"] - config["vocab_size"]
    if extra:
        weights["embed"][-extra:, :] = 30.0 * rng.standard_normal((extra, c))
        weights["head"][:, -extra:] = 30.0 * rng.standard_normal((c, extra))


def encode(data):
    """Bytes -> int32 tokens: bos, the bytes, eos."""
    tokens = np.empty(len(data) + 2, dtype=np.int32)
    tokens[0], tokens[-1] = BOS, EOS
    tokens[1:-1] = np.frombuffer(data, dtype=np.uint8)
    return tokens


def sha256_of(path):
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


CONTENT = digest.ATTRIBUTE
content_digest = digest.content_sha256
record_content = digest.record


@contextlib.contextmanager
def new_file(path, schema):
    """An HDF5 file open for writing that takes the place of `path` once the block has succeeded."""
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        with h5py.File(temporary, "w") as file:
            file.attrs["schema"] = schema
            file.attrs["schema_version"] = np.int64(SCHEMA_VERSION)
            yield file
        record_content(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def put(group, name, array, **options):
    """Stores an array, checksummed, in one chunk unless told otherwise; a chunk cannot be empty."""
    array = np.ascontiguousarray(array)
    if array.size:
        options = {"chunks": array.shape, "fletcher32": True, **options}
    else:
        options = {}
    group.create_dataset(name, data=array, **options)


def put_provenance(file, provenance):
    """Stores a mapping of strings as the attributes of /provenance."""
    group = file.create_group("provenance")
    for key, value in provenance.items():
        group.attrs[key] = str(value)


def write_model(path, config, weights, provenance, tokenizer=TOKENIZER):
    """Writes a gyre/model file; `weights` maps each name of model_shapes(config) to an array."""
    shapes = model_shapes(config)
    if set(weights) != set(shapes):
        raise ValueError(f"wrong set of weights: {sorted(set(weights) ^ set(shapes))}")
    with new_file(path, "gyre/model") as file:
        model = file.create_group("model")
        for key in CONFIG_INTEGERS:
            model.attrs[key] = np.int64(config[key])
        for key in CONFIG_FLOATS:
            model.attrs[key] = np.float64(config[key])
        if "layer_types" in config:
            model.attrs["layer_types"] = json.dumps(config["layer_types"])
            for key in CONFIG_RECURRENT:
                model.attrs[key] = np.int64(config[key])
        model.attrs["tokenizer"] = tokenizer
        for name, shape in shapes.items():
            array = np.asarray(weights[name], dtype=np.float32)
            if array.shape != shape:
                raise ValueError(f"{name}: shape {array.shape}, wanted {shape}")
            put(model, name, array)
        put_provenance(file, provenance)


def write_documents(path, documents, provenance):
    """Writes a gyre/documents file from a list of (name, int32 tokens)."""
    tokens = [np.asarray(t, dtype=np.int32) for _, t in documents]
    offsets = np.zeros(len(documents) + 1, dtype=np.int64)
    np.cumsum([t.size for t in tokens], out=offsets[1:])
    with new_file(path, "gyre/documents") as file:
        group = file.create_group("documents")
        group.attrs["vocab_size"] = np.int64(VOCAB_SIZE)
        group.attrs["tokenizer"] = TOKENIZER
        put(group, "tokens", np.concatenate([np.empty(0, np.int32), *tokens]))
        put(group, "offsets", offsets)
        names = np.array([name for name, _ in documents], dtype=object)
        # HDF5 has no checksum for strings of variable length.
        group.create_dataset("names", data=names, dtype=h5py.string_dtype("utf-8"))
        put_provenance(file, provenance)


def write_bshd(path, arrays, vocab_size, provenance, sentinel=-1000):
    """Writes a gyre/bshd file.

    `arrays`: input_ids [B, S] (or inputs_embeds [B, S, H]), labels [B, S], position_ids [B, S] (or
    [axes, B, S]), seq_lens and seq_lens_padded [B, M], where cells without a segment hold the
    sentinel.
    """
    with new_file(path, "gyre/bshd") as file:
        group = file.create_group("bshd")
        group.attrs["vocab_size"] = np.int64(vocab_size)
        group.attrs["sentinel"] = np.int64(sentinel)
        for name, array in arrays.items():
            put(group, name, np.asarray(array, np.float32 if name == "inputs_embeds" else np.int64))
        put_provenance(file, provenance)


def write_salm(path, arrays, audio, attributes, provenance):
    """Writes a gyre/salm file.

    `arrays`: input_ids, target_ids [B, S], inputs_embeds [B, S, H], encoder [window, H]; `audio`: a
    list of sample vectors, one for each placeholder in row-major order; `attributes`: vocab_size,
    pad_id, placeholder_id.
    """
    offsets = np.zeros(len(audio) + 1, dtype=np.int64)
    np.cumsum([len(item) for item in audio], out=offsets[1:])
    with new_file(path, "gyre/salm") as file:
        group = file.create_group("salm")
        for name, value in attributes.items():
            group.attrs[name] = np.int64(value)
        for name, array in arrays.items():
            whole = np.int64 if name.endswith("_ids") else np.float32
            put(group, name, np.asarray(array, whole))
        put(group, "audio", np.concatenate([np.empty(0, np.float32), *audio]).astype(np.float32))
        put(group, "audio_offsets", offsets)
        put_provenance(file, provenance)
