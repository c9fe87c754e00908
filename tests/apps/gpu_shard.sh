#!/usr/bin/env bash
# gyre-shard on GPUs: the tables, checks and files of the CPU's runs.
# Usage: gpu_shard.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
source "$source_dir/tests/support/gpu_app_test.bash"
shard=$apps/gyre-shard
compare=$apps/gyre-compare
"$apps/gyre-pack" --input "$source_dir/inputs/docs_tiny.h5" --capacity 144 --cp 4 -o packed.h5 >/dev/null
"$apps/gyre-pack" --input "$source_dir/inputs/salm_tiny.h5" --cp 2 -o embeddings.h5 >/dev/null
cp "$source_dir/inputs/golden/packed_positions_cp2.h5" positions.h5
require_gpu "$shard" --input packed.h5 --cp 2 --layout striped -o none.h5 "${gpu[@]}"
rm none.h5

# The same table, and as many checks: with as many ranks as shards they travel over the communicator too.
rows() { awk '/^#/ || NF < 15 { next } { $14 = ""; print }' output; } # all columns but the time of planning
for ranks in 1 2 4; do
  expect 0 'VERIFY PASSED' "$MPIEXEC" -n "$ranks" "$shard" --input packed.h5 --cp "$ranks" --chunk 4 --columns all
  rows >host
  [ "$(wc -l <host)" -eq "$(registered layouts | wc -w)" ] || fail "not all layouts: $(cat host)"
  verified=$(grep '^VERIFY' output)
  expect 0 "$verified" "$MPIEXEC" -n "$ranks" "$shard" --input packed.h5 --cp "$ranks" --chunk 4 --columns all "${gpu[@]}"
  rows | diff host - || fail "another table on the GPU"
done
expect 0 'VERIFY PASSED 3/3' "$MPIEXEC" -n 2 "$shard" --input packed.h5 --cp 5 --repad "${gpu[@]}"
expect 0 'VERIFY PASSED' "$MPIEXEC" -n 2 "$shard" --input embeddings.h5 --cp 2 "${gpu[@]}"

# Files are the CPU's.
for input in packed embeddings positions; do
  expect 0 'VERIFY PASSED' "$shard" --input $input.h5 --cp 2 --layout dual-chunk-swap -o host.h5
  for ranks in 1 2; do
    expect 0 'VERIFY PASSED' "$MPIEXEC" -n "$ranks" "$shard" --input $input.h5 --cp 2 --layout dual-chunk-swap -o gpu.h5 "${gpu[@]}"
    expect 0 'VERIFY PASSED' "$compare" gpu.h5 host.h5
  done
done

expect 0 'VERIFY PASSED' "$MPIEXEC" -n 2 "$shard" --input positions.h5 --cp 2 --layout dual-chunk-swap --relayout contiguous "${gpu[@]}"

# Nothing to shard, and what cannot be.
expect 0 'RESULT UNVERIFIED (nothing to check: no slots' "$MPIEXEC" -n 2 "$shard" --gen dist=fixed,length=0,count=3 --cp 2 "${gpu[@]}"
expect 2 'is not a multiple of 2·cp = 10' "$MPIEXEC" -n 2 "$shard" --input packed.h5 --cp 5 --layout dual-chunk-swap "${gpu[@]}"
[ -z "$(ls | grep tmp)" ] || fail "temporary files are left: $(ls)"
echo "gpu_shard: all passed"
