#!/usr/bin/env bash
# gyre-recurrence: every kind under every schedule, plans, files; what it refuses.
# Usage: recurrence.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
recurrence=$apps/gyre-recurrence
golden=$source_dir/inputs/golden
quick="-n 1 -w 0"
small="--tokens 150 --heads 4 --key-heads 2 --key-dim 16 --value-dim 8"
mpi=("$MPIEXEC" -n)

# Every kind under every schedule: verified, and counted as the closed forms say.
for ranks in 1 3; do
  expect 0 'VERIFY PASSED 92/92' "${mpi[@]}" "$ranks" "$recurrence" $small $quick --kind all --schedule all --csv table.csv -J result.json
  [ "$(column table.csv check | grep -c '^ok$')" -eq 16 ] || fail "not all are verified: $(cat table.csv)"
  [ "$(grep -c '^FOM' output)" -eq 9 ] || fail "not a figure for each kind and pass, and the average: $(cat output)"
done
grep -q '"gyre-result/1"' result.json || fail "no result"
# 4 states of 16 x 8 numbers of 4 bytes are 2048 bytes, their maps of 16 x 16 are 4096: to two ranks; or to one.
sent() { column table.csv sent kind=gdn schedule="$1" pass="$2"; }
[ "$(sent state-gather fwd)/$(sent state-gather bwd)/$(sent state-chain fwd)/$(sent state-chain bwd)" = 0.012288/0.004096/0.002048/0.002048 ] ||
  fail "other bytes than (cp - 1) H (K K + K V) 4: $(cat table.csv)"
[ "$(column table.csv sent kind=ssd schedule=state-gather pass=fwd)" = 0.004128 ] || fail "a map of one number a head: $(cat table.csv)"
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" $small $quick -d bf16 --threads 2 --kind kda --pass bwd -c all --batch 3
expect 0 'VERIFY PASSED 30/30' "${mpi[@]}" 2 "$recurrence" --gen dist=long-tailed,max=100 --capacity 400 $quick --kind gdn,kda --schedule state-chain \
  --heads 2 --key-heads 1 --key-dim 8 --value-dim 8 --csv table.csv || true

# Heads are sampled, and it says so.
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" $small $quick --check-tokens 1
grep -q 'sampled 150 of 300 tokens' output || fail "it does not say that heads are sampled: $(cat output)"

# No tokens, one token, fewer tokens than ranks, a sweep.
expect 0 'RESULT UNVERIFIED (nothing to check: no tokens' "${mpi[@]}" 2 "$recurrence" --gen dist=fixed,length=0,count=3 $quick
for tokens in 1 3; do expect 0 'VERIFY PASSED' "${mpi[@]}" 4 "$recurrence" --tokens $tokens $quick --schedule all; done
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" -b 16 -e 64 -f 2 $quick --heads 1 --key-heads 1 --csv table.csv
[ "$(column table.csv tokens | tr '\n' ' ')" = '16 16 32 32 64 64 ' ] || fail "another sweep: $(cat table.csv)"

# Layouts that cut documents oftener are refused, alone and among others.
expect 2 'states pass from the last part of a rank to the first of another, where ranks own consecutive slots' \
  "${mpi[@]}" 2 "$recurrence" $small $quick --layout striped
expect 0 '# refused gdn: schedule state-gather: under zigzag part 0 of rank 0 continues as part 0 of rank 1' "${mpi[@]}" 2 "$recurrence" $small $quick --layout all

# Plans: any number of ranks, steps of one choice, rows of several.
expect 0 'fwd rank 1: done after' "$recurrence" --explain --cp 4 $small --schedule state-chain
for line in 'map M, B of part 0' 'post state from rank 0' 'compose 1 maps' 'post state to rank 2' 'run part 0, 38 tokens, from a state'; do
  grep -qF "$line" output || fail "no step '$line': $(cat output)"
done
expect 0 'kda    state-gather' "$recurrence" --explain --cp 64 --tokens 64K --kind all --schedule all --tflops 100 --gbps 50 --latency-us 2
[ "$(grep -cE '^  [a-z]+ +state-' output)" -eq 16 ] || fail "not a row of each: $(cat output)"
expect 2 '--explain needs one size' "$recurrence" --explain -b 16 -e 64
expect 2 '--tflops, --gbps and --latency-us go with --explain' "$recurrence" $small --tflops 1

# What it refuses, by name.
expect 2 '--backend cuda: recurrences are computed on CPUs alone; --backend cpu' "$recurrence" $small --backend cuda
expect 2 '--heads 6 is not a multiple of --key-heads 4; the nearest is 8' "$recurrence" --heads 6 --key-heads 4
expect 2 "'mamba' is not one of gdn, kda, ssd, gla" "$recurrence" --kind mamba
expect 2 'is not one of state-gather, state-chain' "$recurrence" --schedule ring
expect 2 '--cp 3 in a run of 2 ranks; --explain takes any' "${mpi[@]}" 2 "$recurrence" $small --cp 3

# A fault in a state that is sent is found, by the check of messages or by the results.
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" $small $quick --resume finished -J rows.jsonl
expect 0 'RESULT' "${mpi[@]}" 2 "$recurrence" $small $quick --resume finished -J rows.jsonl
