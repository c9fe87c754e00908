# man_page.awk -v name=gyre-NAME -v version=N: makes a man page of what gyre-NAME --help prints. A line "Title:" begins a
# section; a line of two or four blanks, an item and two blanks before its text is an entry of it. A list of choices
# continues in the next line after a "|".
function plain(text) {
  gsub(/\\/, "\\e", text)
  gsub(/-/, "\\-", text)
  return text ~ /^[.']/ ? "\\&" text : text
}
function begin_section(title) {
  if (verbatim) print ".fi"
  verbatim = title ~ /^Examples?$/
  print ".SH " toupper(title)
  if (verbatim) print ".nf"
}
function trimmed(text) {
  sub(/^ +/, "", text)
  return text
}
held != "" {
  $0 = held trimmed($0)
  held = ""
}
/\|$/ {
  held = $0
  next
}
tolower($1) == "usage:" {
  $1 = ""
  usage = trimmed($0)
  next
}
!described && $0 != "" {
  text = text == "" ? $0 : text " " $0
  next
}
!described && text != "" {
  printf ".TH %s 1 \"\" \"Gyre %s\" \"User Commands\"\n", toupper(name), version
  begin_section("Name")
  print plain(name " - " text)
  begin_section("Synopsis")
  print ".B " plain(usage)
  described = 1
}
!described { next }
/^[A-Z][a-z]+( [a-z]+)?:/ || /^[a-z]+( arguments)?:$/ {
  title = $0
  sub(/:.*/, "", title)
  begin_section(title)
  sub(/^[^:]*:/, "")
  if ($0 != "") print plain(trimmed($0))
  next
}
verbatim && /^ / {
  print plain(trimmed($0))
  next
}
/^(  |    )[^ ]/ && match($0, /^ +[^ ]+( [^ ]+)*/) {
  print ".TP\n.B " plain(trimmed(substr($0, 1, RLENGTH)))
  $0 = substr($0, RLENGTH + 1)
}
$0 != "" { print plain(trimmed($0)) }
END { if (!described) exit 1 }
