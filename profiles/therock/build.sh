# Builds targets of TheRock: build.sh TARGET...

set -eu
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
        cp "$file" "$kept.$$.part"
        mv "$kept.$$.part" "$kept"
    }
done
