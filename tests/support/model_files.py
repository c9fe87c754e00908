"""Writes checkpoints of other programs for tests: safetensors with config.json, and GGUF."""

import json
import struct

import h5py
import numpy as np

LAYER_NAMES = {  # ours -> Hugging Face's, llama.cpp's
    "attn_norm": ("input_layernorm", "attn_norm"),
    "wq": ("self_attn.q_proj", "attn_q"),
    "wk": ("self_attn.k_proj", "attn_k"),
    "wv": ("self_attn.v_proj", "attn_v"),
    "bq": ("self_attn.q_proj", "attn_q"),
    "bk": ("self_attn.k_proj", "attn_k"),
    "bv": ("self_attn.v_proj", "attn_v"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "wo": ("self_attn.o_proj", "attn_output"),
    "bo": ("self_attn.o_proj", "attn_output"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "w_gate": ("mlp.gate_proj", "ffn_gate"),
    "w_up": ("mlp.up_proj", "ffn_up"),
    "w_down": ("mlp.down_proj", "ffn_down"),
}
OUTER_NAMES = {
    "embed": ("model.embed_tokens", "token_embd"),
    "final_norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
}


def stored(name, array):
    """A tensor as PyTorch stores it: [out, in]."""
    return array.T if array.ndim == 2 and name != "embed" else array


def their_name(name, which):
    """Name of our tensor `name` in safetensors (0) or GGUF (1)."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name][which] + ".weight"
    _, layer, rest = name.split("/")
    kind = "bias" if rest in ("bq", "bk", "bv", "bo") else "weight"
    return f"{('model.layers', 'blk')[which]}.{layer}.{LAYER_NAMES[rest][which]}.{kind}"


def bfloat16(array):
    return ((array.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes, offset or None)."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, raw, offset) in tensors.items():
        at = len(data) if offset is None else offset
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def encoded(array, dtype):
    """The bits of float32 values as elements of a type of safetensors; F16 and BF16 are rounded."""
    array = np.ascontiguousarray(array)
    if dtype == "BF16":
        return bfloat16(array)
    return array.astype(np.float16).view(np.uint16) if dtype == "F16" else array.view(np.uint32)


HYBRIDS = ("qwen3_next", "qwen3_5_text")  # families with recurrent layers


def hybrid_of(arrays, config):
    """Hugging Face's name -> array as PyTorch stores it, of a family with recurrent layers."""
    found, layers = {}, {}
    for name, array in arrays.items():
        array = stored(name, array)
        if name.endswith("norm") and not name.endswith("o_norm"):
            array = array - 1
        if name in OUTER_NAMES:
            found[their_name(name, 0)] = array
        else:
            _, layer, leaf = name.split("/")
            layers.setdefault(layer, {})[leaf] = array
    for layer, own in layers.items():

        def fused(groups, *leaves, own=own):
            parts = [own.pop(leaf) for leaf in leaves]
            columns = parts[0].shape[1]
            return np.concatenate([part.reshape(groups, -1, columns) for part in parts], axis=1).reshape(-1, columns)

        by_name, key_heads = {}, config["linear_num_key_heads"]
        if "conv_q" in own:
            if config["model_type"] == "qwen3_next":
                by_name["in_proj_qkvz.weight"] = fused(key_heads, "wq", "wk", "wv", "wz")
                by_name["in_proj_ba.weight"] = fused(key_heads, "wb", "wa")
            else:
                by_name["in_proj_qkv.weight"] = fused(1, "wq", "wk", "wv")
                by_name |= {f"in_proj_{leaf[1]}.weight": own.pop(leaf) for leaf in ("wz", "wb", "wa")}
            by_name["conv1d.weight"] = fused(1, "conv_q", "conv_k", "conv_v")[:, None]
            by_name |= {"A_log": own.pop("a_log"), "dt_bias": own.pop("dt_bias")}
            by_name |= {"norm.weight": own.pop("o_norm"), "out_proj.weight": own.pop("wo")}
            by_name = {f"linear_attn.{name}": array for name, array in by_name.items()}
        else:
            by_name["self_attn.q_proj.weight"] = fused(config["num_attention_heads"], "wq", "wz")
        found |= {f"model.layers.{layer}.{name}": array for name, array in by_name.items()}
        found |= {their_name(f"layers/{layer}/{leaf}", 0): array for leaf, array in own.items()}
    return found


def safetensors_of(arrays, dtype="F32", config=None):
    """`config`: that of the model, if its family may have recurrent layers."""
    if config is not None and config["model_type"] in HYBRIDS:
        tensors = hybrid_of(arrays, config)
    else:
        tensors = {their_name(name, 0): stored(name, a) for name, a in arrays.items()}
    return {name: (dtype, a.shape, encoded(a, dtype).tobytes(), None) for name, a in tensors.items()}


def add_to_model(path, config, arrays):
    """Adds attributes and tensors to a file of gyre/model."""
    with h5py.File(path, "r+") as file:
        file.attrs.pop("content_sha256", None)
        file["model"].attrs.update({key: value if isinstance(value, float) else int(value) for key, value in config.items()})
        for name, array in arrays.items():
            file[f"model/{name}"] = array


def write_folder(path, config, tensors):
    """A folder with config.json and, unless `tensors` is None, model.safetensors."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        write_safetensors(path / "model.safetensors", tensors)
    return path


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path, tensors, keys):
    """tensors: name -> (ggml type, shape of rows first, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, value in keys.items():
        out += text(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            out += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            out += struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % 32)
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += raw
    path.write_bytes(out + bytes(-len(out) % 32) + data)


def interleaved(array, head_dim):
    """Rows of queries and keys in llama.cpp's order for `llama`: halves of a head element by element."""
    return array.reshape(-1, 2, head_dim // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def gguf_of(arrays, head_dim, architecture="llama"):
    """float32 tensors; `llama` turns neighbouring elements, the other architectures halves of a head."""
    tensors = {}
    for name, array in arrays.items():
        rows = stored(name, array)
        if architecture == "llama" and name.endswith(("/wq", "/wk", "/bq", "/bk")):
            rows = interleaved(rows, head_dim)
        tensors[their_name(name, 1)] = (0, rows.shape, np.ascontiguousarray(rows).tobytes())
    return tensors
