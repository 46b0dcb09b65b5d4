//! Owns the list of the environment variables that rockenv reads.

use crate::sys::trust;

/// The variables that are read and what they mean, for the documentation.
pub const VARIABLES: [(&str, &str); 32] = [
    ("ROCKENV_HOME", "root of the store, like `--home`"),
    (
        "ROCKENV_ENGINE",
        "engine to use: `auto`, `nspawn`, `docker` or `podman`",
    ),
    (
        "ROCKENV_DISK_FLOOR",
        "free space below which a step is paused, such as `1G`; `0` never pauses",
    ),
    (
        "ROCKENV_LOG_MAX",
        "size of a step's log, such as `256M`; of a longer one the middle is left out",
    ),
    (
        "ROCKENV_NINJA",
        "a ninja 1.13 or newer, in place of the one that rockenv fetches",
    ),
    (
        "ROCKENV_CA_CERTIFICATES",
        "certificate authorities that steps and downloads trust too: `host`, or PEM files with colons in between",
    ),
    (
        "ROCKENV_HTTP_TIMEOUT",
        "how long a server may send next to nothing, such as `60s`: then a download, a login or a request has failed",
    ),
    (
        trust::VARIABLE,
        "directories, with `:` between them, whose `rockenv.toml`, `profiles/`, `images/` and `hooks/` count without `rockenv trust`, as do those below",
    ),
    (
        "ROCKENV_REGISTRY",
        "repository that snapshots are pushed to and pulled from, such as `registry.example.org/rockenv`",
    ),
    ("DOCKER_HOST", "socket of Docker, as `unix:///PATH`"),
    (
        "DOCKER_CONTEXT",
        "Docker's context, in place of the one that `docker context use` chose; `DOCKER_HOST` wins",
    ),
    (
        "ROCKENV_SSH",
        "how `rockenv on` calls ssh, such as `ssh -i KEY` [default: `ssh`]",
    ),
    ("CONTAINER_HOST", "socket of Podman, as `unix:///PATH`"),
    (
        "ROCKENV_JOBS",
        "jobs at once on this machine, in all envs together, in place of the number of cores",
    ),
    (
        "ROCKENV_BUILD_USER",
        "`UID:GID` that steps run as, in place of the invoking user",
    ),
    (
        "ROCKENV_GPU_ROOT",
        "directory in whose `sys` and `dev` GPUs are looked for, to try out another machine's [default: `/`]",
    ),
    (
        "SUDO_UID, SUDO_GID, PKEXEC_UID",
        "the invoking user, whom root acts for",
    ),
    (
        "HOME",
        "what `~` in a profile means where the user has no passwd entry",
    ),
    (
        "XDG_CONFIG_HOME",
        "where `rockenv/config.toml`, `profiles/`, `images/` and `hooks/` are looked for",
    ),
    (
        "REGISTRY_AUTH_FILE",
        "file with logins to registries, in place of those that `podman login` and `docker login` write",
    ),
    (
        "DOCKER_CONFIG",
        "directory of Docker's `config.json`, `~/.docker` otherwise",
    ),
    (
        "PATH",
        "where the programs are looked for that keep an ordinary user's logins to registries; no others are",
    ),
    (
        "CCACHE_REMOTE_STORAGE",
        "ccache's storage for several machines, like `ccache-remote` in the configuration: for profiles that name it in `env-from-host`",
    ),
    ("XDG_DATA_HOME", "where the store of an ordinary user is"),
    (
        "http_proxy, https_proxy, ftp_proxy, no_proxy",
        "passed on to tools that fetch, in either case",
    ),
    ("NO_COLOR", "no colour, where it is set and not empty"),
    (
        "CLICOLOR_FORCE",
        "colour without a terminal too, where it is set and not `0`",
    ),
    (
        "TERM",
        "`dumb` or unset: nothing moves on the screen, and no colour; inside it is the same, on a terminal",
    ),
    (
        "CI",
        "nothing moves on the screen, where it is set and not `false` or `0`",
    ),
    (
        "GITHUB_ACTIONS, GITLAB_CI",
        "where one is `true`, steps fold in the job's output, and GitHub shows errors and warnings beside it",
    ),
    (
        "GITHUB_STEP_SUMMARY",
        "file that `up` and `matrix up` add their report to, in GitHub Actions",
    ),
    (
        "COMPLETE",
        "the shell that asks for completions: set by its script",
    ),
];
