#!/usr/bin/env bash
# one_place.sh SOURCE_DIR [BUILD_DIR]: the name of a schedule or of a layout stands in one file, its own: nothing else in src
# and apps names it. The names are those that the entries give themselves. Then the check itself is checked: it must notice
# violations planted into a copy.
set -euo pipefail

# entries FOLDER SUFFIX: prints "NAME FILE" for each entry X(LINE) of the folder's list, whose file defines LINE_SUFFIX().
# The name is `.name = "..."` of the entry, or the layout_name that it stands for.
entries() {
  local folder=$1 suffix=$2 line name file
  while IFS= read -r line; do
    file=$folder/$line.cpp
    if [[ ! -e $file ]] || ! grep -qE "^[A-Z][A-Za-z]+ ${line}_$suffix\(\) \{" "$file"; then
      echo "$folder/list.hpp: X($line) is not defined in $file" >&2
      continue
    fi
    name=$(sed -nE 's/.*(\.name|layout_name) = "([^"]+)".*/\2/p' "$file")
    [[ $name =~ ^[a-z-]+$ ]] || { echo "$file: not one name, but '$name'" >&2 && continue; }
    echo "$name $file"
  done < <(sed -nE 's/^ *X\(([a-z_]+)\).*/\1/p' "$folder/list.hpp")
}

# Prints every violation in the tree $1.
violations() {
  cd "$1"
  local name file all
  all=$(entries src/attention/schedules schedule 2>&1 && entries src/sharding/layouts layout 2>&1)
  grep -E ' is not defined in |: not one name' <<<"$all" || true
  all=$(grep -E '^[a-z-]+ src/' <<<"$all" || true)
  [[ $(grep -c ' src/attention/' <<<"$all") -ge 2 && $(grep -c ' src/sharding/' <<<"$all") -ge 2 ]] ||
    echo "there are not even two schedules and two layouts: $all"
  while read -r name file; do
    [[ $(grep -oE "\"$name\"" "$file" | wc -l) -eq 1 ]] || echo "$file: \"$name\" is there more than once"
    # A packer of bins may have the name of a layout.
    grep -rnE --include='*.[ch]pp' --include='*.cu' --include='*.cuh' "\"$name\"" src apps |
      sed 's@//.*@@' | grep -F "\"$name\"" |
      grep -vE "^($file|src/packing/bins[a-z_]*\.cpp):" | sed "s@\$@   <- only $file may name it@" || true
    # In a longer text, an option's value is a name all the same, but for the examples of --help in a main file.
    grep -rnE --include='*.[ch]pp' --exclude=main.cpp -- "\".*--(schedule|layout) $name\b" src apps |
      sed "s@\$@   <- only $file may name it@" || true
  done <<<"$all"
}

failed=0

# must_notice FILE LINE EXPECTED: with LINE added to FILE of a copy, the violations must hold EXPECTED; nothing, if that is ''.
must_notice() {
  local copy found
  copy=$(mktemp -d)
  mkdir -p "$copy/src" "$copy/apps/common"
  cp -r "$source_dir/src/attention" "$source_dir/src/sharding" "$copy/src"
  mkdir -p "$copy/$(dirname "$1")"
  printf '%b\n' "$2" >>"$copy/$1"
  found=$(violations "$copy")
  rm -rf "$copy"
  if [[ -n $3 && $found != *"$3"* ]] || [[ -z $3 && -n $found ]]; then
    echo "the check is broken: with '$2' in $1 it should find '${3:-nothing}', but finds '$found'"
    failed=1
  fi
}

source_dir=$(cd "$1" && pwd)
found=$(violations "$source_dir")
if [[ -n $found ]]; then
  printf '%s\n' "$found"
  failed=1
fi

must_notice apps/common/a.cpp 'if (o.schedule == "all-gather-strided") return;' 'all_gather_strided.cpp may name it'
must_notice src/model/a.hpp 'Layout* layout = find("striped");' 'striped.cpp may name it'
must_notice src/sharding/layouts/zigzag.cpp 'bool is(const char* n) { return n == "contiguous"; }' 'contiguous.cpp may name it'
must_notice src/attention/schedules/halo.cpp 'const char* again = "halo";' 'more than once'
must_notice apps/common/a.cpp 'problems.add("goes with --layout zigzag");' 'zigzag.cpp may name it'
must_notice src/attention/schedules/list.hpp '  X(newcomer)' 'X(newcomer) is not defined'
must_notice src/packing/plan.cpp 'if (layout == "balanced") return;' 'balanced.cpp may name it'
# And what is allowed must pass.
must_notice src/packing/bins.cpp '{"balanced", "a packer"},' ''
must_notice apps/one/main.cpp '"Examples: gyre-one --schedule halo\\n"' ''
must_notice apps/common/a.cpp '// not "halo" in a comment' ''

[[ $failed -eq 0 ]] && echo "one place: no schedule or layout is named outside its own file"
exit "$failed"
