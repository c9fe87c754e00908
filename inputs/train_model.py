#!/usr/bin/env python3
"""Trains the byte-level decoder that Gyre's demonstrations use, on text that a Debian machine has.

Text. English manual pages, the copyright files, readme files, news and changelogs of installed
packages, and C and C++ headers, decompressed. Identical files count once. /usr/share/
common-licenses is left out, as is any copy of a file of it, because the demonstrations score those
licences; note that the copyright files quote from them at length, so they are unseen as files but
not as language. A hash of its content decides whether a file is for training or held out.

Training. AdamW with a cosine schedule and gradient clipping, matrix products in bfloat16, master
weights in float32. Time is what is budgeted (--minutes), so schedule and phases are functions of
the share of it that has passed and no two runs give the same weights. Every sample starts with
bos at position 0, whatever part of its file follows: in use a document always does. The windows
are much shorter than the documents in use, so in half of the samples the window is cut into pieces
whose positions are spread over MAX_POSITION: the model meets every distance in training though
never that many tokens at once. The phases lengthen the windows.

Measures, stored in the model file's /provenance. Bits per byte over whole held-out files, each
scored as one document (the cost of the final eos included, the number of bytes the denominator),
in all and by position in the file, against gzip -9 on the same bytes. Here too matrix products are
in bfloat16, float32 taking many times as long on long files.

Needs python3-torch (CPU), python3-numpy, python3-h5py. On Debian set OPENBLAS_CORETYPE=SkylakeX
(or what fits) if OpenBLAS fails to recognise the processor.
"""

import argparse
import datetime
import glob
import gzip
import hashlib
import math
import os
import sys
import time
import zlib

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError as error:
    print(f"skipped: {error}; it needs PyTorch (CPU), NumPy and h5py", file=sys.stderr)
    sys.exit(77)

import gyre_files

HERE = os.path.dirname(os.path.abspath(__file__))

CONFIG = {
    "vocab_size": gyre_files.VOCAB_SIZE,
    "vocab_padded": gyre_files.VOCAB_PADDED,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "rope_theta": 50000.0,  # the slowest pair turns half a circle in about 80000 positions
    "rms_norm_eps": 1e-5,
}

# Kind -> (patterns, bytes wanted at most). Files are taken in the order of their hash.
SOURCES = {
    "manual pages": (["/usr/share/man/man[1-8]/*"], 40 << 20),
    "copyright files": (["/usr/share/doc/*/copyright"], 12 << 20),
    "readme, news, changelogs": (
        [
            f"/usr/share/doc/*/{stem}*"
            for stem in ("README", "NEWS", "changelog", "TODO", "FAQ", "AUTHORS", "THANKS")
        ],
        12 << 20,
    ),
    "C and C++ headers": (
        ["/usr/include/**/*.h", "/usr/include/**/*.hpp"],
        24 << 20,
    ),
}
EXCLUDED = "/usr/share/common-licenses"
FILE_BYTES = (200, 160 << 10)  # smaller and larger files are not used
HELD_OUT_BYTES = (200, 40_000)  # sizes of files held out; others of that hash are not used
HELD_OUT_PER_MILLE = 10
MAX_POSITION = 48_000
BUCKETS = (0, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

# (share of the time at which the phase begins, window, samples per step)
PHASES = ((0.0, 256, 16), (0.40, 512, 8), (0.85, 2048, 2))


def read_text(path):
    """A file's bytes, decompressed; None if it is not text of a size we use."""
    try:
        with open(path, "rb") as file:
            data = file.read(8 << 20)
        if path.endswith(".gz"):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return None
    smallest, largest = FILE_BYTES
    return None if not smallest <= len(data) <= largest or b"\0" in data else data


def collect():
    """The corpus: (training files, held-out files, summary), files as (kind, bytes)."""
    seen = set()
    for path in glob.glob(EXCLUDED + "/*"):
        with open(path, "rb") as file:
            seen.add(hashlib.sha256(file.read()).digest())
    training, held_out, summary = [], [], []
    for kind, (patterns, wanted) in SOURCES.items():
        found = {}
        for pattern in patterns:
            for path in glob.iglob(pattern, recursive=True):
                data = read_text(path) if os.path.isfile(path) else None
                if data is not None:
                    digest = hashlib.sha256(data).digest()
                    if digest not in seen:
                        seen.add(digest)
                        found[digest] = data
        count = total = 0
        for digest, data in sorted(found.items()):
            if total + len(data) > wanted:
                break
            count, total = count + 1, total + len(data)
            if int.from_bytes(digest[-4:], "big") % 1000 >= HELD_OUT_PER_MILLE:
                training.append((kind, data))
            elif HELD_OUT_BYTES[0] <= len(data) <= HELD_OUT_BYTES[1]:
                held_out.append((kind, data))
        summary.append(f"{kind}: {count} of {len(found)} files, {total} bytes")
    return training, held_out, "; ".join(summary)


class Sampler:
    """Draws training windows from files, a file's chance being proportional to its length."""

    def __init__(self, files, seed):
        encoded = [gyre_files.encode(data) for _, data in files]
        self.bounds = np.cumsum([0] + [tokens.size for tokens in encoded])
        self.tokens = np.concatenate(encoded).astype(np.int16)
        self.rng = np.random.default_rng(seed)

    def sample(self, window):
        """tokens, positions, counts [window + 1]; counts is false for targets not to train on."""
        rng = self.rng
        index = np.searchsorted(self.bounds, rng.integers(self.bounds[-1]), side="right") - 1
        begin, end = self.bounds[index], self.bounds[index + 1]
        length = end - begin
        places = np.zeros(window + 1, dtype=np.int64)  # place 0 of the file is its bos
        counts = np.zeros(window + 1, dtype=bool)
        if length <= window + 1:
            places[:length] = np.arange(length)
            counts[1:length] = True
            shift = np.zeros(window + 1, dtype=np.int64)
            used = length
        else:
            pieces = int(rng.integers(2, 6)) if rng.random() < 0.5 else 1
            cuts = np.sort(rng.choice(np.arange(1, window), pieces - 1, replace=False)) + 1
            cuts = np.concatenate([[1], cuts, [window + 1]])
            spare = length - (window + 1)
            skips = np.sort(rng.integers(0, spare + 1, pieces))
            if pieces > 1 and rng.random() < 0.5:  # further apart than the file is long
                stretch = np.sort(rng.integers(0, max(1, MAX_POSITION - length), pieces))
            else:
                stretch = np.zeros(pieces, dtype=np.int64)
            shift = np.zeros(window + 1, dtype=np.int64)
            for piece in range(pieces):
                here = slice(cuts[piece], cuts[piece + 1])
                places[here] = np.arange(cuts[piece], cuts[piece + 1]) + skips[piece]
                shift[here] = stretch[piece]
                counts[here] = True
                counts[cuts[piece]] = skips[piece] == 0
            used = window + 1
        tokens = np.full(window + 1, gyre_files.PAD, dtype=np.int64)
        tokens[:used] = self.tokens[begin + places[:used]]
        return tokens, places + shift, counts

    def batch(self, samples, window):
        """inputs, positions, targets [samples, window]; a target of -1 does not count."""
        drawn = [self.sample(window) for _ in range(samples)]
        tokens, positions, counts = (torch.from_numpy(np.stack(part)) for part in zip(*drawn))
        targets = torch.where(counts, tokens, torch.full_like(tokens, -1))
        return tokens[:, :-1], positions[:, :-1], targets[:, 1:]


def initial_weights():
    """Trainable float32 weights by their names in the file; the vocabulary is not yet padded."""
    unpadded = {**CONFIG, "vocab_padded": CONFIG["vocab_size"]}
    depth = 1.0 / math.sqrt(2 * CONFIG["num_hidden_layers"])
    weights = {}
    for name, shape in gyre_files.model_shapes(unpadded).items():
        if name.endswith("norm"):
            value = torch.ones(shape)
        elif name == "embed":
            value = 0.2 * torch.randn(shape)
        else:
            scale = depth if name.endswith(("wo", "w_down")) else 0.5 if name == "head" else 1.0
            value = scale * torch.randn(shape) / math.sqrt(shape[0])
        weights[name] = value.requires_grad_()
    return weights


def norm(x, weight):
    """RMS norm over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x, cos, sin):
    """Rotary embedding of x [B, W, heads, D]; cos, sin [B, W, 1, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(q, k, v, block):
    """Causal attention: q [B, K, G, W, D], k and v [B, K, W, D] -> as q. G = H/K.

    Blocks of queries see only the keys up to their end, which halves the work.
    """
    batch, groups, per_group, window, dim = q.shape
    block = min(block, window)
    corner = torch.full((block, block), -math.inf, dtype=q.dtype).triu(1)
    out = []
    for begin in range(0, window, block):
        end = min(begin + block, window)
        rows = q[:, :, :, begin:end].reshape(batch * groups, per_group * (end - begin), dim)
        keys = k[:, :, :end].reshape(batch * groups, end, dim)
        values = v[:, :, :end].reshape(batch * groups, end, dim)
        score = torch.bmm(rows, keys.transpose(1, 2))
        square = score.view(batch * groups, per_group, end - begin, end)
        square[..., begin:] += corner[: end - begin, : end - begin]
        mixed = torch.bmm(torch.softmax(score, -1), values)
        out.append(mixed.view(batch, groups, per_group, end - begin, dim))
    return torch.cat(out, dim=3)


def logits_of(weights, tokens, positions, dtype, block=128):
    """tokens, positions [B, W] -> logits [B, W, vocab_size] float32; products in `dtype`."""
    dim, groups = CONFIG["head_dim"], CONFIG["num_key_value_heads"]
    per_group = CONFIG["num_attention_heads"] // groups
    batch, window = tokens.shape
    turn = CONFIG["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = (positions.double()[..., None] * turn)[:, :, None, :]
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def times(x, *names):
        return x.to(dtype) @ torch.cat([weights[name].to(dtype) for name in names], dim=1)

    x = weights["embed"][tokens]
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"layers/{layer}/"
        h = norm(x, weights[at + "attn_norm"])
        qkv = times(h, at + "wq", at + "wk", at + "wv")
        qkv = qkv.view(batch, window, groups * (per_group + 2), dim)
        qk, v = qkv.split([groups * (per_group + 1), groups], dim=2)
        q, k = rotate(qk, cos, sin).split([groups * per_group, groups], dim=2)
        q = (q * dim**-0.5).view(batch, window, groups, per_group, dim).permute(0, 2, 3, 1, 4)
        mixed = attention(q, k.transpose(1, 2), v.transpose(1, 2), block)
        mixed = mixed.permute(0, 3, 1, 2, 4).reshape(batch, window, -1)
        x = x + times(mixed, at + "wo")
        h = norm(x, weights[at + "mlp_norm"])
        gate, up = times(h, at + "w_gate", at + "w_up").chunk(2, dim=-1)
        x = x + times(F.silu(gate) * up, at + "w_down")
    return times(norm(x, weights["final_norm"]), "head").float()


@torch.no_grad()
def surprise(weights, data, dtype):
    """Nats of every byte of a file and of its eos, the file scored as one document."""
    tokens = torch.from_numpy(gyre_files.encode(data).astype(np.int64))[None]
    positions = torch.arange(tokens.shape[1])[None]
    logits = logits_of(weights, tokens, positions, dtype, block=256)
    return F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none").double().numpy()


def measure(weights, held_out, dtype=torch.bfloat16):
    """Bits per byte on whole files: (in all, text by position, text by kind)."""
    nats, tokens = np.zeros(len(BUCKETS)), np.zeros(len(BUCKETS))
    kinds = {}
    total_bytes = 0
    for kind, data in held_out:
        cost = surprise(weights, data, dtype)
        bucket = np.searchsorted(BUCKETS, np.arange(cost.size), side="right") - 1
        nats += np.bincount(bucket, cost, len(BUCKETS))
        tokens += np.bincount(bucket, minlength=len(BUCKETS))
        sums = kinds.setdefault(kind, [0.0, 0])
        sums[0], sums[1] = sums[0] + cost.sum(), sums[1] + len(data)
        total_bytes += len(data)
    bits = nats / math.log(2)
    by_position = "; ".join(
        f"{BUCKETS[i]}..{BUCKETS[i + 1] - 1}: {bits[i] / tokens[i]:.3f} ({int(tokens[i])})"
        for i in range(len(BUCKETS) - 1)
        if tokens[i]
    )
    by_kind = "; ".join(f"{k}: {s[0] / math.log(2) / s[1]:.3f} ({s[1]})" for k, s in kinds.items())
    return bits.sum() / total_bytes, by_position, by_kind


def save(path, weights, provenance, seed):
    """Writes the model file, with the vocabulary padded."""
    extra = CONFIG["vocab_padded"] - CONFIG["vocab_size"]
    arrays = {name: value.detach().numpy() for name, value in weights.items()}
    arrays["embed"] = np.pad(arrays["embed"], ((0, extra), (0, 0)))
    arrays["head"] = np.pad(arrays["head"], ((0, 0), (0, extra)))
    gyre_files.fill_padding(arrays, CONFIG, seed)
    gyre_files.write_model(path, CONFIG, arrays, provenance)


def train(args, sampler, weights, checkpoint):
    """Optimises the weights until the time is up; returns (steps, tokens, seconds)."""
    matrices = [w for w in weights.values() if w.dim() == 2]
    vectors = [w for w in weights.values() if w.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.rate,
        betas=(0.9, 0.95),
        foreach=True,
    )
    start = time.monotonic()
    steps = tokens = 0
    saved = reported = 0.0
    recent = None
    while True:
        elapsed = time.monotonic() - start
        share = elapsed / (60.0 * args.minutes)
        if share >= 1.0:
            return steps, tokens, elapsed
        _, window, samples = [phase for phase in PHASES if phase[0] <= share][-1]
        warm = min(1.0, (steps + 1) / 150)
        rate = args.rate * warm * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, positions, targets = sampler.batch(samples, window)
        logits = logits_of(weights, inputs, positions, torch.bfloat16)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        steps, tokens = steps + 1, tokens + samples * window
        bits = loss.item() / math.log(2)
        recent = bits if recent is None else 0.98 * recent + 0.02 * bits
        if elapsed - reported >= 20.0:
            reported = elapsed
            print(
                f"{elapsed:6.0f} s  step {steps:6d}  {tokens / 1e6:7.2f} M tokens  "
                f"window {window}  rate {rate:.2e}  {recent:.3f} bits per token",
                flush=True,
            )
        if elapsed - saved >= 60.0 * args.save_every:
            saved = elapsed
            checkpoint(steps, tokens, elapsed)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Train the byte-level model of the demonstrations on this machine's texts."
    )
    parser.add_argument(
        "--output", default=os.path.join(HERE, "model.h5"), help="file to write (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="training time (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (%(default)s)")
    parser.add_argument(
        "--save-every", type=float, default=5.0, help="minutes between checkpoints (%(default)s)"
    )
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    training, held_out, summary = collect()
    training_bytes = sum(len(data) for _, data in training)
    texts = [data for _, data in held_out]
    held_bytes = sum(map(len, texts))
    gzip_files = 8.0 * sum(len(gzip.compress(data, 9)) for data in texts) / held_bytes
    gzip_joined = 8.0 * len(gzip.compress(b"".join(texts), 9)) / held_bytes
    provenance = {
        "generator": "inputs/train_model.py",
        "command": " ".join(["inputs/train_model.py", *sys.argv[1:]]),
        "sources": summary,
        "sources_note": f"{EXCLUDED} and exact copies of its files are left out; copyright files "
        "quote from them",
        "licence_note": "Trained on texts of Debian packages under their free licences; the "
        "texts themselves are not part of this file.",
        "created": datetime.date.today().isoformat(),
        "seed": args.seed,
        "torch": torch.__version__,
        "training_files": len(training),
        "training_bytes": training_bytes,
        "held_out_files": len(held_out),
        "held_out_bytes": held_bytes,
        "gzip_9_bits_per_byte_per_file": f"{gzip_files:.4f}",
        "gzip_9_bits_per_byte_concatenated": f"{gzip_joined:.4f}",
    }
    for key, value in provenance.items():
        print(f"{key}: {value}", flush=True)

    sampler = Sampler(training, args.seed)
    weights = initial_weights()

    def store(steps, tokens, seconds, **extra):
        numbers = {"steps": steps, "tokens": tokens, "training_seconds": round(seconds), **extra}
        save(args.output, weights, {**provenance, **numbers}, args.seed)

    glance = [(kind, data) for kind, data in held_out if len(data) < 8192][:25]
    glance += [(kind, data) for kind, data in held_out if len(data) > 25_000][:1]

    def checkpoint(steps, tokens, seconds):
        store(steps, tokens, seconds, state="training unfinished")
        began = time.monotonic()
        overall, by_position, _ = measure(weights, glance)
        took = time.monotonic() - began
        print(f"some held-out files: {overall:.3f}; {by_position} [{took:.0f} s]", flush=True)

    steps, tokens, seconds = train(args, sampler, weights, checkpoint)
    store(steps, tokens, seconds, state="trained, not measured")
    overall, by_position, by_kind = measure(weights, held_out)
    results = {
        "held_out_bits_per_byte": f"{overall:.4f}",
        "held_out_bits_per_token_by_position": by_position,
        "held_out_bits_per_byte_by_kind": by_kind,
    }
    store(steps, tokens, seconds, state="trained and measured", **results)
    for key, value in {"steps": steps, "tokens": tokens, "seconds": seconds, **results}.items():
        print(f"{key}: {value}", flush=True)


if __name__ == "__main__":
    main()
