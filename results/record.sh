#!/usr/bin/env bash
# record.sh counted|demo|timed [BUILD_DIR]: makes the runs whose figures README.md and docs/ show, again, and writes what
# the programs say to results/cpu-2core/. Then `results/tables.py --write` brings the pages up to date. `demo` is the last
# screen of ./run demo.
# `counted` runs are about bytes, messages, shares and predictions: any machine gives the same. `timed` runs need a machine
# of two cores with nothing else to do, and a clean tree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=${1:-}
build=${2:-build/cpu}
apps=$build/apps
out=results/cpu-2core
mpiexec=$(command -v mpiexec.mpich || command -v mpiexec)
export UCX_HANDLE_ERRORS=none UCX_MEM_EVENTS=n HWLOC_COMPONENTS=-pci OMP_NUM_THREADS=1
mkdir -p "$out"

# record NAME RANKS PROGRAM ARGS...: to NAME.json.
record() {
  echo "record: $1.json: mpirun -n $2 ${*:3}"
  timeout 900 "$mpiexec" -n "$2" "$apps/$3" "${@:4}" --json "$out/$1.json" >/dev/null
}

# explain NAME ARGS...: appends what the machine model says of a plan to NAME.txt.
explain() {
  echo "record: $1.txt: gyre-attention --explain ${*:2}"
  {
    printf '$ gyre-attention --explain %s\n' "${*:2}"
    "$apps/gyre-attention" --explain "${@:2}" | grep '^#' | grep -vE '^# +(rank|\()'
  } >>"$out/$1.txt"
}

counted() {
  local schedule tokens
  record pack-algorithms 1 gyre-pack --gen dist=long-tailed,count=100K,max=16K,seed=1 --capacity 64K --algorithm all
  record shard-layouts 2 gyre-shard --gen dist=long-tailed,count=4K,max=16K,seed=1 --capacity 64K --cp 8
  record attention-counted 4 gyre-attention --tokens 2K --heads 8 --kv-heads 4 --schedule all -n 1 -w 0
  record logprobs-counted 2 gyre-logprobs --op all --method all --tp 2 --tokens 4K --vocab 32K -d bf16 -n 1 -w 0
  record filter-152k 8 gyre-logprobs --op filtered --method all --tp 8 --tokens 256 --vocab 152K -d bf16 -n 1 -w 0
  record pipeline-reference 2 gyre-pipeline --input inputs/docs_small.h5 --model inputs/model.h5 --cp 2
  rm -f "$out"/predicted-*.txt
  for tokens in 64K 128K; do
    for schedule in ring ring-forward all-gather all-gather-strided all-to-all all-to-all-ring group-cast canonical; do
      explain predicted-cp64 --cp 64 --tokens "$tokens" --heads 64 --kv-heads 8 --head-dim 128 -d bf16 \
        --schedule "$schedule" --tflops 400 --gbps 50 --latency-us 5
    done
  done
}

demo() {
  echo "record: demo.txt: ./run demo"
  ./run demo >/dev/null
  /usr/bin/python3 scripts/demo_summary.py demo "$apps" >"$out/demo.txt"
}

timed() {
  local layout
  record attention-schedules 2 gyre-attention --tokens 8K --heads 8 --kv-heads 4 --schedule all -n 3
  record attention-one-rank 1 gyre-attention --tokens 8K --heads 4 --kv-heads 4 --schedule ring
  for layout in dual-chunk-swap contiguous zigzag striped balanced; do
    record "attention-$layout" 2 gyre-attention --tokens 8K --heads 4 --kv-heads 4 --schedule ring --layout "$layout"
  done
  record attention-slow-network 2 gyre-attention --tokens 4K --heads 8 --kv-heads 2 --schedule all --pass fwd \
    --emulate-network alpha=20us,beta=100M
  record logprobs-upstream 2 gyre-logprobs --op all --method all --tp 2 --tokens 4K --vocab 32K -d bf16
}

case $what in
  counted) counted ;;
  demo) demo ;;
  timed) timed ;;
  *)
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
    ;;
esac
