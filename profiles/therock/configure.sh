# Configures TheRock in /therock/build: configure.sh JOBS LINKS TENSILE MEMORY_IN_BYTES CMAKE_ARGUMENT...
#
# From scratch each time, because features keep the value in the cache that their group once had. Only the cache is made
# anew: sub-projects whose configuration stays the same are not built again.

set -eu
# Before the cache is gone.
limits=$(sh /opt/rockenv/limits.sh "$1" "$2" "$3" "$4")
shift 4

# TheRock's fingerprints say nothing of its own CMake files, except that what is built from a directory of the superproject has the
# commit of all of it, of whatever that commit was. A file in such a directory stands for the commit. It says what the
# superproject holds, without submodules, which have commits of their own, and without what is only read.
cd /therock/src
tab=$(printf '\t')
listed=$(git ls-tree -r HEAD)
content=$(printf '%s\n' "$listed" | grep -v -e '^160000 ' -e '[.]md$' -e "${tab}docs/" -e "${tab}[.]github/" | sha256sum)
git grep -l -E '^ *EXTERNAL_SOURCE_DIR +[.]$' -- '*/CMakeLists.txt' | while read -r file; do
    grep -q FPRINT_ "$file" && continue
    # To TheRock the directory's name is `.`.
    known=${file%/CMakeLists.txt}/..
    echo "$content" >"$known.part.smrev"
    mv "$known.part.smrev" "$known.smrev"
done

# Releases before 7.13 want targets for what is the same for all, too, at the latest for rocprof-trace-decoder.
version=$(sed -n 's/.*"rocm-version": *"\([0-9.]*\)".*/\1/p' version.json)
case "$version $*" in
*' -DTHEROCK_AMDGPU_FAMILIES='*) ;;
[0-6].* | 7.[0-9].* | 7.1[0-2].*)
    for argument in "$@"; do
        case $argument in
        -DTHEROCK_DIST_AMDGPU_FAMILIES=*)
            set -- "$@" "-DTHEROCK_AMDGPU_FAMILIES=${argument#*=}" -DTHEROCK_AMDGPU_DIST_BUNDLE_NAME=generic
            ;;
        esac
    done
    ;;
esac

# mirage is Rust, with a dashboard that Node.js builds, and TheRock's images have no Node.js.
case "$*" in
*-DTHEROCK_ENABLE_EMULATION=OFF*) ;;
*)
    node=$(node --version 2>/dev/null | sed -n 's/^v\([0-9]*\).*/\1/p')
    if [ -e emulation/artifact-mirage.toml ] && { [ "${node:-0}" -lt 20 ] || ! command -v cargo >/dev/null; }; then
        echo "left out, because the image has no Rust and Node.js 20: mirage"
        set -- "$@" -DTHEROCK_ENABLE_MIRAGE=OFF
    fi
    ;;
esac

cmake --fresh -G Ninja -S /therock/src -B /therock/build \
    -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache \
    -DTHEROCK_BACKGROUND_BUILD_JOBS=2 \
    $limits \
    "$@"

# Since summer 2026 TheRock splits no library that has code, but none for the targets that it is configured for. RCCL is one where
# it excludes all of them. Its split would fail after the math libraries.
own=$(printf '%s\n' "$@" | sed -n 's/^-DTHEROCK_AMDGPU_FAMILIES=//p')
if [ -n "$own" ] && grep -q -e '--artifact-prefix rccl_lib' /therock/build/build.ninja 2>/dev/null &&
    grep -q 'no device code objects' /therock/src/rocm-systems/shared/kpack/python/rocm_kpack/artifact_splitter.py 2>/dev/null; then
    rccl=$(sed -n 's/^set(GPU_TARGETS \(.*\) CACHE .*/\1/p' /therock/build/comm-libs/rccl/*_toolchain.cmake 2>/dev/null | tr ';' '\n')
    [ -z "$rccl" ] || printf '%s\n' "$own" | tr ';' '\n' | grep -q -x -F -e "$rccl" || {
        echo "error: RCCL has no code for $own, and this version of TheRock refuses to package that" >&2
        echo "help: build variant \`lean\`, or an older release" >&2
        exit 1
    }
fi

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
