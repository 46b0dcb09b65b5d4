# Builds targets of TheRock: build.sh TARGET...

set -eu
# Each sub-project has a ninja of its own. They share the jobs of the jobserver, as long as none of them is given a number.
unset CMAKE_BUILD_PARALLEL_LEVEL
# Its argument is for the targets only; ninja hands no number on.
cmake --build /therock/build --target "$@"

# TheRock downloads them again for every build directory.
cd /therock/build
find . -path '*_fetch/src/*' -type f \( -name '*.tar.*' -o -name '*.tgz' -o -name '*.zip' \) ! -path '*-stamp/*' | while read -r file; do
    [ -e "/cache/tarballs/$file" ] || {
        mkdir -p "/cache/tarballs/${file%/*}"
        cp "$file" "/cache/tarballs/$file.$$.part"
        mv "/cache/tarballs/$file.$$.part" "/cache/tarballs/$file"
    }
done
