#!/usr/bin/env bash
# report_app.sh SOURCE_DIR BUILD_DIR: the frame of the mini-apps as a user meets it: help, version, configuration file,
# and what a mistake on the command line prints and returns, once, on two ranks.
set -euo pipefail

program=$2/apps/gyre-pipeline
if [[ ! -x $program ]]; then
  echo "skipped: $program is not built"
  exit 77
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

fail() {
  echo "FAILED: $*"
  sed 's/^/  | /' "$folder/out" "$folder/err"
  failed=1
}

# expect CODE STDOUT STDERR ARGS...: the exit code, and a text that each stream must hold ("" for an empty stream).
expect() {
  local code=0 stream want
  timeout 60 "${MPIEXEC:-mpiexec}" -n 2 "$program" "${@:4}" >"$folder/out" 2>"$folder/err" || code=$?
  [[ $code -eq $1 ]] || fail "${*:4}: exit code $code, not $1"
  for stream in out err; do
    want=$2
    [[ $stream == out ]] || want=$3
    if [[ -z $want ]]; then
      [[ ! -s $folder/$stream ]] || fail "${*:4}: std$stream is not empty"
    elif [[ $(grep -cF -- "$want" "$folder/$stream") -ne 1 ]]; then
      fail "${*:4}: std$stream does not say '$want' exactly once"
    fi
  done
}

expect 0 'Usage: gyre-pipeline' '' --help
expect 0 '--timeout' '' -h
expect 0 'git ' '' --version
expect 2 '' 'unknown option --inptu; nearest: --input' --inptu a.h5
expect 2 '' 'unknown option --tpp; nearest: --tp' --inptu a.h5 --tpp=2
expect 2 '' 'see gyre-pipeline --help' --inptu a.h5 --tpp=2
expect 2 '' "'two' is not an integer" --input a.h5 --model b.h5 --cp two
expect 2 '' "'soon' is not a finite number" --timeout soon
expect 2 '' '--verbose is a switch: true or false' --verbose=18446744073709551616
expect 2 '' "cannot read 'none.toml': No such file or directory" --config none.toml

printf 'cp = 3\ntp = "many"\n' >"$folder/bad.toml"
expect 2 '' "'many' is not an integer" --config "$folder/bad.toml"
printf 'quiet = 3\n' >"$folder/switch.toml"
expect 2 '' '--quiet is a switch: true or false' --config "$folder/switch.toml"
printf 'cp = 1\ninptu = "a.h5"\n' >"$folder/typo.toml"
expect 2 '' "$folder/typo.toml:2: unknown key inptu = 'a.h5'; nearest: input" --config "$folder/typo.toml"
printf '[pipeline]\ninput = "a.h5"\n' >"$folder/section.toml"
expect 2 '' "$folder/section.toml:1: unknown section [pipeline]" --config "$folder/section.toml"
printf 'input = true\n' >"$folder/type.toml"
expect 2 '' 'input = true: a truth value where --input takes one TEXT' --config "$folder/type.toml"

# A launcher of another MPI, or srun --mpi=none, announces two ranks, and each of them finds itself alone.
for size in PMIX_SIZE FLUX_JOB_SIZE SLURM_STEP_NUM_TASKS; do
  code=0
  env "$size=2" timeout 60 "$program" --help >"$folder/out" 2>"$folder/err" || code=$?
  if [[ $code -ne 3 ]] || ! grep -q 'sees only one' "$folder/err" || ! grep -qF 'srun --mpi=pmi2' "$folder/err"; then
    fail "$size: a foreign launcher was not noticed (exit code $code)"
  fi
done

[[ $failed -eq 0 ]] && echo "report_app: all as expected"
exit "$failed"
