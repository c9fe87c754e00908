#!/usr/bin/env bash
# logprobs_names.sh SOURCE_DIR: what gyre-logprobs measures and reports depends on the entries of its operations, never
# on their names. No name of an operation stands in quotes in apps/logprobs outside ops/. The names are learned from the
# entries in ops/, of which there must be as many as lines in the registry. Then the check itself is checked.
set -euo pipefail
source_dir=${1%/}

# The lines of these files without // comments, as FILE:LINE:TEXT.
code_of() { grep -nH '' "$@" | sed 's@//.*@@'; }

# Names of the operations whose entries are in the tree $1, one a line: the text behind `.name =`, or the first argument of a
# family's function.
names_of() {
  grep -hoE '(\.name = |_family\()"[a-z0-9-]+"' "$1"/apps/logprobs/ops/*.cpp | grep -oE '"[a-z0-9-]+"' | tr -d '"'
}

# Prints every violation in the tree $1.
violations() {
  local names entries lines pattern file
  names=$(names_of "$1" | sort -u)
  entries=$(wc -l <<<"$names")
  lines=$(grep -cE '^  X\([a-z_]+\)' "$1/apps/logprobs/registry.cpp" || true)
  [[ $entries -eq $lines ]] || echo "registry.cpp lists $lines operations, but ops/ has the entries of $entries"
  pattern="\"($(paste -sd'|' <<<"$names"))\""
  code_of "$1"/apps/logprobs/*.[ch]pp | grep -E "$pattern" |
    sed "s@^$1/@@; s@\$@   <- the name of an operation@" || true
  # Members of a family are told apart by what their entries hold.
  code_of "$1"/apps/logprobs/ops/*.[ch]pp | grep -E "(==|!=) *$pattern|$pattern *(==|!=)" |
    sed "s@^$1/@@; s@\$@   <- compares the name of an operation@" || true
}

failed=0
found=$(violations "$source_dir")
if [[ -n $found ]]; then
  printf '%s\n' "$found"
  failed=1
fi

# must_notice FILE LINE EXPECTED: with LINE added to FILE of a copy, a violation must contain EXPECTED; none, if empty.
must_notice() {
  local copy found
  copy=$(mktemp -d)
  mkdir -p "$copy/apps"
  cp -r "$source_dir/apps/logprobs" "$copy/apps"
  printf '%s\n' "$2" >>"$copy/apps/logprobs/$1"
  found=$(violations "$copy")
  rm -rf "$copy"
  if [[ -n $3 && $found != *"$3"* ]] || [[ -z $3 && -n $found ]]; then
    echo "the check is broken: with '$2' in $1 it should find '${3:-nothing}', but finds '$found'"
    failed=1
  fi
}

# Every name that there is, all at once.
copy=$(mktemp -d)
mkdir -p "$copy/apps"
cp -r "$source_dir/apps/logprobs" "$copy/apps"
names_of "$source_dir" | sed 's@.*@if (row.op == "&") return rates.copy;@' >>"$copy/apps/logprobs/run.cpp"
found=$(violations "$copy")
rm -rf "$copy"
while read -r name; do
  [[ $found == *"\"$name\""* ]] || { echo "the check is broken: '$name' in run.cpp is not found"; failed=1; }
done < <(names_of "$source_dir")
must_notice main.cpp 'bool is_written(const std::string& op) { return op == "top-k"; }' 'the name of an operation'
must_notice report.hpp 'inline constexpr const char* shown = "logprob-entropy";' 'the name of an operation'
must_notice ops/top_k.cpp 'const bool argmax = name == "argmax";' 'compares the name of an operation'
must_notice registry.cpp '  X(newcomer)' 'but ops/ has the entries of'
must_notice ops/top_k.cpp 'LogprobsOperation new_operation() { return {.name = "newcomer"}; }' 'but ops/ has the entries of'
# And what is allowed must pass.
must_notice run.cpp '// As "softmax" does.' ''
must_notice run.cpp 'const char* text = "the softmax of a row";' ''
must_notice run.cpp 'if (operation.forward == RowTraffic::copies) return rates.copy;' ''

[[ $failed -eq 0 ]] && echo "logprobs_names: all rules hold"
exit "$failed"
