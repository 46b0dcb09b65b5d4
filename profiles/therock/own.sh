# Ends with an error if a directory for results has other files: own.sh DIRECTORY... Steps that take hours run this first.
#
# empty.sh marks the directories that it made. An earlier rockenv did not.

set -eu
for results in "$@"; do
    [ -e "$results" ] || [ -L "$results" ] || continue
    if [ -d "$results" ] && [ ! -L "$results" ]; then
        if [ -f "$results/.rockenv" ] || [ -z "$(ls -A "$results")" ]; then continue; fi
    fi
    echo "error: \`$results\` has files that this profile did not make, or that an earlier rockenv made" >&2
    echo "help: move it away, or if you need nothing in it: rockenv exec ENV -- rm -r $results" >&2
    exit 1
done
