#!/usr/bin/env bash
# records_slow.sh SOURCE_DIR BUILD_DIR: as records.sh, all predictions and all counts. (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
for what in predicted counted; do
  GYRE_RESULTS=$scratch/again "$source_dir/results/record.sh" $what "$2" >made 2>&1 || fail "$(cat made)"
done
/usr/bin/python3 "$source_dir/tests/support/check_records.py" "$source_dir/results" again || fail "results/ is stale"
echo "records: all passed"
