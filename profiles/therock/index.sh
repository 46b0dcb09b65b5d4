# Prints the index of finished wheels: index.sh INDEX, or '' for the one that TheRock's own instructions name.

set -eu
[ -n "$1" ] || set -- "$(grep -o -m 1 'https\{0,1\}://[^ ]*/whl-multi-arch/' /therock/src/external-builds/pytorch/build_prod_wheels.py)"
echo "$1"
