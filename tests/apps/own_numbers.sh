#!/usr/bin/env bash
# Files as people bring them: references in full, in part, of other types, with ties; wrong ones named; models and
# tokenizers that the decoder does not know.
# Usage: own_numbers.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
logprobs=$apps/gyre-logprobs
attention=$apps/gyre-attention
pipeline=$apps/gyre-pipeline
compare=$apps/gyre-compare
ties=$source_dir/inputs/logprobs_ties.h5
quick="-n 1 -w 0"
mpi=("$MPIEXEC" -n)

# 120 tokens, of which a check would sample 64; one file for each thing that differs.
/usr/bin/python3 - "$source_dir/inputs" "$ties" <<'PY'
import shutil, sys
sys.path.insert(0, sys.argv[1])
import h5py, numpy as np
import make_logprobs as reference

rng = np.random.default_rng(5)
logits = rng.integers(-24, 25, (120, 64)) / 8  # exact in 16 bits
targets = rng.integers(0, 64, 120)
answer = reference.picked(reference.log_softmax(logits), targets[:, None], 0)[:, 0]
words = np.uint32(np.float32(logits).view(np.uint32) >> 16).astype(np.uint16)
inexact = logits + 1e-3

def write(name, logits, answers, dtype=None, targets=targets, **more):
    with h5py.File(name, "w") as file:
        file.attrs["schema"], file.attrs["schema_version"] = "gyre/logprobs", 1
        group = file.create_group("logprobs")
        group.attrs["vocab_size"] = 64
        group["logits"], group["targets"] = logits, targets
        if dtype:
            group["logits"].attrs["dtype"] = dtype
        for key, values in more.items():
            if np.ndim(values):
                group[key] = values
            else:
                group.attrs[key] = values
        for key, values in answers.items():
            file[f"reference/{key}"] = values

wrong = answer.copy()
wrong[1] += 1e-2
write("good.h5", np.float32(logits), {"logprob": answer})
write("wrong.h5", np.float32(logits), {"logprob": wrong, "entropie": answer})
write("all_wrong.h5", np.float32(logits), {"logprob": answer + 1 + np.arange(120) / 120})
write("half.h5", np.float16(logits), {"logprob": np.float32(answer)})
write("words.h5", words, {"logprob": answer}, "bfloat16")
write("double.h5", logits, {"logprob": answer})
write("inexact.h5", inexact, {"logprob": answer})
# Answers that no operation can compare; a weight that f32 does not hold, which log-probabilities do not depend on.
garbage = np.full(120, 7.0)
write("refused.h5", np.float32(logits), {"logprob": answer, "soft_cross_entropy": garbage})
weight = {"d_value": np.full(120, 0.1)}
write("weight.h5", np.float32(logits), {"logprob": answer, "d_logprob": np.zeros((120, 64))}, **weight)
write("wrong_weight.h5", np.float32(logits), {"logprob": wrong}, **weight)
# Probabilities of 1/2, 1/4 and 2/8: whether two or three of them reach 3/4 is a matter of rounding, and either is right.
close = np.full((8, 64), -30.0)
close[:, :4] = np.log([0.25, 0.5, 0.125, 0.125])
close = np.float32(close)

def filtered(kept, target):
    p = np.exp(np.float64(close[0, kept]))
    return np.log(p[kept.index(target)] / p.sum()) if target in kept else -np.inf

asked = np.array([0, 1, 3, 2, 0, 3, 1, 5])
either = [[1, 0], [1, 0, 3]]
values = np.array([filtered(either[t % 2], asked[t]) for t in range(8)])
following = np.array([[filtered(either[t % 2], asked[t + 1]) for t in range(7)]])
for name, error in ("close.h5", 0), ("wrong_close.h5", 1):
    write(name, close, {"filtered_logprob": values + error, "next_token_filtered_logprob": following + error},
          targets=asked, top_p=0.75)
write("wide.h5", np.float32(logits), {"logprob": answer}, targets=targets + 2**40)

# Of equal logits another library's sort may return others: in another order, and other ones of the last.
shutil.copy(sys.argv[2], "sorted.h5")
with h5py.File("sorted.h5", "r+") as file:
    del file.attrs["content_sha256"]
    values, ids = file["reference/top_values"][()], file["reference/top_ids"][()]
    logits, vocab = file["logprobs/logits"][()], file["logprobs"].attrs["vocab_size"]
    for row, (v, i) in enumerate(zip(values, ids)):
        order = np.lexsort((-i, -v))
        last = np.flatnonzero(logits[row, :vocab] == v[-1])
        i[:] = i[order]
        i[-1] = next((x for x in last[::-1] if x not in i[:-1]), i[-1])
        ids[row] = i
    file["reference/top_ids"][...] = ids
    # All logits of token 3 are equal, and 76 of 101 survive: not id 0, as it is defined; somewhere else, id 0.
    file["logprobs/targets"][3] = 0
    file["reference/filtered_logprob"][3] = -np.log(76)
shutil.copy("sorted.h5", "twice.h5")
with h5py.File("twice.h5", "r+") as file:
    values, ids = file["reference/top_values"][()], file["reference/top_ids"][()]
    row, entry = next((r, e) for r, e in zip(*np.nonzero(values[:, 1:] == values[:, :-1])))
    ids[row, entry + 1] = ids[row, entry]
    file["reference/top_ids"][...] = ids
shutil.copy("sorted.h5", "unsorted.h5")
with h5py.File("unsorted.h5", "r+") as file:
    values = file["reference/top_ids"][()]
    values[2, 0] = (values[2, 0] + 1) % 101
    file["reference/top_ids"][...] = values
    file["reference/filtered_logprob"][3] = -np.log(75)
PY

# A supplied reference is compared in full; a wrong value is named, with what it should be; ten with -v; once on all ranks.
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" --input good.h5 --op logprob $quick
! grep -q 'sampled' <(grep '^VERIFY' output) && fail "gradients without answers are a sample, and nothing says so: $(cat output)"
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" --input good.h5 --op logprob --pass fwd $quick
! grep '^VERIFY' output | grep -q sampled || fail "a sample of a reference: $(cat output)"
# Without --op, what has an answer is run; all of it with --op all, and without answers.
expect 0 '# note: operations that good.h5 has answers for are run; --op all runs the others, too' "$logprobs" --input good.h5 $quick --csv answered.csv
[ "$(column answered.csv op | sort -u | xargs)" = 'logprob logprob-entropy' ] || fail "other operations: $(cat output)"
expect 0 'VERIFY PASSED' "$logprobs" --input good.h5 --op all $quick --csv all.csv
grep -qx top-k <(column all.csv op) || fail "not all operations: $(cat output)"
for ranks in 1 4; do
  expect 1 'log-probabilities: 1 of 120 values outside' "${mpi[@]}" $ranks "$logprobs" --input wrong.h5 --op logprob --pass fwd -c all -n 3 -w 1 -J wrong.json
  grep -qE "VERIFY     /reference/logprob\\[1\\](, rank 0)?: yours -?[0-9.]+, Gyre's -?[0-9.]+, error 0.01, tolerance [0-9.]+e-0[56]\$" output || fail "not what is wrong: $(cat output)"
done
grep -qF 'compared in full: logprob; not compared: /reference/entropie (did you mean entropy?) (not known)' output || fail "an unknown answer is not named: $(cat output)"
/usr/bin/python3 -c 'import json; (w,) = [c for c in json.load(open("wrong.json"))["verification"]["checks"] if not c["passed"]]
assert w["outside"] == 1 and abs(w["worst"][0]["got"] - w["worst"][0]["expected"] + 0.01) < 1e-4, w' || fail "the JSON file does not say what is wrong"
expect 1 '120 of 120 values outside' "$logprobs" --input all_wrong.h5 --op logprob --pass fwd $quick -v
[ "$(grep -c '^VERIFY     /reference/logprob' output)" -eq 10 ] || fail "not the ten worst: $(cat output)"

# Types; what does not fit; what a run would round.
for file in half words double; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" --input $file.h5 --op logprob --pass fwd $quick
  grep -q 'compared in full: logprob$' output || fail "$file: the reference is not used: $(cat output)"
done
expect 0 'VERIFY PASSED' "$logprobs" --input half.h5 --op logprob -d bf16 $quick
grep -q 'compared in full: logprob$' output || fail "exact in bf16, and not used: $(cat output)"
expect 2 'does not fit 32 bits' "${mpi[@]}" 2 "$logprobs" --input wide.h5 $quick
for options in "inexact.h5 -d f32" "inexact.h5 -d bf16"; do
  expect 0 'compared in full: nothing; not compared: logprob (the run rounds /logprobs/logits)' "${mpi[@]}" 2 "$logprobs" --input $options --op logprob $quick
  grep -q '^VERIFY PASSED .*, sampled' output || fail "nothing says that it was a sample: $(cat output)"
done
unverified() { grep -qF "UNVERIFIED (answers not compared: $1" <<<"$(result)" || fail "not 'answers not compared: $1': $(cat output)"; }
expect 0 'VERIFY PASSED' "$logprobs" --input weight.h5 --op logprob $quick -q
unverified 'd_logprob: the run rounds /logprobs/d_value'
expect 1 'log-probabilities: 1 of 120 values outside' "$logprobs" --input wrong_weight.h5 --op logprob $quick
expect 2 'good.h5 has no /logprobs/ids' "$logprobs" --input good.h5 --op gather
expect 2 'distill by gyre, 120 tokens: good.h5 has no /logprobs/ids' "$logprobs" --input good.h5 --op distill
expect 0 '# refused soft-ce by gyre, 120 tokens: refused.h5 has no /logprobs/teacher' "$logprobs" --input refused.h5 $quick
grep -qF 'compared in full: logprob; not compared: soft_cross_entropy (refused.h5 has no /logprobs/teacher)' output || fail "not what was compared: $(cat output)"
unverified 'soft_cross_entropy: refused.h5 has no /logprobs/teacher'
expect 0 'not compared: soft_cross_entropy (--op logprob)' "$logprobs" --input refused.h5 --op logprob $quick
! grep -q 'UNVERIFIED' output || fail "another operation was asked for: $(cat output)"

# Rounding decides what survives a filter: an answer must be that of some right set.
for ranks in 1 2; do
  for op in filtered packed-filtered; do
    expect 0 'VERIFY PASSED' "${mpi[@]}" $ranks "$logprobs" --input close.h5 --op $op $quick
    expect 1 'log-probabilities: ' "${mpi[@]}" $ranks "$logprobs" --input wrong_close.h5 --op $op $quick
  done
done

# Ties: another order is as right, other logits are not.
expect 1 'ids: ' "${mpi[@]}" 2 "$logprobs" --input sorted.h5 --op top-k $quick
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" --input sorted.h5 --op top-k --ties any $quick
expect 1 'ids: ' "$logprobs" --input twice.h5 --op top-k --ties any $quick
expect 1 '/reference/top_ids[2, 0]' "${mpi[@]}" 2 "$logprobs" --input unsorted.h5 --op top-k --ties any $quick
for pass in fwd bwd; do expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$logprobs" --input "$ties" --op filtered --ties any --pass $pass $quick; done
expect 1 'filtered_logprob' "$logprobs" --input sorted.h5 --op filtered --pass fwd $quick
grep -q "yours -4.33[0-9]*, Gyre's -inf" output || fail "whose value is whose: $(cat output)"
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" --input sorted.h5 --op filtered --pass fwd --ties any $quick
expect 1 '/reference/filtered_logprob[3]' "${mpi[@]}" 2 "$logprobs" --input unsorted.h5 --op filtered --pass fwd --ties any $quick
expect 0 'VERIFY PASSED' "$logprobs" --input sorted.h5 --op top-k --ties any $quick -o top.h5
expect 1 'top_ids ' "$compare" --common top.h5:/results sorted.h5:/reference
expect 0 'top_ids ' "$compare" --common --ties any top.h5:/results sorted.h5:/reference
expect 1 '[2, 0]' "$compare" --common --ties any top.h5:/results unsorted.h5:/reference

# Attention: part of a reference, in full.
/usr/bin/python3 - "$source_dir/inputs/attention_causal.h5" <<'PY'
import shutil, sys, h5py
shutil.copy(sys.argv[1], "part.h5")
with h5py.File("part.h5", "r+") as file:
    del file.attrs["content_sha256"]
    for name in ("lse", "d_q", "d_k"):
        del file["reference"][name]
    del file["reference"].attrs["generator"]
    q = file["attention/q"][()]
    del file["attention/q"]
    file["attention/q"] = q.astype("f8")
shutil.copy("part.h5", "rounded_part.h5")
with h5py.File("rounded_part.h5", "r+") as file:
    d_out = file["attention/d_out"][()]
    del file["attention/d_out"]
    file["attention/d_out"] = d_out.astype("f8") + 1e-12
    file["reference/lsf"] = [0.0]
    file["reference/d_v"][...] = 0
shutil.copy("rounded_part.h5", "wrong_out.h5")
with h5py.File("wrong_out.h5", "r+") as file:
    file["reference/out"][40, 1, 3] += 0.01
shutil.copy("part.h5", "wrong_part.h5")
with h5py.File("wrong_part.h5", "r+") as file:
    file["reference/d_v"][40, 1, 3] += 0.01
PY
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" --input part.h5 $quick --check-pairs 1
grep -q '^VERIFY PASSED .*, sampled' output || fail "what has no reference is a sample, and nothing says so: $(cat output)"
expect 0 'compared in full: out; not compared: d_v (the run rounds /attention/d_out), /reference/lsf (did you mean lse?) (not known)' "${mpi[@]}" 2 "$attention" --input rounded_part.h5 $quick --check-pairs 1
unverified 'd_v: the run rounds /attention/d_out; answers not compared: /reference/lsf'
expect 1 'out: 1 of ' "$attention" --input wrong_out.h5 $quick --check-pairs 1
expect 1 'd_v: 1 of ' "${mpi[@]}" 3 "$attention" --input wrong_part.h5 $quick -o out.h5 --check-pairs 1
grep -qE '/reference/d_v\[40, 1, 3\], document [0-9]+ position [0-9]+, rank' output || fail "not what is wrong: $(cat output)"
[ ! -e out.h5 ] && [ -e out.invalid.h5 ] || fail "wrong results have the name that was asked for: $(ls)"

# Models that another decoder is needed for, and tokens of another tokenizer.
/usr/bin/python3 - "$source_dir/inputs" <<'PY'
import shutil, sys, h5py, numpy as np
inputs = sys.argv[1]
def model(name, change):
    shutil.copy(f"{inputs}/model_tiny.h5", name)
    with h5py.File(name, "r+") as file:
        del file.attrs["content_sha256"]
        change(file["model"])
def attribute(key, value):
    return lambda group: group.attrs.__setitem__(key, value)
def dataset(path, like):
    return lambda group: group.__setitem__(path, group[like][()])
model("scaled.h5", attribute("rope_scaling", "linear"))
model("sliding.h5", attribute("sliding_window", 64))
model("relu.h5", attribute("hidden_act", "relu"))
model("silu.h5", attribute("hidden_act", "silu"))
model("norms.h5", dataset("layers/0/q_norm", "layers/0/attn_norm"))
model("biases.h5", dataset("layers/1/bq", "layers/0/attn_norm"))
model("deep.h5", dataset("layers/2/wq", "layers/0/wq"))
model("bpe.h5", attribute("tokenizer", "some-bpe"))
shutil.copy(f"{inputs}/docs_tiny.h5", "bpe_docs.h5")
with h5py.File("bpe_docs.h5", "r+") as file:
    del file.attrs["content_sha256"]
    del file["reference"]
    file["documents"].attrs["tokenizer"] = "some-bpe"
shutil.copy(f"{inputs}/docs_tiny.h5", "part_docs.h5")
with h5py.File("part_docs.h5", "r+") as file:
    del file.attrs["content_sha256"]
    for name in ("offsets", "entropy", "hidden"):
        del file["reference"][name]
    file["reference/logprob"][7] += 1
PY
docs=$source_dir/inputs/docs_tiny.h5
cp "$docs" more_docs.h5
/usr/bin/python3 -c 'import h5py; f = h5py.File("more_docs.h5", "r+"); del f.attrs["content_sha256"]; f["reference/entropies"] = [0.0]'
while read -r model what; do
  expect 2 "$what" "${mpi[@]}" 2 "$pipeline" --input "$docs" --model "$model" $quick
done <<'MODELS'
scaled.h5 'rope_scaling' is 'linear'
relu.h5 'hidden_act' is 'relu'
norms.h5 dataset '/model/layers/0/q_norm' is none of this decoder
biases.h5 dataset '/model/layers/1/bq' is none of this decoder
deep.h5 dataset '/model/layers/2/wq' is none of this decoder
bpe.h5 has tokens of the tokenizer byte-bos-eos, the model of some-bpe
MODELS
# A window is computed: the scores are no longer those of the reference, which has none, but those of the twin.
expect 1 'logprob: 55 of 339 values outside' "${mpi[@]}" 2 "$pipeline" --input "$docs" --model sliding.h5 $quick
/usr/bin/python3 -c 'import h5py; f = h5py.File("no_reference.h5", "w"); h5py.File("more_docs.h5").copy("documents", f)
f.attrs.update({"schema": "gyre/documents", "schema_version": 1})'
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$pipeline" --input no_reference.h5 --model sliding.h5 $quick
expect 0 'compared in full: logprob, entropy, hidden; not compared: /reference/entropies (did you mean entropy?) (not known)' "${mpi[@]}" 2 "$pipeline" --input more_docs.h5 --model silu.h5 $quick
unverified '/reference/entropies'
expect 0 'bits/token' "${mpi[@]}" 2 "$pipeline" --input bpe_docs.h5 --model bpe.h5 $quick --top 3 --check-tokens 64
! grep -q 'nan' output && [ "$(grep -c '^#.*\(document\|\.txt\)' output)" -ge 3 ] || fail "documents without bytes are not listed: $(cat output)"
grep -q '^VERIFY PASSED .*, sampled' output || fail "nothing says that it was a sample: $(cat output)"
expect 1 'logprob: 1 of ' "${mpi[@]}" 2 "$pipeline" --input part_docs.h5 --model "$source_dir/inputs/model_tiny.h5" $quick -o scores.h5
grep -q '/reference/logprob\[7\], document ' output && grep -q '# check   entropies of ' output || fail "not what is wrong: $(cat output)"
[ ! -e scores.h5 ] && [ -e scores.invalid.h5 ] || fail "wrong results have the name that was asked for: $(ls)"
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$pipeline" --input bpe_docs.h5 --model bpe.h5 $quick --check-seconds 0.001
expect 2 'schedule halo: needs a causal mask with a window' "$pipeline" --input "$docs" \
  --model "$source_dir/inputs/model_tiny.h5" --schedule halo
echo "own_numbers: all passed"
