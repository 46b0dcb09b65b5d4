# Prints the index of finished wheels: index.sh INDEX, or '' for the one that TheRock's own instructions name.

set -eu
cd /therock/src/external-builds/pytorch
[ -n "$1" ] || set -- "$(cat build_prod_wheels.py README.md | grep -o -m 1 -E 'https?://[^ ]*/whl-(multi-arch|next)/?')"
[ -n "$1" ] || {
    echo "this release of TheRock names no index for all targets: --param index=URL, or --release 7.13 or newer" >&2
    exit 1
}
echo "$1"
