#!/usr/bin/env bash
# gyre-compare: verdicts, exit codes, refusals.
# Usage: compare.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
import=$apps/gyre-import
compare=$apps/gyre-compare

printf 'some text' >a.txt
printf 'same text' >b.txt
printf 'some more text' >c.txt
for name in a b c; do
  cp "$name.txt" text
  expect 0 '' "$import" -o "$name.h5" text
done

expect 0 'VERIFY PASSED 3/3 max_err_over_tol=0' "$compare" a.h5 a.h5
grep -q '^#.*tensor.*elements.*max_err.*err_over_tol' output || fail "no header: $(cat output)"
expect 1 'VERIFY FAILED 2/3 max_err_over_tol=inf' "$compare" a.h5 b.h5
grep -Eq 'documents/tokens +11 +1 +14 +inf +\[2\] +111 +97 +differs' output ||
  fail "the worst place is not shown: $(cat output)"
expect 1 'VERIFY FAILED 2/3' "$MPIEXEC" -n 3 "$compare" a.h5 b.h5
[ "$(grep -c VERIFY output)" -eq 1 ] || fail "more than one rank speaks: $(cat output)"
expect 1 'shapes [11] and [16]' "$compare" a.h5 c.h5
expect 0 'VERIFY PASSED 3/3' "$compare" --quiet a.h5:/documents a.h5:/documents
[ "$(wc -l <output)" -eq 1 ] || fail "--quiet says more than the verdict: $(cat output)"

# Groups in groups: the deepest that is read, and one more.
for levels in 64 3000; do
  /usr/bin/python3 - "$levels" <<'PY'
import h5py, sys
with h5py.File(f"deep{sys.argv[1]}.h5", "w") as group:
    for _ in range(int(sys.argv[1]) - 1):
        group = group.create_group("g")
    group["x"] = [1.0]
PY
done
expect 0 'VERIFY PASSED 1/1' "$compare" deep64.h5 deep64.h5
expect 2 'is behind 64 groups; at most 63 are read' "$compare" deep3000.h5 deep3000.h5

# Another group, and what only one of the two has.
tiny=$source_dir/inputs/docs_tiny.h5
expect 1 'only in B' "$compare" a.h5 "$tiny"
expect 1 'only in A' "$compare" "$tiny" a.h5
expect 0 'VERIFY PASSED' "$compare" "$tiny:/reference" "$tiny:/reference"
expect 2 'have no tensor in common' "$compare" --common a.h5:/documents "$tiny"

expect 2 "cannot read 'none.h5': No such file or directory" "$compare" a.h5 none.h5
expect 2 "'a.txt' is not an HDF5 file" "$compare" a.txt a.h5
expect 2 "'a.h5' has no group '/results'" "$compare" a.h5:/results a.h5
expect 2 "--rtol: '-1' is not at least 0" "$compare" --rtol=-1 a.h5 a.h5
expect 2 "--atol: 'inf' is not a finite number" "$compare" --atol inf a.h5 a.h5
expect 2 'nearest: --rtol' "$compare" --rtoll 1 a.h5 a.h5
head -c 3000 a.h5 >short.h5
expect 3 'truncated file' "$compare" a.h5 short.h5
echo "compare: all passed"
