#!/usr/bin/env bash
# Every command of the golden suite, on one rank and on three; changed answers, each found and named.
# Usage: golden.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
golden() { timeout 250 /usr/bin/python3 "$source_dir/tests/support/golden.py" "$apps" "$@"; }
golden run
golden run --ranks 3
golden mutate --trials 60 --seed 4
echo "golden: all passed"
