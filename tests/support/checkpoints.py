"""A model of one layer in the forms of other programs: config.json with model.safetensors, and model.gguf."""

import json
import pathlib
import struct

import numpy

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 256, 2, 1, 16


def tensors(vocab):
    """Name of Hugging Face, name of llama.cpp, shape, ggml type and its bytes in a block of values."""
    q, kv, layer, block = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, "model.layers.0.", "blk.0."
    return (
        ("model.embed_tokens", "token_embd", (vocab, HIDDEN), 8, 34, 32),
        (layer + "input_layernorm", block + "attn_norm", (HIDDEN,), 0, 4, 1),
        (layer + "self_attn.q_proj", block + "attn_q", (q, HIDDEN), 2, 18, 32),
        (layer + "self_attn.k_proj", block + "attn_k", (kv, HIDDEN), 3, 20, 32),
        (layer + "self_attn.v_proj", block + "attn_v", (kv, HIDDEN), 1, 2, 1),
        (layer + "self_attn.o_proj", block + "attn_output", (HIDDEN, q), 30, 2, 1),
        (layer + "post_attention_layernorm", block + "ffn_norm", (HIDDEN,), 0, 4, 1),
        (layer + "mlp.gate_proj", block + "ffn_gate", (INNER, HIDDEN), 8, 34, 32),
        (layer + "mlp.up_proj", block + "ffn_up", (INNER, HIDDEN), 8, 34, 32),
        (layer + "mlp.down_proj", block + "ffn_down", (HIDDEN, INNER), 14, 210, 256),
        ("lm_head", "output", (vocab, HIDDEN), 0, 4, 1),
        ("model.norm", "output_norm", (HIDDEN,), 0, 4, 1),
    )


def config(vocab):
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": HIDDEN,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": INNER, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "tie_word_embeddings": False, "max_position_embeddings": 512,
    }  # fmt: skip


def safetensors(vocab, values=numpy.zeros):
    """`values` makes float32 numbers of a shape."""
    header, data = {}, b""
    for index, (name, _, shape, *_) in enumerate(tensors(vocab)):
        numbers = numpy.asarray(values(shape), "<f4")
        halves = (numbers.view("<u4") >> 16).astype("<u2")
        kind, raw = (("F32", numbers), ("F16", numbers.astype("<f2")), ("BF16", halves))[index % 3]
        raw = raw.tobytes()
        header[f"{name}.weight"] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def gguf_value(value):
    """A value with its type; lists are of texts, of float32 or of int32."""
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value.encode())) + value.encode()
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, list):
        kind = {str: 8, float: 6, int: 5}[type(value[0])]
        items = (struct.pack("<i", x) if kind == 5 else gguf_value(x)[4:] for x in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def gguf(tokens, keys=()):
    keys = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": HIDDEN, "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS, "llama.rope.freq_base": 1e4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": len(tokens), "general.alignment": 32,
        "tokenizer.ggml.tokens": list(tokens),
    } | dict(keys)  # fmt: skip
    table = tensors(len(tokens))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(table), len(keys))
    header += b"".join(gguf_value(key)[4:] + gguf_value(value) for key, value in keys.items())
    data = b""
    for _, name, shape, kind, width, block in table:
        data += bytes(-len(data) % 32)
        header += gguf_value(f"{name}.weight")[4:] + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}QIQ", *reversed(shape), kind, len(data))
        data += bytes(width * int(numpy.prod(shape)) // block)
    return header + bytes(-len(header) % 32) + data


def write(folder):
    folder, vocab = pathlib.Path(folder), 8
    (folder / "config.json").write_text(json.dumps(config(vocab)))
    (folder / "model.safetensors").write_bytes(safetensors(vocab))
    index = {"metadata": {}, "weight_map": {f"{name}.weight": "model.safetensors" for name, *_ in tensors(vocab)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.gguf").write_bytes(gguf([f"t{i}" for i in range(vocab)], {"tokenizer.ggml.token_type": [1] * vocab}))
