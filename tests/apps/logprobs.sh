#!/usr/bin/env bash
# gyre-logprobs: every operation on many grids, files, sweeps, outputs; what it refuses, what a wrong number does.
# Usage: logprobs.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
logprobs=$apps/gyre-logprobs
compare=$apps/gyre-compare
golden=$source_dir/inputs/logprobs_golden.h5
ties=$source_dir/inputs/logprobs_ties.h5
linear=$source_dir/inputs/logprobs_linear.h5
quick="-n 1 -w 0"
small="--tokens 50 --vocab 300 --picks 7 --hidden 24 --peaks 5 --peak-height 6"
mpi=("$MPIEXEC" -n)
# What there is, by the lists in the sources; what has an upstream method or a backward pass, by --list.
operations=$(cat "$source_dir/src/logprobs/operations/list.hpp" "$source_dir/apps/logprobs/registry.cpp" | grep -cE '^  X\(')
"$logprobs" --list | sed '/^Layouts/,$d' >list
listed() { sed '1d' list | grep -cE "^  .{22}$1" || true; }
upstream=$(listed u) upstream_backward=$(listed 'u ') backward=$((operations - $(listed '[u ]f')))
[ "$upstream" -ge 6 ] && [ "$upstream_backward" -ge 5 ] && [ "$backward" -ge 20 ] || fail "too little is listed: $(cat list)"

# Every operation by both methods in both directions, on all kinds of grids and shards.
while read -r ranks grid; do
  [[ $grid == *--vocab* ]] || grid+=' --vocab 300 --peaks 5'
  expect 0 'VERIFY PASSED' "${mpi[@]}" "$ranks" "$logprobs" --tokens 50 --picks 7 --hidden 24 --peak-height 6 $quick --method all --csv table.csv $grid
  [ "$(column table.csv check | grep -c '^ok$')" -eq $((operations + backward + upstream + upstream_backward)) ] || fail "not all are verified: $(cat output)"
  [ "$(column table.csv op | sort -u | wc -l)" -eq $operations ] || fail "not all are run: $(cat output)"
  grep -q '^FOM gyre-logprobs speedup_over_upstream' output && fail "methods are compared by single repetitions: $(cat output)"
  [ "$(grep -c '^FOM gyre-logprobs logits_rate' output)" -eq 2 ] || fail "no figure of merit: $(cat output)"
done <<'GRIDS'
1 --threads 2 -c all
2 --cp 2 --sequences 3 --layout zigzag -d bf16 --chunk 7
2 --tp 2 --shards 290,10 --out-of-place --top-k 5 --zero-fraction 0.4
3 --tp 3 --padded 330 --sequences 4 --list-length 2
4 --tp 2 --cp 2 -d bf16 --sequences 7 --layout striped --stripe 3 --chunk 4 -c all
4 --shards 100,0,60,150 --temperature 1 --top-k 9 --top-p 0.7
8 --tp 4 --cp 2 --vocab 301 --out-of-place -d bf16 --peaks 0 --list-length 1
GRIDS

expect 0 'VERIFY PASSED' "$logprobs" $small $quick --op logprob,entropy --method gyre,upstream --csv table.csv
[ "$(column table.csv op | sort -u | xargs)" = 'entropy logprob' ] || fail "a list is not run as such: $(cat table.csv)"

# Operations that upstream does not have are named; where it has all of them, nothing is said.
for method in "all only Gyre's run" 'upstream left out'; do
  read -r method what <<<"$method"
  expect 0 "; $what" "${mpi[@]}" 2 "$logprobs" $small $quick --method "$method"
  note=$(sed -n "s/^# note: upstream has no counterpart of \(.*\); $what\$/\1/p" output)
  [ "$(sed 's/, /\n/g; s/ and /\n/' <<<"$note" | grep -cxE '[a-z-]+')" -eq $((operations - upstream)) ] || fail "not all are named: $(cat output)"
done
expect 0 'RESULT' "$logprobs" $small $quick --method all --op entropy
! grep -q '^# note: upstream' output || fail "a note without need: $(cat output)"

# A temperature: upstream's log-softmax has none.
expect 0 '# refused entropy by upstream, 50 tokens: upstream has no temperature but 1, not 1.5' "${mpi[@]}" 2 "$logprobs" $small $quick --method all --temperature 1.5
grep -q 'VERIFY PASSED' output || fail "a temperature is wrong: $(cat output)"
# Temperatures and filters of tokens, made up and of a file; min-p. Upstream has neither.
while read -r ranks grid; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" "$ranks" "$logprobs" $small $quick --filter-per-token --csv table.csv -o own.h5 $grid
  [ "$(column table.csv check | grep -c '^ok$')" -eq $((operations + backward)) ] || fail "not all are verified: $(cat output)"
done <<'GRIDS'
1 --top-k 9 --min-p 0.05 -d bf16
4 --tp 2 --cp 2 --min-p 0.001 --top-p 0.97 --list-length 2 --sequences 3 --layout zigzag
3 --shards 290,0,10 --top-k 30 --temperature 0.5 --out-of-place --threads 2
GRIDS
/usr/bin/python3 -c 'import h5py; a = h5py.File("own.h5")["results"].attrs; assert a["top_p"] == a["temperature"] == "of each token", dict(a)'
expect 0 'VERIFY PASSED' "$logprobs" --input "$source_dir/inputs/golden/logprobs_temperature_of_tokens.h5" --op filtered -n 1 -o heat.h5
/usr/bin/python3 -c 'import h5py; a = h5py.File("heat.h5")["results"].attrs; assert (a["temperature"], a["top_p"], a["top_k"]) == ("of each token", 1, 0), dict(a)'
expect 0 '# refused filtered by upstream, 50 tokens: upstream has one temperature and filter for all tokens' "${mpi[@]}" 2 "$logprobs" $small $quick --method all --op filtered,logprob --filter-per-token
grep -q '# refused logprob by upstream, 50 tokens: upstream has one temperature for all tokens' output || fail "not refused: $(cat output)"
expect 2 'filtered by upstream, 50 tokens: upstream has no min-p' "${mpi[@]}" 2 "$logprobs" $small $quick --method all --op filtered --min-p 0.1
for file in filter_of_tokens min_p sampling_mask; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" 4 "$logprobs" --input "$source_dir/inputs/golden/logprobs_$file.h5" $quick --tp 2 --cp 2
done
grep -qE 'compared in full: .*d_kept_logprob.*, kept_logprob' output || fail "the answers are not used: $(cat output)"
/usr/bin/python3 - "$source_dir/inputs/golden" <<'PY'
import shutil, sys, h5py
for name, array, place in (("filter_of_tokens", "d_filtered_logprob", (4, 7)), ("sampling_mask", "kept_logprob", 3)):
    shutil.copy(f"{sys.argv[1]}/logprobs_{name}.h5", f"{name}.h5")
    with h5py.File(f"{name}.h5", "r+") as f:
        f.attrs.pop("content_sha256", None)
        f["reference"][array][place] += 0.125
shutil.copy(f"{sys.argv[1]}/logprobs_temperature.h5", "array.h5")
with h5py.File("array.h5", "r+") as f:
    f.attrs.pop("content_sha256", None)
    f["logprobs"].attrs["temperature"] = [1.0, 2.0]
PY
expect 1 'filtered, gyre, bwd, 8 tokens: d_logits: 1 of' "${mpi[@]}" 2 "$logprobs" --input filter_of_tokens.h5 --op filtered $quick
expect 1 'kept, gyre, fwd, 8 tokens: log-probabilities: 1 of 8' "${mpi[@]}" 2 "$logprobs" --input sampling_mask.h5 --op kept $quick
expect 2 "it must be real; a number of each row goes to the dataset '/logprobs/temperature'" "$logprobs" --input array.h5
expect 2 'has no /logprobs/sampling_mask_ids' "$logprobs" --input "$golden" --op kept
expect 2 "--min-p: '1.5' is more than 1" "$logprobs" $small --min-p 1.5
# Probabilities projected to other columns: stored matrices with answers, wrong ones, none; made-up ones for many columns.
for file in projected projected_one_shard; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" 4 "$logprobs" --input "$source_dir/inputs/golden/logprobs_$file.h5" -n 2 -w 0 -c all --op project --tp 2 --cp 2 -d bf16 -o project.h5
  grep -qE 'compared in full: d_projected_probability, projected_probability' output || fail "the answers are not used: $(cat output)"
  expect 0 '' "$compare" --common --rtol 0.01 --atol 1e-6 project.h5:/results "$source_dir/inputs/golden/logprobs_$file.h5:/reference"
done
/usr/bin/python3 - "$source_dir/inputs/golden/logprobs_projected.h5" <<'PY'
import shutil, sys, h5py
for name, dataset, place, value in (("answer", "reference/projected_probability", (3, 2), 0.125),
                                    ("gradient", "reference/d_projected_probability", (5, 20), 0.125),
                                    ("column", "logprobs/projection_columns", 2, 9),
                                    ("weight", "logprobs/projection_weights", 2, -1)):
    shutil.copy(sys.argv[1], f"{name}.h5")
    with h5py.File(f"{name}.h5", "r+") as f:
        f.attrs.pop("content_sha256", None)
        f[dataset][place] = value
PY
expect 1 'project, gyre, fwd, 6 tokens: probabilities: 1 of 54' "${mpi[@]}" 2 "$logprobs" --input answer.h5 --op project $quick
expect 1 'project, gyre, bwd, 6 tokens: d_logits: 1 of 144' "${mpi[@]}" 2 "$logprobs" --input gradient.h5 --op project $quick
expect 2 '/logprobs/projection_columns[2], of row 2, is 9; columns are 0 to 8' "${mpi[@]}" 2 "$logprobs" --input column.h5 --op project $quick
expect 2 '/logprobs/projection_weights[2], of row 2, is -1; a weight is finite and at least 0' "$logprobs" --input weight.h5 --op project $quick
expect 2 'has no /logprobs/projection_offsets' "$logprobs" --input "$golden" --op project
expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$logprobs" --op project --tp 3 --tokens 20 --vocab 70 --padded 75 --picks 500 --filter-per-token --zero-fraction 0.3 --out-of-place $quick
# Nothing, one token, fewer tokens than ranks, more picks than ids, made-up documents, a sweep, one direction.
expect 0 'input prolong64k.csv sha256' "${mpi[@]}" 2 "$logprobs" --gen dist=histogram,tokens=2K,max=300,file="$source_dir/inputs/lengths/prolong64k.csv" \
  --capacity 2K --vocab 1K --op logprob-entropy $quick
[ "$(grep -c '^FOM gyre-logprobs share_of_bandwidth [0-9.]* of measured op=logprob-entropy' output)" -eq 2 ] ||
  fail "no share of the bandwidth of memory: $(cat output)"
expect 0 'RESULT UNVERIFIED (nothing to check: no tokens' "${mpi[@]}" 4 "$logprobs" --gen dist=fixed,length=0,count=3 --vocab 40 --hidden 8 --method all --tp 2 $quick
! grep -q '^FOM' output || fail "a figure of merit of nothing"
for tokens in 1 3; do expect 0 'VERIFY PASSED' "${mpi[@]}" 8 "$logprobs" --tokens $tokens --vocab 40 --picks 3 --hidden 8 --tp 2 $quick --method all; done
expect 0 '# refused distill by gyre, 20 tokens: a teacher has no 64 largest of 5 logits; the most are 5' "${mpi[@]}" 3 "$logprobs" --tokens 20 --vocab 5 --hidden 8 $quick
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" --op packed --cp 2 --gen dist=long-tailed,max=60 --capacity 200 --vocab 90 $quick
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" -b 8 -e 32 --vocab 90 --op logprob --method all $quick --csv table.csv
[ "$(column table.csv tokens | tr '\n' ' ')" = '8 8 8 8 16 16 16 16 32 32 32 32 ' ] || fail "another sweep: $(cat table.csv)"
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" $small $quick --pass bwd --csv table.csv -v
[ "$(column table.csv pass | sort -u)" = bwd ] && [ "$(column table.csv op | wc -l)" -eq $backward ] || fail "other directions than asked for: $(cat output)"
grep -q '^# fused-linear .* TFLOP/s a rank.*, checked against score_row_reference' output && grep -q '^# a rank.s memory, .*update in place' output || fail "no details: $(cat output)"
expect 0 'distill-renormalised' "$logprobs" --list
# Calls on little say nothing about memory; more do. Picks by the thousand are checked in no time.
expect 0 '# note: 50 tokens are 60 kB of logits a rank: times are those of starting calls' "$logprobs" $small $quick --op logprob --csv table.csv
[ "$(column table.csv of_bw_percent | sort -u)" = "" ] || fail "a share of nothing: $(cat table.csv)"
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 timeout 20 "$logprobs" --tokens 300 --vocab 3000 --op gather --picks 3000 $quick --csv table.csv
! grep -q '^# note' output && ! column table.csv of_bw_percent | grep -x '' >log_empty || fail "no share of what memory can do: $(cat output)"

# The files, by both methods; what is written is what their references say.
for ranks in 1 3 4; do
  for file in "$golden" "$linear" "$ties"; do
    expect 0 'VERIFY PASSED' "${mpi[@]}" $ranks "$logprobs" --input "$file" $quick --method all -J result.json
    grep -q 'the run rounds' output && fail "the references are not used: $(cat output)"
  done
done
/usr/bin/python3 - <<'PY'
import json
result = json.load(open("result.json"))
rows = {(r["key"]["op"], r["key"]["method"], r["key"]["pass"]): r for r in result["results"]}
row = rows["filtered", "gyre", "fwd"]
assert row["key"]["vocab"] == 101 and len(row["samples_ms"]) == 4, row
assert "share_of_limit" in row["measurements"], row
assert result["configuration"]["temperature"] == 2, result["configuration"]
PY
expect 0 'VERIFY PASSED' "${mpi[@]}" 4 "$logprobs" --input "$golden" --shards 60,0,1,3 -d bf16 $quick
# Masks of the lowest finite number, or -inf on one side; targets that no rank has.
/usr/bin/python3 - "$golden" <<'PY'
import shutil, sys, h5py, numpy
for name, student, teacher in (("lowest.h5", numpy.finfo("f4").min, numpy.finfo("f4").min), ("infinite.h5", -numpy.inf, 1)):
    shutil.copy(sys.argv[1], name)
    with h5py.File(name, "r+") as f:
        del f.attrs["content_sha256"]
        del f["/reference"]
        f["/logprobs/logits"][:, :12] = student
        f["/logprobs/teacher"][:, 3:12] = teacher
        f["/logprobs/teacher"][:, :3] = -numpy.inf
        f["/logprobs/targets"][:3] = [-100, 3, 64]
PY
for file in lowest.h5 infinite.h5; do expect 0 'VERIFY PASSED' "${mpi[@]}" 4 "$logprobs" --input $file --shards 10,0,30,24 $quick; done
# Lowest logits of one side only: values near the largest f32 whose terms must not overflow, and, over a temperature, values
# beyond it. Divergences with terms of both infinities, and sets of impossible ids, have no value; they are counted.
/usr/bin/python3 - "$golden" <<'PY'
import shutil, sys, h5py, numpy
lowest = numpy.finfo("f4").min
def change(name, edit):
    shutil.copy(sys.argv[1], name)
    with h5py.File(name, "r+") as f:
        del f.attrs["content_sha256"]
        del f["/reference"]
        logits, teacher = f["/logprobs/logits"][...], f["/logprobs/teacher"][...]
        edit(f, logits, teacher)
        f["/logprobs/logits"][...], f["/logprobs/teacher"][...] = logits, teacher
def one_side(array, top):
    """The lowest logit in some columns: of a row's largest on the other side, and of others."""
    for row, other in zip(array, top):
        row[numpy.argsort(other)[-3:]] = row[:4] = lowest
    array[:, 40] = 1
def hot(f, logits, teacher):
    one_side(logits, teacher)
    f["/logprobs"].attrs["temperature"] = 0.7
def undefined(f, logits, teacher):
    width = f["/logprobs"].attrs["vocab_size"]
    target = numpy.argmin(logits[:, :width], axis=1)
    rows = numpy.arange(len(logits))[::2]
    f["/logprobs/targets"][...] = target
    teacher[rows, numpy.argmax(logits[:, :width], axis=1)[rows]] = -numpy.inf
    logits[rows, target[rows]] = -numpy.inf
    kept = numpy.arange(len(logits) + 1)
    f["/logprobs/sampling_mask_offsets"] = kept
    f["/logprobs/sampling_mask_ids"] = target.astype("i4")
change("student_lowest.h5", lambda f, logits, teacher: one_side(logits, teacher))
change("teacher_lowest.h5", lambda f, logits, teacher: one_side(teacher, logits))
change("hot_lowest.h5", hot)
def beyond(f, logits, teacher):
    """Gradients of a loss that leave float32, and probabilities that it flushes, times 1e31."""
    logits[0, 0], logits[1, 1] = 3e38, 100
    f["/logprobs/d_value"][...] = [1e31] * len(logits)
    teacher[2] = logits[2]
    logits[2, 5] = -1e38
    teacher[2, 5] = teacher[2].max() - 88
    f["/logprobs/teacher_topk_logprobs"] = numpy.full(f["/logprobs/ids"].shape, -6, "f4")
    logits[3, f["/logprobs/ids"][3, 0]] = 60  # nothing is left for ids that are not listed
change("undefined.h5", undefined)
change("beyond.h5", beyond)
def apart(f, logits, teacher):
    logits[5, :2] = 3e38, -3e38
    f["/logprobs"].attrs["temperature"] = 50.0
change("apart.h5", apart)
def product(f, logits, teacher):
    f["/logprobs/hidden"] = numpy.full((len(logits), 2), 1e20, "f4")
    f["/logprobs/head"] = numpy.full((64, 2), 1e20, "f4")
change("product.h5", product)
PY
for file in student_lowest.h5 teacher_lowest.h5 hot_lowest.h5; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" 4 "$logprobs" --input $file --shards 10,0,30,24 $quick --method all -c all
  # A divergence beyond f32, of a target that the teacher masks, has no gradient; all else is defined.
  [[ $file == teacher* ]] || ! grep -q 'undefined' output || fail "$file: nothing is undefined: $(cat output)"
done
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" --input hot_lowest.h5 -d bf16 --tp 2 $quick
for op in kept topk-kl; do
  expect 0 'undefined (NaN)' "${mpi[@]}" 2 "$logprobs" --input undefined.h5 --op $op --tp 2 $quick -c all
  grep -q '^VERIFY PASSED' output || fail "undefined values of $op: $(cat output)"
done
expect 0 'undefined (NaN)' "${mpi[@]}" 2 "$logprobs" --input beyond.h5 --op all --tp 2 $quick
grep -q '^VERIFY PASSED' output || fail "gradients beyond float32: $(cat output)"
expect 2 'logits of -3e+38 and 3e+38, whose difference float32 does not hold' "$logprobs" --input apart.h5 $quick
expect 2 'hidden states and head make logits of up to 2e+40' "$logprobs" --input product.h5 --op fused-linear $quick
expect 0 '(the run rounds /logprobs/logits)' "${mpi[@]}" 2 "$logprobs" --input "$ties" -d bf16 $quick
for check in last all none; do
  expect 0 'RESULT' "${mpi[@]}" 4 "$logprobs" --input "$ties" --tp 2 -c $check -o out.h5 $quick
  expect 0 'VERIFY PASSED 13/13' "$compare" out.h5:/results "$ties":/reference --common
done

# In bf16, answers that are right but for a factor of 1 %.
/usr/bin/python3 - "$golden" <<'PY'
import shutil, sys, h5py
with h5py.File(sys.argv[1]) as f:
    assert not (f["logprobs/logits"][...].astype("f4").view("u4") & 0xFFFF).any(), "logits that bf16 rounds"
for name in ("logprob", "d_logprob", "d_entropy", "d_filtered_logprob", "d_soft_cross_entropy"):
    shutil.copy(sys.argv[1], f"{name}.h5")
    with h5py.File(f"{name}.h5", "r+") as f:
        f.attrs.pop("content_sha256", None)
        f[f"reference/{name}"][...] *= 1.01
PY
while read -r name op check; do
  expect 1 "$op, gyre, $check: " "${mpi[@]}" 2 "$logprobs" --input $name.h5 --op $op -d bf16 --tp 2 $quick
done <<'SCALED'
logprob logprob fwd, 16 tokens: log-probabilities
d_logprob logprob bwd, 16 tokens: d_logits
d_entropy entropy bwd, 16 tokens: d_logits
d_filtered_logprob filtered bwd, 16 tokens: d_logits
d_soft_cross_entropy soft-ce bwd, 16 tokens: d_logits
SCALED

# Wrong numbers in references are found, each by name; there is no figure of merit, and no file.
/usr/bin/python3 - "$golden" <<'PY'
import shutil, sys, h5py
shutil.copy(sys.argv[1], "wrong.h5")
with h5py.File("wrong.h5", "r+") as f:
    del f.attrs["content_sha256"]
    reference = f["/reference"]
    for name in ("logprob", "entropy", "filtered_logprob", "soft_cross_entropy"):
        reference[name][5] = -1.5
    for name in ("d_logprob", "d_entropy", "d_gathered", "d_filtered_logprob", "d_soft_cross_entropy"):
        reference[name][3, 7] = 0.25
    for name in ("gathered", "top_values", "top_ids"):
        reference[name][2, 1] = 3
    reference["next_token_logprob"][1, 1] = -3
shutil.copy(sys.argv[1], "nan.h5")
with h5py.File("nan.h5", "r+") as f:
    del f.attrs["content_sha256"]
    f["/logprobs/logits"][2, 1] = float("nan")
PY
expect 1 'RESULT INVALID' "${mpi[@]}" 2 "$logprobs" --input wrong.h5 -w 0 -n 2 -c all -o wrong_out.h5 -J wrong.json --method all
while read -r op what place; do
  for method in gyre upstream; do
    [ $method = gyre ] || [[ " logprob entropy gather soft-ce filtered top-k " == *" $op "* ]] || continue
    grep -A1 "^VERIFY   $op, $method, .*: $what: 1 of .* values outside" output | grep -qF "/reference/$place, rank " || fail "$op, $what by $method is not named: $(cat output)"
  done
done <<'WRONG'
logprob log-probabilities logprob[5]
logprob d_logits d_logprob[3, 7]
entropy entropies entropy[5]
entropy d_logits d_entropy[3, 7]
gather log-probabilities gathered[2, 1]
gather d_logits d_gathered[3, 7]
soft-ce cross.entropies soft_cross_entropy[5]
soft-ce d_logits d_soft_cross_entropy[3, 7]
filtered log-probabilities filtered_logprob[5]
filtered d_logits d_filtered_logprob[3, 7]
top-k values top_values[2, 1]
top-k ids top_ids[2, 1]
packed log-probabilities next_token_logprob[1, 1]
packed-prerolled log-probabilities next_token_logprob[1, 1]
WRONG
! grep -q '^FOM' output && grep -q '"fom": *\[\]' wrong.json || fail "a wrong result has a figure of merit"
[ ! -e wrong_out.h5 ] || fail "a wrong result has the name that was asked for"
grep -q '^# results that did not pass are in wrong_out.invalid.h5' output || fail "where wrong results are is not said: $(cat output)"
expect 1 'VERIFY FAILED' "$compare" wrong_out.invalid.h5:/results wrong.h5:/reference --common
expect 2 '/logprobs/logits[2, 1] is nan; it must be finite or -inf' "${mpi[@]}" 2 "$logprobs" --input nan.h5
expect 2 'nosuch.h5' "${mpi[@]}" 2 "$logprobs" --input nosuch.h5
expect 2 "'gyre/logprobs' is needed" "${mpi[@]}" 2 "$logprobs" --input "$source_dir/inputs/docs_tiny.h5"
head -c 40000 "$ties" >cut.h5
expect 3 'cut.h5' "${mpi[@]}" 2 "$logprobs" --input cut.h5
expect 2 '--shards 100,9 are 109 columns; ' "${mpi[@]}" 2 "$logprobs" --input "$ties" --shards 100,9

# What cannot be: all at once, on all ranks, before anything is written; first values, then what does not go together.
expect 2 "--factor: '0.5' is not above 1" "${mpi[@]}" 4 "$logprobs" --tp 3 --top-p 0 --factor 0.5 --temperature 0 --chunk 2 -o none.h5
grep -qF -- "--temperature: '0' is not at least 1e-15" output && grep -qF -- "--top-p: '0' is not above 0" output ||
  fail "not all values are named: $(cat output)"
expect 2 'the nearest grids: --tp 4 --cp 1 | --tp 2 --cp 2 | --tp 1 --cp 4' "${mpi[@]}" 4 "$logprobs" --tp 3 --chunk 2 -o none.h5 --pass bwd
[ "$(grep -c '^  - ' output)" -eq 3 ] || fail "not all problems are listed: $(cat output)"
expect 2 '6 columns cannot be dealt evenly to 4 ranks; 8 can' "${mpi[@]}" 4 "$logprobs" --vocab 5 --padded 6
expect 2 ' is that of the file of --input: leave it out' "${mpi[@]}" 2 "$logprobs" --input "$golden" --top-k 8
expect 2 '--op packed has no --method upstream, which logprob, ' "$logprobs" --op packed --method upstream
grep -q 'filtered have; the nearest is --method gyre' output || fail "operations that upstream has are not named: $(cat output)"
expect 2 'tokens fit' "${mpi[@]}" 2 "$logprobs" --op logprob --tokens 256M --csv none.csv
! grep -q '^#' output || fail "a refused run began: $(cat output)"
expect 2 '--op exchange has no results for a file' "${mpi[@]}" 2 "$logprobs" $small $quick --op exchange -o none.h5
expect 2 '--stripe 2: layout zigzag does not read it; striped does' "$logprobs" --layout zigzag --stripe 2 -o none.h5
expect 2 '--layout-chunk 4: layout dual-chunk-swap does not read it; balanced and balanced-joint do' "$logprobs" --layout-chunk 4 -o none.h5
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$logprobs" $small $quick --op packed --cp 2 --sequences 3 --layout balanced --layout-chunk 4
expect 2 'the most are 8' "${mpi[@]}" 2 "$logprobs" --op distill --vocab 8
expect 2 '--output needs one size' "$logprobs" -b 8 -e 16 -o none.h5
expect 2 'nearest: soft-ce' "$logprobs" --op softce
expect 2 'no_such_folder' "$logprobs" -o no_such_folder/out.h5
printf 'tokens = 64\nvocab = 100\nop = "entropy"\n' >run.toml
expect 0 'vocab=100' "${mpi[@]}" 2 "$logprobs" --config run.toml $quick
[ -z "$(ls | grep -e none -e tmp)" ] || fail "files are left: $(ls)"
echo "logprobs: all passed"
