#!/usr/bin/env bash
# gyre-recurrence: every kind under every schedule, plans, files; what it refuses.
# Usage: recurrence.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
recurrence=$apps/gyre-recurrence
golden=$source_dir/inputs/golden
quick="-n 1 -w 0"
small="--tokens 150 --heads 4 --key-heads 2 --key-dim 16 --value-dim 8"
mpi=("$MPIEXEC" -n)

# Every kind under every schedule: verified, and counted as the closed forms say. 3 ranks cannot divide 2 heads.
for ranks in 1 2 3; do
  rows=$((ranks == 3 ? 24 : 32))
  expect 0 "VERIFY PASSED $((rows * 23 / 4))/$((rows * 23 / 4))" "${mpi[@]}" "$ranks" "$recurrence" $small $quick --kind all --schedule all \
    --csv table.csv -J result.json
  [ "$(column table.csv check | grep -c '^ok$')" -eq $rows ] || fail "not all are verified: $(cat table.csv)"
  [ "$(grep -c '^FOM' output)" -eq 9 ] || fail "not a figure for each kind and pass, and the average: $(cat output)"
done
grep -q '"gyre-result/1"' result.json || fail "no result"
grep -q '# refused gdn: schedule head-exchange: 2 heads of keys cannot be divided among 3 ranks; the nearest that divide them: 2' output ||
  fail "heads are not refused: $(cat output)"
# 4 states of 16 x 8 numbers of 4 bytes are 2048 bytes, their maps of 16 x 16 are 4096: to two ranks; or to one; of the three of a
# scan, the first sends two states, the second a state and a map.
sent() { column table.csv sent_mb_rank kind=gdn schedule="$1" pass="$2"; }
[ "$(sent state-gather fwd)/$(sent state-gather bwd)/$(sent state-chain fwd)/$(sent state-chain bwd)" = 0.012288/0.004096/0.002048/0.002048 ] ||
  fail "other bytes than (cp - 1) H (K K + K V) 4: $(cat table.csv)"
[ "$(sent state-scan fwd)/$(sent state-scan bwd)" = 0.006144/0.006144 ] || fail "a scan sends more: $(cat table.csv)"
[ "$(column table.csv sent_mb_rank kind=ssd schedule=state-gather pass=fwd)" = 0.004128 ] || fail "a map of one number a head: $(cat table.csv)"
# 75 tokens of 2 (16 + 16) + 4 (8 + 8) numbers of 2 bytes, and 4 (1 + 1) of 4, half of which go to the other rank.
expect 0 'VERIFY PASSED 12/12' "${mpi[@]}" 2 "$recurrence" $small $quick -d bf16 --schedule head-exchange --layout striped --csv table.csv
[ "$(sent head-exchange fwd)/$(sent head-exchange bwd)" = 0.0108/0.0108 ] || fail "other bytes than rows of tokens: $(cat table.csv)"
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" $small $quick -d bf16 --threads 2 --kind kda --pass bwd -c all --batch 3
expect 0 'VERIFY PASSED 24/24' "${mpi[@]}" 2 "$recurrence" --gen dist=long-tailed,max=100 --capacity 400 $quick --kind gdn,kda --schedule state-chain \
  --heads 2 --key-heads 1 --key-dim 8 --value-dim 8

# Messages of an emulated network are late: a chain of three ranks waits for two of them, one after the other.
expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$recurrence" $small $quick --schedule state-chain --emulate-network alpha=100ms,beta=1G --csv late.csv
grep -q '^RESULT UNOFFICIAL.*emulated network alpha=100ms,beta=1G' output || fail "official with an emulated network: $(cat output)"
awk '!($1 >= 200) { bad = 1 } END { exit bad || NR == 0 }' <(column late.csv time_ms) || fail "messages were not late: $(cat late.csv)"
expect 2 "'3parsec'" "${mpi[@]}" 2 "$recurrence" $small --emulate-network alpha=3parsec
expect 2 '--emulate-network goes with a run, not with --explain' "$recurrence" --explain --cp 2 --emulate-network alpha=1us,beta=1G
expect 2 '--emulate-network is about the time' "$recurrence" --replay --cp 2 --emulate-network alpha=1us,beta=1G

# A convolution before it: 3 rows of 96 channels to the next rank, their gradients in f32 back, and an all-reduce of
# 4 weights a channel.
expect 0 'VERIFY PASSED 150/150' "${mpi[@]}" 3 "$recurrence" $small $quick --conv 4 --kind all --schedule all --csv table.csv -J conv.json
[ "$(sent state-chain fwd)/$(sent state-chain bwd)" = 0.0032/0.005248 ] || fail "other bytes of a convolution: $(cat table.csv)"
# Heads convolve whole documents: backward sends the all-reduce of 4 weights of 96 channels besides.
expect 0 'VERIFY PASSED 13/13' "${mpi[@]}" 2 "$recurrence" $small $quick --conv 4 -d bf16 --schedule head-exchange --layout striped --csv heads.csv
column heads.csv sent_mb_rank | tr '\n' ' ' | grep -qx '0.0108 0.012336 ' || fail "other bytes of convolved heads: $(cat heads.csv)"
grep -q '"conv": *4' conv.json || fail "the width of the convolution is not recorded"
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" $small $quick --conv 4 -d bf16 --threads 2 --kind kda -c all --csv table.csv
expect 0 'VERIFY PASSED' "${mpi[@]}" 4 "$recurrence" --tokens 11 $quick --conv 8 --heads 2 --key-heads 1 --schedule all
expect 2 '--conv: ' "$recurrence" --conv 300
expect 2 '--conv is that of the file of --input: leave it out' "$recurrence" --input "$golden/recurrence_conv.h5" --conv 4

# Heads are sampled, and it says so.
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" $small $quick --check-tokens 1
grep -q 'sampled 150 of 300 tokens' output || fail "it does not say that heads are sampled: $(cat output)"

# No tokens, one token, fewer tokens than ranks, a sweep.
expect 0 'RESULT UNVERIFIED (nothing to check: no tokens' "${mpi[@]}" 2 "$recurrence" --gen dist=fixed,length=0,count=3 $quick
for tokens in 1 3; do expect 0 'VERIFY PASSED' "${mpi[@]}" 4 "$recurrence" --tokens $tokens $quick --schedule all; done
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" -b 16 -e 64 -f 2 $quick --heads 1 --key-heads 1 --csv table.csv
[ "$(column table.csv tokens | tr '\n' ' ')" = '16 16 32 32 64 64 ' ] || fail "another sweep: $(cat table.csv)"

# Layouts: those with several parts of a document on a rank, and with too many.
expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$recurrence" $small $quick --kind gdn,ssd --schedule all --layout all --stripe 10 --chunk 10 --csv table.csv
[ "$(column table.csv layout | sort | uniq -c | tr -s ' \n' ' ')" = \
  ' 12 balanced 12 balanced-joint 12 contiguous 12 contiguous-documents 12 dual-chunk-swap 12 hybrid 12 striped 12 zigzag ' ] || fail "not every layout: $(cat table.csv)"
[ "$(column table.csv sent_mb_rank kind=gdn schedule=state-gather pass=fwd layout=dual-chunk-swap)" = 0.024576 ] ||
  fail "not two maps of each rank: $(cat table.csv)"
expect 2 'under striped rank 0 has one in 2 tokens of document 0; states pass between runs of consecutive tokens' \
  "${mpi[@]}" 2 "$recurrence" $small $quick --layout striped
expect 2 'under striped rank 0 has 75 parts of documents that go on elsewhere; at most 64, as each needs a map and states of all heads' \
  "${mpi[@]}" 2 "$recurrence" --tokens 300 $quick --layout striped --stripe 2 --schedule state-chain
expect 0 '# refused gdn: schedule state-scan: under striped rank 0 has one in 2 tokens' \
  "${mpi[@]}" 2 "$recurrence" $small $quick --layout striped --schedule state-scan,head-exchange

# Plans: any number of ranks, steps of one choice, rows of several.
expect 0 'fwd rank 1: done after' "$recurrence" --explain --cp 4 $small --schedule state-chain
for line in 'map M, B of part 0' 'post state from rank 0' 'compose 1 maps' 'post state to rank 2' 'run part 0, 38 tokens, from a state'; do
  grep -qF "$line" output || fail "no step '$line': $(cat output)"
done
expect 0 'fwd rank 1: done after' "$recurrence" --explain --cp 4 --tokens 9 --batch 2 --conv 4 --heads 1 --key-heads 1
for line in 'post histories from rank 0 to rank 2' 'convolve 1 parts: 0' 'post gradients of histories from rank 2 to rank 0' \
  "post an all-reduce of the gradient of the convolution's weights" "gradients of the convolution's sums, weights and histories"; do
  grep -qF "$line" output || fail "no step '$line': $(cat output)"
done
expect 0 'kda    state-gather' "$recurrence" --explain --cp 64 --tokens 64K --kind all --schedule all --tflops 100 --gbps 50 --latency-us 2
[ "$(grep -cE '^  [a-z]+ +state-' output)" -eq 24 ] || fail "not a row of each: $(cat output)"
grep -q '# refused: schedule head-exchange: 8 heads of keys cannot be divided among 64 ranks; the nearest that divide them: 8' output ||
  fail "heads are not refused: $(cat output)"
expect 0 'post an all-to-all of q, k, v, g, beta, tokens for heads' "$recurrence" --explain --cp 2 $small --schedule head-exchange
for line in 'post an all-to-all of out, heads for tokens' 'run part 0, 150 tokens' 'post an all-to-all of d_q, d_k, d_v, d_g, d_beta, heads for tokens'; do
  grep -qF "$line" output || fail "no step '$line': $(cat output)"
done
expect 0 'post maps of states from rank 1 to rank 5' "$recurrence" --explain --cp 8 $small --schedule state-scan
grep -qF 'join the maps of two runs' output || fail "maps are not joined: $(cat output)"
expect 2 '--explain needs one size' "$recurrence" --explain -b 16 -e 64
expect 2 '--tflops, --gbps and --latency-us go with --explain' "$recurrence" $small --tflops 1

# What it refuses, by name.
expect 2 '--heads 6 is not a multiple of --key-heads 4; the nearest is 8' "$recurrence" --heads 6 --key-heads 4
expect 2 "'mamba' is called ssd here" "$recurrence" --kind mamba
expect 2 "'rwkv' is not one of all, gdn, kda, ssd, gla" "$recurrence" --kind rwkv
expect 2 'is not one of all, state-gather, state-chain, state-scan, head-exchange' "$recurrence" --schedule ring
expect 2 '--cp 3 in a run of 2 ranks; --explain and --replay take any' "${mpi[@]}" 2 "$recurrence" $small --cp 3

# Files: every kind is recognised, answers are compared in full, and what is wrong is named.
for kind in gdn kda ssd gla; do
  expect 0 'compared in full: d_' "${mpi[@]}" 3 "$recurrence" --input "$golden/recurrence_$kind.h5" $quick --schedule all --csv table.csv
  [ "$(column table.csv kind | sort -u)" = $kind ] || fail "$kind is taken for another kind: $(cat table.csv)"
done
for file in conv conv_channels conv_no_delta conv_one conv_documents conv_short_parts conv_boundaries conv_zero_rows; do
  expect 0 'compared in full: d_' "${mpi[@]}" 4 "$recurrence" --input "$golden/recurrence_$file.h5" $quick --schedule all
done
grep -q 'd_conv_weight' output || fail "the gradient of the weights is not compared: $(cat output)"
expect 0 'not compared: d_beta, d_g, d_k, d_q, d_v (--pass fwd)' "${mpi[@]}" 2 "$recurrence" --input "$golden/recurrence_gdn.h5" $quick --pass fwd
/usr/bin/python3 - "$golden/recurrence_documents.h5" <<'PY'
import shutil, sys, h5py
def change(name, dataset, index, value):
    shutil.copy(sys.argv[1], name + ".h5")
    with h5py.File(name + ".h5", "r+") as file:
        if "content_sha256" in file.attrs:
            del file.attrs["content_sha256"]
        file[dataset][index] = value
change("answer", "reference/d_k", (45, 0, 3), 9)
change("growing", "recurrence/g", (6, 1), 0.5)
change("strong", "recurrence/beta", (7, 0), 40)
change("narrow", "recurrence/v", (2, 1, 0), 1 / 3)
change("offsets", "recurrence/offsets", 3, 900)
from_plain = sys.argv[1]
sys.argv[1] = from_plain.replace("documents", "conv")
change("weight", "reference/d_conv_weight", (33, 2), 9)
for name in ("wide", "orphan"):
    change(name, "recurrence/q", (0, 0, 0), 0)
with h5py.File("wide.h5", "r+") as file:
    weights = file["recurrence/conv_weight"][:]
    del file["recurrence/conv_weight"]
    file["recurrence/conv_weight"] = weights[:-1]
with h5py.File("orphan.h5", "r+") as file:
    del file["recurrence/conv_weight"]
with h5py.File("narrow.h5", "r") as file:
    shape = file["recurrence/g"].shape
shutil.copy("narrow.h5", "heads.h5")
with h5py.File("heads.h5", "r+") as file:
    del file["recurrence/g"]
    file["recurrence/g"] = [[0.0] * (shape[1] + 1)] * shape[0]
PY
expect 1 '/reference/d_k[45, 0, 3], document 3 position 39, rank 1: yours 9' "${mpi[@]}" 2 "$recurrence" --input answer.h5 $quick
expect 1 '/reference/d_conv_weight[33, 2], rank 0: yours 9' "${mpi[@]}" 2 "$recurrence" --input weight.h5 $quick
expect 2 "dataset '/recurrence/conv_weight' is float32 [55, 4]; it must be real [56, any]" "$recurrence" --input wide.h5 $quick
expect 2 '/reference/d_conv_weight is there, and /recurrence/conv_weight, which it is of, is not' "$recurrence" --input orphan.h5 $quick
expect 2 '/recurrence/g[13] is 0.5; it is the logarithm of a decay: at most 0' "$recurrence" --input growing.h5 $quick
expect 2 'their product must be from 0 to 2' "$recurrence" --input strong.h5 $quick
expect 2 "dataset '/recurrence/g' is float64 [72, 3]; it must be real [72, 2]" "$recurrence" --input heads.h5 $quick
expect 2 '/recurrence/offsets' "$recurrence" --input offsets.h5 $quick
expect 1 '/reference/out' "${mpi[@]}" 2 "$recurrence" --input narrow.h5 $quick
expect 0 'not compared: d_beta, d_g, d_k, d_q, d_v, out (the run rounds /recurrence/v)' "${mpi[@]}" 2 "$recurrence" --input narrow.h5 $quick -d bf16
expect 2 '--key-heads is that of the file of --input: leave it out' "$recurrence" --input narrow.h5 --heads 3 --key-heads 3

# Results are written as the file's answers are, whatever the layout and the schedule.
for run in 'gdn state-gather dual-chunk-swap' 'kda state-scan contiguous' 'ssd state-chain zigzag' 'eight_heads head-exchange striped'; do
  read -r file schedule layout <<<"$run"
  expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" --input "$golden/recurrence_$file.h5" $quick --schedule "$schedule" --layout "$layout" -o answers.h5
  expect 0 'VERIFY PASSED' "$apps/gyre-compare" --common --rtol 1e-4 --atol 1e-5 answers.h5:/results "$golden/recurrence_$file.h5":/reference
done
expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$recurrence" $small $quick -d bf16 --kind ssd -o answers.h5
/usr/bin/python3 -c 'import h5py; r = h5py.File("answers.h5")["results"]
assert sorted(r) == ["d_g", "d_k", "d_q", "d_v", "offsets", "out"] and r["d_g"].shape == (150, 4) and r["d_q"].shape == (150, 2, 16)'
for words in '--kind all' '--schedule all' '--layout all' '-b 16 -e 64'; do
  expect 2 '--output needs one --kind, one --schedule, one --layout and one size' "$recurrence" $words -o answers.h5
done
expect 2 '--output writes gradients too: --pass both' "$recurrence" $small --pass fwd -o answers.h5
expect 2 '--output goes with a run, not with --explain' "$recurrence" --explain --cp 2 $small -o answers.h5
expect 2 '--resume leaves rows out; --output needs its own: run it by itself' "$recurrence" $small --resume finished -J rows.jsonl -o answers.h5

# A replay in one process writes what the ranks write, bit by bit, and is no figure; another schedule or number of ranks is not it.
same_bits() { # RANKS OPTION...
  expect 0 'RESULT' "${mpi[@]}" "$1" "$recurrence" "${@:2}" -o ranks.h5
  expect 0 'VERIFY PASSED' "$recurrence" --replay --cp "$1" "${@:2}" -o replayed.h5
  expect 0 'VERIFY PASSED' "$apps/gyre-compare" replayed.h5 ranks.h5 --rtol 0 --atol 0
}
same_bits 2 $small $quick --schedule head-exchange --layout striped -d bf16 --conv 4
same_bits 3 --input "$golden/recurrence_conv.h5" $quick --schedule state-scan --layout dual-chunk-swap
same_bits 4 $small $quick --kind kda --schedule state-chain
expect 0 'VERIFY PASSED' "$recurrence" --replay --cp 3 $small $quick --kind kda --schedule state-chain -o other.h5
expect 1 'VERIFY FAILED' "$apps/gyre-compare" other.h5 ranks.h5 --rtol 0 --atol 0
expect 1 'VERIFY FAILED' "$recurrence" --replay --cp 4 $small $quick --tol-scale 1e-6
expect 0 'replayed: one process runs the 5 ranks in turn' "$recurrence" --replay --cp 5 $small $quick --kind all --schedule all \
  --layout all --stripe 10 -J replayed.json --csv table.csv
! grep -q '^FOM' output || fail "a figure of merit of a replay: $(cat output)"
[ "$(column table.csv replay | sort -u)/$(column table.csv check | sort -u)" = true/ok ] || fail "not replayed, or not verified: $(head -2 table.csv)"
/usr/bin/python3 - replayed.json <<'PY'
import json, sys
for row in json.load(open(sys.argv[1]))["results"]:
    assert row["key"]["replay"] is True and row["key"]["cp"] == 5, row["key"]
    for name in ("exposed", "exposed_time", "compute_only", "communication_only"):
        assert row["measurements"][name] is None, (name, row)
PY
expect 2 '--replay in a run of 2 ranks: one process runs them all, without mpirun' "${mpi[@]}" 2 "$recurrence" --replay --cp 2 $small
expect 2 '--replay has ranks in host memory, none on a GPU: --backend cpu, or without it' "$recurrence" --replay --cp 2 --backend cuda $small
expect 2 '--explain shows a plan and --replay runs it: one of them, not both' "$recurrence" --replay --cp 2000 --explain $small \
  --at-least recurrence_rate=1
for text in '--cp 2000 with --replay: at most 1024' '--at-least is about the time'; do
  grep -qF -- "$text" output || fail "it does not say '$text': $(cat output)"
done

# Rows of an earlier run are kept.
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" $small $quick -J rows.jsonl
expect 0 'RESULT' "${mpi[@]}" 2 "$recurrence" $small $quick --resume finished -J rows.jsonl
[ "$(grep -c '"kind": *"row"' rows.jsonl)" -eq 2 ] || fail "rows are measured again: $(cut -c1-200 rows.jsonl)"
