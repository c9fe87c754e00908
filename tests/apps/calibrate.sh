#!/usr/bin/env bash
# A machine is measured, predicted for, and asked for by name in a run of another program; one rank is too few.
source "$(dirname "$0")/../support/app_test.bash"

expect 2 'a run of 1 rank: it measures messages' "$apps/gyre-info" --model -J machine.json
expect 2 "'x' is no number of elements of a head" "$MPIEXEC" -n 2 "$apps/gyre-info" --model -J machine.json \
  --model-head-dims 32,x
timeout 200 "$MPIEXEC" -n 2 "$apps/gyre-info" --model --model-head-dims 32 -J machine.json >output 2>&1 || fail "exit $?: $(cat output)"
expect 0 'fastest at cp 2, 4096 tokens' "$apps/gyre-predict" --machine machine.json --cp 2,16 --tokens 4K --heads 4 \
  --kv-heads 2 --head-dim 32 -d f32
grep -q 'outside' output && fail "shapes that were measured are called extrapolated: $(cat output)"
for dtype in f32 bf16; do
  expect 0 'fastest at cp 4, 4096 tokens' "$apps/gyre-predict" --machine machine.json --recurrence gdn --cp 4 --tokens 4K -d $dtype
done
expect 0 'RESULT ' "$MPIEXEC" -n 2 "$apps/gyre-attention" --tokens 256 --machine machine.json -n 1
echo ok
