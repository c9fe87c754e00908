#!/usr/bin/env bash
# valgrind.sh SOURCE BUILD: one path of each program under valgrind's memcheck: reads of memory that was never written,
# which no other tool here sees, in what libraries compile at run time, too.
source "$(dirname "$0")/../support/app_test.bash"
check=(valgrind --quiet --error-exitcode=66 --suppressions="$source_dir/tests/faults/valgrind.supp" --log-file="$scratch/valgrind.%p")

# What follows is worth something only if a wrong read is found.
cat >wrong.c <<'C'
#include <stdlib.h>
int main(void) { int* x = malloc(sizeof(int)); return *x == 5 ? 7 : 8; }
C
cc -O0 -g -o wrong wrong.c
status=0
"${check[@]}" ./wrong || status=$?
((status == 66)) || fail "exit code $status after a read of what was never written: $(cat valgrind.*)"

cases=0
clean() { # RANKS PROGRAM ARGUMENTS...: passes without a report
  local status=0
  rm -f valgrind.*
  timeout 300 "$MPIEXEC" -n "$1" "${check[@]}" "$apps/gyre-$2" "${@:3}" >output 2>&1 </dev/null || status=$?
  grep -hE '^==[0-9]+== ' valgrind.* | grep -v 'WARNING: valgrind ignores' >reports || true
  [[ ! -s reports ]] || fail "gyre-$2 ${*:3}: $(cat reports)"
  ((status == 0)) || fail "exit code $status: gyre-$2 ${*:3}: $(tail -n 30 output)"
  cases=$((cases + 1))
  printf 'valgrind: %d ranks of gyre-%s\n' "$1" "$2"
}
input=$source_dir/inputs
clean 1 import -o docs.h5 "$source_dir/LICENSE"
clean 2 pack --input "$input/docs_tiny.h5" --capacity 128 --cp 4 -o packed.h5
clean 2 shard --input packed.h5 --cp 4 --layout balanced -o shards.h5
clean 2 attention --input "$input/attention_window.h5" --schedule ring -n 1 -w 0 -o attention.h5
clean 2 attention --tokens 96 --heads 4 --kv-heads 2 --head-dim 32 -d bf16 --schedule all -n 1 -w 0
clean 2 logprobs --tokens 16 --vocab 256 --tp 2 --picks 4 --hidden 32 --method all -n 1 -w 0
clean 2 pipeline --input "$input/docs_tiny.h5" --model "$input/model_tiny.h5" --cp 2 -n 1 -o scores.h5
clean 1 compare scores.h5 scores.h5
echo "valgrind: $cases runs without a report"
