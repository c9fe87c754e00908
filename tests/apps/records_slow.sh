#!/usr/bin/env bash
# records_slow.sh SOURCE_DIR BUILD_DIR: as records.sh, all predictions. Counts (record.sh counted) take minutes: they are
# compared by hand, GYRE_RESULTS=again results/record.sh counted && tests/support/check_records.py results again.
# (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
GYRE_RESULTS=$scratch/again "$source_dir/results/record.sh" predicted "$2" >made 2>&1 || fail "$(cat made)"
/usr/bin/python3 "$source_dir/tests/support/check_records.py" "$source_dir/results" again || fail "results/ is stale"
echo "records: all passed"
