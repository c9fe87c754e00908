#!/usr/bin/env bash
# one_place.sh SOURCE_DIR [BUILD_DIR]: the name of a schedule, of a layout or of an operation on logits stands in one file, its
# own, and so do the names of an operation's arrays, inputs and parameters: nothing else in src and apps names them. The names
# are those that the entries give themselves. Then the check itself is checked: it must notice violations planted into a copy.
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
  all=$(entries src/attention/schedules schedule 2>&1 && entries src/recurrence/schedules schedule 2>&1 &&
    entries src/sharding/layouts layout 2>&1)
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

# The lines of these files without // comments, as FILE:LINE:TEXT.
code_of() { grep -nH '' "$@" | sed 's@//.*@@'; }

# Names that the files of operations give: behind .name and .gradient, or the first argument of a family's function.
names_in() { cat "$@" | tr '\n' ' ' | grep -oE '(\.name = |\.gradient = |_family\() *"[a-z0-9_-]+"' | grep -oE '"[^"]+"' | tr -d '"' | sort -u; }

# Prints every violation by operations in the tree $1: those on rows, with an entry each, and those of apps/logprobs/ops.
violations_of_operations() {
  cd "$1"
  local line count pattern rows=src/logprobs/operations ops=apps/logprobs/ops
  while IFS= read -r line; do
    grep -qE "^RowOperation ${line}_operation\(\) \{" "$rows/$line.cpp" 2>/dev/null ||
      echo "$rows/list.hpp: X($line) is not defined in $rows/$line.cpp"
  done < <(sed -nE 's/^ *X\(([a-z_0-9]+)\).*/\1/p' $rows/list.hpp)
  pattern="\"($(names_in $rows/*.cpp | paste -sd'|'))\""
  # The pipeline's results have the names of scores.
  grep -rnE --include='*.[ch]pp' --include='*.cu' --include='*.cuh' "$pattern" src apps | sed 's@//.*@@' |
    grep -E "$pattern" | grep -vE "^($rows/|apps/pipeline/)" |
    sed "s@\$@   <- only its file in $rows may name it@" || true
  count=$(names_in $ops/*.cpp | wc -l)
  [[ $count -eq $(grep -cE '^  X\([a-z_]+\)' apps/logprobs/registry.cpp || true) ]] ||
    echo "apps/logprobs/registry.cpp lists other operations than $ops has"
  pattern="\"($(names_in $ops/*.cpp | paste -sd'|'))\""
  code_of apps/logprobs/*.[ch]pp | grep -E "$pattern" | sed "s@\$@   <- the name of an operation@" || true
  code_of $ops/*.[ch]pp | grep -E "(==|!=) *$pattern|$pattern *(==|!=)" |
    sed "s@\$@   <- compares the name of an operation@" || true
}

failed=0

# must_notice FILE LINE EXPECTED: with LINE added to FILE of a copy, the violations must hold EXPECTED; nothing, if that is ''.
must_notice() {
  local copy found
  copy=$(mktemp -d)
  mkdir -p "$copy/src" "$copy/apps/common"
  cp -r "$source_dir"/src/{attention,recurrence,sharding,logprobs} "$copy/src"
  cp -r "$source_dir/apps/logprobs" "$copy/apps"
  mkdir -p "$copy/$(dirname "$1")"
  printf '%b\n' "$2" >>"$copy/$1"
  found=$("$check" "$copy")
  rm -rf "$copy"
  if [[ -n $3 && $found != *"$3"* ]] || [[ -z $3 && -n $found ]]; then
    echo "the check is broken: with '$2' in $1 it should find '${3:-nothing}', but finds '$found'"
    failed=1
  fi
}

source_dir=$(cd "$1" && pwd)
found=$(violations "$source_dir" && violations_of_operations "$source_dir")
if [[ -n $found ]]; then
  printf '%s\n' "$found"
  failed=1
fi

check=violations
must_notice apps/common/a.cpp 'if (o.schedule == "all-gather-strided") return;' 'all_gather_strided.cpp may name it'
must_notice src/model/a.hpp 'Layout* layout = find("striped");' 'striped.cpp may name it'
must_notice apps/recurrence/a.cpp 'if (o.schedule == "state-chain") return;' 'state_chain.cpp may name it'
must_notice src/sharding/layouts/zigzag.cpp 'bool is(const char* n) { return n == "contiguous"; }' 'contiguous.cpp may name it'
must_notice src/attention/schedules/halo.cpp 'const char* again = "halo";' 'more than once'
must_notice apps/common/a.cpp 'problems.add("goes with --layout zigzag");' 'zigzag.cpp may name it'
must_notice src/attention/schedules/list.hpp '  X(newcomer)' 'X(newcomer) is not defined'
must_notice src/packing/plan.cpp 'if (layout == "balanced") return;' 'balanced.cpp may name it'
# And what is allowed must pass.
must_notice src/packing/bins.cpp '{"balanced", "a packer"},' ''
must_notice apps/one/main.cpp '"Examples: gyre-one --schedule halo\\n"' ''
must_notice apps/common/a.cpp '// not "halo" in a comment' ''

check=violations_of_operations
must_notice src/io/a.cpp 'if (input == "teacher_topk_logprobs") return;' 'only its file in src/logprobs/operations'
must_notice apps/logprobs/report.cpp 'bool shown = op == "logprob-entropy";' 'only its file in src/logprobs/operations'
must_notice src/report/a.cpp 'fields.at("focal_gamma");' 'only its file in src/logprobs/operations'
must_notice src/logprobs/operations/list.hpp '  X(newcomer)' 'X(newcomer) is not defined'
must_notice apps/logprobs/main.cpp 'return op == "top-k";' 'the name of an operation'
must_notice apps/logprobs/ops/top_k.cpp 'const bool argmax = name == "argmax";' 'compares the name of an operation'
must_notice apps/logprobs/registry.cpp '  X(newcomer)' 'lists other operations'
must_notice apps/logprobs/run.cpp 'const char* text = "the softmax of a row"; // "softmax"' ''

[[ $failed -eq 0 ]] && echo "one place: no schedule, layout or operation is named outside its own file"
exit "$failed"
