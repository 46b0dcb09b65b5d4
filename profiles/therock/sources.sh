# Fetches TheRock's submodules into the checkout that it is run in: sources.sh FLAG...
#
# Flags that this release's fetch_sources.py does not have are left out.

set -eu
set -- --depth 1 --jobs 8 $(sh /opt/rockenv/flags.sh 'python3 build_tools/fetch_sources.py' "$@")
mkdir -p ~/.cache
ln -sfn /cache/dvc ~/.cache/therock-dvc
# One fetch at a time: envs share the checkout.
exec 9>.git/rockenv-fetch.lock
flock 9

# What the mirrors have is fetched from them. Not by --reference-dir: with that each submodule goes on reading its objects from the
# mirror, whose path there is in an env only, and nobody could clear the cache.
wanted=$(git ls-tree -r HEAD | sed -n 's/^160000 commit \([0-9a-f]*\).*/\1/p')
mirrors=/tmp/mirrors.gitconfig
: >"$mirrors"
for mirror in $(find /cache/git-mirrors -type d -name '*.git' -prune); do
    url=$(git --git-dir "$mirror" config remote.origin.url) || continue
    for commit in $wanted; do
        git --git-dir "$mirror" cat-file -e "$commit" 2>/dev/null || continue
        git config --file "$mirrors" "url.file://$mirror.insteadOf" "$url"
    done
done
if [ -s "$mirrors" ]; then
    git config --file "$mirrors" include.path ~/.gitconfig
    # Whoever made the mirrors, and although submodules are not to come from files.
    git config --file "$mirrors" safe.directory '*'
    git config --file "$mirrors" protocol.file.allow always
    GIT_CONFIG_GLOBAL=$mirrors python3 build_tools/fetch_sources.py "$@" 9>&- && exit
    echo "not by the mirrors in /cache/git-mirrors: once more without them" >&2
fi
python3 build_tools/fetch_sources.py "$@" 9>&-
