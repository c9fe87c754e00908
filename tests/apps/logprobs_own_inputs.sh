#!/usr/bin/env bash
# gyre-logprobs: what some of its operations alone read: hidden states and the weight of a head, and how the gradient of
# gathered predictions comes back.
# Usage: logprobs_own_inputs.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
logprobs=$apps/gyre-logprobs
linear=$source_dir/inputs/logprobs_linear.h5
quick="-n 1 -w 0"
small="--tokens 50 --vocab 300 --picks 7 --hidden 24 --peaks 5 --peak-height 6"
mpi=("$MPIEXEC" -n)

# Hidden states and the weight of a head, in both types; their answers are used, and those of a file that are wrong found,
# on grids that split the tokens, too. Without answers both are computed from the file, as the file itself shows.
while read -r ranks grid; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" "$ranks" "$logprobs" --input "$linear" --op fused-linear $quick -c all $grid
  grep -q 'compared in full: d_head, d_hidden, linear_entropy, linear_logprob; ' output || fail "the references are not used: $(cat output)"
done <<'GRIDS'
1 -d bf16
2 --cp 2
4 --tp 2 --cp 2 -d bf16
4 --shards 20,0,30,14 --threads 2
GRIDS
/usr/bin/python3 - "$linear" <<'PY'
import shutil, sys, h5py
for name, place in (("linear_logprob", 6), ("linear_entropy", 6), ("d_hidden", (7, 3)), ("d_head", (8, 2))):
    shutil.copy(sys.argv[1], f"wrong_{name}.h5")
    with h5py.File(f"wrong_{name}.h5", "r+") as f:
        del f.attrs["content_sha256"]
        f["/reference"][name][place] += 0.125
shutil.copy(sys.argv[1], "other.h5")
with h5py.File("other.h5", "r+") as f:
    del f.attrs["content_sha256"]
    f["/logprobs/head"][8, 2] += 0.125
shutil.copy("other.h5", "unanswered.h5")
with h5py.File("unanswered.h5", "r+") as f:
    del f["/reference"]
shutil.copy(sys.argv[1], "narrow.h5")
with h5py.File("narrow.h5", "r+") as f:
    del f.attrs["content_sha256"]
    head = f["/logprobs/head"][:, :7]
    del f["/logprobs/head"]
    f["/logprobs/head"] = head
PY
while read -r name what; do
  expect 1 "$what" "${mpi[@]}" 4 "$logprobs" --input "wrong_$name.h5" --op fused-linear --tp 2 --cp 2 $quick
done <<'WRONG'
linear_logprob log-probabilities: 1 of 14 values outside
linear_entropy entropies: 1 of 14 values outside
d_hidden d_x: 1 of 168 values outside
d_head d_weight: 1 of 732 values outside
WRONG
grep -q '/reference/d_head\[8, 2\]' output || fail "the wrong gradient is not named: $(cat output)"
expect 1 'fused-linear, gyre, fwd, 14 tokens: log-probabilities' "${mpi[@]}" 2 "$logprobs" --input other.h5 --op fused-linear $quick
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" --input unanswered.h5 --op fused-linear $quick
expect 2 "dataset '/logprobs/head' is float32 [61, 7]; it must be real [61, 12]" "${mpi[@]}" 2 "$logprobs" --input narrow.h5
grep -q 'narrow.h5' output || fail "the file is not named: $(cat output)"
expect 2 '--hidden is that of the hidden states of ' "${mpi[@]}" 2 "$logprobs" --input "$linear" --hidden 24

# The gradient of what is gathered over the tokens' ranks, by each convention: the same definition, messages of their own.
for convention in split sum none; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$logprobs" $small $quick --cp 3 --sequences 4 --gather-gradient $convention -c all --csv $convention.csv
  grep -q "gather_gradient=$convention" output || fail "the convention is not told: $(cat output)"
done
sent_by() { column "$1.csv" msgs op="$2" pass=bwd; }
for op in packed packed-prerolled; do
  [ "$(sent_by split $op) $(sent_by sum $op) $(sent_by none $op)" = "2 3 2" ] || fail "other messages of $op: $(cat split.csv sum.csv none.csv)"
done
/usr/bin/python3 - "$source_dir/inputs/golden/logprobs_sampling_mask.h5" kept.h5 <<'PY'
import shutil, sys, h5py
shutil.copy(*sys.argv[1:])
with h5py.File(sys.argv[2], "r+") as file:
    for name in list(file["reference"]):
        if not name.endswith("kept_logprob"):
            del file["reference"][name]
    file.attrs.pop("content_sha256")
PY
# More kept ids of a row than a rank takes: refused before anything runs, whichever rank has the row.
/usr/bin/python3 - kept.h5 many.h5 <<'PY'
import sys, h5py, numpy
columns = 65600
with h5py.File(sys.argv[1], "r") as old, h5py.File(sys.argv[2], "w") as file:
    file.attrs.update({k: x for k, x in old.attrs.items() if k != "content_sha256"})
    group = file.create_group("logprobs")
    group.attrs["vocab_size"] = numpy.int64(columns)
    group["logits"] = numpy.zeros((3, columns), "f4")
    group["targets"] = numpy.array([1, 2, 3], "i4")
    group["sampling_mask_offsets"] = numpy.array([0, 1, 2, 2 + 65537])
    group["sampling_mask_ids"] = numpy.concatenate([[1, 2], numpy.arange(65537)]).astype("i4")
PY
expect 2 'kept by gyre, 3 tokens: many.h5: row 2 keeps 65537 ids of rank 0; at most 65536' "${mpi[@]}" 3 "$logprobs" --input many.h5 --op kept --cp 3 -n 1
expect 0 '# refused kept by gyre, 3 tokens: many.h5: row 2 keeps 65537' "${mpi[@]}" 3 "$logprobs" --input many.h5 --op kept,argmax --cp 3 -n 1
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" --input many.h5 --op kept --tp 2 -n 1

# Divergences of a student's largest ids: of a teacher's rows, and of its log-probabilities of these ids; more ids than a
# rank or the vocabulary has. Answers are used, and results written as the references have them.
while read -r file ranks grid; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" "$ranks" "$logprobs" --input "$source_dir/inputs/golden/logprobs_$file.h5" --op topk-kl,topk-kl-advantage $quick -c all -o kl.h5 $grid
  grep -q 'compared in full: d_topk_kl, d_topk_kl_advantage, topk_kl; ' output || fail "the answers are not used: $(cat output)"
  expect 0 'VERIFY PASSED' "$apps/gyre-compare" --common --rtol 1e-2 --atol 1e-2 kl.h5:/results "$source_dir/inputs/golden/logprobs_$file.h5:/reference"
done <<'GRIDS'
topk_kl 1
topk_kl 4 --tp 2 --cp 2 --out-of-place
topk_kl 3 --shards 2,0,29 -d bf16 --threads 2
topk_kl_of_ids 3 --tp 3 -d bf16
topk_kl_of_ids 2 --cp 2
topk_kl_of_given_ids 3 --tp 3
more_ids_than_vocabulary 2 --tp 2
GRIDS
expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$logprobs" --tokens 50 --vocab 90 --picks 90 --padded 96 --op topk-kl,topk-kl-advantage --tp 3 -d bf16 $quick
/usr/bin/python3 - "$source_dir/inputs/golden" <<'PY'
import shutil, sys, h5py
def change(name, of, to):
    shutil.copy(f"{sys.argv[1]}/logprobs_topk_kl{of}.h5", f"kl_{name}.h5")
    with h5py.File(f"kl_{name}.h5", "r+") as f:
        del f.attrs["content_sha256"]
        to(f["logprobs"], f["reference"])
def add(array, place):
    def to(_, reference):
        reference[array][place] += 0.125
    return to
def narrow(problem, _):
    teacher = problem["teacher"][:, :30]
    del problem["teacher"]
    problem["teacher"] = teacher
def twice(problem, _):
    problem["ids"][1, 2] = problem["ids"][1, 1]
change("value", "", add("topk_kl", 4))
change("slope", "_of_ids", add("d_topk_kl_advantage", (3, 20)))
change("none", "", lambda problem, _: problem.__delitem__("teacher"))
change("narrow", "", narrow)
change("twice", "_of_ids", twice)
change("lone", "_of_ids", lambda problem, _: problem.__delitem__("teacher_target_logprobs"))
PY
expect 1 'topk-kl, gyre, fwd, 8 tokens: divergences: 1 of 8' "${mpi[@]}" 2 "$logprobs" --input kl_value.h5 --op topk-kl $quick
expect 1 'topk-kl-advantage, gyre, bwd, 6 tokens: d_logits: 1 of' "${mpi[@]}" 2 "$logprobs" --input kl_slope.h5 --op topk-kl,topk-kl-advantage $quick
grep -q '/reference/d_topk_kl_advantage\[3, 20\]' output || fail "the wrong gradient is not named: $(cat output)"
expect 2 'topk-kl by gyre, 3 tokens: many.h5 has no /logprobs/ids' "$logprobs" --input many.h5 --op topk-kl -n 1
expect 2 'kl_none.h5 has neither /logprobs/teacher nor /logprobs/teacher_logprobs' "$logprobs" --input kl_none.h5 --op topk-kl -n 1
expect 2 "dataset '/logprobs/teacher' is float16 [8, 30]; it must be real [8, 31]" "$logprobs" --input kl_narrow.h5 --op topk-kl -n 1
expect 2 "/logprobs/teacher_logprobs is of different ids" "$logprobs" --input kl_twice.h5 --op topk-kl -n 1
expect 2 "there is no dataset '/logprobs/teacher_target_logprobs'; it must be real [6]" "$logprobs" --input kl_lone.h5 --op topk-kl -n 1
expect 2 'topk-kl by gyre, 1 tokens: 65536 ids of a token, with its target one more; at most 65535' "$logprobs" --tokens 1 --vocab 65536 --picks 65536 --op topk-kl -n 1
expect 2 '--op topk-kl has no --method upstream' "$logprobs" --op topk-kl --method upstream -n 1
expect 2 '--op kept has no --method upstream' "$logprobs" --input kept.h5 --method upstream -n 1
expect 2 'not with kept' "$logprobs" --input kept.h5 --f32-output -n 1
expect 2 '--gather-gradient sum goes with --op packed, packed-prerolled, packed-filtered or all, not with logprob' "${mpi[@]}" 2 "$logprobs" --op logprob --gather-gradient sum
expect 2 'not with --pass fwd' "${mpi[@]}" 2 "$logprobs" --op packed --gather-gradient none --pass fwd
expect 2 'nearest: split' "$logprobs" --op packed --gather-gradient splits

# Log-probabilities of all ids in the logits' type or in f32; their gradients are given for every id.
every_id=$source_dir/inputs/golden/logprobs_every_id.h5
for ranks in 1 2 3; do
  for type in f32 'bf16 --f32-output' 'bf16 --out-of-place'; do
    expect 0 'VERIFY PASSED' "${mpi[@]}" $ranks "$logprobs" --input "$every_id" --op log-softmax $quick -d $type -c all
    grep -q 'compared in full: .*d_log_softmax' output || fail "the references are not used: $(cat output)"
  done
done
expect 0 'VERIFY PASSED' "${mpi[@]}" 4 "$logprobs" $small $quick --op log-softmax -d bf16 --f32-output --tp 2 -c all -o wide.h5
expect 0 'VERIFY PASSED' "$logprobs" $small $quick --op log-softmax -d bf16 --f32-output -o one.h5
expect 0 'VERIFY PASSED' "$apps/gyre-compare" --rtol 0.01 --atol 1e-5 wide.h5 one.h5
/usr/bin/python3 - "$every_id" <<'PY'
import shutil, sys, h5py
shutil.copy(sys.argv[1], "wrong_gradient.h5")
with h5py.File("wrong_gradient.h5", "r+") as f:
    del f.attrs["content_sha256"]
    f["/logprobs/d_logprobs"][4, 20] += 0.125
PY
expect 1 '/reference/d_log_softmax[4, ' "${mpi[@]}" 2 "$logprobs" --input wrong_gradient.h5 --op log-softmax $quick
echo "logprobs_own_inputs: all passed"
