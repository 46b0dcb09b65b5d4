# Builds targets of TheRock: build.sh JOBS LINKS TENSILE MEMORY_IN_BYTES TARGET...

set -eu
sh /opt/rockenv/own.sh /therock/out/rocm /therock/out/torch
limits=$(sh /opt/rockenv/limits.sh "$1" "$2" "$3" "$4")
shift 4
for limit in $limits; do
    name=${limit%%=*}
    name=${name#-D}
    sed -n "s/^$name:[A-Z]*=/-D$name=/p" /therock/build/CMakeCache.txt | grep -q -x -e "$limit" || {
        # Of ninja's commands these are in that of the sub-project's configuration, and compilers are not told of them.
        echo "limits of jobs are others than those that were configured:" $limits
        cmake -S /therock/src -B /therock/build $limits
        break
    }
done

# Releases before 7.11 have no stages: what they would build, the artifacts' step builds.
case $1 in
stage-*)
    ninja -C /therock/build -t query "$1" >/dev/null 2>&1 || {
        echo "this release has no target $1: a later step builds what is in it"
        exit 0
    }
    ;;
esac

# Each sub-project has a ninja of its own. They share the jobs of the jobserver, as long as none of them is given a number.
unset CMAKE_BUILD_PARALLEL_LEVEL
# Its argument is for the targets only; ninja hands no number on.
cmake --build /therock/build --target "$@"

# Tarballs that nobody knew of before, for the next build directory: NAME/FILE.
cd /therock/build
find . -path '*_fetch/src/*' -type f \( -name '*.tar.*' -o -name '*.tgz' -o -name '*.zip' \) ! -path '*-stamp/*' | while read -r file; do
    name=${file%_fetch/src/*}
    kept=/cache/tarballs/${name##*/}/${file##*/}
    [ -e "$kept" ] || {
        mkdir -p "${kept%/*}"
        cp "$file" "$kept.$ROCKENV_ENV.part"
        mv "$kept.$ROCKENV_ENV.part" "$kept"
    }
done
