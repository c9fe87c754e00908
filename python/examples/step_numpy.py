"""A step of a decoder on dp x cp x tp ranks in NumPy, for `gyre conform --backend numpy`, contract gradients.

Layers are split over tp as Megatron-LM splits them: columns, then rows; with sequence parallelism, ranks of tp
have different tokens between them. Keys and values are gathered over cp. Every function returns a value and a
function that maps its gradient to that of the input, and adds gradients of parameters on the way.
"""

import numpy as np
import ranks_numpy

from gyre.distributed.decoder import Config, rotated, softmax, weights_of
from gyre.distributed.layouts import NAMES

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head", "sinks")  # of [out, in]


class Rank:
    """One rank: its shards of the weights, and its groups."""

    sequence_parallel = True

    def __init__(self, weights, microbatches, config, dp_group, cp_group, tp_group, data_group):
        vars(self).update(locals())
        self.tp, self.t, self.type = tp_group.size, tp_group.rank, weights[EMBEDDING].dtype
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        kv_fits = self.kv_heads % self.tp == 0 or self.tp % self.kv_heads == 0
        for what, size, fits in (("heads", self.heads, self.heads % self.tp == 0), ("KV heads", self.kv_heads, kv_fits),
                                 ("ids", config.vocab_size, config.vocab_size % self.tp == 0)):
            if not fits:
                raise NotImplementedError(f"{size} {what} over {self.tp} ranks")
        self.own = {name: self.shard(name, w) for name, w in weights.items()}
        self.gradients = {name: np.zeros_like(w) for name, w in self.own.items()}

    # Parameters: which part a rank has, and what their gradients are summed over.

    def dim(self, name):
        """The dimension that is split over tp; None: every rank has all."""
        if "_proj.bias" in name and "o_proj" not in name or any(row in name for row in ROWS):
            return 0
        return 1 if "o_proj.weight" in name or "down_proj" in name else None

    def shard(self, name, w):
        if self.dim(name) is None:
            return w
        if self.tp > self.kv_heads and ("k_proj" in name or "v_proj" in name):  # neighbours have the same head
            return np.split(w, self.kv_heads)[self.t * self.kv_heads // self.tp]
        return np.split(w, self.tp, axis=self.dim(name))[self.t]

    def placement(self, name):
        return "replicated" if self.dim(name) is None else f"shard({self.dim(name)})"

    def add(self, name, gradient):
        self.gradients[name] += gradient

    def reduced(self, name, gradient):
        gradient = self.over_data(name, gradient)
        if self.dim(name) is None and self.sequence_parallel:
            return self.over_tp(name, gradient)
        return self.over_copies(gradient) if "k_proj" in name or "v_proj" in name else gradient

    def over_data(self, name, gradient):
        return self.data_group.all_reduce(gradient)

    def over_tp(self, name, gradient):
        return self.tp_group.all_reduce(gradient)

    def over_copies(self, gradient):
        """The sum over the ranks that have the same KV head."""
        copies = self.tp // self.kv_heads
        if copies <= 1:
            return gradient
        return sum(self.tp_group.all_gather(gradient)[self.t // copies * copies :][:copies])

    # Tokens between layers: with sequence parallelism each rank of tp has a block of them.

    def gather(self, x):
        return np.concatenate(self.tp_group.all_gather(x)) if self.sequence_parallel else x

    def scatter(self, x):
        if self.sequence_parallel:
            return sum(self.tp_group.all_to_all(np.array_split(x, self.tp)))
        return self.tp_group.all_reduce(x)

    def enter(self, x):
        """What a layer that is split by columns reads."""
        return self.gather(x), self.scatter

    def leave(self, y):
        """What a layer that is split by rows returns: a sum over tp."""
        return self.scatter(y), self.gather

    # Layers.

    def linear(self, name, x, bias=True):
        weight = self.own[name + ".weight"]
        bias = self.own.get(name + ".bias") if bias else None

        def back(d):
            self.add(name + ".weight", d.T @ x)
            if bias is not None:
                self.add(name + ".bias", d.sum(axis=0))
            return d @ weight

        return x @ weight.T + (0 if bias is None else bias), back

    def row_bias(self, name, y):
        """Added once, behind the sum over tp."""
        bias = self.own.get(name + ".bias")
        if bias is None:
            return y, lambda d: d

        def back(d):
            self.add(name + ".bias", d.sum(axis=0))
            return d

        return y + bias, back

    def norm(self, name, x):
        scale = ((x**2).mean(axis=1, keepdims=True) + self.config.rms_norm_eps) ** -0.5
        unit, weight = x * scale, self.own[name]

        def back(d):
            self.add(name, (d * unit).sum(axis=0))
            d = d * weight
            return scale * (d - unit * (d * unit).mean(axis=1, keepdims=True))

        return unit * weight, back

    def embed(self, batch):
        table = self.own[EMBEDDING]
        column = batch["ids"] - self.t * len(table)
        here = (column >= 0) & (column < len(table))
        x, back = self.leave(np.where(here[:, None], table[np.where(here, column, 0)], 0).astype(self.type))

        def add(d):
            gradient = np.zeros_like(table)
            np.add.at(gradient, column[here], back(d)[here])
            self.add(EMBEDDING, gradient)

        return x, add

    def head(self, x):
        name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        whole, back_whole = self.enter(x)
        logits, back = self.linear(name.removesuffix(".weight"), whole)
        return logits, lambda d: back_whole(back(d))

    def positions(self, batch):
        return batch["positions"]

    def allowed(self, batch):
        """[rows, slots]: which keys the rank's queries see."""
        layout, group = batch["layout"], self.cp_group
        segment = np.searchsorted(layout.cu_seqlens, np.arange(layout.slots), side="right")
        mine = layout.index[group.rank]
        return (segment[mine][:, None] == segment) & (np.arange(layout.slots) <= mine[:, None])

    def attend(self, q, k, v, batch, sinks):
        return ranks_numpy.attention(q, k, v, batch["cu_seqlens"], batch["layout"], self.cp_group, self.allowed(batch),
                                     self.config.head_dim**-0.5, sinks)

    def attention(self, front, x, batch):
        whole, back_whole = self.enter(x)
        flat = {n: self.linear(f"{front}{n}_proj", whole) for n in "qkv"}
        q, k, v = (flat[n][0].reshape(len(whole), -1, self.config.head_dim) for n in "qkv")
        positions, theta = self.positions(batch), self.config.rope_theta
        q, k = (rotated(a, positions, theta).astype(self.type) for a in (q, k))
        sinks = self.own.get(front + "sinks")
        out, _, back = self.attend(q, k, v, batch, sinks)
        partial, back_o = self.linear(front + "o_proj", out.reshape(len(whole), -1), bias=False)
        y, back_y = self.leave(partial)
        y, back_bias = self.row_bias(front + "o_proj", y)

        def backward(d):
            found = back(back_o(back_y(back_bias(d))).reshape(out.shape))
            if sinks is not None:
                self.add(front + "sinks", found[3])
            d_q, d_k = (rotated(a, positions, theta, -1).astype(self.type) for a in found[:2])
            d_flat = zip("qkv", (d_q, d_k, found[2]))
            return back_whole(sum(flat[n][1](a.reshape(len(a), -1)) for n, a in d_flat))

        return y, backward

    def swiglu(self, front, x):
        """The part of the sum over tp."""
        (gate, back_gate), (up, back_up) = (self.linear(f"{front}{n}_proj", x) for n in ("gate", "up"))
        sigmoid = 1 / (1 + np.exp(-gate))
        y, back_down = self.linear(front + "down_proj", gate * sigmoid * up)

        def backward(d):
            d = back_down(d)
            return back_gate(d * up * sigmoid * (1 + gate * (1 - sigmoid))) + back_up(d * gate * sigmoid)

        return y, backward

    def mlp(self, front, x):
        whole, back_whole = self.enter(x)
        y, back = self.swiglu(front, whole) if not self.config.num_experts else self.experts(front, x, whole)
        y, back_y = self.leave(y)

        def backward(d):
            found = back(back_y(d))
            return back_whole(found) if not self.config.num_experts else back_whole(found[0]) + found[1]

        return y, backward

    def experts(self, front, x, whole):
        """The router reads the rank's own tokens, and its choice is gathered."""
        scores, back_scores = self.linear(front + "gate", x)
        p = softmax(scores)
        chosen = np.argsort(np.argsort(-p, axis=1), axis=1) < self.config.num_experts_per_tok
        total = (p * chosen).sum(axis=1, keepdims=True)
        share = p * chosen / total
        shares, back_shares = self.enter(share)
        parts = [self.swiglu(f"{front}experts.{e}.", whole) for e in range(p.shape[1])]
        y = sum(shares[:, [e]] * part for e, (part, _) in enumerate(parts))

        def backward(d):
            d_share = back_shares(np.stack([(d * part).sum(axis=1) for part, _ in parts], axis=1))
            d_p = chosen * (d_share - (d_share * share).sum(axis=1, keepdims=True)) / total
            d_scores = p * (d_p - (d_p * p).sum(axis=1, keepdims=True))
            return sum(back(shares[:, [e]] * d) for e, (_, back) in enumerate(parts)), back_scores(d_scores)

        return y, backward

    # The loss and the step.

    def weight(self, batch):
        return np.where(batch["labels"] == -100, 0, batch["weights"])

    def count(self, batch):
        """Of all labels of all microbatches of all ranks: what every label's gradient is divided by."""
        return self.data_group.all_reduce(sum(self.weight(b).sum() for b in self.microbatches))

    def d_logits(self, logits, batch):
        """The gradient of this rank's part of the loss."""
        top = self.tp_group.all_reduce(logits.max(axis=1, initial=-np.inf), "max")
        weights = np.exp(logits - top[:, None])
        p = weights / self.tp_group.all_reduce(weights.sum(axis=1))[:, None]
        column = batch["labels"] - self.t * p.shape[1]
        p -= column[:, None] == np.arange(p.shape[1])
        count = self.count(batch)
        return (p * self.weight(batch)[:, None] * (1 / count if count else 0)).astype(self.type)

    def backward(self, batch):
        x, embedded = self.embed(batch)
        backs = []
        for layer in range(self.config.num_hidden_layers):
            front = f"model.layers.{layer}."
            for norm, part in (("input_layernorm", lambda x, f=front: self.attention(f + "self_attn.", x, batch)),
                               ("post_attention_layernorm", lambda x, f=front: self.mlp(f + "mlp.", x))):
                normed, back_norm = self.norm(f"{front}{norm}.weight", x)
                y, back = part(normed)
                x = x + y
                backs.append((back_norm, back))
        last, back_last = self.norm("model.norm.weight", x)
        logits, back_head = self.head(last)
        d_x = back_last(back_head(self.d_logits(logits, batch)))
        for back_norm, back in reversed(backs):
            d_x = d_x + back_norm(back(d_x))
        embedded(d_x)

    def step(self):
        for batch in self.microbatches:
            self.backward(batch)
        return {name: (self.reduced(name, g).astype(self.type), self.placement(name))
                for name, g in self.gradients.items()}


def gradients(weights, microbatches, config, dp_group, cp_group, tp_group, data_group):
    return Rank(weights, microbatches, config, dp_group, cp_group, tp_group, data_group).step()


def grad_norm(gradients, placements, max_norm, copies, dp_group, cp_group, tp_group):
    """Squares are summed over the axes that split a parameter; of neighbours that have the same shard, one counts."""
    groups, sums = {"dp": dp_group, "cp": cp_group, "tp": tp_group}, {}
    for name, gradient in gradients.items():
        split = tuple(axis for axis, place in placements[name].items() if place.startswith("shard"))
        sums[split] = sums.get(split, 0) + (gradient.astype(np.float64) ** 2).sum() / copies[name]
    for split in sums:
        for axis in split:
            sums[split] = groups[axis].all_reduce(sums[split])
    norm = np.sqrt(sum(sums.values()))
    factor = min(1, max_norm / (norm + 1e-6))
    return np.float32(norm), {name: (factor * g).astype(g.dtype) for name, g in gradients.items()}


def optimizer_step(parameters, gradients, placements, settings, copies, dp_group, cp_group, tp_group, data_group):
    """AdamW: gradients are summed, then clipped by the norm of all, and every rank updates its shards."""
    s, t = settings, 0
    states = {name: [p, np.zeros_like(p), np.zeros_like(p)] for name, p in parameters.items()}
    for step in gradients:
        t += 1
        own = {}
        for name, gradient in step.items():
            whole = data_group.all_reduce(gradient)
            is_split = placements[name]["dp"] == "shard(0)"
            own[name] = np.array_split(whole, dp_group.size)[dp_group.rank] if is_split else whole
        _, clipped = grad_norm(own, placements, s["max_norm"], copies, dp_group, cp_group, tp_group)
        for name, g in clipped.items():
            p, first, second = states[name]
            p = p * (1 - s["lr"] * s["weight_decay"] * (name in s["decayed"]))
            first = s["beta1"] * first + (1 - s["beta1"]) * g
            second = s["beta2"] * second + (1 - s["beta2"]) * g**2
            root = np.sqrt(second / (1 - s["beta2"] ** t)) + s["eps"]
            states[name] = [p - s["lr"] * first / (1 - s["beta1"] ** t) / root, first, second]
    return {name: tuple(x.astype(p.dtype) for x in states[name]) for name, p in parameters.items()}


def mtp_loss(logits_shards, labels, group, data_group, first, mtp_weight):
    """Every depth by its own count; no rank needs labels of each."""
    loss, gradients = 0.0, []
    for depth, (logits, mine) in enumerate(zip(logits_shards, labels)):
        known = mine != -100
        factor = (1 if depth == 0 else mtp_weight / (len(labels) - 1)) / max(1, data_group.all_reduce(known.sum()))
        top = group.all_reduce(logits.max(axis=1, initial=-np.inf), "max")[:, None]
        lse = top + np.log(group.all_reduce(np.exp(logits - top).sum(axis=1)))[:, None]
        here = (mine - first)[:, None] == np.arange(logits.shape[1])
        target = group.all_reduce(np.where(here, logits, 0).sum(axis=1))
        loss += factor * data_group.all_reduce((known * (lse[:, 0] - target)).sum())
        gradients.append((factor * known[:, None] * (np.exp(logits - lse) - here)).astype(logits.dtype))
    return np.float32(loss), lambda d_loss: [d_loss * g for g in gradients]


def router_loss(router_logits, top_k, aux_weight, z_weight, weights, data_group):
    """Fractions, means and the count are sums over all ranks."""
    experts, w = router_logits.shape[1], weights[:, None]
    p, lse = softmax(router_logits), np.logaddexp.reduce(router_logits, axis=1)[:, None]
    chosen = np.argsort(np.argsort(-router_logits, axis=1), axis=1) < top_k
    f, share, z = (data_group.all_reduce((w * x).sum(axis=0)) for x in (chosen, p, lse**2))
    count = data_group.all_reduce(weights.sum())
    slope = aux_weight * experts * w * f / (top_k * count**2)
    loss = aux_weight * experts * (f @ share) / (top_k * count**2) + z_weight * z[0] / count
    gradient = p * (slope - (slope * p).sum(axis=1, keepdims=True)) + z_weight * 2 * w * lse * p / count
    return np.float32(loss), lambda d_loss: (d_loss * gradient).astype(router_logits.dtype)


def policy_loss(logprobs, old_logprobs, advantages, weights, document, documents, clip, convention, data_group):
    """Documents may lie on several ranks: their tokens are counted over all."""
    tokens = data_group.all_reduce(np.bincount(document, weights, documents))
    share = weights / max(1, (tokens > 0).sum())
    if convention == "token-mean":
        share = weights / max(1, tokens.sum())
    elif convention == "sequence-mean":
        share = share / np.where(tokens > 0, tokens, 1)[document]
    ratio = np.exp(logprobs - old_logprobs)
    kept, cut = ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages
    slope = -share * np.where((kept <= cut) | (np.abs(ratio - 1) <= clip), kept, 0)
    loss = data_group.all_reduce((-share * np.minimum(kept, cut)).sum())
    return np.float32(loss), lambda d_loss: (d_loss * slope).astype(logprobs.dtype)


CONFIG = Config(attention_sinks=True)
WEIGHTS = weights_of(CONFIG, 11)


def invariant(microbatches, dp_group, cp_group, tp_group, data_group):
    """The gradients of a model with weights of its own."""
    return gradients(WEIGHTS, microbatches, CONFIG, dp_group, cp_group, tp_group, data_group)


invariant.layouts = NAMES
