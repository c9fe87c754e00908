"""A decoder in float64, and the gradient of each parameter, divided among groups of tokens.

Token embedding, RMS norms, rotary grouped-query attention (with sinks and biases where there are some), SwiGLU
or a mixture of such experts, and a head, which may be the embedding. Parameters are named as transformers names
them. The gradient of a parameter is a sum over the tokens that it is applied to; the parts of this sum are what
ranks with different tokens have before they reduce it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Back = Callable[[np.ndarray], np.ndarray]
Arrays = Mapping[str, np.ndarray]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder, as transformers names them."""

    vocab_size: int = 24
    hidden_size: int = 12
    intermediate_size: int = 16
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 4
    rope_theta: float = 100.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_sinks: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each parameter; weights of linear layers are [out, in]."""
        hidden, inner, heads = self.hidden_size, self.intermediate_size, self.num_attention_heads
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            front = f"model.layers.{layer}."
            found[front + "input_layernorm.weight"] = (hidden,)
            for name, count in (("q", heads), ("k", self.num_key_value_heads), ("v", self.num_key_value_heads)):
                found[f"{front}self_attn.{name}_proj.weight"] = (count * self.head_dim, hidden)
                if self.attention_bias:
                    found[f"{front}self_attn.{name}_proj.bias"] = (count * self.head_dim,)
            found[front + "self_attn.o_proj.weight"] = (hidden, heads * self.head_dim)
            if self.attention_bias:
                found[front + "self_attn.o_proj.bias"] = (hidden,)
            if self.attention_sinks:
                found[front + "self_attn.sinks"] = (heads,)
            found[front + "post_attention_layernorm.weight"] = (hidden,)
            if self.num_experts:
                found[front + "mlp.gate.weight"] = (self.num_experts, hidden)
            for part in [f"mlp.experts.{e}." for e in range(self.num_experts)] or ["mlp."]:
                found |= {f"{front}{part}{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
                found[f"{front}{part}down_proj.weight"] = (hidden, inner)
        found[NORM] = (hidden,)
        return found if self.tie_word_embeddings else found | {HEAD: (self.vocab_size, hidden)}


def weights_of(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Random weights in float32: norms are near 1, others have the size that keeps activations near 1."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in config.shapes().items():
        scale = 0.3 if len(shape) == 1 else 1.0 if name == EMBEDDING else 1.5 * shape[1] ** -0.5
        found[name] = (("norm" in name) + scale * rng.normal(size=shape)).astype(np.float32)
    return found


def rotated(x: np.ndarray, positions: np.ndarray, theta: float, sign: int = 1) -> np.ndarray:
    """x [tokens, heads, dim] after the rotary embedding; with sign = -1, its transpose."""
    half = x.shape[2] // 2
    angle = sign * positions[:, None] * theta ** (-np.arange(half) / half)
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=2)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class Decoder:
    """One pass over a stream of tokens.

    groups [tokens]: the group of each token, of `count`. run gives logits and a function that maps their gradient
    to the gradients of the parameters, [count, *shape] each. After it, by_head are functions of no argument that give
    the gradients of k_proj and v_proj by query head, [heads, *shape]. What a wrong backward pass does: kept are the
    pairs whose part of the gradients of keys and values is kept, and columns(width) [width] those outputs of
    column-parallel layers whose gradient reaches the input.
    """

    def __init__(self, config: Config, weights: Arrays, groups: np.ndarray, count: int) -> None:
        self.config = config
        self.kept: np.ndarray | None = None
        self.columns: Callable[[int], np.ndarray] | None = None
        self.weights = {name: np.asarray(w, np.float64) for name, w in weights.items()}
        self.member = (groups == np.arange(count)[:, None]).astype(np.float64)  # [count, tokens]
        self.gradients: dict[str, Any] = {}
        self.by_head: dict[str, Callable[[], np.ndarray]] = {}

    def add(self, name: str, d_y: np.ndarray, x: np.ndarray | None = None) -> None:
        """Adds sum_t d_y[t] x[t], or sum_t d_y[t], of each group to the gradient of a parameter."""
        part = self.member @ d_y if x is None else (self.member[:, None] * d_y.T) @ x
        self.gradients[name] = self.gradients.get(name, 0) + part

    def run(self, ids: np.ndarray, positions: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, Callable]:
        """pairs [tokens, tokens]: which keys each query sees."""
        x, tied = self.weights[EMBEDDING][ids], self.config.tie_word_embeddings
        backs: list[Back] = []
        for layer in range(self.config.num_hidden_layers):
            front = f"model.layers.{layer}."
            normed, back_norm = self.norm(front + "input_layernorm.weight", x)
            y, back = self.attention(front + "self_attn.", normed, positions, pairs)
            x = x + y
            backs.append(lambda d, back=back, back_norm=back_norm: d + back_norm(back(d)))
            normed, back_norm = self.norm(front + "post_attention_layernorm.weight", x)
            y, back = (self.experts if self.config.num_experts else self.swiglu)(front + "mlp.", normed)
            x = x + y
            backs.append(lambda d, back=back, back_norm=back_norm: d + back_norm(back(d)))
        last, back_last = self.norm(NORM, x)
        head = self.weights[EMBEDDING if tied else HEAD]

        def backward(d_logits: np.ndarray) -> dict[str, np.ndarray]:
            self.gradients, self.by_head = {}, {}
            self.add(HEAD, d_logits, last)
            d_x = back_last(self.reaching(HEAD, d_logits) @ head)
            for back in reversed(backs):
                d_x = back(d_x)
            self.add(EMBEDDING, np.eye(self.config.vocab_size)[ids], d_x)
            return self.gradients

        return last @ head.T, backward

    def reaching(self, name: str, d_y: np.ndarray) -> np.ndarray:
        """The gradient of a layer's output that reaches its input."""
        split = name == HEAD or name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
        return d_y * self.columns(d_y.shape[1]) if self.columns and split else d_y

    def norm(self, name: str, x: np.ndarray) -> tuple[np.ndarray, Back]:
        scale = ((x**2).mean(axis=1, keepdims=True) + self.config.rms_norm_eps) ** -0.5
        unit = x * scale

        def back(d_y: np.ndarray) -> np.ndarray:
            self.add(name, d_y * unit)
            d = d_y * self.weights[name]
            return scale * (d - unit * (d * unit).mean(axis=1, keepdims=True))

        return unit * self.weights[name], back

    def linear(self, name: str, x: np.ndarray) -> tuple[np.ndarray, Back]:
        weight, bias = self.weights[name + ".weight"], self.weights.get(name + ".bias")

        def back(d_y: np.ndarray) -> np.ndarray:
            self.add(name + ".weight", d_y, x)
            if bias is not None:
                self.add(name + ".bias", d_y)
            return self.reaching(name, d_y) @ weight

        return x @ weight.T + (0 if bias is None else bias), back

    def attention(self, front: str, x: np.ndarray, positions: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, Back]:
        c = self.config
        share, tokens = c.num_attention_heads // c.num_key_value_heads, len(x)
        flat = {n: self.linear(f"{front}{n}_proj", x) for n in "qkv"}
        q, k, v = (flat[n][0].reshape(tokens, -1, c.head_dim) for n in "qkv")
        q, k = (rotated(a, positions, c.rope_theta) for a in (q, k))
        k, v = (np.repeat(a, share, axis=1) for a in (k, v))
        sinks = self.weights.get(front + "sinks", np.full(c.num_attention_heads, -np.inf))
        scale = c.head_dim**-0.5
        scores = np.where(pairs, scale * np.einsum("qhd,khd->hqk", q, k), -np.inf)
        p = softmax(np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (len(sinks), tokens, 1))], axis=2))
        p, of_sink = p[..., :-1], p[..., -1]
        out = np.einsum("hqk,khd->qhd", p, v)
        y, back_out = self.linear(front + "o_proj", out.reshape(tokens, -1))

        def back(d_y: np.ndarray) -> np.ndarray:
            d_out = back_out(d_y).reshape(out.shape)
            delta = (out * d_out).sum(axis=2).T
            d_p = np.einsum("qhd,khd->hqk", d_out, v)
            d_scores = scale * p * (d_p - delta[:, :, None])
            if front + "sinks" in self.weights:
                self.add(front + "sinks", -(of_sink * delta).T)
            kept = 1.0 if self.kept is None else self.kept
            d = {
                "q": np.einsum("hqk,khd->qhd", d_scores, k),
                "k": np.einsum("hqk,qhd->khd", kept * d_scores, q),
                "v": np.einsum("hqk,qhd->khd", kept * p, d_out),
            }
            for n in "qk":
                d[n] = rotated(d[n], positions, c.rope_theta, -1)
            for n in "kv":
                self.add_by_head(f"{front}{n}_proj", d[n], x)
                d[n] = d[n].reshape(tokens, -1, share, c.head_dim).sum(axis=2)
            return sum(flat[n][1](d[n].reshape(tokens, -1)) for n in "qkv")

        return y, back

    def add_by_head(self, name: str, d_y: np.ndarray, x: np.ndarray) -> None:
        """The gradient of k_proj or v_proj that each query head gives; d_y [tokens, query heads, dim]."""
        heads, kv_heads = d_y.shape[1], self.config.num_key_value_heads
        of_kv = np.repeat(np.eye(kv_heads), heads // kv_heads, axis=0)
        self.by_head[name + ".bias"] = lambda: np.einsum("hk,thd->hkd", of_kv, d_y).reshape(heads, -1)
        self.by_head[name + ".weight"] = lambda: np.einsum("hk,thd,ti->hkdi", of_kv, d_y, x).reshape(
            heads, -1, x.shape[1]
        )

    def swiglu(self, front: str, x: np.ndarray) -> tuple[np.ndarray, Back]:
        gate, back_gate = self.linear(front + "gate_proj", x)
        up, back_up = self.linear(front + "up_proj", x)
        sigmoid = 1 / (1 + np.exp(-gate))
        y, back_down = self.linear(front + "down_proj", gate * sigmoid * up)

        def back(d_y: np.ndarray) -> np.ndarray:
            d = back_down(d_y)
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            return back_gate(d * up * slope) + back_up(d * gate * sigmoid)

        return y, back

    def experts(self, front: str, x: np.ndarray) -> tuple[np.ndarray, Back]:
        """The experts that have a token's largest probabilities, weighted by these, which are normalised to 1."""
        scores, back_scores = self.linear(front + "gate", x)
        p = softmax(scores)
        chosen = np.zeros(p.shape)
        np.put_along_axis(chosen, np.argsort(-p, axis=1)[:, : self.config.num_experts_per_tok], 1, axis=1)
        total = (p * chosen).sum(axis=1, keepdims=True)
        share = p * chosen / total
        parts = [self.swiglu(f"{front}experts.{e}.", x) for e in range(p.shape[1])]
        y = sum(share[:, e, None] * part for e, (part, _) in enumerate(parts))

        def back(d_y: np.ndarray) -> np.ndarray:
            d_share = np.stack([(d_y * part).sum(axis=1) for part, _ in parts], axis=1)
            d_p = chosen * (d_share - (d_share * share).sum(axis=1, keepdims=True)) / total
            d_scores = p * (d_p - (d_p * p).sum(axis=1, keepdims=True))
            return back_scores(d_scores) + sum(back(share[:, e, None] * d_y) for e, (_, back) in enumerate(parts))

        return y, back
