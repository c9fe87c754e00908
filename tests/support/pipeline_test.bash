# What the tests of gyre-pipeline share, behind app_test.bash: input and model with a float64 reference, schedules and
# layouts that --help lists, and runs that are compared.
input=$source_dir/inputs/docs_tiny.h5
model=$source_dir/inputs/model_tiny.h5

pipeline() { # RANKS ARGUMENTS...
  local ranks=$1
  shift
  timeout 120 "$MPIEXEC" -n "$ranks" "$apps/gyre-pipeline" --input "$input" --model "$model" -n 1 "$@"
}

# compare_results CODE A.h5 B.h5 TOLERANCE MESSAGE: gyre-compare ends with CODE for the results that both files have.
compare_results() {
  local status=0
  timeout 60 "$apps/gyre-compare" "$2:/results" "$3:/results" --common --atol "$4" --rtol "$4" >"$scratch/log2" 2>&1 || status=$?
  ((status == $1)) || fail "$5: gyre-compare ends with $status: $(cat "$scratch/log2")"
}
same() { compare_results 0 "$@"; }
differ() { compare_results 1 "$@"; }

# choices OPTION: what --help lists for it, one a line.
choices() {
  "$apps/gyre-pipeline" --help | sed -E ':join; /\|$/ { N; s/\n +//; b join }' | grep -E -- "^ +$1 " | grep -oE '[a-z-]+(\|[a-z-]+)+' | tr '|' '\n'
}
mapfile -t schedules < <(choices --schedule)
mapfile -t layouts < <(choices --layout)
((${#schedules[@]} >= 2 && ${#layouts[@]} >= 2)) || fail "schedules ${schedules[*]}, layouts ${layouts[*]}"

refusals=0
# compared RANKS ARGUMENTS...: verified by the program, and by gyre-compare. A schedule that refuses says so and is
# passed over.
compared() {
  local status=0
  pipeline "$@" -o "$scratch/out.h5" >"$scratch/log" 2>&1 || status=$?
  if ((status == 2)) && grep -q '^  - schedule ' "$scratch/log"; then
    echo "passed over: $*: $(grep '^  - schedule ' "$scratch/log")"
    refusals=$((refusals + 1))
    return
  fi
  ((status == 0)) || fail "exit $status: $*: $(cat "$scratch/log")"
  grep -q '^VERIFY PASSED 6/6 ' "$scratch/log" || fail "not verified: $*: $(cat "$scratch/log")"
  timeout 60 "$apps/gyre-compare" "$scratch/out.h5:/results" "$input:/reference" --common --atol 1e-4 --rtol 1e-4 \
    >"$scratch/log2" || fail "$*: $(cat "$scratch/log2")"
}
