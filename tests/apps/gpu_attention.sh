#!/usr/bin/env bash
# gyre-attention on GPUs: every schedule verified, forward and backward; what it refuses; a machine without a GPU
# gets a reason and exit code 3. The ranks share one GPU, or the software GPU.
# Usage: gpu_attention.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
source "$source_dir/tests/support/gpu_app_test.bash"
attention=$apps/gyre-attention
compare=$apps/gyre-compare
quick="-n 1 -w 0"
small="--tokens 40 --heads 4 --kv-heads 2 --head-dim 16"
mpi=("$MPIEXEC" -n)

# What does not go together, all at once, with what does; before any GPU is looked for.
expect 2 '--emulate-network delays messages of CPUs' "${mpi[@]}" 2 "$attention" "${gpu[@]}" --threads 2 --emulate-network alpha=1ms,beta=1G --head-dim 320
grep -qF -- '--threads 2 are of a CPU' output && grep -qF -- '--head-dim 320: with --backend cuda at most 256' output ||
  fail "not all problems are listed: $(cat output)"
expect 2 '--kernel tiled is one of GPUs: --backend cuda' "${mpi[@]}" 2 "$attention" --kernel tiled
expect 2 'goes with a run, not with --explain' "$attention" --backend cuda --explain --cp 4
expect 2 '--cuda-graph records the work of a GPU' "${mpi[@]}" 2 "$attention" --cuda-graph
expect 2 '--comm mpi moves host memory' "${mpi[@]}" 2 "$attention" --backend cuda --comm mpi
expect 2 '--comm staged moves GPU memory' "${mpi[@]}" 2 "$attention" --comm staged

require_gpu "$attention" "${gpu[@]}" $small $quick --schedule ring -o none.h5

# verified CHECKS RANKS ARGUMENTS...: on a shared GPU, or the software GPU, which is never official.
verified() {
  local checks=$1 ranks=$2
  shift 2
  expect 0 "VERIFY PASSED $checks/$checks " "${mpi[@]}" "$ranks" "$attention" "${gpu[@]}" "$@" $quick --csv table.csv
  on_shared_gpu output
  grep -qE '^# config .*kernel=(tiled|cudnn)' output || fail "the kernel is not named: $(cat output)"
  [ "$(column table.csv of_peak_percent | sort -u)" = "" ] || fail "a peak that nobody has measured: $(cat table.csv)"
}

# Every schedule but the halo, which needs a window: 8 checks each (counters, 2 forward, 5 backward).
checks=$((8 * ($(registered schedules | wc -w) - 1)))
for ranks in 1 2 4; do
  verified $checks "$ranks" $small --schedule all
  [ "$(column table.csv check | grep -c '^ok$')" -eq $((checks / 4)) ] || fail "not all are verified: $(cat table.csv)"
done
verified 9 2 $small --schedule halo --window 9 --sinks -d bf16 --wire-dkv f32 -c all
verified 8 2 --gen dist=long-tailed,max=30 --capacity 60 --heads 2 --kv-heads 1 --head-dim 8 --mask full --layout balanced --chunk 8 --kernel tiled
verified 8 2 $small --schedule ring -d bf16 --deterministic
grep -q '^# config .*deterministic=true' output || fail "the order is not named: $(cat output)"
verified 8 4 --tokens 3 --heads 2 --kv-heads 2 --head-dim 64 --schedule all-gather

# A pass as one launch: the graphs are what is timed, and what is verified.
expect 2 'the host takes part in messages of --comm staged; a graph takes --comm nccl' "${mpi[@]}" 2 "$attention" "${gpu[@]}" $small $quick --cuda-graph
if grep -q ' nccl' <("$apps/gyre-info"); then
  NCCL_MULTI_RANK_GPU_ENABLE=1 expect 0 'VERIFY PASSED 9/9 ' "${mpi[@]}" 2 "$attention" --backend cuda --share-gpus --comm nccl $small --schedule ring --sinks -n 2 -c all --cuda-graph --json graph.json
  grep -qE '^# config .*cuda_graph=true' output || fail "graphs are not named: $(cat output)"
  grep -qE '^# CUDA graphs: up to [1-9][0-9]* operations a launch on rank 0$' output || fail "not every iteration launched one: $(cat output)"
  [ "$(grep -c '"graph_operations"' graph.json)" -ge 2 ] || fail "the size of graphs is not recorded: $(cat graph.json)"
fi

# Messages of GPU memory by MPI itself.
if grep -q 'software GPU' output; then
  GYRE_SOFTGPU_MPI=1 expect 0 "VERIFY PASSED $checks/$checks " "${mpi[@]}" 3 "$attention" --backend cuda --share-gpus --comm mpi-gpu $small $quick --schedule all
  grep -qE ' comm=mpi-gpu( |$)' output || fail "not by MPI: $(cat output)"
fi

# What is written is what the file's references say.
expect 0 'RESULT' "${mpi[@]}" 2 "$attention" "${gpu[@]}" --input "$source_dir/inputs/attention_window.h5" $quick --schedule group-cast -o out.h5
expect 0 'VERIFY PASSED 6/6' "$compare" out.h5:/results "$source_dir/inputs/attention_window.h5":/reference --common

# A timeline: its format, messages and arrows.
expect 0 'RESULT' "${mpi[@]}" 2 "$attention" "${gpu[@]}" $small $quick --trace trace.json -v
grep -q '^# peak n/a' output || fail "a peak of a GPU: $(cat output)"
/usr/bin/python3 "$source_dir/tests/support/check_attention_trace.py" trace.json 2 output
echo "gpu_attention: all passed"
