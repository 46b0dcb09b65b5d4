#!/bin/sh
# build.sh COMPONENT [option of cmake]...: configure, build, install to /home/builder/rocm, check.
#
# TARGET: the GPU; none for headers, which are the same for every GPU. BUILD: what ninja builds.
# CODE: installed files with code for GPUs. HOST_TESTS: a regular expression of tests that need no GPU.
set -eu
component=$1
shift
prefix=/home/builder/rocm
if [ ! -d "/src/$component" ]; then
  echo "left out: $component is not among the components"
  exit 0
fi
if [ -n "${TARGET:-}" ]; then build=/build/$component; else build=/tmp/$component; fi
# Named on no command line and in no dependency file, but linked into every kernel: the device libraries.
CCACHE_EXTRAFILES=$(find /var/lib/dpkg/info -name 'rocm-device-libs-*.md5sums')
export CCACHE_EXTRAFILES CCACHE_STATSLOG=$build/ccache.statslog

cmake --fresh -G Ninja -S "/src/$component" -B "$build" \
  -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_INSTALL_PREFIX=$prefix -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_PREFIX_PATH=$prefix \
  -DCMAKE_INSTALL_RPATH='$ORIGIN' \
  -DCMAKE_CXX_COMPILER=hipcc -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_C_COMPILER_LAUNCHER=ccache \
  -DGPU_TARGETS="${TARGET:-gfx1100}" -DAMDGPU_TARGETS="${TARGET:-gfx1100}" \
  -DROCM_SYMLINK_LIBS=OFF -DFETCHCONTENT_FULLY_DISCONNECTED=ON \
  "$@"
rm -f "$CCACHE_STATSLOG"
# Without -j ninja takes its jobs from rockenv's jobserver, which withdraws some while memory is short.
ninja -C "$build" ${BUILD:-all}
# By component: without, tests and benchmarks would be installed too, which are not all built.
for part in runtime devel Unspecified; do cmake --install "$build" --component $part; done

for code in ${CODE:-}; do python3 /opt/rocm-libs/check_isa.py "$prefix/lib/$code" "$TARGET"; done
if [ -n "${HOST_TESTS:-}" ]; then
  ctest --test-dir "$build" --no-tests=error --output-on-failure -R "^($HOST_TESTS)\$"
fi
if [ -e "$CCACHE_STATSLOG" ]; then ccache --show-log-stats; fi
