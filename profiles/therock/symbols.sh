# Builds a sub-project of TheRock again with debug symbols, and puts its libraries where the wheels' are:
# symbols.sh PROJECT JOBS LINKS TENSILE MEMORY_IN_BYTES

set -eu
project=$1
limits=$(sh /opt/rockenv/limits.sh "$2" "$3" "$4" "$5")
unset CMAKE_BUILD_PARALLEL_LEVEL

# It is built anew, by this machine's limits.
find /therock/build -maxdepth 6 -path "*/$project/stamp/build.stamp" -delete
cmake -S /therock/src -B /therock/build "-D${project}_BUILD_TYPE=RelWithDebInfo" $limits
cmake --build /therock/build --target "$project+dist"

stage=$(find /therock/build -maxdepth 6 -type d -path "*/$project/stage" | head -n 1)
[ -n "$stage" ] || { echo "sub-project $project has no directory below /therock/build" >&2; exit 1; }
replaced=0
for library in $(find "$stage/lib" -type f -name '*.so*'); do
    for installed in $(find /home/builder/venv/lib -path '*_rocm_sdk_*' -type f -name "${library##*/}"); do
        cp "$library" "$installed.part"
        mv "$installed.part" "$installed"
        replaced=$((replaced + 1))
        echo "$installed has debug symbols"
    done
done
[ "$replaced" != 0 ] || { echo "no library of $project is installed in /home/builder/venv" >&2; exit 1; }
