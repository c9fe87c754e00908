# Completion of bash for Gyre's programs: commands, options and choices as their --help lists them, and the names of
# machines and models that Gyre brings.
_gyre() {
  local program=$1 word=$2 previous=$3 words='' command=()
  if [[ $program == *gyre-study ]]; then
    if [[ $COMP_CWORD -gt 1 ]]; then command=("${COMP_WORDS[1]}"); else words=1; fi
  fi
  local help inputs
  help=$("$program" "${command[@]}" --help 2>/dev/null) || return
  help=$(sed -E ':join; /\|$/ { N; s/\n +//; b join }' <<<"$help")
  inputs=$(dirname "$(command -v "$program")")/../share/gyre/inputs
  if [[ $word == -* ]]; then
    words=$(grep -oE '^ +-[^ ]+( [^ ]+)*' <<<"$help" | grep -oE -- '--[a-z0-9-]+')
  elif [[ -n $words ]]; then
    words=$(sed -nE 's/^    ([a-z]+) .*/\1/p' <<<"$help")
  elif [[ $program == *gyre-predict && $previous =~ ^--(machine|model)$ ]]; then
    words=$(cd "$inputs/${previous#--}s" 2>/dev/null && printf '%s\n' *.toml *.json | sed -nE 's/^([^*]+)\.(toml|json)$/\1/p')
  elif [[ $previous == -* ]]; then
    words=$(sed -nE "s/^ +(.*,)?$previous(,--[a-z0-9-]+)? ([^ =]*\|[^ =]*).*/\3/p" <<<"$help" | tr '|' '\n' | grep -v '[A-Z]')
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
complete -o default -F _gyre "${BASH_SOURCE[0]##*/}" # installed under the name of each program
