#!/usr/bin/env python3
"""gyre-import --model: safetensors and GGUF checkpoints against the model they were made of.

Usage: test_import_model.py SOURCE_DIR BUILD_DIR
"""

import hashlib
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np
from h5py import h5s, h5t

SOURCE, BUILD = map(pathlib.Path, sys.argv[1:3])
sys.dont_write_bytecode = True
sys.path += [str(SOURCE / "tests" / "support"), str(SOURCE / "python")]
import model_cases  # noqa: E402
import model_files  # noqa: E402
from gyre.storage import bfloat16_type  # noqa: E402
from model_files import encoded, safetensors_of, their_name, write_safetensors  # noqa: E402

IMPORT = BUILD / "apps" / "gyre-import"
CONFIG = {
    "model_type": "llama", "vocab_size": 37, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256, "rope_theta": 5e4, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
HEAD_DIM = 16
TYPES = {"F32": h5t.IEEE_F32LE, "F16": h5t.IEEE_F16LE, "BF16": bfloat16_type()}


def shapes_of(config):
    """Our name -> shape in the layout of gyre/model, without padding of the vocabulary."""
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q, kv = (config[k] * HEAD_DIM for k in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"embed": (vocab, hidden), "head": (hidden, vocab), "final_norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "attn_norm": (hidden,), "wq": (hidden, q), "wk": (hidden, kv), "wv": (hidden, kv), "wo": (q, hidden),
            "mlp_norm": (hidden,), "w_gate": (hidden, inner), "w_up": (hidden, inner), "w_down": (inner, hidden),
        }.items():  # fmt: skip
            shapes[f"layers/{layer}/{name}"] = shape
    return shapes


def weights(config=CONFIG):
    """Our name -> array in the layout of gyre/model, without padding of the vocabulary."""
    random = np.random.default_rng(40)
    shapes = shapes_of(config)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def words_of(dataset, dtype):
    """The elements' bits; the dataset must be of this type."""
    kind = dataset.id.get_type()
    assert kind == TYPES[dtype], (dataset.name, dtype, kind.dtype)
    words = np.empty(dataset.shape, f"u{kind.get_size()}")
    dataset.id.read(h5s.ALL, h5s.ALL, words, kind)
    return words


def write_gguf(path, tensors, keys=()):
    """A GGUF file of CONFIG; `keys` add to its keys or replace them."""
    usual = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64,
        "llama.feed_forward_length": 256, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 5e4, "llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.vocab_size": 37,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(37)],
    }  # fmt: skip
    model_files.write_gguf(path, tensors, usual | dict(keys))


def gguf_of(arrays):
    return model_files.gguf_of(arrays, HEAD_DIM)


def quantised(kind, shape, random):
    """Random blocks of a ggml type: bytes, and the values that ggml.h defines for them."""
    blocks = int(np.prod(shape)) // (256 if kind == 14 else 32)
    byte = lambda n: random.integers(0, 256, (blocks, n), dtype=np.uint8)  # noqa: E731
    scale = lambda: (random.standard_normal((blocks, 1)) / 8).astype(np.float16)  # noqa: E731
    d, m, q = scale(), scale(), byte({8: 32, 2: 16, 3: 16, 14: 128}[kind])
    f = np.float32
    raw = lambda *parts: np.concatenate([p.view(np.uint8) for p in parts], axis=1).tobytes()  # noqa: E731
    nibbles = np.concatenate([q & 15, q >> 4], axis=1)
    if kind == 8:  # Q8_0
        return raw(d, q), (d.astype(f) * q.view(np.int8)).reshape(shape)
    if kind == 2:  # Q4_0
        return raw(d, q), (d.astype(f) * (nibbles.astype(f) - 8)).reshape(shape)
    if kind == 3:  # Q4_1
        return raw(d, m, q), (d.astype(f) * nibbles + m.astype(f)).reshape(shape)
    high, scales = byte(64), byte(16)  # Q6_K
    low = q.reshape(blocks, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(2, 1) & 15
    bits = high.reshape(blocks, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    six = (low.reshape(blocks, 2, 4, 32) | bits << 4).astype(f) - 32
    each = d.astype(f) * scales.view(np.int8).astype(f)
    return raw(q, high, scales, d), (each.reshape(blocks, 16, 1) * six.reshape(blocks, 16, 16)).reshape(shape)


def run(*arguments, ranks=1):
    launch = ["mpiexec.mpich", "-n", str(ranks)] if ranks > 1 else []
    return subprocess.run([*launch, IMPORT, *arguments], capture_output=True, text=True, timeout=120)


def expect_model(source, arrays, *arguments, ranks=1, types=()):
    """`arrays` must be there bit by bit, each of its type in `types`, else F32."""
    output = source.with_suffix(".h5")
    done = run("-o", output, "--model", source, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr
    with h5py.File(output) as file:
        model = file["model"]
        vocab = arrays["embed"].shape[0]
        assert {k: model.attrs[k] for k in ("vocab_size", "vocab_padded", "head_dim")} == {
            "vocab_size": vocab, "vocab_padded": -(-vocab // 128) * 128, "head_dim": HEAD_DIM,
        }  # fmt: skip
        assert np.isclose(model.attrs["rope_theta"], 5e4) and np.isclose(model.attrs["rms_norm_eps"], 1e-6)
        for name, array in arrays.items():
            dtype = dict(types).get(name, "F32")
            found = words_of(model[name], dtype)
            if name in ("embed", "head"):
                padding = found[vocab:] if name == "embed" else found[:, vocab:]
                assert not padding.any(), name
                found = found[:vocab] if name == "embed" else found[:, :vocab]
            np.testing.assert_array_equal(found, encoded(array, dtype), err_msg=name)
        return model.attrs.get("tokenizer", "")


def expect_refusal(source, *needles, arguments=()):
    output = source.with_suffix(".h5")
    done = run("-o", output, "--model", source, *arguments)
    assert done.returncode == 2, (needles, done.returncode, done.stderr)
    for needle in needles:
        assert needle in done.stderr, (needle, done.stderr)
    assert not output.exists()


def folder(parent, name, tensors, config=()):
    return model_files.write_folder(parent / name, CONFIG | dict(config), tensors)


def test_safetensors(scratch):
    arrays = weights()
    expect_model(folder(scratch, "f32", safetensors_of(arrays)), arrays, ranks=3)
    expect_model(folder(scratch, "f16", safetensors_of(arrays, "F16")), arrays, types=dict.fromkeys(arrays, "F16"))
    path = folder(scratch, "bf16", None)
    tensors = safetensors_of(arrays, "BF16")
    shards = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        write_safetensors(path / shard, {n: t for n, t in tensors.items() if shards[n] == shard})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')  # test_gyre_text checks the name
    tokenizer = expect_model(path, arrays, types=dict.fromkeys(arrays, "BF16"), ranks=2)
    assert tokenizer == "sha256:" + hashlib.sha256(struct.pack("<Q", 1) + b"a").hexdigest()
    whole = (scratch / "f32.h5").stat().st_size
    for half in ("f16", "bf16"):
        size = (scratch / f"{half}.h5").stat().st_size
        assert 0.5 < size / whole < 0.6, (size, whole)
    kinds = {name: ("F32", "F16", "BF16")[i % 3] for i, name in enumerate(arrays)}
    mixed = {}
    for name, kind in kinds.items():
        mixed |= safetensors_of({name: arrays[name]}, kind)
    expect_model(folder(scratch, "mixed", mixed), arrays, types=kinds)
    only = {n: a for n, a in arrays.items() if n != "head"}
    ties = {"tie_word_embeddings": True}
    twice = safetensors_of(arrays | {"head": arrays["embed"].T})
    for name, tensors in (("tied", safetensors_of(only)), ("tied_twice", twice)):
        expect_model(folder(scratch, name, tensors, ties), only)
        with h5py.File(scratch / f"{name}.h5") as file:
            assert file["model"].attrs["tie_word_embeddings"] == 1 and "head" not in file["model"]
    hint = 'but another one is stored; "tie_word_embeddings": false in config.json would use that one'
    expect_refusal(folder(scratch, "tied_to_another", safetensors_of(arrays), ties), hint)
    (path / "part-1.safetensors").unlink()
    path.with_suffix(".h5").unlink()
    expect_refusal(path, "part-1.safetensors", "No such file")


def test_gguf(scratch):
    arrays = weights()
    path = scratch / "f32.gguf"
    write_gguf(path, gguf_of(arrays))
    assert expect_model(path, arrays, ranks=2).startswith("sha256:")
    random = np.random.default_rng(6)
    for kind, name, dtype in ((1, "layers/0/wq", "F16"), (30, "layers/1/wk", "BF16")):
        tensors = gguf_of(arrays)
        _, shape, raw = tensors[their_name(name, 1)]
        words = encoded(np.frombuffer(raw, np.float32).reshape(shape), dtype)
        tensors[their_name(name, 1)] = (kind, shape, words.tobytes())
        path = scratch / f"kind{kind}.gguf"
        write_gguf(path, tensors)
        expect_model(path, arrays, types={name: dtype})
    for kind, name in ((8, "layers/0/wq"), (2, "layers/1/w_gate"), (3, "layers/0/wk"), (14, "layers/1/w_down")):
        tensors, wanted = gguf_of(arrays), dict(arrays)
        shape = arrays[name].T.shape
        raw, values = quantised(kind, shape, random)
        tensors[their_name(name, 1)] = (kind, shape, raw)
        if name.endswith(("wq", "wk")):
            values = values.reshape(-1, HEAD_DIM // 2, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        wanted[name] = values.T
        path = scratch / f"kind{kind}.gguf"
        write_gguf(path, tensors)
        expect_model(path, wanted)
    write_gguf(path, gguf_of(arrays), {"tokenizer.ggml.tokens": 1})
    assert expect_model(path, arrays) == ""
    tensors = gguf_of(arrays)
    del tensors["output.weight"]
    path = scratch / "tied.gguf"
    write_gguf(path, tensors)
    del arrays["head"]
    expect_model(path, arrays)


def attributes(path):
    """Attributes of the rotary embedding in the model file made of `path`."""
    with h5py.File(path.with_suffix(".h5")) as file:
        attrs = file["model"].attrs
        return json.loads(attrs.get("rope_scaling", "{}")), attrs.get("rotary_dim", HEAD_DIM)


def test_rotary_embedding_of_gguf(scratch):
    arrays = weights()
    good = gguf_of(arrays)
    for i, (keys, extra, scaling) in enumerate(
        (
            ({"llama.rope.scaling.factor": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
            ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}, {}),
            (
                {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 16}, {},
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
                 "truncate": True, "attention_factor": 0.1 * np.log(4) + 1},
            ),
            ({}, {"rope_freqs.weight": (0, (8,), np.arange(1, 9, dtype=np.float32).tobytes())},
             {"rope_type": "divided", "divisors": list(range(1, 9))}),
        )
    ):  # fmt: skip
        path = scratch / f"rope{i}.gguf"
        write_gguf(path, good | extra, keys)
        expect_model(path, arrays)
        assert attributes(path) == (scaling, HEAD_DIM), attributes(path)
    # Only the first 8 elements of a head turn, in neighbouring pairs; the others keep their places.
    partial = dict(good)
    for name in ("layers/0/wq", "layers/1/wk"):
        heads = arrays[name].T.reshape(-1, HEAD_DIM, 64)
        pairs = np.stack([heads[:, :4], heads[:, 4:8]], axis=2).reshape(-1, 8, 64)
        rows = np.concatenate([pairs, heads[:, 8:]], axis=1).reshape(-1, 64)
        partial[their_name(name, 1)] = (0, rows.shape, rows.tobytes())
    path = scratch / "partial.gguf"
    write_gguf(path, partial, {"llama.rope.dimension_count": 8})
    wanted = {name: a for name, a in arrays.items() if not name.endswith(("/wq", "/wk")) or name in ("layers/0/wq", "layers/1/wk")}
    expect_model(path, wanted)
    assert attributes(path) == ({}, 8)


def test_refusals_of_safetensors(scratch):
    good = safetensors_of(weights())
    first, last = next(iter(good)), list(good)[-1]
    for i, (needle, change) in enumerate(
        {
            "'model.layers.0.self_attn.q_proj.bias' is none of this decoder's": {"model.layers.0.self_attn.q_proj.bias": ("F32", (64,), bytes(256), None)},
            "has a tensor for 'layers/7/wq'": {"model.layers.7.self_attn.q_proj.weight": ("F32", (1,), bytes(4), None)},
            "has type 'I8'": {first: ("I8", (37, 64), bytes(37 * 64), None)},
            "the configuration wants [37, 64]": {first: ("F32", (64, 37), bytes(4 * 37 * 64), None)},
            "4 are needed": {first: ("F32", (1,), bytes(8), None)},
            "share bytes": {last: (*good[last][:3], 8)},
            "the file has": {first: (*good[first][:3], 1 << 40)},
            "for 'embed' has nan at [0, 3]": {first: ("F32", (37, 64), np.where(np.arange(37 * 64) == 3, np.nan, 1).astype(np.float32).tobytes(), None)},
        }.items()
    ):  # fmt: skip
        expect_refusal(folder(scratch, f"bad{i}", good | change), needle)
    expect_refusal(folder(scratch, "missing", {n: t for n, t in good.items() if n != last}), "is missing")
    done = run("-o", scratch / "x.h5", "--model", folder(scratch, "deep", good, {"num_hidden_layers": 1 << 14}))
    assert done.returncode == 2 and done.stderr.count("\n") == 12, done.stderr
    assert f"{9 * ((1 << 14) - 2) - 10} more tensors are missing" in done.stderr, done.stderr
    path = folder(scratch, "cut", good)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    expect_refusal(path, "model.safetensors", "the file has")
    file.write_bytes(struct.pack("<Q", 1 << 60))
    expect_refusal(path, "truncated")
    write_safetensors(file, good)
    whole = file.read_bytes()
    file.write_bytes(whole + bytes(3))
    expect_refusal(path, "3 bytes are behind the last tensor")
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = whole[8 : 8 + length], whole[8 + length :]
    twice = header[:-1] + b', "model.norm.weight": ' + json.dumps(json.loads(header)["model.norm.weight"]).encode() + b"}"
    file.write_bytes(struct.pack("<Q", len(twice)) + twice + data)
    expect_refusal(path, "the key 'model.norm.weight' is there twice")
    shifted = json.loads(header)
    for name, entry in shifted.items():
        if name != "__metadata__":
            entry["data_offsets"] = [at + 4 * (at > 0) for at in entry["data_offsets"]]
    shifted[first]["data_offsets"] = json.loads(header)[first]["data_offsets"]
    text = json.dumps(shifted).encode()
    size = shifted[first]["data_offsets"][1]
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[:size] + bytes(4) + data[size:])
    expect_refusal(path, f"the bytes {size} to {size + 4} are of no tensor")
    file.write_bytes(struct.pack("<Q", 4) + b"{]  ")
    expect_refusal(path, "the header of a safetensors file")


def test_which_files_of_a_folder_are_the_model(scratch):
    arrays = weights()
    good = safetensors_of(arrays)
    path = folder(scratch, "both", good)
    shards = {name: f"model-{i % 4 + 1:05}-of-00004.safetensors" for i, name in enumerate(good)}

    def write_shards(tensors):
        for shard in set(shards.values()):
            write_safetensors(path / shard, {n: t for n, t in tensors.items() if shards[n] == shard})

    write_shards(good)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    expect_model(path, arrays)
    path.with_suffix(".h5").unlink()
    name = their_name("layers/1/wo", 0)
    dtype, shape, raw, offset = good[name]
    write_shards(good | {name: (dtype, shape, raw[:-1] + bytes([raw[-1] ^ 1]), offset)})
    expect_refusal(path, "are both there, and the tensor for 'layers/1/wo' differs", "transformers reads model.safetensors")
    write_safetensors(path / "model.safetensors", {n: t for n, t in good.items() if n != name})
    expect_refusal(path, "the tensor for 'layers/1/wo' differs")
    write_shards(good)
    index.unlink()
    (path / "model.safetensors").unlink()
    names = ", ".join(sorted(set(shards.values()))[:3])
    expect_refusal(path, f"has {names} and 1 more, but neither model.safetensors nor model.safetensors.index.json")


def hybrid(scratch, name, changes=(), tensors=(), case="qwen3-next", dtype="F32"):
    """Folder of a case with recurrent layers; a key or tensor that is None in the changes is left out."""
    config = model_cases.config_of(case) | {"rope_theta": 5e4, "rms_norm_eps": 1e-6} | dict(changes)
    config = {key: value for key, value in config.items() if value is not None}
    whole = model_cases.config_of(case)
    kept = model_files.safetensors_of(model_cases.weights_of(whole), dtype, whole) | dict(tensors)
    return model_files.write_folder(scratch / name, config, {n: t for n, t in kept.items() if t is not None})


def test_recurrent_layers(scratch):
    config = model_cases.config_of("qwen3-next")
    arrays = model_cases.weights_of(config)
    centred = {name: a - 1 for name, a in arrays.items() if name.endswith("norm") and "o_norm" not in name}
    for dtype in ("F32", "BF16", "F16"):
        path = hybrid(scratch, f"types{dtype}", dtype=dtype)
        stored = model_files.encoded
        widen = {"F32": lambda w: w.view(np.float32), "F16": lambda w: w.view(np.float16).astype(np.float32),
                 "BF16": lambda w: (w.astype(np.uint32) << 16).view(np.float32)}[dtype]  # fmt: skip
        wanted = arrays | {name: 1 + widen(stored(a, dtype)) for name, a in centred.items()}
        expect_model(path, wanted, ranks=2, types={name: dtype for name in arrays if name not in centred})
    with h5py.File(path.with_suffix(".h5")) as file:
        found = {key: file["model"].attrs[key] for key in ("attn_output_gate", "qk_norm", "rotary_dim", "layer_types")}
        assert [found.pop("layer_types")] == ['["linear_attention","full_attention","linear_attention"]'], found
        assert found == {"attn_output_gate": 1, "qk_norm": 1, "rotary_dim": 8}, found
        assert all(file["model"].attrs[key] == value for key, value in config.items() if key.startswith("linear_"))
    shards = {name: "part.safetensors" for name in model_files.safetensors_of(arrays, config=config)}
    path = hybrid(scratch, "both")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (path / "part.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    assert run("-o", scratch / "both.h5", "--model", path).returncode == 0
    tensors = model_files.safetensors_of(arrays, config=config)
    name = "model.layers.2.linear_attn.in_proj_qkvz.weight"
    kind, shape, raw, _ = tensors[name]
    row = len(raw) // shape[0]
    at = (80 + 2 * 16 + 1) * row  # of the second row of the second head's values
    write_safetensors(path / "part.safetensors", tensors | {name: (kind, shape, raw[:at] + bytes(4) + raw[at + 4 :], None)})
    (scratch / "both.h5").unlink()
    expect_refusal(path, "the tensor for 'layers/2/wv' differs")
    nan = raw[:at] + struct.pack("<f", np.nan) + raw[at + 4 :]
    expect_refusal(hybrid(scratch, "nan", (), {name: (kind, shape, nan, None)}), "the tensor for 'layers/2/wv' has nan at [113, 0]")
    expect_refusal(hybrid(scratch, "short", (), {name: (kind, (shape[0] - 2, shape[1]), raw[: -2 * row], None)}),
                   f"'{name}' is [158, 32]; the configuration wants 160 rows")  # fmt: skip


def test_what_recurrent_layers_lack_is_refused(scratch):
    qkv, conv = (f"model.layers.0.linear_attn.{name}.weight" for name in ("in_proj_qkv", "conv1d"))
    for i, (changes, tensors, needle) in enumerate(
        (
            ({"mlp_only_layers": None}, {}, "layer 1 has experts, which are not supported; 'num_experts' is 8, 'decoder_sparse_step' 2, 'mlp_only_layers' []"),
            ({"decoder_sparse_step": None}, {}, "layer 0 has experts, which are not supported; 'num_experts' is 8"),
            ({"num_experts": None, "mlp_only_layers": [0, 2]}, {}, "layer 1 has experts, which are not supported; 'num_experts' is 512"),
            ({"mlp_only_layers": ["x"]}, {}, """'mlp_only_layers' is '["x"]'; wanted: a list of layers"""),
            ({"decoder_sparse_step": 0}, {}, "'decoder_sparse_step' is 0; wanted: a number from 1 on"),
            ({"full_attention_interval": 0}, {}, "'full_attention_interval' is 0; wanted: a number from 1 on"),
            ({"attention_bias": True}, {}, "'attention_bias' is true; an output gate cannot have biases"),
            ({"attn_output_gate": False}, {}, "'attn_output_gate' is false, which means another decoder; wanted: true"),
            ({"linear_key_head_dim": None}, {}, "lacks 'linear_key_head_dim'"),
            ({"linear_num_value_heads": 3}, {}, "linear_num_value_heads is 3; it must be a multiple of linear_num_key_heads = 2"),
            ({"layer_types": ["linear_attention", "sliding_attention", "linear_attention"]}, {}, "there is no 'sliding_window'"),
            ({"partial_rotary_factor": 0.2}, {}, "rotary embedding turns 3 of 16 elements"),
            ({"model_type": "qwen3_5_text"}, {}, "the key 'decoder_sparse_step' is not known"),
            ({"model_type": "qwen3"}, {}, "the key 'full_attention_interval' is not known"),
            ({}, {conv: None}, "the tensor for 'layers/0/conv_q' is missing"),
            ({}, {qkv: ("F32", (112, 32), bytes(112 * 32 * 4), None)}, "is there twice"),
            ({}, {"model.layers.0.mlp.experts.0.up_proj.weight": ("F32", (1,), bytes(4), None)}, "is none of this decoder's"),
        )
    ):  # fmt: skip
        expect_refusal(hybrid(scratch, f"refused{i}", changes, tensors), needle)
    sizes = {key: None for key in ("num_experts", "mlp_only_layers", "partial_rotary_factor")}
    dense = hybrid(scratch, "dense", sizes | {"num_experts": 0, "full_attention_interval": 2, "norm_topk_prob": True})
    assert run("-o", scratch / "dense.h5", "--model", dense).returncode == 0
    with h5py.File(scratch / "dense.h5") as file:
        assert file["model"].attrs["rotary_dim"] == 4  # a quarter


def test_links_that_lead_nowhere(scratch):
    good = safetensors_of(weights())
    path = folder(scratch, "links", good)
    for name, target, text in (("tokenizer.json", "nowhere", "No such file"), ("model.safetensors.index.json", "nowhere", "No such file"),
                               ("tokenizer.json", "tokenizer.json", "Too many levels"), ("model.safetensors", "model.safetensors", "Too many levels"),
                               ("config.json", "config.json", "Too many levels")):  # fmt: skip
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)
        expect_refusal(path, f"{name}': {text}")
        (path / name).unlink()
    (scratch / "circle").symlink_to("circle")
    expect_refusal(scratch / "circle", "is no model; wanted: a folder")


def test_a_file_that_shrinks_while_it_is_read(scratch):
    config = CONFIG | {"vocab_size": 1 << 15, "hidden_size": 1024, "num_hidden_layers": 1, "head_dim": HEAD_DIM}
    shapes = {their_name(name, 0): shape if name == "embed" else shape[::-1] for name, shape in shapes_of(config).items()}
    path = folder(scratch, "shrinks", None, config)
    for ranks in (1, 2):
        header, at = {}, 0
        for name, shape in shapes.items():
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * int(np.prod(shape))]}
            at = header[name]["data_offsets"][1]
        text = json.dumps(header).encode()
        with open(path / "model.safetensors", "wb") as file:  # sparse
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + at)
        launch = ["mpiexec.mpich", "-n", str(ranks)] if ranks > 1 else []
        command = [*launch, IMPORT, "-o", scratch / "x.h5", "--model", path]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
            while running.poll() is None and not list(scratch.glob("x.h5.*")):
                time.sleep(0.002)
            with open(path / "model.safetensors", "rb+") as file:
                file.truncate(100000)
            _, said = running.communicate(timeout=120)
        assert running.returncode == 3, (ranks, running.returncode, said)
        assert f"cannot read '{path}/model.safetensors': it ends at byte 100000, and had {8 + len(text) + at}" in said, said
        assert not list(scratch.glob("x.h5*"))


def test_sizes_of_several_blocks_that_are_no_multiple_of_anything(scratch):
    config = CONFIG | {"vocab_size": 4203, "hidden_size": 1051, "intermediate_size": 4201, "num_hidden_layers": 1, "head_dim": HEAD_DIM}
    arrays = weights(config)
    path = folder(scratch, "large", safetensors_of(arrays, "BF16"), config)
    expect_model(path, arrays, types=dict.fromkeys(arrays, "BF16"))


def test_weights_that_are_not_finite(scratch):
    config = CONFIG | {"hidden_size": 67, "head_dim": HEAD_DIM}
    arrays = weights(config)
    for i, (dtype, name, place, value, text) in enumerate(
        (
            ("BF16", "embed", (36, 66), np.nan, "has nan at [36, 66]"),
            ("F16", "layers/1/w_up", (66, 255), -np.inf, "has -inf at [255, 66]"),
            ("F16", "layers/0/mlp_norm", (0,), np.nan, "has nan at [0, 0]"),
            ("F32", "final_norm", (66,), np.inf, "has inf at [0, 66]"),
            ("F32", "layers/0/wk", (65, 31), np.nan, "has nan at [31, 65]"),
        )
    ):
        bad = {name: array.copy() for name, array in arrays.items()}
        bad[name][place] = value
        expect_refusal(folder(scratch, f"not_finite{i}", safetensors_of(bad, dtype), config), f"for '{name}' {text}")
    largest = {"BF16": 3.38953139e38, "F16": 65504, "F32": 3.4028234e38}
    for dtype, value in largest.items():
        arrays["final_norm"][:] = value
        path = folder(scratch, f"largest{dtype}", safetensors_of(arrays, dtype), config)
        expect_model(path, arrays, types=dict.fromkeys(arrays, dtype))


def test_windows_of_families(scratch):
    arrays = weights()
    good = safetensors_of(arrays)
    biases = {their_name(f"layers/{layer}/b{kind}", 0): ("F32", (size,), bytes(4 * size), None)
              for layer in range(2) for kind, size in (("q", 64), ("k", 32), ("v", 32))}  # fmt: skip
    kv = {"num_key_value_heads": 2}
    for i, (config, tensors, window, types) in enumerate(
        (
            ({"model_type": "mistral"}, good, 4096, None),  # MistralConfig's default
            ({"model_type": "mistral", "sliding_window": None}, good, None, None),
            ({"model_type": "mistral", "sliding_window": 16}, good, 16, None),
            ({"sliding_window": 16, "use_sliding_window": False}, good, None, None),
            ({"model_type": "qwen2"} | kv, good | biases, None, None),
            ({"model_type": "qwen2", "sliding_window": 16} | kv, good | biases, None, None),
            ({"model_type": "qwen2", "use_sliding_window": True} | kv, good | biases, None, None),  # from layer 28 on
            ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1} | kv, good | biases, 4096,
             ["full_attention", "sliding_attention"]),
            ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None, "max_window_layers": 0} | kv,
             good | biases, None, None),
            ({"model_type": "smollm3", "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 8, "tie_word_embeddings": False},
             good, 8, ["full_attention", "sliding_attention"]),
        )
    ):  # fmt: skip
        path = folder(scratch, f"window{i}", tensors, config)
        expect_model(path, arrays)
        with h5py.File(path.with_suffix(".h5")) as file:
            attrs = file["model"].attrs
            found = attrs.get("sliding_window"), json.loads(attrs.get("layer_types", "null"))
            assert found == (window, types), (config, found)
    for i, (config, needle) in enumerate(
        (
            ({"sliding_window": 16}, "'sliding_window' is 16, which means another decoder than the model_type llama"),
            ({"use_sliding_window": True}, "'use_sliding_window' is true, which means another decoder"),
            ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "'layer_types' is"),
            ({"model_type": "mistral", "use_sliding_window": True}, "'use_sliding_window' is true"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "but there is no 'sliding_window'"),
            ({"layer_types": ["full_attention", "chunked_attention"]}, "for each of 2 layers"),
            ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1}, "'max_window_layers' is -1"),
            ({"model_type": "mistral", "sliding_window": "wide"}, "'sliding_window' is 'wide'"),
        )
    ):
        expect_refusal(folder(scratch, f"no_window{i}", good, config), needle)


def test_activations(scratch):
    arrays = weights()
    tanh = "gelu_pytorch_tanh"
    names = {"silu": None, "swish": None, "gelu": "gelu", "gelu_new": tanh, "gelu_fast": tanh}
    for name, stored in (names | {tanh: tanh}).items():
        path = folder(scratch, name, safetensors_of(arrays), {"hidden_act": name})
        expect_model(path, arrays)
        with h5py.File(path.with_suffix(".h5")) as file:
            assert file["model"].attrs.get("hidden_act") == stored, name


def test_features_that_a_family_does_not_have(scratch):
    good = safetensors_of(weights())
    bias = {"model.layers.0.self_attn.q_proj.bias": ("F32", (64,), bytes(256), None)}
    for i, (config, tensors, needle) in enumerate(
        (
            ({"model_type": "qwen2"}, good, "the tensor for 'layers/0/bq' is missing"),
            ({"model_type": "qwen3", "head_dim": HEAD_DIM}, good, "the tensor for 'layers/1/k_norm' is missing"),
            ({"model_type": "qwen2", "attention_bias": True}, good, "'attention_bias' is true, which the model_type qwen2 does not read"),
            ({"model_type": "mistral", "sliding_window": None}, good | bias, "'model.layers.0.self_attn.q_proj.bias' is none of this decoder's"),
            ({"attention_bias": True}, good | bias, "the tensor for 'layers/0/bk' is missing"),
            ({"model_type": "smollm3", "no_rope_layer_interval": 0}, good, "'no_rope_layer_interval' is 0; wanted: a number from 1 on"),
            ({"model_type": "smollm3", "no_rope_layers": [0]}, good, "wanted: a list of 1 or 0 for each of 2 layers"),
        )
    ):  # fmt: skip
        expect_refusal(folder(scratch, f"family{i}", tensors, config), needle)


NEUTRAL_KEYS = {  # key: (values that ask for nothing, a value that is refused)
    "attention_chunk_size": ((0, None), 8), "use_qk_norm": ((False, None), True), "attn_output_gate": ((False,), True),
    "num_local_experts": ((0,), 8), "num_experts": ((0,), 8), "n_routed_experts": ((0,), 8), "kv_lora_rank": ((0, None), 8),
    "rope_type": (("default",), "llama3"), "rope_interleaved": ((False,), True), "use_mrope": ((False,), True),
    "hidden_act": (("silu", "swish"), "relu"), "mlp_bias": ((False,), True), "query_pre_attn_scalar": ((HEAD_DIM, None), 8),
    "attention_multiplier": ((HEAD_DIM**-0.5,), 0.5), "final_logit_softcapping": ((None, 0), 30.0),
    "attn_logit_softcapping": ((None, 0), 50.0), "logit_scale": ((1, 1.0), 0.5), "logits_scaling": ((1,), 8.0),
    "residual_multiplier": ((1.0,), 0.5), "embedding_multiplier": ((1.0,), 12.0),
}  # fmt: skip
HARMLESS_KEYS = {
    "_name_or_path": "x", "architectures": ["X"], "attention_dropout": 0.1, "auto_map": {}, "bos_token_id": 1, "dtype": "bfloat16",
    "eos_token_id": [2, 3], "initializer_range": 0.02, "is_llama_config": True, "max_position_embeddings": 64, "pad_token_id": 0,
    "pretraining_tp": 2, "torch_dtype": "float16", "transformers.js_config": {}, "transformers_version": "5", "unk_token_id": 0,
    "use_cache": True, "max_window_layers": 28,
}  # fmt: skip


def test_each_key_that_asks_for_another_decoder_is_refused(scratch):
    arrays = weights()
    good = safetensors_of(arrays)
    refused = {key: value for key, (_, value) in NEUTRAL_KEYS.items()}
    expect_refusal(folder(scratch, "all", good, refused), *(f"'{key}' is" for key in refused))
    for i in range(2):
        neutral = {key: values[min(i, len(values) - 1)] for key, (values, _) in NEUTRAL_KEYS.items()}
        expect_model(folder(scratch, f"neutral{i}", good, neutral | HARMLESS_KEYS), arrays)
    page = (SOURCE / "docs" / "model-and-text.md").read_text()
    missing = [key for key in NEUTRAL_KEYS | HARMLESS_KEYS if f"`{key}`" not in page]
    assert not missing, f"docs/model-and-text.md does not name {missing}"


COMMON = {
    "architectures": ["X"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": True,
}  # fmt: skip
PUBLISHED = {  # config.json as the authors of models write them; sizes are ours
    "Llama-2": {"_name_or_path": "x", "model_type": "llama", "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False},
    "Llama-3.2": {
        "model_type": "llama", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 5e5, "tie_word_embeddings": True,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                         "rope_type": "llama3"},
    },
    "SmolLM2": {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "pad_token_id": 2,
                "pretraining_tp": 1, "mlp_bias": False, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    "Mistral-7B-v0.1": {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 1e4, "tie_word_embeddings": False},
    "Mistral-7B-v0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e6, "tie_word_embeddings": False},
    "Qwen2.5": {"model_type": "qwen2", "max_window_layers": 24, "rope_theta": 1e6, "sliding_window": 32768, "tie_word_embeddings": True,
                "use_mrope": False, "use_sliding_window": False},
    "Qwen2.5, YaRN": {"model_type": "qwen2", "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False,
                      "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen3": {"model_type": "qwen3", "attention_bias": False, "max_window_layers": 28, "rope_scaling": None, "rope_theta": 1e6,
              "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False},
    "SmolLM3": {"model_type": "smollm3", "attention_bias": False, "layer_types": ["full_attention"] * 2, "max_window_layers": 28,
                "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1], "pad_token_id": 0, "pretraining_tp": 2,
                "rope_scaling": None, "rope_theta": 5e6, "sliding_window": None, "use_sliding_window": False},
}  # fmt: skip


def test_configurations_as_they_are_published(scratch):
    sizes = {key: CONFIG[key] for key in CONFIG if key.startswith("num_") or key.endswith("_size")}
    for name, config in PUBLISHED.items():
        path = folder(scratch, name, None, {})
        (path / "config.json").write_text(json.dumps(COMMON | sizes | {"head_dim": HEAD_DIM} | config))
        expect_refusal(path, "model.safetensors", "No such file")  # all keys are known
    config = PUBLISHED["Qwen2.5"] | {"dual_chunk_attention_config": {"chunk_size": 262144}}
    expect_refusal(folder(scratch, "other", None, config), "the key 'dual_chunk_attention_config' is not known")


KEYS_NAMED_OTHERWISE = {
    "partial_rotary_factor": "rotary embedding turns 11 of 16 elements",
    "rotary_dim": "rotary embedding turns 32 of 16 elements",
}


def test_every_key_of_a_configuration_is_known_or_refused(scratch):
    good = safetensors_of(weights())
    for i, (key, value) in enumerate(
        {
            "model_type": "gemma2", "attention_bias": "yes", "no_rope_layers": [1, 0], "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            "rope_parameters": {"rope_type": "longrope", "factor": 8.0}, "partial_rotary_factor": 0.7, "rotary_dim": 32,
            "sliding_window": 128, "use_qk_norm": True, "hidden_act": "relu", "mystery": 1, "rms_norm_eps": "small",
        }.items()
    ):  # fmt: skip
        expect_refusal(folder(scratch, f"key{i}", good, {key: value}), KEYS_NAMED_OTHERWISE.get(key, f"'{key}'"))
    expect_model(folder(scratch, "ignored", good, {"mystery": 1, "sliding_window": None}), weights(), "--ignore-key", "mystery")


def test_keys_that_are_ignored(scratch):
    good = safetensors_of(weights())
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attn_factor": 0.9}
    path = folder(scratch, "inner", good, {"rope_scaling": scaling, "mystery": 1})
    expect_refusal(path, "the type yarn does not read; --ignore-key rope_scaling.attn_factor if it changes no result",
                   "the key 'mystery' is not known; --ignore-key mystery", "--ignore-key mystry: the configuration has no such key; nearest: 'mystery'",
                   "--ignore-key attn_factor: the configuration has no such key; nearest: 'rope_scaling.attn_factor'",
                   "--ignore-key rope_theta: this key is read", "--ignore-key rope_scaling.factor: the type yarn reads this key",
                   "--ignore-key nonsense: the configuration has no such key; it has model_type, vocab_size",
                   arguments=[word for key in ("mystry", "attn_factor", "rope_theta", "rope_scaling.factor", "nonsense") for word in ("--ignore-key", key)])  # fmt: skip
    expect_model(path, weights(), "--ignore-key", "rope_scaling.attn_factor", "--ignore-key", "mystery")
    path = scratch / "inner.gguf"
    write_gguf(path, gguf_of(weights()), {"llama.mystery": 2})
    path.with_suffix(".h5").unlink()
    expect_refusal(path, "--ignore-key llama.mystary: the configuration has no such key; nearest: 'llama.mystery'",
                   "--ignore-key llama.block_count: this key is read", arguments=["--ignore-key", "llama.mystary", "--ignore-key", "llama.block_count"])  # fmt: skip
    expect_model(path, weights(), "--ignore-key", "llama.mystery")


def test_values_of_keys(scratch):
    arrays = weights()
    good = safetensors_of(arrays)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1e30}
    for i, (config, needle) in enumerate(
        (
            ({"rope_theta": False}, "'rope_theta' is false; wanted: a number"),
            ({"rope_scaling": yarn}, "attention_factor is 1e+30; it must be at most 1000"),
            ({"partial_rotary_factor": 0.5}, "lets 8 of 16 elements of a head turn, which the code of the model_type llama does not read"),
            ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "8 of 16 elements"),
            ({"rotary_dim": 4}, "4 of 16 elements"),
        )
    ):
        expect_refusal(folder(scratch, f"value{i}", good, config), needle)
    expect_model(folder(scratch, "whole", good, {"partial_rotary_factor": 1.0, "rotary_dim": HEAD_DIM}), arrays)
    # null means as many as query heads, in every family: 32 is the default of an absent key
    tensors = {n: a for n, a in arrays.items() if not n.endswith(("wk", "wv"))}
    tensors |= {n: np.tile(a, 2) for n, a in arrays.items() if n.endswith(("wk", "wv"))}
    for layer in range(2):
        tensors |= {f"layers/{layer}/{n}": np.ones(64, np.float32) for n in ("bq", "bk", "bv")}
    path = folder(scratch, "null", safetensors_of(tensors), {"model_type": "qwen2", "num_key_value_heads": None, "max_position_embeddings": 99})
    expect_model(path, tensors)
    with h5py.File(path.with_suffix(".h5")) as file:
        assert file["model"].attrs["num_key_value_heads"] == 4
        assert file["model"].attrs["max_position_embeddings"] == 99


def test_refusals_of_gguf(scratch):
    good = gguf_of(weights())
    path = scratch / "bad.gguf"
    for keys, needle in (
        ({"general.architecture": "gemma2"}, "'general.architecture' is 'gemma2'; wanted: llama, qwen2 or qwen3"),
        ({"llama.expert_count": 8}, "'llama.expert_count' asks for another decoder"),
        ({"llama.attention.sliding_window": 128}, "the key 'llama.attention.sliding_window' is not known"),
        ({"llama.rope.dimension_count": 7}, "'llama.rope.dimension_count' asks for another decoder"),
        ({"llama.rope.scaling.type": "longrope"}, "'llama.rope.scaling.type' is 'longrope'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "lacks 'llama.rope.scaling.original_context_length'"),
        ({"llama.rope.scaling.factor": -1.0}, "it must be positive"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "the key 'llama.rope.scaling.attn_factor' is not known"),
        ({"llama.block_count": 3}, "'layers/2/wq' is missing"),
    ):
        write_gguf(path, good, keys)
        expect_refusal(path, needle)
    write_gguf(path, good | {"output.weight": (12, (37, 64), bytes(4096))})
    expect_refusal(path, "'output.weight' has ggml type 12")
    for keys, shape, raw, needle in (
        ({}, (8,), bytes(32), "divisor 0 of the rotary scaling is 0; it must be positive"),
        ({}, (4,), bytes(16), "'rope_freqs.weight' is [4]; wanted: float32 [8]"),
        ({"llama.rope.scaling.factor": 4.0}, (8,), bytes(32), "'rope.scaling.type' are both there"),
    ):
        write_gguf(path, good | {"rope_freqs.weight": (0, shape, raw)}, keys)
        expect_refusal(path, needle)
    write_gguf(path, good)
    whole = path.read_bytes()
    for length in (3, 30, 700, len(whole) - 1):
        path.write_bytes(whole[:length])
        expect_refusal(path, "bad.gguf")
    name = b"output_norm.weight"
    at = whole.index(name) + len(name) + struct.calcsize("<IQI")  # dimensions, extent and type are before the offset
    path.write_bytes(whole[:at] + struct.pack("<Q", 1 << 62) + whole[at + 8 :])
    expect_refusal(path, f"the tensor 'output_norm.weight' begins at byte ", f" + {1 << 62} of {len(whole)}")


def test_arguments(scratch):
    for arguments, needle in (
        ((), "either text files or --model"),
        (("--max-tokens", "8", "--model", scratch), "--max-tokens 8: it is for text files"),
        ((__file__, "--ignore-key", "x"), "--ignore-key x: it is for --model"),
    ):
        done = run("-o", scratch / "x.h5", *arguments, ranks=2)
        assert done.returncode == 2 and needle in done.stderr, done.stderr
    path = folder(scratch, "own", safetensors_of(weights()))
    for name in ("model.safetensors", "config.json"):
        before = (path / name).read_bytes()
        done = run("-o", path / name, "--model", path)
        assert done.returncode == 2 and "is a file of the model" in done.stderr, done.stderr
        assert (path / name).read_bytes() == before
    expect_refusal(scratch / "nowhere", "is no model; wanted: a folder with config.json")


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            with tempfile.TemporaryDirectory() as scratch:
                test(pathlib.Path(scratch))
                print(f"{name}: ok")
