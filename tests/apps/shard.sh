#!/usr/bin/env bash
# gyre-shard: tables, files and pictures of every layout; what it refuses.
# Usage: shard.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
shard=$apps/gyre-shard
compare=$apps/gyre-compare
"$apps/gyre-pack" --input "$source_dir/inputs/docs_tiny.h5" --capacity 144 --cp 6 -o packed.h5 >/dev/null

# On as many ranks as shards, they are gathered over the communicator and shifted too.
expect 0 'VERIFY PASSED 3/3' "$shard" --input packed.h5 --cp 6
for cp in 1 2 3 6; do
  expect 0 'VERIFY PASSED 5/5' "$MPIEXEC" -n "$cp" "$shard" --input packed.h5 --cp "$cp" --csv "table$cp.csv" --chunk 4
  [ "$(wc -l <"table$cp.csv")" -eq $((1 + $(registered layouts | wc -w))) ] || fail "not all layouts: $(cat "table$cp.csv")"
done
# Plans do not depend on the ranks that make them.
planned() { # FILE.csv: all columns but the time of planning, and what identifies the run
  /usr/bin/python3 -c 'import csv, sys
for row in csv.DictReader(open(sys.argv[1])):
    for name, cell in row.items():
        if not name.startswith("planning") and name not in ("start", "ranks", "git"):
            print(name, f"{float(cell):.9g}" if cell[:1].isdigit() else cell)' "$1"
}
planned table6.csv >six
expect 0 'VERIFY PASSED 3/3' "$MPIEXEC" -n 2 "$shard" --input packed.h5 --cp 6 --chunk 4 --csv table62.csv
[ "$(grep -c ^layout six)" -eq "$(registered layouts | wc -w)" ] || fail "not all layouts: $(cat six)"
planned table62.csv | diff six - || fail "other numbers on 2 ranks"
# DualChunkSwap balances whole documents exactly; one full document, any cp.
expect 0 'input blocks-1k.csv sha256' "$shard" --gen dist=histogram,count=5,file="$source_dir/inputs/lengths/blocks-1k.csv" --capacity 8K --cp 2
expect 0 ' ok' "$shard" --gen dist=fixed,length=1024,count=8 --capacity 2K --cp 8 --csv even.csv
even=$(for name in pairs_max_mean pad_percent; do column even.csv $name layout=dual-chunk-swap; done | xargs)
[ "$even" = '1 0' ] ||
  fail "dual-chunk-swap is not even: $(cat even.csv)"
# No more ranks than one are needed to plan for many.
expect 0 'RESULT UNVERIFIED' "$shard" --gen dist=long-tailed,count=60,max=16K,seed=2 --capacity 64K --cp 128 -c none

# Nothing to shard, and documents of one token.
expect 0 'RESULT UNVERIFIED (nothing to check: no slots' "$MPIEXEC" -n 2 "$shard" --gen dist=fixed,length=0,count=3 --cp 2
expect 0 'VERIFY PASSED 5/5' "$MPIEXEC" -n 2 "$shard" --gen dist=fixed,length=1,count=3 --cp 2

# Files of shards are the same from any number of ranks.
expect 0 'VERIFY PASSED 4/4' "$shard" --input packed.h5 --cp 3 --layout balanced --chunk 8 -o one.h5
expect 0 'VERIFY PASSED 6/6' "$MPIEXEC" -n 3 "$shard" --input packed.h5 --cp 3 --layout balanced --chunk 8 -o three.h5
expect 0 'VERIFY PASSED' "$compare" one.h5 three.h5

# Cp that the file was not packed for: refused by segment, or repadded.
expect 0 '# refused: dual-chunk-swap: bin 0, segment 1' "$shard" --input packed.h5 --cp 5
expect 2 'is not a multiple of 2·cp = 10; the next valid one is' "$shard" --input packed.h5 --cp 5 --layout dual-chunk-swap
expect 2 "is a batch of rows: --layout takes one layout, not striped,balanced" "$shard" --input "$source_dir/inputs/bshd_tiny.h5" --cp 2 --layout striped,balanced
expect 0 'VERIFY PASSED 4/4' "$shard" --input packed.h5 --cp 5 --layout dual-chunk-swap --repad -o repadded.h5
expect 0 'by rank' "$shard" --input packed.h5 --cp 2 --layout striped --stripe 4 -v --svg picture.svg
grep -q '</svg>' picture.svg || fail "no picture"
[ "$(grep -c '<polygon' picture.svg)" -gt 10 ] || fail "an empty picture"
expect 0 'RESULT' "$shard" --input packed.h5 --cp 2 -q -J result.json -d f32 --heads 16 --kv-heads 16 --head-dim 64 --tflops 50 --gbps 10
grep -q '"needed_share"' result.json || fail "no figures of merit in the JSON"

# Batches of rows: as a stream of segments, and as rows with their key mask.
rows=$source_dir/inputs/bshd_tiny.h5
left=$source_dir/inputs/bshd_left.h5
for ranks in 1 2 3; do
  expect 0 'VERIFY PASSED 5/5' "$MPIEXEC" -n "$ranks" "$shard" --input "$rows" --cp 2 --chunks 2 --csv "rows$ranks.csv" -J rows.json
done
diff <(planned rows1.csv) <(planned rows3.csv) || fail "other numbers on 3 ranks"
[ "$(paste <(column rows1.csv tokens_min_rank format=thd) <(column rows1.csv tokens_max_rank format=thd) | awk '{ print $1 + $2 }' | xargs)" = '24 16' ] ||
  fail "wrong tokens: $(cat rows1.csv)"
for tail in own-segment keep absorb; do
  expect 0 'VERIFY PASSED' "$shard" --input "$rows" --cp 2 --tail "$tail"
done
expect 0 'VERIFY PASSED 2/2' "$shard" --input "$rows" --cp 3 --layout striped --stripe 2
expect 0 'VERIFY PASSED 2/2' "$shard" --input "$left" --cp 1
for positions in zero counting restarted; do
  expect 0 'VERIFY PASSED 4/4' "$MPIEXEC" -n 4 "$shard" --input "$left" --cp 4 --tp 2 --format bshd --pad-positions "$positions" \
    --csv left.csv
done
# 3 · 7 and 6 · 4 pairs of a real token and the padding before it.
[ "$(column left.csv hidden_pairs format=bshd) $(column left.csv slots_rank format=bshd)" = '45 12' ] || fail "wrong pairs: $(cat left.csv)"
"$apps/gyre-pack" --gen dist=fixed,length=10,count=3 --rows 11 -o ids.h5 >/dev/null
expect 0 'VERIFY PASSED 4/4' "$MPIEXEC" -n 2 "$shard" --input ids.h5 --cp 2 --format bshd
expect 2 'would see each other' "$shard" --input "$rows" --cp 2 --format bshd
expect 2 '--format bshd has no boundaries' "$shard" --input "$rows" --cp 2 --format bshd --mask causal-segments
expect 2 'a full attention mask under context parallelism' "$shard" --input "$left" --cp 2 --format bshd --mask full
expect 0 'VERIFY PASSED' "$shard" --input "$left" --cp 1 --format bshd --mask dense
expect 2 "row 0, segment 0: slot length 10 is not a multiple of 4" "$shard" --input "$left" --cp 2
expect 2 'cannot be cut into 3 equal chunks' "$shard" --input "$rows" --cp 2 --chunks 3
expect 2 'into 281474976710656 equal chunks; the most is 4' "$shard" --input "$rows" --cp 2 --chunks 262144G
expect 2 'are for --format thd' "$shard" --input "$left" --cp 2 --format bshd --chunks 2
expect 2 '--tp 2 pads the rows of --format bshd' "$shard" --input "$rows" --cp 2 --tp 2
expect 2 'is a batch of rows' "$shard" --input "$rows" --cp 2 --ulysses
expect 2 'rank 0 holds the arrays of all ranks' "$shard" --input "$left" --cp 2 --tp 500000000 --format bshd -o large.h5

# Shards of rows are the same from any number of ranks; a file of another program is compared in full.
bshd=("$shard" --input "$left" --cp 4 --tp 2 --format bshd --pad-positions counting)
for ranks in 1 3 4; do
  expect 0 'VERIFY PASSED' "$MPIEXEC" -n "$ranks" "${bshd[@]}" -o "left$ranks.h5"
  expect 0 'VERIFY PASSED' "$compare" left1.h5 "left$ranks.h5"
done
changed() { # FILE GROUP DATASETS [OTHERS]: yours.h5, a copy with 1 more in the last elements, and without the others
  cp "$1" yours.h5
  /usr/bin/python3 - "${@:2}" <<'PY'
import sys, h5py
with h5py.File("yours.h5", "r+") as file:
    del file.attrs["content_sha256"]
    group = file[sys.argv[1]]
    for name in sys.argv[2].split():
        values = group[name][...]
        values.reshape(-1)[-1] += 1
        group[name][...] = values
    for name in sys.argv[3:]:
        del group[name]
PY
}
named() { # TEXT...: each is in the output
  for text in "$@"; do grep -qF -- "$text" output || fail "'$text' is not named: $(cat output)"; done
}
expect 0 "# yours: 5 of 5 datasets are in 'left3.h5'" "$MPIEXEC" -n 2 "${bshd[@]}" --yours left3.h5
changed left1.h5 /row_shards 'index inputs_embeds key_mask labels position_ids'
expect 1 'VERIFY FAILED' "$MPIEXEC" -n 2 "${bshd[@]}" --yours yours.h5 -v
named 'index[3' 'inputs_embeds[3' 'key_mask[3' 'labels[3' 'position_ids[3'
changed left1.h5 /row_shards labels index inputs_embeds key_mask position_ids
expect 1 '# yours: 1 of 5 datasets' "${bshd[@]}" --yours yours.h5
changed left1.h5 /row_shards labels index inputs_embeds key_mask position_ids labels
expect 2 'has none of the 5 datasets of gyre/row-shards' "${bshd[@]}" --yours yours.h5
expect 2 "cp of '/row_shards' is 4; the run has 2" "$shard" --input "$left" --cp 2 --format bshd --yours left1.h5
expect 2 "is of the kind 'gyre/bshd'; 'gyre/row-shards' is needed" "${bshd[@]}" --yours "$left"
expect 2 'take --format bshd' "$shard" --input "$rows" --cp 2 --layout dual-chunk-swap --yours left1.h5
expect 2 '--yours are checks' "${bshd[@]}" --yours left1.h5 -c none
expect 2 'is the file of --yours' "${bshd[@]}" --yours left1.h5 -o left1.h5
# The same of shards of streams: every element, also those that no round trip needs.
balanced=("$shard" --input packed.h5 --cp 3 --layout balanced --chunk 8)
expect 0 'VERIFY PASSED 6/6' "$MPIEXEC" -n 3 "${balanced[@]}" --yours one.h5
changed one.h5 /shards 'ids labels positions index cu_seqlens cu_seqlens_padded'
expect 1 'VERIFY FAILED' "${balanced[@]}" --yours yours.h5 -v
named 'rank 2 '{ids,labels,positions,index,cu_seqlens,cu_seqlens_padded}'['
# And of exchanges, with fewer KV heads than ranks.
ulysses=("$shard" --input packed.h5 --ulysses --heads 4 --kv-heads 1 --head-dim 2)
expect 0 'VERIFY PASSED 5/5' "$MPIEXEC" -n 2 "${ulysses[@]}" -o heads.h5
expect 0 '# yours: 15 of 15' "$MPIEXEC" -n 2 "${ulysses[@]}" --yours heads.h5
changed heads.h5 /ulysses 'ids positions slot_offsets q_exchanged kv_exchanged out_token_major d_kv swapped_index swapped_q_ordered'
expect 1 'VERIFY FAILED' "$MPIEXEC" -n 2 "${ulysses[@]}" --yours yours.h5 -v
named {ids,positions,slot_offsets,q_exchanged,kv_exchanged,out_token_major,d_kv,swapped_index,swapped_q_ordered}'['
expect 2 "ranks of '/ulysses' is 2; the run has 1" "${ulysses[@]}" --yours heads.h5
# Bins that the ranks do not divide.
expect 0 'VERIFY PASSED' "$MPIEXEC" -n 3 "$shard" --gen dist=fixed,length=7,count=4 --capacity 24 --cp 1 --ulysses \
  --heads 3 --kv-heads 3 --head-dim 2 -o odd.h5

# Ids alone: a row is a document of a stream, or has a key mask that hides the pad id at both ends.
golden=$source_dir/inputs/golden
expect 0 'VERIFY PASSED 5/5' "$MPIEXEC" -n 2 "$shard" --input "$golden/rows_without_tables.h5" --cp 2
expect 0 'VERIFY PASSED' "$shard" --input "$golden/rows_padded.h5" --cp 2 --chunks 4
expect 2 "rows_padded.h5': row 1, slot 5 holds the pad id 100 before real tokens" "$shard" --input "$golden/rows_padded.h5" --cp 2
expect 0 'VERIFY PASSED 4/4' "$MPIEXEC" -n 2 "$shard" --input "$golden/rows_padded.h5" --cp 2 --format bshd

# Extras: of rows they are compared, of packed streams also written, without the mask of attention.
for ranks in 1 2; do
  expect 0 'VERIFY PASSED 6/6' "$MPIEXEC" -n "$ranks" "$shard" --input "$golden/rows_extras.h5" --cp 2
done
grep -q '# extra attention_mask is left out: no mask by slots describes a shard' output || fail "not said: $(cat output)"
expect 0 '# extras: attention_mask (slots), grid (none)' "$shard" --input "$golden/rows_extras.h5" --cp 1
expect 0 'VERIFY PASSED 6/6' "$MPIEXEC" -n 2 "$shard" --input "$golden/packed_extras_cp2.h5" --cp 2
expect 0 'VERIFY PASSED 5/5' "$shard" --input "$golden/packed_extras_cp2.h5" --cp 2 --layout striped --stripe 3 -o extras1.h5
expect 0 'VERIFY PASSED 7/7' "$MPIEXEC" -n 2 "$shard" --input "$golden/packed_extras_cp2.h5" --cp 2 --layout striped --stripe 3 -o extras2.h5
expect 0 'VERIFY PASSED' "$compare" extras1.h5 extras2.h5
expect 0 'VERIFY PASSED' "$shard" --input "$golden/packed_extras_cp2.h5" --cp 3 --layout dual-chunk-swap --repad -o extras3.h5
expect 0 'VERIFY PASSED' "$shard" --input "$golden/packed_extras_cp2.h5" --cp 1 --layout contiguous -o extras1.h5
grep -q '( 1, 28 )' <(h5dump -d /shards/extras/attention_mask extras1.h5) || fail "one rank has the whole stream: $(h5dump -H extras1.h5)"

# Labels of further tokens are compared as int64, too; of another type they are named.
for type in i8 i2; do
  cp "$golden/packed_labels_ahead_cp2.h5" "labels_$type.h5"
  /usr/bin/python3 - "labels_$type.h5" $type <<'PY'
import sys, h5py
with h5py.File(sys.argv[1], "r+") as file:
    file.attrs.pop("content_sha256")
    extras = file["packed/extras"]
    values, attributes = extras["labels_3"][...], dict(extras["labels_3"].attrs)
    del extras["labels_3"]
    if sys.argv[2] == "i8":
        values = values.astype("i8")
        values[0] += 2**32  # not the label, although its low half is
    else:
        attributes.pop("padding")
    extras.create_dataset("labels_3", data=values.astype(sys.argv[2])).attrs.update(attributes)
PY
done
expect 1 'bin 0 labels_3[0]' "$shard" --input labels_i8.h5 --cp 2 --layout zigzag
expect 0 '# extra labels_3 is not compared with labels: it is not one int32' "$shard" --input labels_i2.h5 --cp 2 --layout zigzag

# Masks of packed streams that shards cannot keep.
expect 0 'VERIFY PASSED' "$shard" --input packed.h5 --cp 2 --mask causal-segments
expect 2 'would see each other' "$shard" --input packed.h5 --cp 2 --mask causal
expect 2 'a dense attention mask' "$shard" --input packed.h5 --cp 2 --mask dense
expect 0 'VERIFY PASSED' "$shard" --input packed.h5 --cp 1 --mask full

# The gradient of a gathered stream, by each convention.
expect 0 'VERIFY PASSED 8/8' "$MPIEXEC" -n 3 "$shard" --input packed.h5 --cp 3 --gather-gradient all
expect 0 'VERIFY PASSED 6/6' "$MPIEXEC" -n 2 "$shard" --input packed.h5 --cp 2 --layout balanced --gather-gradient sum
expect 2 '--gather-gradient gathers over the run' "$shard" --input packed.h5 --cp 2 --gather-gradient split

# Shards of one layout become those of another; rows are sent once, and come back as gradients do.
expect 0 'VERIFY PASSED 11/11' "$MPIEXEC" -n 3 "$shard" --input packed.h5 --cp 3 --layout dual-chunk-swap,striped --relayout contiguous
grep -q '# dual-chunk-swap to contiguous: all ranks send [1-9][0-9]* B' output || fail "not said: $(cat output)"
expect 0 '# striped to striped: all ranks send 0 B' "$MPIEXEC" -n 2 "$shard" --input packed.h5 --cp 2 --layout striped --relayout striped
expect 0 'VERIFY PASSED' "$MPIEXEC" -n 4 "$shard" --gen dist=uniform,count=7,min=0,max=50 --cp 4 --layout all --relayout dual-chunk-swap
expect 2 '--relayout needs as many ranks as --cp' "$shard" --input packed.h5 --cp 2 --relayout contiguous
expect 2 'is not a multiple of 2·cp = 10' "$MPIEXEC" -n 5 "$shard" --input packed.h5 --cp 5 --layout contiguous --relayout dual-chunk-swap
expect 2 'is a batch of rows' "$shard" --input "$rows" --cp 2 --relayout contiguous

# Heads for tokens: fewer key heads than ranks, as many, more; a stream that the ranks do not divide.
for case in '1 6' '3 1' '3 6' '4 2'; do
  read -r ranks kv <<<"$case"
  expect 0 'VERIFY PASSED' "$MPIEXEC" -n "$ranks" "$shard" --input packed.h5 --ulysses --heads 12 --kv-heads "$kv" --head-dim 3
done
expect 0 'VERIFY PASSED 3/3' "$MPIEXEC" -n 5 "$shard" --input packed.h5 --ulysses --heads 5 --kv-heads 1 --head-dim 2 --csv heads.csv
(($(column heads.csv padding_slots step=slices) > 0)) || fail "no padding: $(cat heads.csv)"
expect 0 'VERIFY PASSED 4/4' "$MPIEXEC" -n 2 "$shard" --gen dist=fixed,length=12,count=5 --capacity 64 --cp 2 --ulysses --heads 4 \
  --kv-heads 2 --head-dim 8 --csv heads.csv -J heads.json
for step in exchange swapped; do
  sent=$(column heads.csv sent_b step=$step)
  ((sent > 0 && sent == $(column heads.csv formula_b step=$step))) || fail "bytes are not those of the formula: $(cat heads.csv)"
done
for heads in 8 2; do # heads that the ranks do not divide, and fewer than ranks: exchanged, but a file has equal numbers
  uneven=("$MPIEXEC" -n 3 "$shard" --input packed.h5 --ulysses --heads $heads --kv-heads 2 --head-dim 3)
  expect 0 'VERIFY PASSED' "${uneven[@]}"
  expect 2 "$heads query heads do not divide over 3 ranks" "${uneven[@]}" -o uneven.h5
  expect 2 'the nearest number is 1' "${uneven[@]}" -o uneven.h5
done
expect 2 '--ulysses takes no --layout' "$shard" --input packed.h5 --ulysses --layout zigzag

# What cannot be.
expect 2 'one of --input and --gen' "$shard" --cp 2
expect 2 'needs one --layout' "$shard" --input packed.h5 -o none.h5
expect 2 '--heads 8 is not a multiple of --kv-heads 3; the nearest is 9' "$shard" --input packed.h5 --heads 8 --kv-heads 3
expect 2 "--tflops: '0' is not above 0" "$shard" --input packed.h5 --tflops 0
expect 2 '--bin 99: there are' "$shard" --input packed.h5 --svg none.svg --bin 99
expect 2 "'gyre/packed' is needed" "$shard" --input "$source_dir/inputs/docs_tiny.h5"
expect 2 'go with --gen' "$shard" --input packed.h5 --capacity 4K
expect 2 '--bin says what --svg draws' "$shard" --input packed.h5 --bin 1
expect 2 '--heads 7 is not a multiple of --kv-heads 3; the nearest is 6' "$shard" --input packed.h5 --heads 7 --kv-heads 3
expect 2 "--output 'packed.h5' is the file of --input" "$shard" --input packed.h5 --layout zigzag -o packed.h5
expect 2 'is not a positive multiple of 6' "$shard" --gen dist=fixed,length=10,count=5 --cp 3 --capacity 7
# As many ranks as there can be, under every layout, the searched ones as well.
expect 0 'RESULT UNVERIFIED' "$shard" --gen dist=fixed,length=128K,count=1 --capacity 128K --cp 65536 -c none --layout balanced-joint,hybrid
expect 2 '--gen: 1099511627776 slots need 17.6 TB at least, and ' "$shard" --gen dist=fixed,length=64M,count=16K --capacity 64M --cp 2
expect 2 "--cp: '100000' is more than 65536" "$shard" --gen dist=fixed,length=10,count=5 --cp 100000
expect 2 '--stripe 2: layout contiguous does not read it; striped does' "$shard" --input packed.h5 --layout contiguous --stripe 2 -o none.h5
expect 2 '--chunk 8: layout dual-chunk-swap does not read it; balanced and balanced-joint do' "$shard" --input packed.h5 --layout dual-chunk-swap --chunk 8
expect 2 'nearest: zigzag' "$shard" --input packed.h5 --layout zigzg
[ ! -e none.h5 ] && [ ! -e none.svg ] || fail "a refused run left a file"
[ -z "$(ls | grep tmp)" ] || fail "temporary files are left: $(ls)"
echo "shard: all passed"
