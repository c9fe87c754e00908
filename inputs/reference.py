#!/usr/bin/env python3
"""Scores documents with a Gyre model in NumPy float64, as the reference for the C++ programs.

This is the plainest statement of the model that still runs in reasonable time: one document after
another, one layer after another, one attention head after another, every sum in double precision.
It shares no code with the program that trains models nor with the C++ library, so that agreement
between them means something.

The results are stored in the documents file itself, as the group /reference (replacing an earlier
one; the rest of the file is copied unchanged). With n documents, T tokens in all, L layers, C =
hidden_size, and P = sum over documents of max(0, length - 1):

    attributes model_sha256 (of the model file's bytes), generator
    offsets   int64   [n + 1]      the predictions of document i are offsets[i] .. offsets[i+1]
    logprob   float64 [P]          natural logarithm of the probability of the token that came
    entropy   float64 [P]          Shannon entropy of the predicted distribution, nats
    hidden    float64 [L+1, T, C]  residual stream, before the final norm (--hidden; or float32);
                                   hidden[0] is the embedding, hidden[l] what layer l left

Prediction j of a document is the distribution after its tokens 0..j; its logprob is that of token
j + 1. Positions start at 0 in every document, and no document sees another.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os

import h5py
import numpy as np

import gyre_files
from gyre import reading

QUERY_BLOCK = 1024  # rows of attention scores held at once; bounds memory, changes no result


class Model:
    """The weights of a model file in float64, and its configuration as attributes."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.sha256 = hashlib.sha256(file.read()).hexdigest()
        with h5py.File(path, "r") as file:
            check_schema(file, path, "gyre/model")
            group, arrays = file["model"], reading.read_arrays(path, "model")
            self.vocab_size = int(group.attrs["vocab_size"])
            self.layers = int(group.attrs["num_hidden_layers"])
            self.heads = int(group.attrs["num_attention_heads"])
            self.kv_heads = int(group.attrs["num_key_value_heads"])
            self.head_dim = int(group.attrs["head_dim"])
            self.frequencies, self.rope_factor = rotary(group.attrs)
            turning = group.attrs.get("no_rope_layers", str([1] * self.layers))
            self.turns = [flag == 1 for flag in json.loads(turning)]
            self.windows = windows(group.attrs, self.layers)
            types = json.loads(group.attrs.get("layer_types", "[]")) or [""] * self.layers
            self.recurrent = [kind == "linear_attention" for kind in types]
            self.key_heads, self.value_heads = (
                int(group.attrs.get(f"linear_num_{kind}_heads", 0)) for kind in ("key", "value")
            )
            self.eps = float(group.attrs["rms_norm_eps"])
            self.soft_cap = float(group.attrs.get("final_logit_softcapping", 0))
            self.activation = ACTIVATIONS[group.attrs.get("hidden_act", "silu")]
            weights = {name: array.astype(np.float64) for name, array in arrays.items()}
            self.embed = weights["embed"]
            is_tied = group.attrs.get("tie_word_embeddings", 0)
            self.head = self.embed.T if is_tied else weights["head"]
            self.final_norm = weights["final_norm"]
            self.layer = [layer_of(weights, i) for i in range(self.layers)]


def layer_of(weights, layer):
    """The weights of one layer by their names in it."""
    front = f"layers/{layer}/"
    return {name[len(front) :]: data for name, data in weights.items() if name.startswith(front)}


def windows(attrs, layers):
    """How many tokens a query of each layer sees, itself included; None: all before it."""
    window = int(attrs.get("sliding_window", 0)) or None
    types = json.loads(attrs.get("layer_types", json.dumps(["sliding_attention"] * layers)))
    return [window if kind == "sliding_attention" else None for kind in types]


def check_schema(file, path, schema):
    """Refuses a file of another kind or version."""
    found = (file.attrs.get("schema"), int(file.attrs.get("schema_version", -1)))
    if found != (schema, 1):
        raise SystemExit(f"{path}: schema {found}, wanted {(schema, 1)}")


def rms_norm(x, weight, eps):
    """x [t, C] with each row scaled to a root mean square of one, times weight [C]."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotary(attrs):
    """(radians per position of each pair of a head, factor of cos and sin) as /model has them.

    The first R = rotary_dim elements of a head turn. Pair i turns by theta^(-2i/R), unless
    rope_scaling says otherwise; the formulas are those of Hugging Face's rope types.
    """
    elements = int(attrs.get("rotary_dim", attrs["head_dim"]))
    theta = float(attrs["rope_theta"])
    pair = np.arange(elements // 2)
    usual = theta ** (-2.0 * pair / elements)
    scaling = json.loads(attrs.get("rope_scaling", "{}"))
    kind, factor = scaling.get("rope_type", "default"), scaling.get("factor", 1.0)
    context = scaling.get("original_max_position_embeddings")
    if kind == "default":
        return usual, 1.0
    if kind == "linear":
        return usual / factor, 1.0
    if kind == "divided":
        return usual / np.array(scaling["divisors"]), 1.0
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = np.clip((context * usual / (2 * np.pi) - low) / (high - low), 0, 1)
        return kept * usual + (1 - kept) * usual / factor, 1.0
    if kind != "yarn":
        raise SystemExit(f"rope_scaling of type {kind} is not known")

    def pair_that_makes(turns):
        return elements * math.log(context / turns / (2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_makes(scaling["beta_fast"]), pair_that_makes(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, elements - 1)
    stretched = np.clip((pair - first) / (last - first or 0.001), 0, 1)
    return (1 - stretched) * usual + stretched * usual / factor, scaling["attention_factor"]


def rope(x, frequencies, factor):
    """Rotary position embedding of one head, x [t, D], row p being position p of its document.

    Elements i and i + R/2 are a pair, turned by the angle p * frequencies[i]; cos and sin are
    multiplied by `factor`. R = 2 * len(frequencies); elements from R on stay as they are.
    """
    half = frequencies.size
    angle = np.arange(len(x))[:, None] * frequencies[None, :]
    cos, sin = factor * np.cos(angle), factor * np.sin(angle)
    first, second = x[:, :half], x[:, half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin, x[:, 2 * half :]]
    return np.concatenate(turned, axis=1)


def attend(q, k, v, window, sink):
    """Causal softmax attention of one head, of the last `window` tokens: q, k, v [t, D] -> [t, D].

    The sink is the score of one more key, whose value is 0.
    """
    t, d = q.shape
    out = np.empty_like(q)
    for begin in range(0, t, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, t)
        score = q[begin:end] @ k[:end].T / np.sqrt(d)
        distance = np.arange(begin, end)[:, None] - np.arange(end)[None, :]
        score[(distance < 0) | (distance >= (window or t))] = -np.inf
        top = np.maximum(score.max(axis=1, keepdims=True), sink)
        weight = np.exp(score - top)
        total = weight.sum(axis=1, keepdims=True) + np.exp(sink - top)
        out[begin:end] = (weight @ v[:end]) / total
    return out


def sigmoid(x):
    """1 / (1 + e^-x), without overflow for large negative x."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x):
    """x times the standard normal distribution function of x."""
    return x / 2 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))


def gelu_tanh(x):
    """The approximation of gelu(x) by tanh."""
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
}


def convolved(x, weight):
    """silu of the causal convolution of each column of x [t, columns]; weight [width, columns]."""
    history = np.concatenate([np.zeros((len(weight) - 1, x.shape[1])), x])
    return silu(sum(tap * history[j : j + len(x)] for j, tap in enumerate(weight)))


def units(x):
    """Heads of length one, along the last axis."""
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def recur(model, w, h):
    """A recurrent layer in place of attention: h [t, C] -> [t, C], token by token.

    The state of a head is a matrix that maps keys to values. It fades, and what it holds for the
    token's key is replaced by the token's value, in part: the gated delta rule.
    """
    t, group = len(h), model.value_heads // model.key_heads
    by_head = lambda x, heads: x.reshape(t, heads, -1)  # noqa: E731
    q = units(by_head(convolved(h @ w["wq"], w["conv_q"]), model.key_heads))
    k = units(by_head(convolved(h @ w["wk"], w["conv_k"]), model.key_heads))
    v = by_head(convolved(h @ w["wv"], w["conv_v"]), model.value_heads)
    q, k = (np.repeat(x, group, axis=1) for x in (q / np.sqrt(q.shape[-1]), k))
    strength = sigmoid(h @ w["wb"])
    decay = np.exp(-np.exp(w["a_log"]) * np.logaddexp(0, h @ w["wa"] + w["dt_bias"]))
    state = np.zeros((model.value_heads, k.shape[-1], v.shape[-1]))
    out = np.empty_like(v)
    for i in range(t):
        state *= decay[i, :, None, None]
        held = np.einsum("hkv,hk->hv", state, k[i])
        state += np.einsum("hk,hv->hkv", k[i], strength[i, :, None] * (v[i] - held))
        out[i] = np.einsum("hkv,hk->hv", state, q[i])
    gated = rms_norm(out, w["o_norm"], model.eps) * silu(by_head(h @ w["wz"], model.value_heads))
    return gated.reshape(t, -1) @ w["wo"]


def heads_of(model, layer, x, count, matrix, bias, weight):
    """Queries or keys of each head, [t, D]: projected, with bias, normalised and turned."""
    w, d = model.layer[layer], model.head_dim
    x = x @ w[matrix] + w.get(bias, 0.0)
    for head in range(count):
        mine = x[:, head * d : (head + 1) * d]
        if weight in w:
            mine = rms_norm(mine, w[weight], model.eps)
        if model.turns[layer]:
            mine = rope(mine, model.frequencies, model.rope_factor)
        yield mine


def attention(model, layer, h):
    """Softmax attention of one layer: h [t, C] -> [t, C]."""
    d, w = model.head_dim, model.layer[layer]
    queries = heads_of(model, layer, h, model.heads, "wq", "bq", "q_norm")
    keys = list(heads_of(model, layer, h, model.kv_heads, "wk", "bk", "k_norm"))
    v = h @ w["wv"] + w.get("bv", 0.0)
    sinks = w.get("sinks", np.full(model.heads, -np.inf))
    mixed = []
    for head, query in enumerate(queries):
        kv_head = head // (model.heads // model.kv_heads)
        values = v[:, kv_head * d : (kv_head + 1) * d]
        mixed.append(attend(query, keys[kv_head], values, model.windows[layer], sinks[head]))
    mixed = np.concatenate(mixed, axis=1)
    if "wz" in w:
        mixed = mixed * sigmoid(h @ w["wz"])
    return mixed @ w["wo"] + w.get("bo", 0.0)


def forward(model, tokens):
    """Residual streams of one document: tokens [t] -> [L + 1, t, C]."""
    x = model.embed[tokens]
    hidden = [x]
    for layer, w in enumerate(model.layer):
        h = rms_norm(x, w["attn_norm"], model.eps)
        x = x + (recur(model, w, h) if model.recurrent[layer] else attention(model, layer, h))
        h = rms_norm(x, w["mlp_norm"], model.eps)
        x = x + (model.activation(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]
        hidden.append(x)
    return np.stack(hidden)


def log_probabilities(model, x):
    """Last residual stream x [t, C] -> [t, vocab_size]; the padded columns take no part."""
    logits = rms_norm(x, model.final_norm, model.eps) @ model.head[:, : model.vocab_size]
    if model.soft_cap:
        logits = model.soft_cap * np.tanh(logits / model.soft_cap)
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def score(model, tokens):
    """One document -> (logprob [t-1], entropy [t-1], hidden [L+1, t, C]); t may be 0."""
    tokens = np.asarray(tokens, dtype=np.int64)
    if tokens.size and not (0 <= tokens.min() and tokens.max() < model.vocab_size):
        raise SystemExit("a token is outside the model's vocabulary")
    if tokens.size == 0:
        empty = np.empty((model.layers + 1, 0, model.embed.shape[1]))
        return np.empty(0), np.empty(0), empty
    hidden = forward(model, tokens)
    logp = log_probabilities(model, hidden[-1][:-1])
    logprob = logp[np.arange(tokens.size - 1), tokens[1:]]
    entropy = -(np.exp(logp) * logp).sum(axis=1)
    return logprob, np.abs(entropy), hidden  # abs: -0.0 -> 0.0; no term of the sum is negative


def add_reference(model_path, documents_path, hidden_type=None):
    """Scores every document of a file and stores the results in it.

    hidden_type is None (leave the residual streams out), "float64" or "float32".
    """
    model = Model(model_path)
    with h5py.File(documents_path, "r") as file:
        check_schema(file, documents_path, "gyre/documents")
        tokens = file["documents/tokens"][...]
        bounds = file["documents/offsets"][...]
    scored = [score(model, tokens[a:b]) for a, b in zip(bounds[:-1], bounds[1:])]

    offsets = np.zeros(len(scored) + 1, dtype=np.int64)
    np.cumsum([logprob.size for logprob, _, _ in scored], out=offsets[1:])
    arrays = {
        "offsets": offsets,
        "logprob": np.concatenate([np.empty(0)] + [s[0] for s in scored]),
        "entropy": np.concatenate([np.empty(0)] + [s[1] for s in scored]),
    }
    if hidden_type is not None:
        empty = np.empty((model.layers + 1, 0, model.embed.shape[1]))
        hidden = np.concatenate([empty] + [s[2] for s in scored], axis=1)
        arrays["hidden"] = hidden.astype(hidden_type)

    # A new file, not a change in place: HDF5 does not give back the room of what is deleted.
    temporary = f"{documents_path}.tmp{os.getpid()}"
    try:
        with h5py.File(documents_path, "r") as old, h5py.File(temporary, "w") as new:
            for key, value in old.attrs.items():
                if key != gyre_files.CONTENT:
                    new.attrs[key] = value
            for name in old:
                if name != "reference":
                    old.copy(name, new)
            group = new.create_group("reference")
            group.attrs["model_sha256"] = model.sha256
            group.attrs["generator"] = "inputs/reference.py (NumPy, float64)"
            for name, array in arrays.items():
                options = {"chunks": array.shape, "fletcher32": True} if array.size else {}
                if name == "hidden" and array.size:
                    options["chunks"] = (1,) + array.shape[1:]
                group.create_dataset(name, data=array, **options)
        gyre_files.record_content(temporary)
        os.replace(temporary, documents_path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
    return arrays


def main():
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Score documents in float64 and store the results in their file.",
        epilog="Results: the group /reference of the documents file; see the top of this program.",
    )
    parser.add_argument("--model", required=True, help="gyre/model file")
    parser.add_argument("--documents", required=True, help="gyre/documents file, rewritten")
    parser.add_argument(
        "--hidden",
        nargs="?",
        const="float64",
        choices=["float64", "float32"],
        help="also store the residual streams, as float64 unless float32 is asked for",
    )
    args = parser.parse_args()
    arrays = add_reference(args.model, args.documents, args.hidden)
    nats, count = -arrays["logprob"].sum(), arrays["logprob"].size
    bits = nats / np.log(2.0) / max(1, count)
    print(f"{args.documents}: {count} predictions, {nats:.6f} nats, {bits:.4f} bits per token")


if __name__ == "__main__":
    main()
