# What the shell tests of the programs share; sourced with the test's arguments, SOURCE_DIR BUILD_DIR.
# Gives source_dir, apps, MPIEXEC, a scratch folder (removed at exit, and the present one), fail and expect.
set -euo pipefail

source_dir=$1
apps=$2/apps
: "${MPIEXEC:=mpiexec}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# expect CODE PATTERN COMMAND...: the command ends with CODE and prints a line that holds PATTERN.
expect() {
  local code=$1 pattern=$2 got=0
  shift 2
  timeout 60 "$@" >output 2>&1 </dev/null || got=$?
  [ "$got" -eq "$code" ] || fail "exit code $got, not $code: $*
$(cat output)"
  grep -qF -- "$pattern" output || fail "no line holds '$pattern': $*
$(cat output)"
}
