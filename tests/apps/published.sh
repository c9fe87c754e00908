#!/usr/bin/env bash
# Predictions of all published and recorded figures (results/published.py): every large error has a reason. Surfaces of
# machine files are what results/surface.py makes of the recorded run.
# Usage: published.sh SOURCE_DIR BUILD_DIR
source "$(dirname "$0")/../support/app_test.bash"
results=$source_dir/results
/usr/bin/python3 "$results/published.py" "$apps" -o "$PWD" >output 2>&1 || fail "$(cat output)"
[[ $(grep -c '^[a-z].* [+-][0-9.]* %$' published.txt) -ge 23 ]] || fail "no table of the recorded cases: $(cat published.txt)"

record=$results/gpu/NVIDIA-H200-20261127T172530Z-kernels.json
cp "$source_dir"/inputs/machines/h200-sxm-8{,-200g}.toml .
surface=(/usr/bin/python3 "$results/surface.py")
"${surface[@]}" "$record" --head-dim 64 h200-sxm-8.toml h200-sxm-8-200g.toml --check || fail "see above"
"${surface[@]}" "$record" --head-dim 64 --without 8192 h200-sxm-8.toml || fail "see above"
grep -q '^rows = \[16384, 32768\]$' h200-sxm-8.toml || fail "not without 8192 tokens: $(cat h200-sxm-8.toml)"
expect 0 'RESULT' "$apps/gyre-predict" --machine h200-sxm-8.toml --cp 1 --tokens 8K --head-dim 64 --schedule ring
expect 1 'differs from results/gpu/' "${surface[@]}" "$record" --head-dim 64 h200-sxm-8.toml --check
expect 1 '0 lengths of attention forward by cudnn with heads of 96; wanted: 2 or more' \
  "${surface[@]}" "$record" --head-dim 96 h200-sxm-8.toml
sed 's/"median_s": 0.001/"median_s": -0.001/' "$record" >broken.json
expect 1 'broken.json: results[0].median_s is -0.001' "${surface[@]}" broken.json --head-dim 64 h200-sxm-8.toml
echo "published: all passed"
