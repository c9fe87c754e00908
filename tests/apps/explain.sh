#!/usr/bin/env bash
# gyre-attention --explain: every schedule in one table, and plans as JSON whose messages, pairs and bytes are counted again.
source "$(dirname "$0")/../support/app_test.bash"
explain=("$apps/gyre-attention" --explain --heads 8 --kv-heads 4 --head-dim 16)

expect 0 'refused under contiguous: schedule halo: needs a causal mask with a window' \
  "${explain[@]}" --cp 4 --tokens 512 --schedule all --layout all -J all.json
for schedule in ring all-gather all-to-all group-cast; do
  [ "$(grep -cE "^ *$schedule +striped +(fwd|bwd)" output)" -eq 2 ] || fail "no rows of $schedule: $(cat output)"
done
[ "$(wc -L <output)" -le 150 ] || fail "long lines: $(cat output)"
for schedule in ring all-gather-strided all-to-all-ring canonical; do
  expect 0 'forward, rank 3 of 4' "${explain[@]}" --cp 4 --gen dist=long-tailed,count=9,max=300,seed=3 --capacity 1K \
    --schedule $schedule -J "$schedule.json" --svg "$schedule.svg"
  grep -q '8 query heads of 16, 4 of keys; f32; a rank computes' "$schedule.svg" || fail "the picture does not say of what it is"
done
expect 0 "by the library's alltoall of 2 ranks" "${explain[@]}" --cp 4 --tokens 512 --schedule all-to-all-ring --collectives library \
  -J library.json --svg library.svg
expect 0 "by the library's reduce_scatter of 4 ranks" "${explain[@]}" --cp 4 --tokens 512 --schedule all-gather --collectives library \
  -J gather.json --svg gather.svg
expect 0 'window' "${explain[@]}" --cp 3 --tokens 300 --window 40 --layout striped --schedule ring -J window.json
expect 0 'own out <- 3 partial results' "${explain[@]}" --cp 4 --tokens 512 --schedule ring --merge at-end -J merge.json --svg merge.svg
expect 0 'mask of 18 regions' "${explain[@]}" --cp 4 --tokens 300 --mask shared-prefix,prompt=60,answer=15 --schedule group-cast -J prefix.json
/usr/bin/python3 - "$source_dir/results/gyre-plan-1.schema.json" ./*.json <<'PY' || fail "see above"
import json, sys
import jsonschema

schema = json.load(open(sys.argv[1]))
for path in sys.argv[2:]:
    document = json.load(open(path))
    jsonschema.validate(document, schema)
    assert (len(document["plans"]) > 1) == (path == "./all.json"), path
    for plan in document["plans"]:
        for one in plan["passes"]:
            ranks = one["ranks"]
            assert sum(r["bytes_sent"] for r in ranks) == sum(r["bytes_received"] for r in ranks)
            assert max(r["seconds"] for r in ranks) == one["seconds"]
            if "arrays" not in plan:
                continue
            sent, received = {}, {}
            for rank in ranks:
                me, arrays, pairs = rank["rank"], plan["arrays"][rank["rank"]], 0
                assert [a["kind"] for a in arrays[:7]] == ["q", "kv", "out", "stats", "d_out", "d_q", "d_kv"]
                messages = [(m, sent, me, m["peer"]) for s in rank["steps"] for m in s.get("sends", [])]
                messages += [(m, received, m["peer"], me) for s in rank["steps"] for m in s.get("receives", [])]
                for m, lists, a, b in messages:
                    lists.setdefault((a, b), []).append(m["bytes"])
                outgoing = [m for s in rank["steps"] for m in s.get("sends", []) if m["peer"] != me]
                operations = [s for s in rank["steps"] if s.get("carrier", "messages") != "messages"]
                messages = [m for s in rank["steps"] if s not in operations for m in s.get("sends", []) if m["peer"] != me]
                assert rank["bytes_sent"] == sum(m["bytes"] for m in outgoing)
                assert rank["messages"] == len(messages) + len(operations)
                for step in rank["steps"]:
                    heads = step.get("kv_heads", [0, 0])
                    counts = "out" in step or "d_q" in step  # dK and dV alone are counted with their dQ
                    for r in step.get("rectangles", []):
                        visible = r["q_count"] * r["k_count"]
                        if "mask" in r:
                            m = r["mask"]
                            visible = sum(
                                1 for i in range(r["q_count"]) for j in range(r["k_count"])
                                if (q := m["offset"] + i * m["q_stride"]) >= j * m["k_stride"] or not m["causal"]
                                if (m["window"] == 0 or q - m["window"] < j * m["k_stride"]))
                        assert visible == r["pairs"], (path, r)
                        pairs += counts * visible * (heads[1] - heads[0]) * document["heads"] // document["kv_heads"]
                if path not in ("./all-to-all-ring.json", "./library.json"):  # there, an array of queries has some heads alone
                    assert pairs == rank["pairs"], (path, pairs, rank["pairs"])
            assert sent == received, path
PY
# The documents of a file, under its mask.
expect 0 "all ranks: " "$apps/gyre-attention" --explain --input "$source_dir/inputs/attention_regions.h5" --cp 3 --layout contiguous --schedule group-cast --svg tree.svg
grep -q 'mask of ' tree.svg || fail "the picture does not say the mask of the file"
expect 2 'needs a causal mask with a window' "$apps/gyre-attention" --explain --input "$source_dir/inputs/attention_causal.h5" --cp 2 --schedule halo
expect 2 '--svg needs one --schedule and one --layout' "${explain[@]}" --cp 2 --schedule all --svg none.svg
expect 2 '--explain needs one size' "${explain[@]}" --cp 2 --min 1K --max 2K
expect 2 '--json goes with a run' "${explain[@]}" --cp 2 -J none.jsonl
expect 2 'nothing can be explained' "${explain[@]}" --cp 2 --schedule halo --layout all
[ -z "$(ls | grep none)" ] || fail "files are left: $(ls)"
echo "explain: all passed"
