#!/usr/bin/env bash
# gyre-attention --emulate-compute: four ranks that sleep take the time that is said, and nothing of it is verified; what it refuses.
# Usage: emulated_compute.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
attention=$apps/gyre-attention
small="--tokens 512 --heads 4 --kv-heads 1 --head-dim 16 --schedule ring"
mpi=("$MPIEXEC" -n)

# 512 · 513 / 2 pairs of 4 heads are 33.6 MFLOP forward, 84.0 backward: of each of 4 ranks at 1 GFLOP/s, 8.4 ms and 21.0 ms.
# Their messages of 16 kB take 0.2 ms, and hide.
expect 0 'emulated compute tflops=0.001,launch=1us: nothing is computed' "${mpi[@]}" 4 "$attention" $small -n 7 -J result.json \
  --emulate-compute tflops=0.001,launch=1us --emulate-network alpha=20us,beta=100M --csv table.csv --trace trace.json -v
grep -q '^RESULT UNVERIFIED (nothing checked; ' output || fail "it is verified: $(cat output)"
! grep -q 'of its core' output || fail "a sleeping rank counts as noise: $(cat output)"
grep -q '"compute": *"tflops=0.001,launch=1us"' result.json && grep -q '"kernel": *"emulated"' result.json || fail "not in the configuration: $(cat result.json)"
[ "$(column table.csv check | sort -u)" = - ] || fail "something was checked: $(cat table.csv)"
paste <(column table.csv time_ms) <(printf '8.4\n21.0\n') | awk '{ if ($1 < 0.9 * $2 || $1 > 2 * $2) bad = 1 } END { exit bad || NR != 2 }' ||
  fail "not the time that was said: $(cat table.csv)"
grep -q '[0-9]' <(column table.csv of_peak_percent) && fail "a share of a peak that means nothing: $(cat table.csv)"

# There are no results to check or to write, no GPU, no threads, and one thing is wrong with the rate.
expect 2 '--check last: with --emulate-compute there are no results to check' "${mpi[@]}" 2 "$attention" $small --emulate-compute tflops=1,launch=3 \
  -c last -o none.h5 --threads 2
grep -q -- '--output: with --emulate-compute there are no results to write' output || fail "--output is not refused: $(cat output)"
[ "$(grep -c '^  - ' output)" -eq 4 ] || fail "not all problems are listed: $(cat output)"
expect 2 'sleeps on CPUs' "${mpi[@]}" 2 "$attention" $small --emulate-compute tflops=1 --backend cuda
expect 2 'goes with a run, not with --explain' "$attention" --explain --cp 4 --emulate-compute tflops=1
[ ! -e none.h5 ] || fail "a file is left"
