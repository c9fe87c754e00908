# Sourced by scripts that run programs step by step. Needs `folder`.
LOG_TAIL=15
steps=0

# step NAME TITLE COMMAND...: runs the command with all output in $folder/NAME.log; a failure ends the script.
step() {
  local name=$1 title=$2 status=0 start log=$folder/$1.log
  shift 2
  steps=$((steps + 1))
  printf '  %d  %-9s  %-60s' "$steps" "$name" "$title"
  start=$(date +%s%N)
  printf '$ %s\n' "$*" >"$log"
  timeout 600 "$@" >>"$log" 2>&1 || status=$?
  if [[ $status -ne 0 ]]; then
    printf 'FAILED\n\nStep "%s" ended with exit code %d; the end of %s:\n' "$name" "$status" "$log" >&2
    tail -n "$LOG_TAIL" "$log" >&2
    exit 1
  fi
  awk -v ns=$(($(date +%s%N) - start)) 'BEGIN { printf "%6.1f s\n", ns / 1e9 }'
}
