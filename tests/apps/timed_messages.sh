#!/usr/bin/env bash
# One changed bit in a message of a timed call, whose messages are not checked, fails the run: the timed call's results
# are compared with those of a call with checked messages. In the latter the message itself is found. What one rank alone
# finds ends all ranks at once, with a line that says what: it does not wait for the others on its way out.
source "$(dirname "$0")/../support/app_test.bash"
shim=$2/tests/libgyre-mpi-fault.so
[[ -f $shim ]] || { echo "skipped: $shim is not built" && exit 77; }
if grep -qE '^GYRE_SANITIZE:[A-Z]*=.+' "$2/CMakeCache.txt"; then
  echo "skipped: a sanitizer wants to be the first library" && exit 77
fi

with_fault() { # FAULT PROGRAM ARGUMENTS... on two ranks
  local fault=$1
  shift
  rm -rf messages && mkdir messages
  timeout 60 "$MPIEXEC" -n 2 -genv LD_PRELOAD "$shim" -genv GYRE_FAULT "$fault" -genv GYRE_FAULT_LOG "$scratch/messages" \
    "$apps/$1" "${@:2}" >log 2>&1
}
# Numbers of rank 0's messages of the call that sends what CALL BYTES says.
messages() { awk -v call="$1" -v bytes="$2" '$2 == call && $3 == bytes { print $1 }' messages/rank.0; }
ends() { # CODE TEXT MESSAGE|FAULT PROGRAM ARGUMENTS...
  local code=$1 text=$2 message=$3 got=0
  shift 3
  [[ $message == *' '* ]] || message="corrupt rank=0 message=$message byte=8 bit=6"
  with_fault "$message" "$@" || got=$?
  ((got == code)) || fail "exit code $got, not $code, with $message: $*: $(cat log)"
  grep -qF -- "$text" log || fail "'$text' is missing, with $message: $*: $(cat log)"
}

logprobs=(gyre-logprobs --op logprob --pass fwd --tp 2 --tokens 16 --vocab 64 -w 0 -n 1)
with_fault count "${logprobs[@]}" || fail "a clean run: $(cat log)"
mapfile -t checked_then_timed < <(messages iallgatherv 192)
((${#checked_then_timed[@]} == 2)) || fail "not two calls: $(cat messages/rank.0)"
ends 3 'arrived with other bits' "${checked_then_timed[0]}" "${logprobs[@]}"
ends 1 'other bits than with checked messages' "${checked_then_timed[1]}" "${logprobs[@]}"

attention=(gyre-attention --pass fwd --mask full --tokens 64 --heads 2 --kv-heads 1 --head-dim 16 --schedule ring -w 0 -n 1)
with_fault count "${attention[@]}" || fail "a clean run: $(cat log)"
cp messages/rank.0 attention.messages
mapfile -t blocks < <(messages isend 4096)
((${#blocks[@]} == 3)) || fail "not three blocks of keys and values: $(cat messages/rank.0)" # checked, alone, timed
ends 3 'arrived with other bits' "${blocks[0]}" "${attention[@]}"
ends 0 'VERIFY PASSED' "${blocks[1]}" "${attention[@]}"
ends 1 'VERIFY FAILED' "${blocks[2]}" "${attention[@]}"

# The rank that notices has the model file open, which is closed by all ranks together, and would wait there.
inputs=$source_dir/inputs
pipeline=(gyre-pipeline --input "$inputs/docs_tiny.h5" --model "$inputs/model_tiny.h5" --cp 2 -n 1)
with_fault count "${pipeline[@]}" || fail "a clean run: $(cat log)"
mapfile -t blocks < <(messages isend 48640)
((${#blocks[@]} == 6)) || fail "not six blocks of keys and values: $(cat messages/rank.0)" # checked, timed, checked
ends 3 "error on rank 1 ($(uname -n)): KV: what rank 0 sent arrived with other bits" "${blocks[0]}" "${pipeline[@]}"
ends 3 "error on rank 1 ($(uname -n)): MPI_I" "fail rank=1 message=$((blocks[0] - 2))" "${pipeline[@]}"
ends 3 "error on rank 1 ($(uname -n)): there is no memory left" "memory rank=1 message=${blocks[0]}" "${pipeline[@]}"
import=(gyre-import -o documents.h5 "$inputs/golden")
with_fault count "${import[@]}" || fail "a clean run: $(cat log)"
gather=$(awk '$2 == "iallreduce" { reduced = 1 } reduced && $2 == "iallgatherv" { print $1; exit }' messages/rank.1)
ends 3 "error on rank 1 ($(uname -n)): MPI_Iallgather" "fail rank=1 message=$gather" "${import[@]}"
echo ok
