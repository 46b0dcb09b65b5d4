# Fetches TheRock's submodules into the checkout that it is run in: sources.sh FLAG...
#
# Flags that this release's fetch_sources.py does not have are left out.

set -eu
sh /opt/rockenv/own.sh /therock/out/rocm /therock/out/torch
flags=$(sh /opt/rockenv/flags.sh 'python3 build_tools/fetch_sources.py' "$@")
set -- --depth 1 --jobs 8 $flags
if [ ! -d .git ]; then
    echo "error: the git directory of this checkout is elsewhere, as that of a git worktree, and steps do not see it" >&2
    echo "help: use a clone" >&2
    exit 1
fi
mkdir -p ~/.cache
ln -sfn /cache/dvc ~/.cache/therock-dvc
# One fetch at a time: envs share the checkout.
exec 9>.git/rockenv-fetch.lock
flock 9

# A fetch applies TheRock's patches anew, and files that it writes are newer than what was built of them. So there is none, as long
# as all submodules are what the last one left, of the same commit.
fetched() {
    git rev-parse HEAD
    printf '%s\n' "$@"
    git diff HEAD -- .gitmodules patches
    git ls-files --others -z -- patches | xargs -0 -r sha256sum
    git submodule foreach --quiet --recursive 'echo "$displaypath $(git rev-parse HEAD)"'
}
if [ "$(fetched "$@")" = "$(cat .git/rockenv-fetched 2>/dev/null)" ]; then
    echo "all submodules are as they were fetched"
    exit
fi
# A fetch checks out the commits that TheRock names. Prints the submodules below $1 that are at others, which the user made or chose:
# the log of HEAD says so. Those that an earlier commit of the superproject named count only if the user made them.
made='^(am:|cherry-pick|commit|revert|rebase.* \((pick|continue|squash|fixup|reword|edit)|(merge|pull).*: Merge made)'
kept() {
    git -C "./$1" ls-files --stage | sed -n 's/^160000 \([0-9a-f]*\) 0\t/\1 /p' | while read -r named path; do
        path=$1$path
        [ -e "$path/.git" ] || continue
        # On top of it are the patches of a fetch.
        commit=$(git -C "$path" log --format='%H %ce' | sed -n '/ therockbot@amd[.]com$/!{s/ .*//p;q}')
        log=$(git -C "$path" log -g --format='%H %gs' | sed -n "s/^$commit //p" |
            grep -v -x -e 'clone: .*' -e 'reset: moving to HEAD') || :
        if [ "$commit" != "$named" ] && [ -n "$log" ] && { printf '%s\n' "$log" | grep -q -E "$made" ||
            [ -z "$(git -C "./$1" log --all --reflog -1 --format=%h --no-renames --find-object="$commit")" ]; }; then
            printf ' %s' "$path"
        fi
        kept "$path/"
    done
}
kept=$(GIT_DIR=.git; export GIT_DIR; kept '')
if [ -n "$kept" ]; then
    echo "error: a fetch would replace your commits in these submodules:$kept" >&2
    echo "help: run in the directory above each: git add SUBMODULE, to build it (if TheRock patches it: git format-patch, to patches/);" \
        "or git submodule update SUBMODULE, to leave it" >&2
    exit 1
fi
rm -f .git/rockenv-fetched

# Patched submodules are commits of their own, and before 7.11 those had the present time: each fetch made others, and the source
# was never what it had been. The date is that of newer releases.
export GIT_COMMITTER_DATE='Thu, 1 Jan 2099 00:00:00 +0000'

# What the mirrors have is fetched from them. Not by --reference-dir: with that each submodule goes on reading its objects from the
# mirror, whose path there is in an env only, and nobody could clear the cache.
wanted=$(git ls-tree -r HEAD | sed -n 's/^160000 commit \([0-9a-f]*\).*/\1/p')
names=$(git config --file .gitmodules --get-regexp '^submodule[.].*[.]url$' | sed 's/[.]git$//; s|.*[/ ]||')
mirrors=/tmp/mirrors.gitconfig
: >"$mirrors"
for mirror in $(find /cache/git-mirrors -type d -name '*.git' -prune); do
    url=$(git --git-dir "$mirror" config remote.origin.url) || continue
    known= name=${url##*/}
    # Which commit a submodule wants of its own submodules is not known before it is here.
    printf '%s\n' "$names" | grep -q -x -F -e "${name%.git}" || known=1
    for commit in $wanted; do
        [ -z "$known" ] || break
        ! git --git-dir "$mirror" cat-file -e "$commit" 2>/dev/null || known=1
    done
    [ -z "$known" ] || git config --file "$mirrors" "url.file://$mirror.insteadOf" "$url"
done
if [ -s "$mirrors" ]; then
    git config --file "$mirrors" include.path ~/.gitconfig
    # Whoever made the mirrors, and although submodules are not to come from files.
    git config --file "$mirrors" safe.directory '*'
    git config --file "$mirrors" protocol.file.allow always
    GIT_CONFIG_GLOBAL=$mirrors python3 build_tools/fetch_sources.py "$@" 9>&- && {
        fetched "$@" >.git/rockenv-fetched
        exit
    }
    echo "not by the mirrors in /cache/git-mirrors: once more without them" >&2
    # What was cloned and not checked out is at its commit already, so git would leave it empty.
    git submodule foreach --quiet --recursive '[ -n "$(ls -A | grep -v -x .git)" ] || git reset --quiet --hard'
fi
python3 build_tools/fetch_sources.py "$@" 9>&-
fetched "$@" >.git/rockenv-fetched
