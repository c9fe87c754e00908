#!/usr/bin/env bash
# gyre-pipeline on every grid of 1, 2, 3, 4, 6 and 8 ranks that the model admits, and every schedule on several grids:
# equal to the independent float64 reference.
source "$(dirname "$0")/../support/app_test.bash"
source "$source_dir/tests/support/pipeline_test.bash"

grids=0
for ranks in 1 2 3 4 6 8; do
  for tp in 1 2 4; do
    ((ranks % tp == 0)) || continue
    for cp in 1 2 3 4 6 8; do
      ((ranks / tp % cp == 0)) || continue
      dp=$((ranks / tp / cp))
      out=$scratch/out-$ranks-$dp-$cp-$tp.h5
      pipeline "$ranks" --dp $dp --cp $cp --tp $tp --bin $((48 / (2 * cp) * 2 * cp)) -o "$out" >"$scratch/log" 2>&1 ||
        fail "dp=$dp cp=$cp tp=$tp: $(cat "$scratch/log")"
      grep -q '^VERIFY PASSED 6/6 ' "$scratch/log" || fail "dp=$dp cp=$cp tp=$tp was not verified: $(cat "$scratch/log")"
      timeout 60 "$apps/gyre-compare" "$out:/results" "$input:/reference" --common --atol 1e-4 --rtol 1e-4 >"$scratch/log" ||
        fail "dp=$dp cp=$cp tp=$tp: $(cat "$scratch/log")"
      grids=$((grids + 1))
    done
  done
done
((grids >= 26)) || fail "only $grids grids"

# Every schedule, with and without tensor parallelism.
for schedule in "${schedules[@]}"; do
  for grid in "2 --cp 2" "3 --cp 3" "4 --cp 2 --tp 2" "4 --cp 4"; do
    read -ra arguments <<<"$grid"
    compared "${arguments[@]}" --bin 48 --schedule "$schedule"
  done
  # It alone needs what scoring never gives, a window.
  ((refusals == 0)) || [[ $schedule == halo ]] || fail "$schedule refused"
  refusals=0
done

# The real model against its reference, hidden states included.
input=$source_dir/inputs/docs_small.h5 model=$source_dir/inputs/model.h5
for grid in "6 --dp 2 --cp 3" "4 --tp 4"; do
  read -ra arguments <<<"$grid"
  pipeline "${arguments[@]}" >"$scratch/log"
  grep -q '^VERIFY PASSED 8/8 ' "$scratch/log" || fail "$grid: $(cat "$scratch/log")"
done
echo "ok: $grids grids, ${#schedules[@]} schedules"
