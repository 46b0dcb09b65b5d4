# Makes a directory for results, without those of an earlier run: empty.sh DIRECTORY. Files of others stay.

set -eu
sh /opt/rockenv/own.sh "$1"
mkdir -p "$1"
# The mark is there before the first result and after the last one, whenever the step is killed.
touch "$1/.rockenv"
find "$1" -mindepth 1 ! -path "$1/.rockenv" -delete
