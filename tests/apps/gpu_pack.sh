#!/usr/bin/env bash
# gyre-pack on GPUs: the tables, checks and files of the CPU's runs.
# Usage: gpu_pack.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
source "$source_dir/tests/support/gpu_app_test.bash"
pack=$apps/gyre-pack
compare=$apps/gyre-compare
docs=$source_dir/inputs/docs_tiny.h5
salm=$source_dir/inputs/salm_tiny.h5
expect 2 '--unpack works on the host' "$pack" --unpack --input "$docs" -o none.h5 --backend cuda
require_gpu "$pack" --input "$docs" --capacity 128 --cp 4 -o none.h5 "${gpu[@]}"
rm none.h5

# Documents: the file of the CPU, whatever the number of ranks, with the same checks.
expect 0 'VERIFY PASSED 4/4' "$pack" --input "$docs" --capacity 128 --cp 4 -o host.h5
for ranks in 1 2 4; do
  expect 0 'VERIFY PASSED 4/4' "$MPIEXEC" -n "$ranks" "$pack" --input "$docs" --capacity 128 --cp 4 -o gpu.h5 "${gpu[@]}"
  expect 0 'VERIFY PASSED' "$compare" gpu.h5 host.h5
done
expect 0 'RESULT' "$MPIEXEC" -n 2 "$pack" --input "$docs" --capacity 128 --cp 4 -c none -o gpu.h5 "${gpu[@]}"
expect 0 'VERIFY PASSED' "$compare" gpu.h5 host.h5
made=(--gen dist=long-tailed,count=40,max=200,seed=3 --capacity 400)
expect 0 'VERIFY PASSED 4/4' "$pack" "${made[@]}" -o host.h5
expect 0 'VERIFY PASSED 4/4' "$MPIEXEC" -n 2 "$pack" "${made[@]}" -o gpu.h5 "${gpu[@]}"
expect 0 'VERIFY PASSED' "$compare" gpu.h5 host.h5

# Text with audio: encodings travel over the device's communicator; rows of a data loader are in place.
expect 0 'VERIFY PASSED 9/9' "$MPIEXEC" -n 2 "$pack" --input "$salm" --cp 2 --tp 3 -o host.h5
expect 0 'VERIFY PASSED 9/9' "$MPIEXEC" -n 2 "$pack" --input "$salm" --cp 2 --tp 3 -o gpu.h5 "${gpu[@]}"
grep -q 'encoder 3 audio items over 2 ranks, 2 each, dummies included; gathered padded [1-9]' output ||
  fail "nothing was gathered: $(cat output)"
expect 0 'VERIFY PASSED' "$compare" gpu.h5 host.h5
expect 0 '9 segments' "$MPIEXEC" -n 2 "$pack" --input "$source_dir/inputs/bshd_tiny.h5" --tail keep -o rows.h5 "${gpu[@]}"

# What cannot be.
expect 2 'tokens takes 120 slots, a bin has 64' "$MPIEXEC" -n 2 "$pack" --input "$docs" --capacity 64 "${gpu[@]}"
[ -z "$(ls | grep tmp)" ] || fail "temporary files are left: $(ls)"
echo "gpu_pack: all passed"
