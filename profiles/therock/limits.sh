# Prints what CMake is told of limits that no jobserver imposes, an argument a line: limits.sh JOBS LINKS TENSILE MEMORY_IN_BYTES
#
# They are in no key: a tree that was configured before memory ran out, or on another machine, has others. What is built keeps
# those that it was built with. New ones would change nothing of it, but TheRock would configure and stage it again, and then
# all that stands on it.

set -eu
jobs=$1 links=$2 tensile=$3 gib=$(($4 / 1073741824))
cd /therock/build

# flang takes 2 to 6 GiB for each file.
flang=$((gib / 8))
[ "$flang" -ge 1 ] || flang=1
[ "$flang" -le "$jobs" ] || flang=$jobs

built() { # PROJECT
    find . -maxdepth 5 -type d \( -name build -o -name source -o -name stage -o -name dist \) -prune \
        -o -path "*/$1/stamp/build.stamp" -print | grep -q .
}

limit() { # PROJECT VARIABLE VALUE
    kept=
    if [ -e CMakeCache.txt ] && built "$1"; then kept=$(sed -n "s/^$2:[A-Z]*=//p" CMakeCache.txt); fi
    echo "-D$2=${kept:-$3}"
}

limit amd-llvm FLANG_PARALLEL_COMPILE_JOBS "$flang"
limit amd-llvm LLVM_PARALLEL_LINK_JOBS "$links"
limit amd-llvm amd-llvm_CMAKE_ARGS "-DLLVM_PARALLEL_COMPILE_JOBS=$jobs"
limit hipBLASLt hipBLASLt_CMAKE_ARGS "-DTENSILELITE_BUILD_PARALLEL_LEVEL=$tensile"
