#!/usr/bin/env bash
# gyre-pack: what it packs, converts and unpacks, what it prints, what it refuses.
# Usage: pack.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
pack=$apps/gyre-pack
compare=$apps/gyre-compare
docs=$source_dir/inputs/docs_tiny.h5

# The bits do not depend on the number of ranks.
expect 0 'VERIFY PASSED 4/4' "$pack" --input "$docs" --capacity 128 --cp 4 -o one.h5
for ranks in 2 5; do
  expect 0 'VERIFY PASSED 4/4' "$MPIEXEC" -n "$ranks" "$pack" --input "$docs" --capacity 128 --cp 4 -o many.h5
  expect 0 'VERIFY PASSED' "$compare" one.h5 many.h5
done
expect 0 '17 documents' "$MPIEXEC" -n 3 "$pack" --input one.h5 --unpack -o back.h5
expect 0 'VERIFY PASSED 3/3' "$compare" --common back.h5 "$docs"

# All packers in one table; each packs all items, in no more bins than next-fit.
expect 0 'VERIFY PASSED 2/2' "$pack" --gen dist=long-tailed,count=2000,max=8K,seed=3 --capacity 32K \
  --algorithm all --dp 4 -n 2 --csv table.csv -J result.json
paste <(column table.csv algorithm) <(column table.csv items) <(column table.csv bins) |
  awk '{ bins[$1] = $3; if ($2 != 2000) exit 1 }
     END { exit !(NR == 6 && bins["balanced"] <= bins["first-fit-decreasing"] && bins["balanced"] % 4 == 0 &&
                  bins["first-fit-decreasing"] <= bins["next-fit"]) }' || fail "wrong table: $(cat table.csv)"
grep -q 'over dp=4 ranks' output || fail "no line about ranks: $(cat output)"
grep -q '"gyre-result/1"' result.json || fail "no JSON"
grep -qE '^FOM gyre-pack documents_per_s [0-9.e+]+ 1/s algorithm=balanced' output || fail "no documents a second: $(cat output)"

# Bins for groups of ranks: the shortest step of all packers. A token's keys take as long as so many pairs.
for rates in '2000 --gbps 50' '33 --gbps 3000' '2000 --gbps 50 --dp 2' '1000 --gbps 50 --kv-heads 4' '1000 --tflops 200' \
  '2000 --heads 64 --head-dim 256 --tflops 800 -d bf16' '4000 -d f32'; do
  # shellcheck disable=SC2086
  expect 0 "as it needs (for other programs: --pairs-per-key ${rates%% *}): next-fit " "$pack" --cp 8 ${rates#* } \
    --gen dist=long-tailed,count=200,max=32K,seed=1 --capacity 32K --algorithm all --csv table.csv
  paste <(column table.csv algorithm) <(column table.csv step_ms) |
    awk '{ step[$1] = $2 } $1 != "hybrid" && (least == "" || $2 < least) { least = $2 }
         END { exit !(NR == 6 && least > 0 && step["hybrid"] == least) }' || fail "hybrid is not the shortest: $(cat table.csv)"
done
expect 0 'VERIFY PASSED' "$pack" --input "$docs" --capacity 128 --cp 4 --algorithm hybrid -o hybrid.h5
grep -q '"hybrid"' <(h5dump -a /packed/algorithm hybrid.h5) || fail "another packer: $(h5dump -A hybrid.h5)"
expect 0 '17 documents' "$pack" --input hybrid.h5 --unpack -o back.h5
expect 0 'VERIFY PASSED 3/3' "$compare" --common back.h5 "$docs"
expect 0 'VERIFY PASSED' "$apps/gyre-shard" --input hybrid.h5 --cp 4 --layout hybrid
# The groups of the layout follow the same weights: keys that take long to receive are sent less.
for pairs in 1 5000; do
  expect 0 'VERIFY PASSED' "$apps/gyre-predict" --machine h100-sxm-8 --cp 8 --capacity 32K --layout hybrid --schedule group-cast \
    --gen dist=long-tailed,count=60,max=16K,seed=1 --pairs-per-key $pairs --pass fwd --csv "$pairs.csv"
done
awk '{ sent[NR] = $1 } END { exit !(NR == 2 && sent[2] < 0.7 * sent[1]) }' <(column 1.csv sent_mb_rank; column 5000.csv sent_mb_rank) ||
  fail "as many keys are sent: $(cat 1.csv 5000.csv)"
expect 2 '--pairs-per-key 9: layout striped does not read it; balanced-joint and hybrid do' "$apps/gyre-predict" --machine h100-sxm-8 --cp 8 --tokens 8K --layout striped --pairs-per-key 9
expect 2 '--heads 32 is not a multiple of --kv-heads 5' "$pack" --input "$docs" --kv-heads 5
for other in '--unpack -o never.h5' '--algorithm balanced' ''; do
  # shellcheck disable=SC2086
  expect 2 '--tflops and --gbps go with --algorithm hybrid' "$pack" --input one.h5 $other --gbps 9
done
printf '5\n7\n300\n' >lengths.txt
expect 0 'dist=list,file=lengths.txt' "$pack" --gen dist=list,file=lengths.txt --capacity 512 --csv table.csv
[ "$(column table.csv tokens)" = 312 ] || fail "other lengths than the file's: $(cat table.csv)"
! grep -q documents_per_s output || fail "a figure of merit of one repetition"
expect 0 'dist=speech' "$pack" --gen dist=speech,count=50 --capacity 4K -o speech.h5
expect 0 'dist=uniform' "$pack" --gen dist=uniform,min=1,max=300,count=40 --capacity 600 --algorithm next-fit \
  --max-items 3 --min-bins 17
expect 0 'over dp=3' "$pack" --gen dist=fixed,length=100,count=30 --capacity 1K --dp 3 --algorithm first-fit-shuffle --seed 9
expect 0 'dist=log-normal' "$pack" --gen dist=log-normal,median=200,count=64,max=1K --capacity 2K \
  --algorithm modified-first-fit-decreasing --bin-multiple 4

# Documents that begin alike, stored once, and separated again.
for i in 1 2 3 4; do
  { head -c 200 "$source_dir/LICENSE"; head -c $((340 + 50 * i)) "$source_dir/LICENSE" | tail -c 40; } >"answer$i"
done
expect 0 documents "$apps/gyre-import" -o rollouts.h5 answer? "$source_dir/CMakePresets.json"
expect 0 '5 documents in 2 trees' "$pack" --input rollouts.h5 --share-prefixes --cp 2 -o trees.h5
grep -q 'VERIFY PASSED 4/4' output || fail "trees are not checked: $(cat output)"
for ranks in 1 3; do
  expect 0 'VERIFY PASSED 4/4' "$MPIEXEC" -n "$ranks" "$pack" --input rollouts.h5 --share-prefixes --capacity 512 --oversize own-bin -o split.h5
  expect 0 '5 documents' "$MPIEXEC" -n "$ranks" "$pack" --input split.h5 --unpack -o separate.h5
  expect 0 'VERIFY PASSED' "$compare" --common rollouts.h5 separate.h5
done
grep -q '241, 201, 202' <(h5dump -y -w 0 -d /packed/positions trees.h5) || fail "positions do not go on from the prompt"
pairs=$("$pack" --input rollouts.h5 --share-prefixes | grep -oE '[0-9]+ pairs instead' | grep -oE '[0-9]+')
expect 0 'VERIFY PASSED' "$apps/gyre-shard" --input trees.h5 --cp 2 --layout all -v
[ "$(awk '/by rank:/ { tables++ } /^# +[01] / && tables { sum += $4 } END { print sum / tables }' output)" = "$pairs" ] ||
  fail "ranks do not compute the $pairs pairs of trees: $(cat output)"
expect 2 'hold trees of them (--share-prefixes)' "$pack" --input trees.h5 --repad --cp 3 -o never.h5
expect 2 '--share-prefixes packs the documents of --input' "$pack" --gen dist=fixed,length=9,count=3 --share-prefixes
expect 2 "CMakePresets.json') of" "$pack" --input rollouts.h5 --share-prefixes --capacity 512

# Rows of a data loader, text with audio.
expect 0 '9 segments' "$pack" --input "$source_dir/inputs/bshd_tiny.h5" --tail keep -o rows.h5
expect 0 '11 segments' "$pack" --input "$source_dir/inputs/bshd_tiny.h5" --cp 2
expect 0 'absorbed by the last segment' "$pack" --input "$source_dir/inputs/bshd_tiny.h5" --chunks 4 --tail absorb
expect 2 'chunks' "$pack" --input "$source_dir/inputs/bshd_tiny.h5" --chunks 3
expect 2 'row 0, segment 0' "$pack" --input "$source_dir/inputs/bshd_tiny.h5" --cp 4

# Labels rolled by cu_seqlens: the padding before a document has its first token.
/usr/bin/python3 - "$source_dir/inputs/bshd_tiny.h5" <<'PY'
import shutil, sys, h5py
for path, labels, place in ((sys.argv[1], "bshd/labels", (0, 3)), ("rows.h5", "packed/labels", 3)):
    name = "rolled_" + labels[:4] + ".h5"
    shutil.copy(path, name)
    with h5py.File(name, "r+") as f:
        del f.attrs["content_sha256"]
        f[labels][place] = 134
PY
rolled='slot 3 is padding, and its label is the first token of the next document: were labels rolled by cu_seqlens'
expect 2 "rolled_bshd.h5': row 0, $rolled" "$MPIEXEC" -n 2 "$pack" --input rolled_bshd.h5
expect 2 "rolled_bshd.h5': row 0, $rolled" "$apps/gyre-shard" --input rolled_bshd.h5 --cp 2
expect 2 "row 0, $rolled" "$apps/gyre-shard" --input rolled_bshd.h5 --cp 2 --format bshd
expect 2 "bin 0, $rolled" "$apps/gyre-shard" --input rolled_pack.h5
expect 2 "bin 0, $rolled" "$pack" --input rolled_pack.h5 --repad -o never.h5

# Ids alone: each row is a document, padding is at the end of a stream; slot lengths that are the real ones.
golden=$source_dir/inputs/golden
expect 0 'stream 0: 5 segments, 48 slots' "$pack" --input "$golden/rows_without_tables.h5" -o ids.h5
grep -q 'VERIFY PASSED 3/3' output || fail "documents of rows are not checked: $(cat output)"
expect 0 'tokens 31 real by the padding mask' "$pack" --input "$golden/rows_without_tables.h5" --tail absorb
grep -q absorbed output && fail "without slot lengths there is nothing to absorb: $(cat output)"
expect 0 '5 documents, 31 tokens' "$pack" --input ids.h5 --unpack -o back.h5
expect 2 "rows_padded.h5': row 1, slot 5 holds the pad id 100 before real tokens" "$pack" --input "$golden/rows_padded.h5"
grep -q -- '; --chunks 4 makes a stream of each row' output || fail "no advice: $(cat output)"
expect 0 'stream 3: 1 segments' "$MPIEXEC" -n 2 "$pack" --input "$golden/rows_padded.h5" --chunks 4 --tail keep -o padded.h5

# What goes along comes out of every conversion, whatever the ranks.
expect 0 '# extras: attention_mask (slots), grid (none), image (slots), weight (rows), word (rows)' \
  "$pack" --input "$golden/rows_extras.h5" --cp 2 -o extras.h5
grep -q 'VERIFY PASSED 3/3' output || fail "extras are not checked: $(cat output)"
expect 0 'VERIFY PASSED' "$MPIEXEC" -n 3 "$pack" --input "$golden/rows_extras.h5" --cp 2 --chunks 3 -o extras3.h5
expect 0 'VERIFY PASSED 5/5' "$compare" extras.h5:/packed/extras extras3.h5:/packed/extras
expect 0 'VERIFY PASSED 3/3' "$pack" --input extras.h5 --repad --cp 3 -o repadded.h5
grep -q H5T_STD_I32BE <(h5dump -d /packed/extras/grid extras.h5) || fail "another type: $(h5dump -H extras.h5)"

expect 0 'encoder 3 audio items over 2 ranks' "$MPIEXEC" -n 2 "$pack" --input "$source_dir/inputs/salm_tiny.h5" \
  --cp 2 --tp 3 -o salm.h5

salm=("$pack" --input "$source_dir/inputs/salm_tiny.h5")
expect 0 'VERIFY PASSED 9/9' "$MPIEXEC" -n 4 "${salm[@]}" --cp 4 -o salm.h5
"$pack" --input "$source_dir/inputs/salm_tiny.h5" -q -J salm.json >/dev/null
for check in 'shards of text and audio' 'encoder gradient, sum' 'encoder gradient, split' 'encoder gradient, none' \
  'encoder bytes' 'encoder gradient bytes'; do
  grep -q "$check" salm.json || fail "no check '$check' in the JSON"
done
# Encodings and their gradients, to a file and against one.
expect 0 'VERIFY PASSED 8/8' "$MPIEXEC" -n 2 "${salm[@]}" --cp 2 --encoder encoder.h5
expect 0 '# yours: 7 of 7 datasets' "$MPIEXEC" -n 2 "${salm[@]}" --cp 2 --yours encoder.h5
expect 2 "ranks of '/encoder' is 2; the run has 1" "${salm[@]}" --yours encoder.h5
/usr/bin/python3 - <<'PY'
import h5py
with h5py.File("encoder.h5") as file, h5py.File("yours.h5", "w") as yours:
    yours.attrs.update({k: v for k, v in file.attrs.items() if k != "content_sha256"})
    file.copy("encoder", yours)
    for dataset in yours["encoder"].values():
        values = dataset[...]
        values.reshape(-1)[-1] += 1
        dataset[...] = values
PY
expect 1 'VERIFY FAILED' "$MPIEXEC" -n 2 "${salm[@]}" --yours yours.h5 -v
for array in frame_offsets encoder_rank frames d_frames d_sum d_split d_none; do
  grep -qF "$array[" output || fail "$array is not named: $(cat output)"
done
expect 2 '--yours and --tp-rounding are for text with audio' "$pack" --input "$docs" --encoder none.h5
# Times, and the rounding of upstream: tp divides all slots, but not those of a rank.
expect 0 'FOM gyre-pack documents_per_s' "${salm[@]}" --iters 7
expect 0 'FOM gyre-pack documents_per_s' "$pack" --input "$source_dir/inputs/bshd_tiny.h5" --iters 7
slots() { # OPTION...: slots of the stream of text and audio
  "${salm[@]}" --cp 2 --tp 8 "$@" -q -o rounded.h5 >/dev/null
  h5dump -H -d /packed/labels rounded.h5 | grep -oP 'SIMPLE \{ \( \K[0-9]+'
}
total=$(slots --tp-rounding total) each=$(slots)
[ $((total % 8)) -eq 0 ] && [ $((total / 2 % 8)) -ne 0 ] && [ $((each / 2 % 8)) -eq 0 ] ||
  fail "slots: $total in all, $each by rank"

# Documents in rows, which become streams; what a row cannot hold.
expect 0 '3 rows of 160 slots, 0 documents dropped' "$pack" --input "$docs" --rows 160 --cp 2 -o rows160.h5
grep -q 'VERIFY PASSED 4/4' output || fail "rows are not checked: $(cat output)"
expect 0 'tokens 354 real by the padding mask, 339 with a label' "$pack" --input rows160.h5 --cp 2
expect 0 'VERIFY PASSED 4/4' "$MPIEXEC" -n 3 "$pack" --input "$docs" --rows 160 --cp 2 -o rows3.h5
expect 0 'VERIFY PASSED' "$compare" rows160.h5 rows3.h5
expect 0 '5 rows of 64 slots, 1 documents dropped' "$pack" --input "$docs" --rows 64 --cp 2 --oversize drop
expect 0 'VERIFY PASSED 3/3' "$pack" --gen dist=long-tailed,count=100,max=64 --rows 100
expect 2 'sample 9: length 120 takes 120 slots in a row of 64' "$pack" --input "$docs" --rows 64 --cp 2
expect 2 'row width 66 is not a positive multiple of 4' "$pack" --input "$docs" --rows 66 --cp 2
expect 2 'rows have one width' "$pack" --input "$docs" --rows 64 --oversize own-bin
expect 2 '--rows alone leaves documents out' "$pack" --input "$docs" --oversize drop
expect 2 'do not apply' "$pack" --input "$docs" --rows 160 --algorithm balanced
expect 2 'do not apply' "$pack" --input rows160.h5 --rows 160

# Packed streams for other ranks hold the same documents.
expect 0 'VERIFY PASSED 3/3' "$MPIEXEC" -n 2 "$pack" --input one.h5 --repad --cp 6 --tp 2 -o other.h5
expect 0 '17 documents' "$pack" --input other.h5 --unpack -o back.h5
expect 0 'VERIFY PASSED 3/3' "$compare" --common back.h5 "$docs"
expect 2 'option of next-fit, which --algorithm first-fit-decreasing,balanced lacks' "$pack" --input "$docs" --capacity 256 \
  --algorithm first-fit-decreasing,balanced --max-items 1
expect 0 'VERIFY PASSED' "$pack" --gen dist=fixed,length=0,count=2 --capacity 64 --mtp 3 -o nothing.h5
expect 2 '--mtp 2 needs --output' "$pack" --input "$docs" --mtp 2
expect 2 "'gyre/packed' is needed" "$pack" --input "$docs" --repad --cp 2
expect 2 '--repad takes the packed streams' "$pack" --input one.h5 --repad --stream-slots 160
expect 2 '--repad pads ids' "$pack" --input salm.h5 --repad

# Streams of a length that a trainer asks for: the tail is a document of no tokens, or of the last one.
expect 0 '480 slots in all, 20 documents with padding' "$pack" --input "$docs" --capacity 144 --cp 2 --tp 2 --stream-slots 160 -o long.h5
grep -q 'VERIFY PASSED 5/5' output || fail "rounded streams are not checked: $(cat output)"
expect 0 '20 documents, 354 tokens' "$pack" --input long.h5 --unpack -o back.h5
expect 0 '448 slots in all, 17 documents' "$pack" --input "$docs" --capacity 144 --cp 2 --tp 2 --stream-multiple 32 --tail keep
expect 2 'stream 0: the sequences need 144 slots; a stream of 80 is too short' "$pack" --input "$docs" --capacity 144 --stream-slots 80
expect 2 'cannot have both a fixed length' "$pack" --input "$docs" --stream-slots 16K --stream-multiple 8
expect 2 '--tail absorb counts padding' "$pack" --input "$docs" --stream-slots 16K --tail absorb

# Every row of the table of what is sound, asked before anything is packed.
able=(--input "$docs" --cp 2 --attention varlen,padded-offsets,cp-aware)
expect 0 '# compatibility: ok' "$pack" "${able[@]}" --fused-flag 0 --device 12.0
expect 0 '# compatibility: ok' "$pack" "${able[@]}" --device 12.0 --gradient-probe agrees
expect 0 '# compatibility: warning' "$pack" "${able[@]}" --device 9.0
expect 0 '# compatibility: warning' "$pack" "${able[@]}" --device 12.0 --forward-only
expect 2 'turn fused attention off' "$pack" "${able[@]}" --device 12.0
expect 2 'differs from the reference' "$pack" "${able[@]}" --fused-flag 1 --device 9.0 --gradient-probe differs
expect 2 'linear-attention layers' "$pack" "${able[@]}" --linear-attention
expect 2 'does not support context parallelism' "$pack" --input "$docs" --cp 2 --attention varlen,padded-offsets
expect 0 '# compatibility: warning' "$pack" --input "$docs" --attention varlen,padded-offsets
expect 2 'does not support segments of different lengths' "$pack" --input "$docs" --attention none -o none.h5
# Padded offsets are needed only where there is padding; rows that are not packed, only with one rank.
expect 0 '# compatibility: warning' "$pack" --input "$docs" --attention varlen
expect 2 'does not support padding between segments' "$pack" --input "$docs" --attention varlen --tp 8
expect 2 'does not support padding between segments' "$pack" --input "$docs" --cp 2 --attention varlen,cp-aware
expect 2 'does not support padding between segments' "$pack" --input "$source_dir/inputs/bshd_tiny.h5" --attention varlen --tail keep
expect 0 '# compatibility: warning' "$pack" --input "$golden/rows_of_padding.h5" --attention varlen --tail absorb
expect 2 'unpacked rows with cp 2: the padding mask cannot be honoured' "$pack" "${able[@]}" --unpacked
expect 0 '# compatibility: ok: unpacked rows with cp 1' "$pack" --input "$docs" --attention none --unpacked
expect 2 'nearest: padded-offsets' "$pack" --input "$docs" --attention varlen,paded-offsets
expect 2 "--device '9' is no compute capability" "$pack" "${able[@]}" --device 9
expect 2 'go with --attention' "$pack" --input "$docs" --device 9.0

# Documents longer than a bin.
expect 2 "('length-120') of 120 tokens takes 120 slots, a bin has 64" "$pack" --input "$docs" --capacity 64
expect 2 '--gen: 1099511627776 slots need 17.6 TB at least, and ' "$pack" --gen dist=fixed,length=64M,count=16K --capacity 64M -o none.h5
expect 2 '--gen: 1099511627776 slots need 17.6 TB at least, and ' "$pack" --gen dist=fixed,length=64M,count=16K --rows 64M
expect 2 'max=8192 in --gen cuts documents' "$pack" --gen dist=fixed,length=9000,count=2
expect 0 'RESULT' "$pack" --input "$docs" --capacity 64 --oversize own-bin

expect 2 'a bin has 16 (the longest of 5 that do not fit); --capacity 120 would hold all' "$pack" --input "$docs" --capacity 16

# No documents: nothing is packed, nor claimed to have been checked.
documents_of "$docs" empty.h5
expect 0 'RESULT UNVERIFIED (nothing to check: no documents' "$pack" --input empty.h5 --algorithm all
expect 0 'RESULT UNVERIFIED (nothing to check: no documents' "$MPIEXEC" -n 3 "$pack" --input empty.h5 -o packed-empty.h5
expect 0 'RESULT UNVERIFIED (nothing to check: no slots' "$apps/gyre-shard" --input packed-empty.h5 --cp 2
expect 2 'nothing was packed' "$pack" --input empty.h5 --rows 64

# Labels of further tokens ahead: in the file, through --repad and in shards of layouts that pad; a wrong one is found.
expect 0 'VERIFY PASSED 9/9' "$MPIEXEC" -n 2 "$pack" --input "$docs" --capacity 512 --cp 2 --mtp 6 -o ahead.h5
expect 0 'VERIFY PASSED' "$pack" --input ahead.h5 --repad --cp 3 -o ahead3.h5
expect 0 'VERIFY PASSED' "$pack" --input one.h5 --repad --cp 3 --mtp 6 -o other3.h5
for ranks in 1 3; do
  expect 0 'VERIFY PASSED' "$MPIEXEC" -n "$ranks" "$apps/gyre-shard" --input ahead3.h5 --cp 3 --layout all
done
expect 0 'VERIFY PASSED' "$MPIEXEC" -n 2 "$apps/gyre-shard" --input ahead.h5 --cp 2 --layout striped --stripe 7 -o shards.h5
/usr/bin/python3 - <<'PY'
import h5py, numpy as np, shutil
with h5py.File("ahead.h5") as f:
    packed = f["packed"]
    bins, real, slots = (packed[n][:] for n in ("bin_offsets", "cu_seqlens", "cu_seqlens_padded"))
    first = 0
    for b, (begin, end) in enumerate(zip(bins, bins[1:])):
        bounds = slice(begin + b, end + b + 1)
        for n, at in zip(np.diff(real[bounds]), slots[bounds]):
            tokens = packed["ids"][first + at : first + at + n]
            for k in range(2, 7):
                mine = packed[f"extras/labels_{k}"][first + at : first + at + n]
                assert (mine == np.append(tokens[k:], [-100] * min(k, n))).all(), (b, at, k)
        first += slots[bounds][-1]
    assert all(packed[f"extras/labels_{k}"].attrs["padding"] == -100 for k in range(2, 7))
with h5py.File("shards.h5") as f:
    pads = f["shards/index"][:] >= first
    assert pads.any() and (f["shards/extras/labels_3"][:][pads] == -100).all()
shutil.copy("ahead.h5", "rolled.h5")
with h5py.File("rolled.h5", "r+") as f:  # as if the document behind went on
    f.attrs.pop("content_sha256", None)
    f["packed/extras/labels_4"][real[1] - 1] = f["packed/ids"][slots[1]]
PY
expect 1 'bin 0 labels_4' "$apps/gyre-shard" --input rolled.h5 --cp 2 --layout zigzag
expect 2 'has the extra labels_2 already' "$pack" --input ahead.h5 --repad --cp 4 --mtp 3 -o none.h5
expect 2 "--mtp: '17' is more than 16" "$pack" --input "$docs" --mtp 17 -o none.h5
expect 2 'not with --unpack or --rows' "$pack" --input "$docs" --mtp 2 --rows 64 -o none.h5
expect 2 'with --share-prefixes, documents go on differently' "$pack" --input "$docs" --mtp 2 --share-prefixes -o none.h5

# What cannot be.
expect 2 'one of --input and --gen' "$pack" --capacity 64
for several in all next-fit,balanced; do expect 2 "needs one --algorithm, not $several" "$pack" --input "$docs" --algorithm $several -o none.h5; done
expect 0 'VERIFY PASSED' "$pack" --input "$docs" --capacity 256 --algorithm balanced,next-fit --csv several.csv
[ "$(column several.csv algorithm | xargs)" = 'next-fit balanced' ] || fail "a list is not run as such: $(cat several.csv)"
expect 2 'nearest: balanced' "$pack" --input "$docs" --algorithm balancd
expect 2 'bin capacity 100 is not a positive multiple of 8' "$MPIEXEC" -n 2 "$pack" --input "$docs" --capacity 100 --cp 4 -o none.h5
expect 2 'long-tail' "$pack" --gen dist=long-tail
expect 2 'takes --input and --output' "$pack" --unpack --input one.h5
expect 2 '--csv goes with a run, not with --unpack' "$pack" --unpack --input one.h5 -o none.h5 --csv none.csv
expect 2 'do not apply' "$pack" --input "$source_dir/inputs/bshd_tiny.h5" --algorithm balanced
expect 2 "--output 'one.h5' is the file of --input" "$MPIEXEC" -n 2 "$pack" --unpack --input one.h5 -o one.h5
expect 2 "--csv './none.h5' is the file of --output" "$pack" --input "$docs" -o none.h5 --csv ./none.h5
expect 2 'it is there and no regular file' "$pack" --input "$docs" --capacity 128 -o /dev/null
[ -c /dev/null ] || fail "/dev/null was replaced"
expect 2 "--cp: '2000000000' is more than 65536" "$pack" --input "$docs" --cp 2000000000
expect 2 "cannot read '.': it is a folder" "$pack" --input .
expect 0 'balanced ' "$pack" --input "$docs" --capacity 256 --algorithm all
! grep '# refused' output || fail "a packer refuses documents of which one is empty"
expect 2 "'gyre/packed' is needed" "$pack" --unpack --input "$docs" -o none.h5
expect 2 "'gyre/documents' is needed" "$pack" --input one.h5 -o none.h5
expect 2 'there is no folder' "$pack" --input "$docs" -o no/none.h5
[ ! -e none.h5 ] || fail "a refused run left a file"
head -c 20000 one.h5 >short.h5
expect 3 'short.h5' "$pack" --input short.h5 --unpack -o none.h5
[ -z "$(ls | grep tmp)" ] || fail "temporary files are left: $(ls)"
echo "pack: all passed"
