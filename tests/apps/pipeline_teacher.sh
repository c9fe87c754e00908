#!/usr/bin/env bash
# gyre-pipeline --teacher: divergences on every kind of grid are those of NumPy in float64 and of the serial twin; equal
# models have none; FLOPs and memory are those of two forward passes; what cannot be compared is refused.
source "$(dirname "$0")/../support/app_test.bash"
source "$source_dir/tests/support/pipeline_test.bash"
export PYTHONPATH=$source_dir/python:$source_dir/inputs

# Prompts and answers that begin alike, and one document that does not.
for i in 1 2 3; do { head -c 150 "$source_dir/LICENSE"; echo "answer $i"; } >"$scratch/answer$i"; done
head -c 90 "$source_dir/CMakePresets.json" >"$scratch/other"
timeout 60 "$apps/gyre-import" -o "$scratch/rollouts.h5" "$scratch"/answer? "$scratch/other" >"$scratch/log"

# A teacher that differs in layers, heads, windows, soft cap and padding, and the divergences from it and to it. Trees of
# documents have no windows, so their teacher has none.
/usr/bin/python3 - "$source_dir/inputs" "$scratch" <<'PY'
import json, shutil, sys
import h5py, numpy as np
import gyre_files, reference
inputs, scratch = sys.argv[1:]
config = {"vocab_size": 259, "vocab_padded": 260, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 24, "rope_theta": 5e3, "rms_norm_eps": 1e-5}
random = np.random.default_rng(5)
weights = {name: random.normal(size=shape).astype("f4") / np.sqrt(shape[0]) if len(shape) > 1 else np.ones(shape, "f4")
           for name, shape in gyre_files.model_shapes(config).items()}
weights["head"] *= 3
gyre_files.write_model(f"{scratch}/plain.h5", config, weights, {})
shutil.copy(f"{scratch}/plain.h5", f"{scratch}/teacher.h5")
with h5py.File(f"{scratch}/teacher.h5", "r+") as f:
    f.attrs.pop("content_sha256", None)
    f["model"].attrs.update({"sliding_window": 16, "final_logit_softcapping": 4.0,
                             "layer_types": json.dumps(["full_attention", "sliding_attention", "full_attention"])})
def divergences(documents, of, by):
    of, by = reference.Model(of), reference.Model(by)
    with h5py.File(documents) as f:
        tokens, offsets = f["documents/tokens"][...].astype("i8"), f["documents/offsets"][...]
    kl = []
    for begin, end in zip(offsets, offsets[1:]):
        if end - begin >= 2:
            p, q = (reference.log_probabilities(m, reference.forward(m, tokens[begin:end])[-1][:-1]) for m in (by, of))
            kl.append((np.exp(p) * (p - q)).sum(1))
    return np.concatenate(kl)
model, teacher, plain = f"{inputs}/model_tiny.h5", f"{scratch}/teacher.h5", f"{scratch}/plain.h5"
for name, problem in {"right": (f"{inputs}/docs_tiny.h5", model, teacher), "reverse": (f"{inputs}/docs_tiny.h5", teacher, model),
                      "shared": (f"{scratch}/rollouts.h5", model, plain)}.items():
    with h5py.File(f"{scratch}/{name}.h5", "w") as f:
        f["results/kl"] = divergences(*problem)
PY
teacher=$scratch/teacher.h5
for grid in "1" "2 --cp 2 --layout balanced" "2 --tp 2" "2 --dp 2 --bin 48" "4 --cp 2 --tp 2 --bin 48"; do
  read -ra arguments <<<"$grid"
  pipeline "${arguments[@]}" --teacher "$teacher" -o "$scratch/kl.h5" --json "$scratch/kl.json" >"$scratch/log" ||
    fail "$grid: $(cat "$scratch/log")"
  grep -q '^VERIFY PASSED 7/7 ' "$scratch/log" || fail "$grid: $(cat "$scratch/log")"
  same "$scratch/kl.h5" "$scratch/right.h5" 1e-4 "$grid"
done
differ "$scratch/kl.h5" "$scratch/reverse.h5" 1e-4 "the divergence is as large in the other direction"
pipeline "${arguments[@]}" --teacher "$teacher" -o "$scratch/again.h5" -c none >"$scratch/log"
same "$scratch/kl.h5" "$scratch/again.h5" 0 "two runs differ"
/usr/bin/python3 - "$scratch" "$teacher" <<'PY'
import hashlib, json, sys
import h5py, numpy as np
scratch, teacher = sys.argv[1:]
result = json.load(open(f"{scratch}/kl.json"))
mean = float(np.mean(h5py.File(f"{scratch}/right.h5")["results/kl"]))
assert abs(result["results"][0]["measurements"]["kl"] - mean) < 1e-4, (result["results"][0], mean)
assert result["configuration"]["teacher_parameters"] > 0, result["configuration"]
digest = hashlib.sha256(open(teacher, "rb").read()).hexdigest()
assert {"file": "teacher.h5", "sha256": digest} in result["inputs"], result["inputs"]
assert h5py.File(f"{scratch}/kl.h5")["results"].attrs["teacher_sha256"] in (digest, digest.encode())
PY

# FLOPs and planned memory: those of the two models by themselves, forward alone, and of the logits that are compared.
ranks=(2 --cp 2 -c none)
pipeline "${ranks[@]}" -J "$scratch/of_model.json" >"$scratch/log"
model=$teacher pipeline "${ranks[@]}" -J "$scratch/of_teacher.json" >"$scratch/log"
pipeline "${ranks[@]}" --teacher "$teacher" -J "$scratch/of_both.json" >"$scratch/log"
/usr/bin/python3 - "$scratch" "$input" "$model" "$teacher" <<'PY'
import json, sys
import h5py, numpy as np
import reference
scratch, documents, *models = sys.argv[1:]
models = [reference.Model(path) for path in models]
lengths = np.diff(h5py.File(documents)["documents/offsets"][...])
def flops(m): # products of weights and tokens; for each pair of a query and a key that it sees, a score and a sum
    hidden, inner = m.layer[0]["w_gate"].shape
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    pairs = sum(min(i + 1, window or i + 1) for window in m.windows for n in lengths for i in range(n))
    return 2 * lengths.sum() * (m.layers * hidden * (2 * q + 2 * kv + 3 * inner) + hidden * m.vocab_size) + 4 * pairs * q
runs = [json.load(open(f"{scratch}/{name}.json")) for name in ("of_model", "of_teacher", "of_both")]
got = [run["results"][0]["model"]["flops"] for run in runs]
wanted = [flops(m) for m in models]
assert got == wanted + [sum(wanted) + 2 * lengths.sum() * 259 * sum(m.embed.shape[1] for m in models)], (got, wanted)
# A rank keeps hidden states and a cross entropy of its slots, and blocks of logits, tiles and rows of both models, with
# records of 60 bytes a row. The vocabulary of the teacher's embedding and head is padded as the model's.
slots, block, (columns, width) = sum(-(-lengths // 4)) * 2, 64, models[0].embed.shape
fewer, of_teacher = models[1].embed.shape
more = slots * (width + 1) + block * (4 * columns + width + of_teacher + 15) + 2 * (columns - fewer) * of_teacher
got = [run["memory"]["planned_bytes"] for run in runs]
assert got[2] == got[0] + got[1] + 4 * more, (got, more)
PY

# The twin's check fails where a tolerance is below the roundings.
status=0
pipeline 1 --teacher "$teacher" --tol-scale 1e-4 >"$scratch/log" || status=$?
((status == 1)) && grep -q '^VERIFY   kl: [0-9]* of 339 values outside' "$scratch/log" || fail "exit $status: $(cat "$scratch/log")"

pipeline 2 --tp 2 -d bf16 --teacher "$teacher" >"$scratch/log" || fail "bf16: $(cat "$scratch/log")"
grep -q '^VERIFY PASSED 7/7 ' "$scratch/log" || fail "bf16: $(cat "$scratch/log")"

# Prompts that are stored once: the divergences of documents by themselves from another model, and none from the same
# model. The file has no reference.
input=$scratch/rollouts.h5
for grid in "2 --cp 2 --layout zigzag" "2 --tp 2" "2 --dp 2 --bin 192" "4 --cp 2 --tp 2 --schedule all-gather"; do
  read -ra arguments <<<"$grid"
  pipeline "${arguments[@]}" --share-prefixes --teacher "$scratch/plain.h5" -o "$scratch/kl.h5" >"$scratch/log" ||
    fail "$grid: $(cat "$scratch/log")"
  grep -q '^VERIFY PASSED 4/4 ' "$scratch/log" || fail "$grid: $(cat "$scratch/log")"
  grep -q '^# prefixes  4 documents in 2 trees: ' "$scratch/log" || fail "$grid: $(cat "$scratch/log")"
  same "$scratch/kl.h5" "$scratch/shared.h5" 1e-4 "$grid"
done
for options in "-d f32" "-d bf16"; do
  read -ra arguments <<<"$options"
  pipeline 2 --tp 2 "${arguments[@]}" --share-prefixes --teacher "$model" -o "$scratch/none.h5" >"$scratch/log" || fail "$(cat "$scratch/log")"
  grep -q '^VERIFY PASSED 4/4 ' "$scratch/log" || fail "$options: $(cat "$scratch/log")"
  /usr/bin/python3 -c 'import h5py, sys; kl = h5py.File(sys.argv[1])["results/kl"][...]; assert kl.size and abs(kl).max() < 1e-5, kl' \
    "$scratch/none.h5" || fail "equal models differ"
done

# Refusals.
refused() { # TEXT RANKS ARGUMENTS...
  local text=$1 status=0
  shift
  pipeline "$@" >"$scratch/log" 2>&1 || status=$?
  ((status == 2)) || fail "exit $status, not 2, for $*: $(cat "$scratch/log")"
  grep -qF -- "$text" "$scratch/log" || fail "'$text' is not in: $(cat "$scratch/log")"
}
/usr/bin/python3 - "$teacher" "$scratch/other.h5" <<'PY'
import shutil, sys, h5py
shutil.copy(*sys.argv[1:])
with h5py.File(sys.argv[2], "r+") as f:
    f.attrs.pop("content_sha256", None)
    f["model"].attrs["vocab_size"] = 258
PY
refused "--teacher $scratch/other.h5 has a vocabulary of 258, --model $model of 259" 1 --teacher "$scratch/other.h5"
refused "--teacher needs --backend cpu" 1 --teacher "$teacher" --backend cuda
refused "windows of trees are not supported" 1 --teacher "$teacher" --share-prefixes --dry-run
input=$source_dir/inputs/docs_tiny.h5
refused "--tp 8 does not divide the teacher's num_attention_heads = 4" 1 --teacher "$teacher" --tp 8 --dry-run
pipeline 1 --teacher "$teacher" --cp 4 --dry-run >"$scratch/log"
grep -q '^#   teacher: FLOPs of a pass .* blocks of logits ' "$scratch/log" || fail "$(cat "$scratch/log")"
echo "ok: divergences"
