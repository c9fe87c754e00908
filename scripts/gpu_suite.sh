#!/usr/bin/env bash
# Implements `run test-gpu` and `run bench-gpu` for built programs, in a build folder or in a bundle.
#
#   gpu_suite.sh test [--apps-only]    the GPU's unit tests, the programs on 1 to 4 ranks, compute-sanitizer
#   gpu_suite.sh bench [ARGS]          the GPU benchmarks; JSON to results/gpu/
#
# Environment: GYRE_PROGRAMS (folder with apps/, tests/, bench/), GYRE_INPUTS, GYRE_RESULTS, MPIEXEC,
# GYRE_SOFTGPU=1 if the programs use the software GPU, GYRE_RANKS (numbers of ranks of the programs; "1 2 4").
# Exit codes: 0 all passed, 1 something failed, 3 there is no usable GPU.
set -euo pipefail

: "${GYRE_PROGRAMS:?}" "${GYRE_INPUTS:?}" "${MPIEXEC:=mpiexec}" "${GYRE_SOFTGPU:=0}"
export NCCL_MULTI_RANK_GPU_ENABLE=1 # ranks share a GPU here, if NCCL allows it
export UCX_HANDLE_ERRORS=none UCX_MEM_EVENTS=n HWLOC_COMPONENTS=-pci,-linux:pci OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
apps=$GYRE_PROGRAMS/apps
tests=$GYRE_PROGRAMS/tests
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

passed=0
failed=0
skipped=0
say() { printf 'gpu: %s\n' "$*"; }

# piece NAME COMMAND...: prints one line, and the output if it fails. 77 is a skip; the last line says why.
piece() {
  local name=$1 status=0 begin=$SECONDS
  shift
  "$@" >"$scratch/log" 2>&1 </dev/null || status=$?
  case $status in
    0) passed=$((passed + 1)) && say "passed   $name ($((SECONDS - begin)) s)" ;;
    77) skipped=$((skipped + 1)) && say "skipped  $name: $(grep -v '^ *$' "$scratch/log" | tail -n 1)" ;;
    *)
      failed=$((failed + 1))
      say "FAILED   $name: exit code $status: $*"
      tail -n 60 "$scratch/log" | sed 's/^/    /'
      ;;
  esac
}

ranks() { # RANKS PROGRAM ARGS...
  local n=$1
  shift
  limited "$MPIEXEC" -n "$n" "$@"
}
limited() { timeout --kill-after=10 "${GYRE_SECONDS:-600}" "$@"; }

# verified PATTERN COMMAND...: expects exit code 0 and a line that begins with PATTERN.
verified() {
  local pattern=$1 status=0
  shift
  "$@" >"$scratch/out" 2>&1 || status=$?
  cat "$scratch/out"
  [[ $status -eq 0 ]] || return "$status"
  grep -q "^$pattern" "$scratch/out" || { echo "no line begins with '$pattern'" && return 1; }
}

lacks_nccl='NCCL takes several ranks|this build has no NCCL|libnccl.*is not on this host'
# verified_or_lacks WHAT COMMAND...: as verified, but skips where a library lacks support and says so: several ranks on
# one GPU need an NCCL that allows it, and messages in GPU memory an MPI that takes them.
verified_or_lacks() {
  local status=0
  verified 'VERIFY PASSED' "${@:2}" || status=$?
  if [[ $status -eq 3 ]] && grep -qiE "$1" "$scratch/out"; then
    grep -iE "$1" "$scratch/out" | tail -n 1
    return 77
  fi
  return "$status"
}

# with VARIABLE=VALUE... -- COMMAND...
with() {
  local settings=()
  while [[ $1 != -- ]]; do settings+=("$1") && shift; done
  (export "${settings[@]}" && "${@:2}")
}

# disturbed DISTURB COMMAND...: starts COMMAND, waits until it has printed the head of its table, and calls DISTURB with the
# process id of one of its ranks. Fails when there is none.
disturbed() {
  local disturb=$1 status=0 launcher victim
  "${@:2}" >"$scratch/out" 2>&1 &
  launcher=$!
  while kill -0 "$launcher" 2>/dev/null && ! grep -q '^# schedule' "$scratch/out"; do sleep 0.1; done
  victim=$(newest_rank "$launcher")
  [[ -n $victim ]] && "$disturb" "$victim" || { echo "no rank was disturbed" && status=1; }
  wait "$launcher" || status=$?
  cat "$scratch/out"
  return "$status"
}
newest_rank() { # PID of the newest descendant of process $1 that is a program of ours
  local child
  for child in $(pgrep -P "$1" || true); do newest_rank "$child"; done | tail -n 1
  [[ $(cat "/proc/$1/comm" 2>/dev/null) != gyre-* ]] || pgrep -P "$1" >/dev/null || echo "$1"
}
skew() { # the rank is late for its messages, until it ends
  kill -STOP "$1" && sleep 0.05 && kill -CONT "$1" || return 1
  for _ in {1..20}; do
    kill -STOP "$1" && sleep 0.05 && kill -CONT "$1" && sleep 0.02 || return 0
  done 2>/dev/null
}
kill_rank() { kill -KILL "$1"; }
skewed_ranks() { disturbed skew "$@" && grep -q '^VERIFY PASSED' "$scratch/out"; }
# Exit code 3, and who died of what.
killed_rank() {
  local status=0
  disturbed kill_rank "$@" || status=$?
  [[ $status -eq 3 ]] && grep -qE 'rank [0-9]+.* was killed by signal 9' "$scratch/out"
}

# Exits with code 3 unless a program can use a GPU.
need_gpu() {
  local status=0
  timeout 120 "$MPIEXEC" -n 1 "$apps/gyre-attention" --backend cuda --comm staged --tokens 64 --heads 1 --kv-heads 1 \
    --head-dim 16 -n 1 >"$scratch/log" 2>&1 </dev/null || status=$?
  [[ $status -eq 3 ]] || return 0
  grep -v '^ *$' "$scratch/log" | tail -n 5 >&2
  say "no GPU can be used here: nothing was run" >&2
  exit 3
}

# each_test COMMAND...: calls COMMAND NAME PROGRAM OPTION for each file of tests. Each runs in its own process, so that
# its effects on a GPU end with it.
each_test() {
  local program files file name
  for program in "$tests"/gpu.*; do
    [[ -x $program && $program != *.bin ]] || continue
    if ! files=$("$program" --list-files 2>/dev/null); then
      piece "${program##*/}" "$program" --list-files # says why
      continue
    fi
    for file in $files; do
      name=${file##*/}
      "$@" "gpu.${name%.*}" "$program" "--file=$file"
    done
  done
}

on_ranks() {
  local n
  for n in 1 2 3 4; do
    [[ $n -eq 1 || $1 == gpu.mpi_* ]] || continue
    piece "$1 on $n" ranks "$n" "${@:2}"
  done
}
unit_tests() { each_test on_ranks; }

# under_sanitizer TOOL COMMAND... NAME PROGRAM OPTION
under_sanitizer() {
  local name=${*: -3:1}
  [[ $name != gpu.mpi_* && $name != gpu.softgpu ]] || return 0
  # Pooled memory would hide accesses behind an array.
  GYRE_MEMORY_POOL=off piece "$1 $name" limited "${@:2:$#-4}" "${@: -2}"
}

sanitizers() {
  local tool checker options
  checker=$(command -v compute-sanitizer || true)
  if [[ -z $checker || $GYRE_SOFTGPU == 1 ]]; then
    say "compute-sanitizer is not here, or has nothing to check: memcheck and racecheck were not run"
    return
  fi
  for tool in memcheck racecheck; do
    options=(--tool "$tool" --error-exitcode 99 --target-processes all)
    # An API error is not a wrong access, and a test launches on purpose what no device can run.
    [[ $tool != memcheck ]] || options+=(--report-api-errors no)
    # cuDNN's kernels order accesses by means that racecheck does not know.
    [[ $tool != racecheck ]] || options+=(--kernel-name-exclude kernel_substring=cudnn)
    each_test under_sanitizer "$tool" "$checker" "${options[@]}"
  done
}

# NCCL between ranks of one GPU, by every transport that one node has, and with ranks that are late or die.
between_ranks() {
  local n run=("$apps/gyre-attention" --backend cuda --comm nccl --share-gpus --tokens 8K --heads 8 --kv-heads 2
    --head-dim 64 --schedule all -d bf16)
  for n in 2 4; do
    local check=(verified_or_lacks "$lacks_nccl" ranks "$n" "${run[@]}" -w 0)
    piece "gyre-attention, shared memory, on $n" with NCCL_P2P_DISABLE=1 -- "${check[@]}" -n 1
    piece "gyre-attention, sockets, on $n" with NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 -- "${check[@]}" -n 1
    piece "gyre-attention, nonblocking, on $n" with NCCL_COMM_BLOCKING=0 -- "${check[@]}" -n 1
    piece "gyre-attention, late ranks, on $n" skewed_ranks ranks "$n" "${run[@]}" -n 20
    piece "gyre-attention --cuda-graph, late ranks, on $n" skewed_ranks ranks "$n" "${run[@]}" -n 20 --cuda-graph
    piece "gyre-attention, a killed rank, on $n" killed_rank ranks "$n" "${run[@]}" -n 100000
  done
}

programs() {
  local n comm gpu=(--backend cuda) tokens=8K vocab=32K launches=10 heads=(--heads 8 --kv-heads 2 --head-dim 64)
  local states=(--heads 8 --key-heads 4 --key-dim 128 --value-dim 128)
  if [[ $GYRE_SOFTGPU == 1 ]]; then
    tokens=96 vocab=500 launches=1 heads=(--heads 2 --kv-heads 1 --head-dim 16)
    states=(--heads 4 --key-heads 4 --key-dim 8 --value-dim 8)
  fi
  for n in ${GYRE_RANKS:-1 2 4}; do
    for comm in nccl staged mpi-gpu; do
      local check=(verified 'VERIFY PASSED') with=("${gpu[@]}" --comm "$comm")
      [[ $n -eq 1 ]] || with+=(--share-gpus)
      # NCCL must work with one rank per GPU; the software GPU may be built without it.
      [[ $comm != nccl || $n -eq 1 && $GYRE_SOFTGPU == 0 ]] || check=(verified_or_lacks "$lacks_nccl")
      # The software GPU's MPI takes device memory only if told to.
      [[ $comm != mpi-gpu ]] || check=(with GYRE_SOFTGPU_MPI=1 -- verified_or_lacks 'takes no GPU memory')
      piece "gyre-attention $comm on $n" "${check[@]}" ranks "$n" "$apps/gyre-attention" "${with[@]}" \
        --tokens $tokens "${heads[@]}" --schedule all -d bf16 -n 1 -w 0
      [[ $comm != nccl ]] || piece "gyre-attention --cuda-graph $comm on $n" "${check[@]}" ranks "$n" \
        "$apps/gyre-attention" "${with[@]}" --tokens $tokens "${heads[@]}" --schedule all -d bf16 -n $launches --cuda-graph
      piece "gyre-recurrence $comm on $n" "${check[@]}" ranks "$n" "$apps/gyre-recurrence" "${with[@]}" \
        --tokens $tokens "${states[@]}" --conv 4 --kind all --schedule all -d bf16 -n 1 -w 0
      piece "gyre-logprobs $comm on $n" "${check[@]}" ranks "$n" "$apps/gyre-logprobs" "${with[@]}" \
        --op all --tokens 128 --vocab $vocab -d bf16 --tp "$n" -n 1 -w 0
      piece "gyre-pipeline $comm on $n" "${check[@]}" ranks "$n" "$apps/gyre-pipeline" "${with[@]}" \
        --input "$GYRE_INPUTS/docs_tiny.h5" --model "$GYRE_INPUTS/model_tiny.h5" --bin 48 --cp "$n" -n 1
    done
  done
}

run_tests() {
  need_gpu
  [[ ${1:-} == --apps-only ]] || unit_tests
  programs
  [[ $GYRE_SOFTGPU == 1 ]] || between_ranks
  [[ ${1:-} == --apps-only ]] || sanitizers
  printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
  [[ $failed -eq 0 && $passed -gt 0 ]]
}

run_benchmarks() {
  local program name device date status=0 folder=${GYRE_RESULTS:?}/gpu
  if [[ $GYRE_SOFTGPU == 1 ]]; then
    say "the software GPU is no machine to time: bench-gpu needs programs of preset cuda" >&2
    exit 2
  fi
  need_gpu
  mkdir -p "$folder"
  for program in "$GYRE_PROGRAMS"/bench/bench-gpu-*; do
    [[ -x $program && $program != *.bin ]] || continue
    name=${program##*/bench-gpu-}
    [[ ! "$*" =~ --only[\ =]([a-z]+) ]] || name+=-${BASH_REMATCH[1]}
    "$program" --json "$scratch/$name.json" "$@" || status=$?
    [[ -s $scratch/$name.json ]] || { say "$name wrote no result" >&2 && exit 1; }
    device=$(sed -n 's/.*"device": *"\([^"]*\)".*/\1/p' "$scratch/$name.json" | head -n 1 | tr -cs 'A-Za-z0-9\n' '-')
    date=$(date -u +%Y%m%dT%H%M%SZ)
    cp "$scratch/$name.json" "$folder/${device%-}-$date-$name.json"
    say "recorded $folder/${device%-}-$date-$name.json"
  done
  return "$status"
}

command=${1:-}
[[ $# -eq 0 ]] || shift
case $command in
  test) run_tests "$@" ;;
  bench) run_benchmarks "$@" ;;
  *)
    echo "usage: gpu_suite.sh test [--apps-only] | bench [ARGS]" >&2
    exit 2
    ;;
esac
