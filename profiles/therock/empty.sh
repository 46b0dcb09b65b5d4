# Makes a directory for results, without those of an earlier run: empty.sh DIRECTORY. Files that others put there stay.

set -eu
if [ -e "$1" ] && [ ! -e "$1/.rockenv" ]; then
    echo "error: \`$1\` was not made by this profile, so its files stay: move it elsewhere" >&2
    exit 1
fi
rm -rf "$1"
mkdir -p "$1"
touch "$1/.rockenv"
