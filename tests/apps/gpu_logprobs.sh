#!/usr/bin/env bash
# gyre-logprobs on GPUs: every operation verified on many grids, what is written, what is refused; a machine without a
# GPU gets a reason and exit code 3. The ranks share one GPU, or the software GPU.
source "$(dirname "$0")/../support/app_test.bash"
source "$source_dir/tests/support/gpu_app_test.bash"
logprobs=$apps/gyre-logprobs
golden=$source_dir/inputs/logprobs_golden.h5
ties=$source_dir/inputs/logprobs_ties.h5
quick="-n 1 -w 0"
tiny="--tokens 14 --vocab 90 --picks 5 --hidden 8 --peaks 3 --peak-height 6"
mpi=("$MPIEXEC" -n)

# Usage errors come before any GPU is looked for.
expect 2 'with --backend cuda the nearest is --method gyre' "$logprobs" $tiny "${gpu[@]}" --op logprob --method upstream
expect 2 '--method all runs' "${mpi[@]}" 2 "$logprobs" $tiny "${gpu[@]}" --method all --threads 3
[ "$(grep -c '^  - ' output)" -eq 2 ] || fail "not all problems are listed: $(cat output)"
expect 2 'with --backend cuda it is nccl, staged or mpi-gpu' "${mpi[@]}" 2 "$logprobs" $tiny --backend cuda --comm mpi
expect 2 'goes with --backend cuda' "$logprobs" $tiny --share-gpus
expect 2 '--comm staged moves GPU memory' "$logprobs" $tiny --comm staged

require_gpu "$logprobs" $tiny "${gpu[@]}" --op logprob $quick -o none.h5

# What there is, by the lists in the sources; what has no backward pass, by --list.
operations=$(cat "$source_dir/src/logprobs/operations/list.hpp" "$source_dir/apps/logprobs/registry.cpp" | grep -cE '^  X\(')
"$logprobs" --list | sed '/^Layouts/,$d' >list
backward=$((operations - $(grep -cE '^  .{22}[u ]f' list)))

# All operations in both directions; messages and bytes are those of CPUs.
while read -r ranks grid; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" "$ranks" "$logprobs" $tiny $quick "${gpu[@]}" --csv gpu.csv $grid
  on_shared_gpu output
  [ "$(column gpu.csv check | grep -c '^ok$')" -eq $((operations + backward)) ] || fail "not all are verified: $(cat output)"
  expect 0 'RESULT' "${mpi[@]}" "$ranks" "$logprobs" $tiny $quick --csv cpu.csv ${grid/-c all/} -c none
  for name in op pass msgs sent_mb_rank; do
    [ -n "$(column gpu.csv $name)" ] || fail "no $name: $(head -1 gpu.csv)"
    diff <(column gpu.csv $name) <(column cpu.csv $name) >differences || fail "$grid: other $name than CPUs: $(cat differences)"
  done
done <<'GRIDS'
1 -d bf16
2 --tp 2 --shards 80,10 --out-of-place --zero-fraction 0.4 --top-k 5
2 --cp 2 -d bf16 --sequences 3 -c all
4 --tp 2 --cp 2 -d bf16 --sequences 3 --layout striped --padded 100
4 --tp 4 --shards 40,0,20,30 --temperature 1.5 --list-length 2
2 --tp 2 --filter-per-token --top-k 9 --min-p 0.02 --list-length 2
GRIDS

# Files and their references; what is written is what they say.
for file in "$golden" "$ties" "$source_dir/inputs/golden/logprobs_topk_kl_of_ids.h5"; do
  expect 0 'VERIFY PASSED' "${mpi[@]}" 3 "$logprobs" --input "$file" $quick "${gpu[@]}"
done
expect 0 'RESULT' "${mpi[@]}" 2 "$logprobs" --input "$ties" -o out.h5 $quick "${gpu[@]}"
expect 0 'VERIFY PASSED 13/13' "$apps/gyre-compare" out.h5:/results "$ties":/reference --common
# Wrong references are found on GPUs too, in results and in gradients.
/usr/bin/python3 - "$golden" <<'PY'
import shutil, sys, h5py
shutil.copy(sys.argv[1], "wrong.h5")
with h5py.File("wrong.h5", "r+") as f:
    del f.attrs["content_sha256"]
    f["/reference/logprob"][5] = -1.5
    f["/reference/d_entropy"][3, 7] = 0.25
PY
expect 1 'RESULT INVALID' "${mpi[@]}" 2 "$logprobs" --input wrong.h5 $quick "${gpu[@]}"
grep -A1 '^VERIFY   logprob, gyre, .*: log-probabilities: 1 of 16' output | grep -q 'reference/logprob\[5\]' || fail "a wrong log-probability is not named: $(cat output)"
grep -A1 '^VERIFY   entropy, gyre, .*: d_logits: 1 of 1024' output | grep -q 'reference/d_entropy\[3, 7\]' || fail "a wrong gradient is not named: $(cat output)"
# Enough for a share of what memory can do; nothing at all.
expect 0 'VERIFY PASSED' "$logprobs" --tokens 64 --vocab 4096 --op raw-gather $quick "${gpu[@]}" -v --csv gpu.csv
grep -q "^# a rank.s GPU memory, .*: fill .*, copy " output || fail "no rates: $(cat output)"
[ -n "$(column gpu.csv of_bw_percent | tail -1)" ] || fail "no share of memory: $(cat gpu.csv)"
expect 0 'RESULT UNVERIFIED (nothing to check: no tokens' "${mpi[@]}" 2 "$logprobs" --gen dist=fixed,length=0,count=3 --vocab 40 --hidden 8 $quick "${gpu[@]}"
echo "gpu_logprobs: all passed"
