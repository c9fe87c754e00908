#!/usr/bin/env bash
# CPack's packages: the .deb names the libraries that it needs, and a program of what it holds runs; the archive has the
# same files. The target uninstall removes what was installed before them.
# Usage: package.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
command -v dpkg-deb dpkg-shlibdeps >/dev/null || { echo "skipped: there is no dpkg-deb and dpkg-shlibdeps" && exit 77; }

cmake --install "$2" --prefix "$scratch/installed" >log 2>&1 || fail "$(cat log)"
# As of a build by Ninja: for make, CPack would build everything first, other tests too.
cpack --config "$2/CPackConfig.cmake" -D CPACK_CMAKE_GENERATOR=Ninja -B "$scratch/packages" >log 2>&1 || fail "$(cat log)"
deb=$(echo packages/gyre_*.deb)
dpkg-deb -x "$deb" root
for needed in libmpich12 libhdf5-mpich libhwloc15; do
  grep -q "$needed" <(dpkg-deb -f "$deb" Depends) || fail "it does not depend on $needed: $(dpkg-deb -f "$deb")"
done
expect 0 "RESULT UNOFFICIAL" root/usr/bin/gyre-predict --machine h100-sxm-8 --cp 8 --tokens 32K --schedule ring
expect 0 "VERIFY PASSED" "$MPIEXEC" -n 2 root/usr/bin/gyre-attention --tokens 64 -n 2
dpkg-deb -c "$deb" | awk '{ print $6 }' | sed -nE 's@^\./usr/(.*[^/])$@\1@p' | sort >of_deb
cmake -E tar tf packages/gyre-*.tar.zst | sed -nE 's@^[^/]*/(.*[^/])$@\1@p' | sort >of_archive
[[ $(wc -l <of_deb) -gt 500 ]] || fail "few files: $(cat of_deb)"
diff of_deb of_archive || fail "the archive differs from the .deb"
cmake --build "$2" --target uninstall >log 2>&1 || fail "$(cat log)"
! grep -q Warning log || fail "uninstall: $(cat log)"
left=$(find installed ! -type d -o -name '*gyre*')
[[ -z $left ]] || fail "uninstall left $left"
echo "package: all passed"
