#!/usr/bin/env bash
# reached.sh SOURCE_DIR BUILD_DIR: every function of a public header of src is in a linked app, or stands in tests/unit/reached.allow
# with a reason. Then the check itself is checked on a program that leaves a function out.
set -euo pipefail
source_dir=$1
build_dir=$2

# Sanitizers keep what they instrument; only programs without them are linked with what they reach.
grep -q '^GYRE_SANITIZE:[A-Z]*=.' "$build_dir/CMakeCache.txt" && exit 77

# Without a GPU, functions for its device are in the libraries, but in no program.
grep -q '^GYRE_CUDA:STRING=SOFTWARE$' "$build_dir/CMakeCache.txt" || { echo "skipped: not a build for the software GPU" && exit 77; }

# unreached SOURCE BUILD ALLOWED: a line for each function that is left out of every app and not allowed to be, and for each line
# of ALLOWED that is not needed.
unreached() { /usr/bin/python3 - "$@" <<'PYTHON'
"""Compares the symbols of BUILD/src/libgyre_*.a with those of the programs BUILD/apps/gyre-*.

A function counts when a header of SOURCE/src declares its name. It is reached when any overload of its qualified name is in a
program. A function that its own file, or a file compiled together with it, uses is left out, too, when the compiler has inlined
it there; it is as reached as its caller.
Constructors and destructors do not count: the methods of their class do.
"""
import collections
import glob
import os
import re
import subprocess
import sys

source, build, allowed_path = sys.argv[1:]


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(\\.|[^\"\\\n])*\"", "", text, flags=re.S)


def qualified_name(symbol):
    """"std::vector<float> gyre::f<float>(int)" -> "gyre::f"; nothing for what is no function of ours."""
    if "operator" in symbol or symbol.startswith(("vtable", "typeinfo", "guard", "construction", "VTT")):
        return None
    symbol = symbol.replace("(anonymous namespace)", "ANONYMOUS").replace("[abi:cxx11]", "")
    plain, depth = "", 0
    for character in symbol:
        depth += character == "<"
        if depth == 0:
            plain += character
        depth -= character == ">"
    if "(" not in plain:
        return None
    name = plain.split("(")[0].split()[-1]
    parts = name.split("::")
    if parts[0] != "gyre" or "ANONYMOUS" in parts or "~" in name or parts[-1] == parts[-2]:
        return None
    return name


def symbols(path):
    """Type, demangled name, and for an archive the object of each symbol that `path` defines."""
    output = subprocess.run(["nm", "-A", "-C", "--defined-only", path], check=True, capture_output=True, text=True).stdout
    for line in output.splitlines():
        found = re.match(r"(?P<place>.*?):(?P<address>[0-9a-f]{8,}) (?P<type>\w) (?P<name>.*)", line)
        if found:
            yield found["type"], found["name"], found["place"].split(":")[-1]


headers = ""
for path in sorted(glob.glob(source + "/src/**/*.hpp", recursive=True)):
    headers += without_comments(read(path)) + "\n"


declarations = {}  # of each name, where its parameters begin: a type stands in front, on the same line
for found in re.finditer(r"(?<=[\s&*])(\w+)\(", headers):
    front = headers[headers.rfind("\n", 0, found.start()) + 1:found.start()]
    if re.fullmatch(r"(?!\s*return\b)[^;{}=]*[\w>&*][\s&*]+", front):
        declarations.setdefault(found[1], []).append(found.end())


def is_declared(name):
    """A header declares the function outside of other functions' bodies: a semicolon follows its parameters."""
    for at in declarations.get(name.split("::")[-1], []):
        depth = 1
        while depth > 0 and at < len(headers):
            depth += {"(": 1, ")": -1}.get(headers[at], 0)
            at += 1
        if re.match(r"[^;{}]*;", headers[at:at + 1000]):
            return True
    return False


reached = set()
for program in glob.glob(build + "/apps/gyre-*"):
    if os.access(program, os.X_OK) and os.path.isfile(program):
        reached.update(qualified_name(name) for _, name, _ in symbols(program))

sources = {}
for pattern in ("cpp", "cu"):
    for path in glob.glob(f"{source}/src/**/*.{pattern}", recursive=True):
        sources.setdefault(os.path.basename(path), []).append(path)


def files_of(archive, member):
    """The source of an object of an archive; of a unity build, all that it includes."""
    if not member.startswith("unity_"):
        return sources.get(member, [])
    library = os.path.basename(archive)[len("lib"):-len(".a")]
    return re.findall(r'#include "([^"]+)"', read(f"{build}/src/CMakeFiles/{library}.dir/Unity/{member}"))


defined, members = {}, {}
for archive in sorted(glob.glob(build + "/src/libgyre_*.a")):
    for kind, symbol, member in symbols(archive):
        name = qualified_name(symbol)
        if name and (kind == "T" or kind == "W" and "<" in symbol) and is_declared(name):
            defined.setdefault(name, set()).add(symbol)
            members.setdefault(name, set()).add((archive, member.removesuffix(".o")))


def is_used_in_own_file(name):
    """The source that defines the function names it more often than it defines it."""
    own = name.split("::")[-1]
    for archive, member in members[name]:
        text = "\n".join(without_comments(read(path)) for path in files_of(archive, member))
        text = re.sub(r"(?m)^\s*template (?!<)[^;]*;", "", text)  # explicit instantiations
        if len(re.findall(r"\b" + own + r"\b", text)) > len(defined[name]):
            return True
    return False


# A function whose body is in a header has no symbol of its own where it is inlined: some other line must name it.
bodies = {}
for path in glob.glob(source + "/src/**/*.hpp", recursive=True):
    for found in re.finditer(r"(?m)^(?:template <[^\n]*>\n)?(?:inline |constexpr |GYRE_HOST_DEVICE )*[\w:<>,&* ]+?[ &*]"
                             r"(\w+)\([^;{}]*\)[^;{}]*\{", without_comments(read(path))):
        bodies.setdefault(found[1], os.path.basename(path))
text = headers
for pattern in ("src/**/*.c*", "apps/**/*.[ch]pp"):
    for path in glob.glob(f"{source}/{pattern}", recursive=True):
        text += without_comments(read(path)) + "\n"
words = collections.Counter(re.findall(r"\w+", text))
in_headers = {name: path for name, path in bodies.items() if words[name] == 1}

if not defined or not reached - {None}:
    print(f"nothing to compare: {len(defined)} functions in {build}/src, {len(reached)} in {build}/apps")
allowed = {}
for line in read(allowed_path).splitlines():
    if line.strip() and not line.startswith("#"):
        name, _, reason = line.strip().partition(" ")
        allowed[name] = reason.strip()
        if not reason.strip():
            print(f"{name}: allowed without a reason")
unused = sorted(name for name in defined if name not in reached and not is_used_in_own_file(name))
for name in unused:
    if name not in allowed:
        print(f"{name}: no app reaches it ({', '.join(sorted(member for _, member in members[name]))})")
for name, path in sorted(in_headers.items()):
    if "gyre::" + name not in allowed:
        print(f"gyre::{name}: nothing in src or apps names it ({path})")
for name, reason in allowed.items():
    if name in reached and not reason.startswith("GPU:"):
        print(f"{name}: allowed, but an app reaches it")
    elif name not in defined and not is_declared(name) and name[len("gyre::"):] not in in_headers:
        print(f"{name}: allowed, but there is no such function")
PYTHON
}

found=$(unreached "$source_dir" "$build_dir" "$source_dir/tests/unit/reached.allow")
failed=0
if [[ -n $found ]]; then
  printf '%s\n' "$found"
  failed=1
fi

# A planted library: one function that a program calls, one that is inlined into it, and one of each kind that none calls.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/src/core" "$scratch/build/src" "$scratch/build/apps"
cat >"$scratch/src/core/planted.hpp" <<'CODE'
namespace gyre {
int called(int x);
int helper(int x);  // of called
int planted(int x);
template <class T>
T planted_template(T x);
class Planted {
 public:
  explicit Planted(int x);
  int method() const;
  int in_header() const { return x_; }

 private:
  int x_;
};
int allowed(int x);
inline int planted_inline(int x) { return x + 6; }
}  // namespace gyre
CODE
cat >"$scratch/src/core/planted.cpp" <<'CODE'
#include "planted.hpp"
namespace gyre {
int helper(int x) { return x + 1; }
int called(int x) { return helper(x) * 2; }
int planted(int x) { return x + 2; }
template <class T>
T planted_template(T x) {
  return x + 3;
}
template float planted_template(float);
Planted::Planted(int x) : x_(x) {}
int Planted::method() const { return x_ + 4; }
int allowed(int x) { return x + 5; }
}  // namespace gyre
CODE
echo '#include "planted.hpp"
int main(int argc, char**) { return gyre::called(argc); }' >"$scratch/main.cpp"
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build_dir/CMakeCache.txt")
(
  cd "$scratch"
  "$compiler" -std=c++20 -O2 -ffunction-sections -Isrc/core -c src/core/planted.cpp -o planted.cpp.o
  ar rcs build/src/libgyre_core.a planted.cpp.o
  "$compiler" -std=c++20 -O2 -Isrc/core main.cpp build/src/libgyre_core.a -Wl,--gc-sections -o build/apps/gyre-planted
)

# expect ALLOW_LINES EXPECTED: what the planted library is found to be.
expect() {
  printf '%b' "$1" >"$scratch/allow"
  found=$(unreached "$scratch" "$scratch/build" "$scratch/allow")
  [[ $found == "$2" ]] && return
  printf 'the check is broken: with "%s" allowed it finds\n%s\nand not\n%s\n' "$1" "$found" "$2"
  failed=1
}
all='gyre::Planted::method: no app reaches it (planted.cpp)
gyre::planted: no app reaches it (planted.cpp)
gyre::planted_template: no app reaches it (planted.cpp)
gyre::in_header: nothing in src or apps names it (planted.hpp)
gyre::planted_inline: nothing in src or apps names it (planted.hpp)'
expect 'gyre::allowed for a test\n' "$all"
expect 'gyre::allowed for a test\ngyre::planted\n' "gyre::planted: allowed without a reason
$(grep -v 'planted:' <<<"$all")"
expect 'gyre::allowed for a test\ngyre::called a reason\n' "$all
gyre::called: allowed, but an app reaches it"
expect 'gyre::allowed for a test\ngyre::nobody a reason\n' "$all
gyre::nobody: allowed, but there is no such function"

[[ $failed -eq 0 ]] && echo "reached: every function of a public header is in an app, or has a reason"
exit "$failed"
