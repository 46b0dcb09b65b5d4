# Builds targets of TheRock: build.sh JOBS TARGET...

set -eu
jobs=$1
shift

# Each sub-project has a ninja of its own, and the number of jobs of the outer one reaches none of them: three run at a time,
# one and two in the background. Where there is a job server they share its jobs, and a number of their own would keep them
# from asking it.
case ${MAKEFLAGS-} in
*--jobserver-auth=*) ;;
*)
    level=$((jobs / 3))
    [ "$level" -ge 1 ] || level=1
    export CMAKE_BUILD_PARALLEL_LEVEL=$level
    ;;
esac
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
