#!/usr/bin/env bash
# gyre-recurrence on GPUs: every kind under every schedule, files, what it refuses.
# Usage: gpu_recurrence.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
source "$source_dir/tests/support/gpu_app_test.bash"
recurrence=$apps/gyre-recurrence
golden=$source_dir/inputs/golden
small="--tokens 90 --heads 4 --key-heads 2 --key-dim 16 --value-dim 8 -w 0"
quick="-n 1"
mpi=("$MPIEXEC" -n)
require_gpu "$recurrence" "${gpu[@]}" $small $quick -o none.h5
rm none.h5

# The same rows, counts and number of checks as on CPUs; bits of iterations are compared there alone.
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" $small $quick --kind all --schedule all --conv 4 --csv cpu.csv
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" "${gpu[@]}" $small $quick --kind all --schedule all --conv 4 --csv gpu.csv
on_shared_gpu output
[ "$(column gpu.csv check | sort -u)" = ok ] || fail "not all are verified: $(cat gpu.csv)"
for name in kind schedule pass sent_mb_rank msgs; do
  [ "$(column gpu.csv $name)" = "$(column cpu.csv $name)" ] || fail "another $name on the GPU: $(cat gpu.csv cpu.csv)"
done
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" "${gpu[@]}" $small $quick -d bf16 --kind kda,ssd --schedule head-exchange,state-scan \
  --layout striped,dual-chunk-swap --stripe 8 --conv 4
expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$recurrence" "${gpu[@]}" $small --pass bwd -c all -n 2
expect 1 'VERIFY FAILED' "$recurrence" "${gpu[@]}" $small $quick --tol-scale 1e-6

# Files: answers are compared in full, and what is written is what the answers say.
for file in gdn kda ssd gla conv conv_short_parts; do
  expect 0 'compared in full: d_' "${mpi[@]}" 2 "$recurrence" "${gpu[@]}" --input "$golden/recurrence_$file.h5" -n 1 -w 0
done
expect 0 'VERIFY PASSED' "${mpi[@]}" 2 "$recurrence" "${gpu[@]}" --input "$golden/recurrence_eight_heads.h5" -n 1 -w 0 \
  --schedule head-exchange --layout striped -o answers.h5
expect 0 'VERIFY PASSED' "$apps/gyre-compare" --common --rtol 1e-4 --atol 1e-5 answers.h5:/results "$golden/recurrence_eight_heads.h5":/reference

expect 2 '--key-dim 257: with --backend cuda at most 256' "$recurrence" "${gpu[@]}" --key-dim 257 --threads 2 --explain
for text in "--threads 2 are of a CPU's kernel; with --backend cuda: 1" '--backend cuda goes with a run, not with --explain'; do
  grep -qF -- "$text" output || fail "it does not say '$text': $(cat output)"
done
echo "gpu_recurrence: all passed"
