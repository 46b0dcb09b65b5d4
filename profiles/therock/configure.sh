# Configures TheRock in /therock/build: configure.sh JOBS MEMORY_IN_BYTES CMAKE_ARGUMENT...
#
# From scratch each time, because features keep the value in the cache that their group once had. Only the cache is made
# anew: sub-projects whose configuration stays the same are not built again.

set -eu
jobs=$1 gib=$(($2 / 1073741824))
shift 2

# One job for each so many GiB of memory, but at least one, and not more than there are jobs.
per() {
    limit=$((gib / $1))
    [ "$limit" -ge 1 ] || limit=1
    [ "$limit" -le "$jobs" ] || limit=$jobs
    echo "$limit"
}

# What is built already may want the tarballs of its sources again; those that are there are not downloaded.
cd /cache/tarballs
find . -type f ! -name '*.part' | while read -r file; do
    [ -e "/therock/build/$file" ] || {
        mkdir -p "/therock/build/${file%/*}"
        cp "$file" "/therock/build/$file"
    }
done
cd /therock/src

# Linking LLVM takes 4 to 8 GiB a job, flang 2 to 6 for each file.
cmake --fresh -G Ninja -S /therock/src -B /therock/build \
    -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache \
    -DTHEROCK_BACKGROUND_BUILD_JOBS=2 \
    "-DFLANG_PARALLEL_COMPILE_JOBS=$(per 8)" "-DLLVM_PARALLEL_LINK_JOBS=$(per 16)" \
    "-Damd-llvm_CMAKE_ARGS=-DLLVM_PARALLEL_COMPILE_JOBS=$jobs" \
    "-DhipBLASLt_CMAKE_ARGS=-DTENSILELITE_BUILD_PARALLEL_LEVEL=$(per 8)" \
    "$@"
