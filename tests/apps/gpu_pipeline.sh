#!/usr/bin/env bash
# gyre-pipeline on GPUs: equal to the independent float64 reference and to the CPU's run, twice the same bits; a
# machine without a GPU gets a reason and exit code 3. The ranks share one GPU, or the software GPU.
source "$(dirname "$0")/../support/app_test.bash"
source "$source_dir/tests/support/gpu_app_test.bash"

input=$source_dir/inputs/docs_tiny.h5
model=$source_dir/inputs/model_tiny.h5

pipeline() { # RANKS ARGUMENTS...
  local ranks=$1
  shift
  timeout 120 "$MPIEXEC" -n "$ranks" "$apps/gyre-pipeline" --input "$input" --model "$model" -n 1 "$@"
}

# A plan needs no GPU.
expect 0 'dp=1 cp=64 tp=2, dual-chunk-swap, ring: nothing was computed' \
  "$apps/gyre-pipeline" --input "$input" --model "$model" --backend cuda --cp 64 --tp 2 --dry-run

require_gpu "$apps/gyre-pipeline" --input "$input" --model "$model" "${gpu[@]}" --cp 2 -o none.h5

# verified CHECKS RANKS ARGUMENTS...: on shared GPUs, which is never official.
verified() {
  local checks=$1
  shift
  pipeline "$@" --backend cuda --share-gpus >log 2>&1 || fail "exit $?: $*: $(cat log)"
  grep -q "^VERIFY PASSED $checks/$checks " log || fail "not verified: $*: $(cat log)"
  on_shared_gpu log
}

# Grids, layouts and schedules, hidden states included; what is put on the wire is what CPUs put there.
wire() { # CSV
  /usr/bin/python3 -c '
import csv, sys
header, row = csv.reader(open(sys.argv[1]))
print(*(value for name, value in zip(header, row) if name.startswith("wire")))' "$1"
}
runs=0
for grid in "1" "2 --tp 2" "3 --dp 3" "4 --cp 4 --schedule all-gather --layout striped" "4 --cp 2 --tp 2"; do
  read -ra arguments <<<"$grid"
  verified 6 "${arguments[@]}" --bin 48 -o out.h5 --csv gpu.csv
  timeout 60 "$apps/gyre-compare" out.h5:/results "$input:/reference" --common --atol 1e-4 --rtol 1e-4 >log ||
    fail "$grid: $(cat log)"
  pipeline "${arguments[@]}" --bin 48 -c none --csv cpu.csv >log 2>&1 || fail "CPU, $grid: $(cat log)"
  on_gpus=$(wire gpu.csv) on_cpus=$(wire cpu.csv)
  [[ -n $on_gpus && $on_gpus == "$on_cpus" ]] || fail "$grid: '$on_gpus' MB on the wire, '$on_cpus' MB of CPUs"
  runs=$((runs + 1))
done

# The same run twice.
verified 6 4 --cp 2 --tp 2 -o a.h5 --json a.json
verified 6 4 --cp 2 --tp 2 -o b.h5
timeout 60 "$apps/gyre-compare" a.h5 b.h5 --atol 0 --rtol 0 >log || fail "two runs differ: $(cat log)"
/usr/bin/python3 - a.json <<'PY'
import json, sys
result = json.load(open(sys.argv[1]))
assert result["configuration"]["backend"] == "cuda", result["configuration"]
assert all(rank["device"] for rank in result["ranks"]), result["ranks"]
PY

# The real model on a little text, against its serial twin.
model=$source_dir/inputs/model.h5
head -c 150 "$source_dir/LICENSE" >text
"$apps/gyre-import" -o text.h5 text >log
input=$scratch/text.h5
verified 3 1
verified 3 4 --cp 2 --tp 2

# Combinations that do not exist.
expect 2 '--comm mpi moves host memory; with --backend cuda it is nccl, staged or mpi-gpu' \
  "$apps/gyre-pipeline" --input "$input" --model "$model" --backend cuda --comm mpi
expect 2 '--share-gpus goes with --backend cuda' \
  "$apps/gyre-pipeline" --input "$input" --model "$model" --share-gpus
echo "ok: $runs grids"
