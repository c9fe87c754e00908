#!/usr/bin/env bash
# tsan.sh SOURCE BUILD: threads under ThreadSanitizer: the kernels' OpenMP loops, and the watchdog beside them.
# BUILD is of the preset tsan, made by clang. GCC's OpenMP runtime tells ThreadSanitizer nothing of its barriers, so that
# every loop is a race; LLVM's does, by way of Archer.
source "$(dirname "$0")/../support/app_test.bash"
tests=$2/tests
archer=$(ls /usr/lib/llvm-*/lib/libarcher.so 2>/dev/null | head -n 1)
[[ -n $archer ]] || fail "there is no libarcher.so (Debian: libomp-14-dev)"
export OMP_TOOL_LIBRARIES=$archer ARCHER_OPTIONS='verbose=1' OMP_NUM_THREADS=2
export TSAN_OPTIONS="suppressions=$source_dir/tests/faults/tsan.supp ignore_noninstrumented_modules=1 exitcode=66 history_size=4"

# What follows is worth something only if right loops pass and wrong ones do not.
"$tests/gyre-race" right >right 2>&1 || fail "a right loop is a race: $(cat right)"
grep -q 'Archer detected OpenMP application with TSan' right || fail "Archer does not run: $(cat right)"
status=0
"$tests/gyre-race" wrong >wrong 2>&1 || status=$?
((status == 66)) && grep -q 'data race' wrong || fail "a race passes: $(cat wrong)"

cases=0
clean() { # COMMAND...: passes without a report
  local status=0
  timeout 200 "$@" >output 2>&1 </dev/null || status=$?
  ! grep -q 'WARNING: ThreadSanitizer' output || fail "$*: $(grep -A40 -m1 'WARNING: ThreadSanitizer' output)"
  ((status == 0)) || fail "exit code $status: $*: $(tail -n 30 output)"
  cases=$((cases + 1))
}
mpi=("$MPIEXEC" -n)
# Loops are shared: a second thread appears.
OMP_DISPLAY_AFFINITY=TRUE clean "$apps/gyre-attention" --tokens 512 --heads 4 --kv-heads 2 --threads 2 -n 1 -w 0
grep -q '^OMP: .* thread 1 ' output || fail "one thread does all: $(cat output)"
input=$source_dir/inputs
clean "$apps/gyre-attention" --tokens 1K --heads 4 --kv-heads 2 --head-dim 32 --threads 2 -n 1 -w 0
clean "$apps/gyre-attention" --tokens 512 --heads 4 --kv-heads 2 --head-dim 32 --threads 2 -n 1 -w 0 --sinks --window 100 -d bf16
clean "${mpi[@]}" 2 "$apps/gyre-attention" --tokens 512 --heads 4 --kv-heads 2 --head-dim 32 --threads 2 -n 1 -w 0 --schedule all
clean "$apps/gyre-logprobs" --tokens 128 --vocab 4K --picks 4 --hidden 64 --threads 2 -n 1 -w 0
clean "${mpi[@]}" 2 "$apps/gyre-logprobs" --tokens 128 --vocab 2K --tp 2 --picks 4 --hidden 64 --threads 2 -n 1 -w 0 -d bf16
clean "${mpi[@]}" 2 "$apps/gyre-pipeline" --input "$input/docs_tiny.h5" --model "$input/model_tiny.h5" --cp 2 -n 1 -w 0 -o scores.h5

# The watchdog: at a timeout, beside a rank that is stopped; at a rank's death; at SIGTERM.
watched() { # SIGNAL TEXT: a long run, of which one rank is signalled
  local launcher status=0 ranks
  timeout 60 "${mpi[@]}" 2 "$apps/gyre-attention" --tokens 256 --heads 2 --kv-heads 2 -n 1000000 --timeout 2 >output 2>&1 &
  launcher=$!
  for _ in $(seq 300); do
    grep -q '^# *schedule' output && break
    sleep 0.1
  done
  sleep 1
  ranks=$(for process in $(pgrep -P "$(pgrep -d, -P "$(pgrep -d, -P "$launcher")")"); do
    pgrep -P "$process" || echo "$process"
  done)
  kill "-$1" "$(tail -n 1 <<<"$ranks")"
  wait "$launcher" || status=$?
  grep -q "$2" output || fail "SIG$1 (exit code $status): '$2' is missing: $(tail -n 30 output)"
  ! grep -q 'WARNING: ThreadSanitizer' output || fail "SIG$1: $(grep -A40 -m1 'WARNING: ThreadSanitizer' output)"
  cases=$((cases + 1))
}
watched STOP 'timeout after 2 s'
watched KILL 'has died'
watched TERM 'SIGTERM'
echo "tsan: $cases runs without a report"
