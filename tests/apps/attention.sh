#!/usr/bin/env bash
# gyre-attention: every schedule under every layout, files, timelines, plans; what it refuses, what a fault does.
# Usage: attention.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
attention=$apps/gyre-attention
compare=$apps/gyre-compare
causal=$source_dir/inputs/attention_causal.h5
window=$source_dir/inputs/attention_window.h5
quick="-n 1 -w 0"
small="--tokens 96 --heads 4 --kv-heads 2 --head-dim 16"
mpi=("$MPIEXEC" -n)

# Every schedule under every layout, but the halo, which needs a window; two directions.
for ranks in 1 3; do
  expect 0 '# refused under zigzag: schedule halo: needs a causal mask' "${mpi[@]}" "$ranks" "$attention" $small $quick --schedule all --layout all --csv table.csv
  layouts=$(column table.csv layout | sort -u | wc -l)
  schedules=$(column table.csv schedule | sort -u | wc -l)
  [ "$layouts" -ge 6 ] && [ "$schedules" -ge 8 ] || fail "not all are run: $(cat output)"
  [ "$(column table.csv check | grep -c '^ok$')" -eq $((2 * layouts * schedules)) ] || fail "not all are verified: $(cat table.csv)"
  [ "$(grep -c '^FOM' output)" -eq 3 ] || fail "not one figure of merit for each direction, and the average: $(cat output)"
  [ "$(grep -cE '^# fastest (fwd|bwd), 96 tokens: .*; next: .* % longer, too few repetitions to tell$' output)" -eq 2 ] ||
    fail "it does not say who won: $(cat output)"
done
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" $small $quick --schedule halo --layout contiguous --window 20 --sinks -d bf16 --partial-out bf16 \
  --partial-dq bf16 --wire-dkv f32 -c all
for schedule in all-gather all-gather-strided all-to-all all-to-all-ring; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" 4 "$attention" $small $quick --schedule $schedule --collectives library --csv table.csv
  [ "$(column table.csv check | grep -c '^ok$')" -eq 2 ] || fail "$schedule by the library is not verified: $(cat table.csv)"
done
[ "$(column table.csv msgs | tr '\n' ' ')" = '4 3 ' ] || fail "not an operation for each all-to-all, and a message of the ring: $(cat table.csv)"
expect 2 '--collectives library: schedule ring does not read it; all-gather' "${mpi[@]}" 2 "$attention" $small --collectives library
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" $small $quick --schedule ring,all-to-all --layout zigzag,striped --csv table.csv
[ "$(column table.csv schedule | sort -u | xargs)/$(column table.csv layout | sort -u | xargs)" = 'all-to-all ring/striped zigzag' ] || fail "a list is not run as such: $(cat table.csv)"
expect 2 "'ulysses' is called all-to-all here" "$attention" $small --schedule ulysses
expect 2 "'mpi' is not one of messages, library" "${mpi[@]}" 2 "$attention" $small --schedule all-to-all --collectives mpi
expect 2 '--collectives messages, or without it' "${mpi[@]}" 2 "$attention" $small --schedule all-to-all --collectives library \
  --emulate-network alpha=1us,beta=1G
# A figure of merit has a least value.
expect 0 'FOM gyre-attention attention_rate' "${mpi[@]}" 2 "$attention" $small $quick --at-least attention_rate=0
expect 1 'below --at-least average_attention_rate=1e9: ' "${mpi[@]}" 2 "$attention" $small $quick --at-least average_attention_rate=1e9 -J result.json
grep -q '"gyre-result/1"' result.json || fail "a slow run leaves no result"
expect 2 'no figure attention_rat; nearest: attention_rate; there are: attention_rate, average_attention_rate' "${mpi[@]}" 2 "$attention" $small $quick --at-least attention_rat=1
expect 2 'is not METRIC=VALUE' "${mpi[@]}" 2 "$attention" $small $quick --at-least 0.1
expect 2 'and --resume leaves rows out' "$attention" $small $quick --at-least attention_rate=0 --resume finished -J none.jsonl
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" $small $quick --mask full --threads 2 --pass bwd --batch 3 --csv table.csv
[ "$(column table.csv pass)" = bwd ] || fail "other directions than asked for: $(cat output)"

# Queries of the last tokens have the results that they have among all, under every schedule.
expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$attention" $small $quick --queries 20 --schedule all --layout dual-chunk-swap
expect 0 'VERIFY PASSED' "$attention" $small $quick -o whole.h5
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" $small $quick --queries 20 --schedule all-gather-query -o last.h5
/usr/bin/python3 - <<'PY' || fail "queries of the last tokens have other results"
import h5py, numpy as np
whole, last = (h5py.File(name)["results"] for name in ("whole.h5", "last.h5"))
assert last["query_offsets"][:].tolist() == [0, 20] and last["d_k"].shape == whole["d_k"].shape
for name in ("out", "lse", "d_q"):
    np.testing.assert_allclose(last[name][:], whole[name][-20:], rtol=1e-4, atol=1e-5)
PY
expect 2 '--queries is that of the file of --input' "$attention" --input "$causal" --queries 3
expect 2 '--queries' "$attention" $small --queries -1

# Nothing to attend, one token, fewer tokens than ranks, made-up documents, a sweep.
expect 0 'RESULT UNVERIFIED (nothing to check: no tokens' "${mpi[@]}" 2 "$attention" --gen dist=fixed,length=0,count=3 $quick
! grep -q '^FOM' output || fail "a figure of merit of nothing"
for tokens in 1 3; do expect 0 'VERIFY PASSED 10/10' "${mpi[@]}" 4 "$attention" --tokens $tokens $quick; done
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" --gen dist=long-tailed,max=300 --capacity 600 $quick --heads 2 --kv-heads 1 --head-dim 8
expect 0 'input prolong64k.csv sha256' "${mpi[@]}" 2 "$attention" --gen dist=histogram,tokens=300,max=90,file="$source_dir/inputs/lengths/prolong64k.csv" --mask share-question $quick \
  --heads 2 --kv-heads 1 --head-dim 8
grep -q 'config documents=1 tokens=300$' output && grep -q 'config source=.*,tokens=300,file=' output || fail "other documents: $(cat output)"
expect 2 'histogram needs file=FILE' "$attention" --gen dist=histogram
expect 2 'none.csv: No such file' "${mpi[@]}" 2 "$attention" --gen dist=histogram,file=none.csv
expect 0 'VERIFY PASSED 30/30' "${mpi[@]}" 2 "$attention" -b 16 -e 64 -f 2 $quick --csv table.csv
[ "$(column table.csv tokens | tr '\n' ' ')" = '16 16 32 32 64 64 ' ] || fail "another sweep: $(cat table.csv)"

# What is written is what the file's references say, whatever timing did to the arrays after it.
for schedule in ring-forward all-gather; do
  for check in all last none; do
    expect 0 'RESULT' "${mpi[@]}" 3 "$attention" --input "$window" --schedule $schedule -c $check -n 2 -o out.h5
    expect 0 'VERIFY PASSED 6/6' "$compare" out.h5:/results "$window":/reference --common
  done
done
expect 0 'VERIFY PASSED 10/10' "${mpi[@]}" 2 "$attention" --input "$causal" $quick -J result.json
regions=$source_dir/inputs/attention_regions.h5
checks=$((11 * $(registered schedules | wc -w)))
expect 0 "VERIFY PASSED $checks/$checks " "${mpi[@]}" 3 "$attention" --input "$regions" --schedule all $quick -c all
expect 0 'RESULT' "${mpi[@]}" 2 "$attention" --input "$regions" $quick -o out.h5
expect 0 'VERIFY PASSED 6/6' "$compare" out.h5:/results "$regions":/reference --common
for mask in causal,window=20,keep=4 prefix-lm,prefix=10 block-causal,block=16 chunked,chunk=40 shared-prefix,prompt=24,answer=16 \
  share-question causal-blockwise sliding-window,window=9,global=5; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$attention" $small $quick --mask $mask --batch 2 --layout balanced
done
/usr/bin/python3 - "$regions" <<'PY'
import shutil, sys, h5py
for name, (row, column, value) in {"blind": (7, 2, 12), "shared": (2, 3, 11), "outside": (7, 4, 14)}.items():
    shutil.copy(sys.argv[1], name + ".h5")
    with h5py.File(name + ".h5", "r+") as f:
        table = f["attention/regions"][...]
        table[row, column] = value
        f["attention/regions"][...] = table
        del f.attrs["content_sha256"]
PY
expect 2 'the query at position 12 of document 2 sees no key; with sinks every query must see one' "${mpi[@]}" 2 "$attention" --input blind.h5
expect 2 'shared.h5: /attention/regions: regions 1 and 2 of document 0 share a pair' "${mpi[@]}" 2 "$attention" --input shared.h5
expect 2 'outside.h5: /attention/regions: region 1 of document 2' "${mpi[@]}" 2 "$attention" --input outside.h5
# Regions: the first document is empty and others are not; queries see later keys only, with large scores, in one document.
/usr/bin/python3 - <<'PY'
import h5py, numpy
def write(path, offsets, regions, size=1.0):
    rng = numpy.random.default_rng(5)
    tokens = offsets[-1]
    with h5py.File(path, "w") as f:
        f.attrs.update({"schema": "gyre/attention", "schema_version": 1})
        group = f.create_group("attention")
        group.attrs.update({"mask": "regions", "window": 0, "scale": 0.25})
        group["offsets"], group["regions"] = offsets, numpy.array(regions, dtype="i8")
        for name in ("q", "k", "v", "d_out"):
            group[name] = (size if name in "qk" else 1) * rng.standard_normal((tokens, 2, 16)).astype("f4")
write("empty_first.h5", [0, 0, 12], [[1, 0, 12, 0, 12, 1, 0]])
write("two_empty.h5", [0, 0, 12, 12, 24], [[1, 0, 12, 0, 12, 1, 0], [3, 0, 12, 6, 12, 0, 0]])
write("later_keys.h5", [0, 48], [[0, 0, 8, 40, 48, 0, 0], [0, 8, 24, 30, 40, 2, 0]], size=8)
PY
for file in empty_first two_empty later_keys; do
  for layout in dual-chunk-swap striped contiguous; do
    expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$attention" --input $file.h5 --layout $layout --schedule all $quick -c all
  done
done
# In bf16, answers that are right but for a factor of 1 %, less than the tolerance of a value.
/usr/bin/python3 - "$causal" <<'PY'
import shutil, sys, h5py, numpy
shutil.copy(sys.argv[1], "exact.h5")
with h5py.File("exact.h5", "r+") as f:
    f.attrs.pop("content_sha256", None)
    del f["reference"]
    for name in ("q", "k", "v", "d_out"):
        f[f"attention/{name}"][...] = (f[f"attention/{name}"][...].view("u4") & 0xFFFF0000).astype("u4").view("f4")
PY
expect 0 'VERIFY PASSED' "$attention" --input exact.h5 $quick -o answers.h5
/usr/bin/python3 - <<'PY'
import shutil, h5py
arrays = ("out", "d_q", "d_k", "d_v")
for wrong in ("right", *arrays):
    shutil.copy("exact.h5", f"{wrong}.h5")
    with h5py.File(f"{wrong}.h5", "r+") as f, h5py.File("answers.h5") as answers:
        for name in arrays:
            f[f"reference/{name}"] = answers[f"results/{name}"][...] * (1.01 if name == wrong else 1)
PY
narrow="-d bf16 --partial-out bf16 --partial-dq bf16 --layout contiguous --schedule ring"
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" --input right.h5 $narrow $quick
grep -q '^# reference.*compared in full: .*d_q' output || fail "the answers are not compared: $(cat output)"
for wrong in out d_q d_k d_v; do
  expect 1 "$wrong: the factor of all values is 0.99" "${mpi[@]}" 2 "$attention" --input $wrong.h5 $narrow $quick
done
# Where a query sees no key, the log-sum-exp is -inf, and nowhere else. Gradients that a gather doubled. Numbers at the ends of types.
/usr/bin/python3 - "$regions" "$causal" <<'PY'
import shutil, sys, h5py, numpy
def write(name, source, change):
    shutil.copy(source, name + ".h5")
    with h5py.File(name + ".h5", "r+") as f:
        del f.attrs["content_sha256"]
        change(f)
def unseen(f, answer):
    table = numpy.array([[0, 0, 2, 0, 2, 0, 0], [0, 3, 8, 2, 8, 1, 2**63 - 1]])
    a = f["attention"]
    q, k, v, d_out = (a[n][:8] for n in ("q", "k", "v", "d_out"))
    for n, x in {"q": q, "k": k, "v": v, "d_out": d_out, "offsets": [0, 8], "regions": table}.items():
        if n in a: del a[n]
        a[n] = x
    a.attrs["mask"] = "regions"
    s, g = a.attrs["scale"], q.shape[1] // k.shape[1]
    lse = numpy.full((8, q.shape[1]), -numpy.inf)
    for i in (0, 1, 3, 4, 5, 6, 7):
        seen = slice(0, 2) if i < 2 else slice(2, i + 1)
        for h in range(q.shape[1]):
            lse[i, h] = numpy.log(numpy.exp(s * (k[seen, h // g].astype("f8") @ q[i, h])).sum())
    lse[answer[0]] = answer[1]
    del f["reference"]
    f["reference/lse"] = lse
for name, answer in {"unseen": (2, -numpy.inf), "seen": ((3, 1), -numpy.inf), "finite": ((2, 0), 0.0)}.items():
    write(name, sys.argv[2], lambda f: unseen(f, answer))
def scale(f, factors):
    for path, factor in factors.items(): f[path][...] *= factor
write("doubled", sys.argv[2], lambda f: scale(f, {"reference/d_q": 2, "reference/d_k": 1 / 3}))
write("large", sys.argv[2], lambda f: scale(f, {"attention/q": 1e8, "attention/k": 1e8}))
PY
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" --input unseen.h5 $quick
expect 2 'seen.h5: /reference/lse[3, 1] is -inf, but the query at position 3 of document 0 sees 2 keys' "${mpi[@]}" 2 "$attention" --input seen.h5
expect 1 "/reference/lse[2, 0], document 0 position 2: yours 0, Gyre's -inf" "$attention" --input finite.h5 $quick
expect 1 'outside, differs by a factor 1/2: gather convention?' "${mpi[@]}" 2 "$attention" --input doubled.h5 $quick
grep -q 'bwd: d_k: .* outside, differs by a factor 3: gather convention?' output || fail "no factor: $(cat output)"
expect 1 'is larger than the values: nothing was verified' "${mpi[@]}" 2 "$attention" --input large.h5 $quick
expect 1 'is larger than the values: nothing was verified' "${mpi[@]}" 2 "$attention" $small $quick --tol-scale 1e7
expect 2 "--tol-scale: 'inf' is not a finite number" "${mpi[@]}" 2 "$attention" $small --tol-scale inf
expect 2 "--window: '9223372036854775807' is more than 281474976710656" "${mpi[@]}" 2 "$attention" $small --window 9223372036854775807
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" $small $quick --window 262144G
expect 2 'visible pairs of a query and a key; at most 2^63 - 1 can be counted: ' "$attention" --explain --cp 8 --tokens 1G --heads 4096
expect 2 'group-cast sends rows to whoever sees them' "${mpi[@]}" 4 "$attention" $small --mask prefix-lm,prefix=10 --schedule halo
expect 2 'nearest: prefix-lm; wanted: causal' "$attention" --mask prefix
expect 2 'needs answer; wanted: shared-prefix,prompt=N,answer=N' "$attention" --mask shared-prefix,prompt=8
grep -q '"exposed_time"' result.json || fail "no exposed time in the JSON"
expect 0 'compared in full: nothing; not compared: out, lse, d_q, d_k, d_v (the run rounds /attention/q)' "${mpi[@]}" 2 "$attention" --input "$causal" $quick -d bf16

# A wrong number in a reference is found, by name; there is no figure of merit, and no file.
/usr/bin/python3 - "$causal" <<'PY'
import shutil, sys, h5py
for name in ("wrong", "missing", "nan"):
    shutil.copy(sys.argv[1], name + ".h5")
with h5py.File("wrong.h5", "r+") as f:
    del f.attrs["content_sha256"]
    f["/reference/d_k"][40, 1, 3] += 1e-3
with h5py.File("missing.h5", "r+") as f:
    del f.attrs["content_sha256"]
    del f["/attention/k"]
with h5py.File("nan.h5", "r+") as f:
    del f.attrs["content_sha256"]
    f["/attention/q"][2, 1, 0] = float("nan")
PY
expect 1 'RESULT INVALID' "${mpi[@]}" 2 "$attention" --input wrong.h5 $quick -o wrong_out.h5 -J wrong.json
grep -A1 'bwd: d_k: 1 of ' output | grep -q '/reference/d_k\[.*position' || fail "the place is not named: $(cat output)"
! grep -q '^FOM' output && grep -q '"fom": *\[\]' wrong.json || fail "a wrong result has a figure of merit"
[ ! -e wrong_out.h5 ] || fail "a wrong result is in a file"
expect 2 '/k' "${mpi[@]}" 2 "$attention" --input missing.h5
expect 2 '/q' "${mpi[@]}" 2 "$attention" --input nan.h5
expect 2 'nosuch.h5' "${mpi[@]}" 2 "$attention" --input nosuch.h5
expect 2 "'gyre/attention' is needed" "${mpi[@]}" 2 "$attention" --input "$source_dir/inputs/docs_tiny.h5"

# A slow network shows: at 10 MB/s, the 0.2 MB that each rank sends take 20 ms, of which compute hides next to nothing.
expect 0 'emulated network alpha=1ms,beta=10M' "${mpi[@]}" 2 "$attention" --tokens 256 --heads 4 --kv-heads 4 --head-dim 48 -n 3 --schedule all --pass fwd \
  --emulate-network alpha=1ms,beta=10M --csv table.csv -v
grep -q '^RESULT VALID' output && fail "an emulated network is official"
paste <(column table.csv sent_mb_rank) <(column table.csv time_ms) <(column table.csv exposed_percent) |
  awk '{ wire = 1 + 1000 * $1 / 10; if (wire < 20 || $2 < wire || $3 < 50) bad = 1 } END { exit bad || NR < 8 }' &&
  [ "$(column table.csv msgs schedule=ring) $(column table.csv msgs schedule=all-gather-strided)" = '1 4' ] || fail "the slow network does not show: $(cat table.csv)"
[ "$(grep -c '^# .*: total .* exposed' output)" -eq "$(($(wc -l <table.csv) - 1))" ] || fail "not all rows have details: $(cat output)"

# Under a short window a check computes all rows again, in double precision; that takes no memory beyond the plan.
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" --tokens 2K --heads 32 --kv-heads 8 --window 1 --pass fwd -n 1 -w 0 -J memory.json
within_plan() {
  /usr/bin/python3 -c 'import json; m = json.load(open("memory.json"))["memory"]
beyond = m["peak_bytes"] - m["start_bytes"] - m["planned_bytes"]
assert beyond < 40e6, f"{beyond} bytes beyond the plan"' || fail "$1 takes memory"
}
within_plan 'a check'
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" --tokens 4K --heads 16 --kv-heads 4 --head-dim 128 --window 64 -n 1 -w 0 -o memory.h5 -J memory.json
within_plan 'a file'

# Plans, of more ranks than there are; in the directions asked for; too large ones are refused.
expect 0 'backward, rank 1 of 3' "$attention" --explain --cp 3 --tokens 1K --svg plan.svg
grep -q '</svg>' plan.svg || fail "no picture"
expect 0 'forward, rank 0 of 64' "$attention" -v --explain --cp 64 --tokens 64K --pass fwd --latency-us 0
! grep -q 'backward' output && grep -q 'latency 0 us' output || fail "not what was asked for: $(cat output)"
expect 0 '# 8 of 64 ranks' "$attention" --explain --cp 64 --tokens 64K --pass bwd
! grep -q 'forward' output || fail "not what was asked for: $(cat output)"
expect 2 'at most 31457280); 512 ranks work' "$attention" --explain --cp 1024 --tokens 1M --schedule all-to-all --heads 64 --kv-heads 8

# What cannot be: all at once, on all ranks, before anything is written.
expect 2 '--heads 7 is not a multiple of --kv-heads 3; the nearest is 6' "${mpi[@]}" 2 "$attention" --heads 7 --kv-heads 3 --cp 3 --window 3 --mask full \
  -o none.h5 --pass fwd --emulate-network alpha=3parsec
[ "$(grep -c '^  - ' output)" -eq 5 ] || fail "not all problems are listed: $(cat output)"
expect 2 "--factor: '0.5' is not above 1" "${mpi[@]}" 2 "$attention" --factor 0.5
expect 2 ' is that of the file of --input: leave it out' "${mpi[@]}" 2 "$attention" --input "$causal" --window 8
expect 2 '4096 tokens: schedule halo: needs a causal mask' "${mpi[@]}" 2 "$attention" --schedule halo --csv none.csv
! grep -q '^#' output || fail "a refused run began: $(cat output)"
expect 2 'tokens fit' "${mpi[@]}" 2 "$attention" --tokens 512M
expect 2 'smallest that works is 1.1503' "$attention" -b 1 -e 1M -f 1.01
expect 2 '--json goes with a run' "$attention" --explain -J none.jsonl --resume finished
grep -q -e '--resume goes with a run, not with --explain' output || fail "--resume is not refused: $(cat output)"
expect 2 'needs one --schedule' "${mpi[@]}" 2 "$attention" --schedule all -o none.h5
expect 2 'nearest: ring' "$attention" --schedule rig
expect 2 '--inner 2: schedule ring does not read it; all-to-all-ring does' "${mpi[@]}" 2 "$attention" --inner 2 --heads-at-once 4 --stripe 3 --chunk 8 --csv none.csv
grep -qF -- '--heads-at-once 4: schedule ring does not read it; all-gather-strided does' output || fail "$(cat output)"
grep -qF -- '--stripe 3: layout dual-chunk-swap does not read it; striped does' output || fail "$(cat output)"
grep -qF -- '--chunk 8: layout dual-chunk-swap does not read it; balanced and balanced-joint do' output || fail "$(cat output)"
expect 2 '--heads-at-once 2: schedule all-to-all does not' "$attention" --explain --cp 4 --schedule all-to-all --heads-at-once 2
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" $small $quick --schedule all --layout all --inner 2 --heads-at-once 2 --stripe 3 --chunk 4
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$attention" $small $quick --inner 0 --heads-at-once 1 --stripe 1 --chunk 0
"$attention" --help >output
for text in 'of an inner group.* by all-to-all-ring' 'of a stage.* by all-gather-strided' 'at a time.* by striped' 'of a chunk.* by balanced and balanced-joint'; do
  grep -qE "$text" <<<"$(tr -s ' \n' ' ' <output)" || fail "--help does not say '$text': $(cat output)"
done
printf 'tokens = 64\nschedule = "all-gather"\n' >run.toml
expect 0 'schedule=all-gather' "${mpi[@]}" 2 "$attention" --config run.toml $quick
[ -z "$(ls | grep -e none -e tmp)" ] || fail "files are left: $(ls)"

# A rank that is killed, or stops, in a long run; in a folder of its own, as both wait at once.
loses_a_rank() { # SIGNAL CODE TEXT
  mkdir "$1" && cd "$1"
  timeout 60 "$MPIEXEC" -n 3 "$attention" $small -n 100000000 --timeout 3 -J "$PWD/killed.json" >output 2>&1 &
  local launcher=$! got=0
  for _ in $(seq 100); do
    grep -q '(ms)' output && break
    sleep 0.1
  done
  sleep 0.5
  kill "-$1" "$(pgrep -f "^$attention .*-J $PWD/killed.json" | sort -n | tail -1)"
  wait $launcher || got=$?
  [ "$got" -eq "$2" ] || fail "exit code $got, not $2, after SIG$1: $(cat output)"
  grep -q "$3" output || fail "nobody said '$3': $(cat output)"
  [ ! -e killed.json ] || fail "a killed run left a result"
}
(loses_a_rank KILL 3 'has died') &
killed=$!
(loses_a_rank STOP 4 'timeout after 3 s without progress') || exit 1
wait $killed || exit 1
echo "attention: all passed"
