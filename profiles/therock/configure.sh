# Configures TheRock in /therock/build: configure.sh JOBS LINKS TENSILE MEMORY_IN_BYTES CMAKE_ARGUMENT...
#
# From scratch each time, because features keep the value in the cache that their group once had. Only the cache is made
# anew: sub-projects whose configuration stays the same are not built again.

set -eu
jobs=$1 links=$2 tensile=$3 gib=$(($4 / 1073741824))
shift 4

# flang takes 2 to 6 GiB for each file.
flang=$((gib / 8))
[ "$flang" -ge 1 ] || flang=1
[ "$flang" -le "$jobs" ] || flang=$jobs

cmake --fresh -G Ninja -S /therock/src -B /therock/build \
    -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache \
    -DTHEROCK_BACKGROUND_BUILD_JOBS=2 \
    "-DFLANG_PARALLEL_COMPILE_JOBS=$flang" "-DLLVM_PARALLEL_LINK_JOBS=$links" \
    "-Damd-llvm_CMAKE_ARGS=-DLLVM_PARALLEL_COMPILE_JOBS=$jobs" \
    "-DhipBLASLt_CMAKE_ARGS=-DTENSILELITE_BUILD_PARALLEL_LEVEL=$tensile" \
    "$@"

# TheRock downloads tarballs into a directory for each: NAME_fetch/src. One that is there already is not downloaded; a download
# that failed leaves an empty file.
cd /therock/build
find . -type d \( -name build -o -name source -o -name stage -o -name dist \) -prune -o -type d -path '*_fetch/src' -print | while read -r place; do
    name=${place%_fetch/src}
    for file in "/cache/tarballs/${name##*/}"/*; do
        [ -f "$file" ] && [ "${file%.part}" = "$file" ] || continue
        cmp -s "$file" "$place/${file##*/}" || cp "$file" "$place/${file##*/}"
    done
done
