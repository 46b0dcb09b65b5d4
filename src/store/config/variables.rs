//! Owns the list of the environment variables that rockenv reads.

use crate::sys::trust;

/// The variables that are read and their meaning, for the documentation.
pub const VARIABLES: [(&str, &str); 38] = [
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
        "size of a step's log, such as `256M`; of a longer one the middle is omitted",
    ),
    (
        "ROCKENV_NINJA",
        "a ninja 1.13 or newer, instead of the one that rockenv fetches",
    ),
    (
        "ROCKENV_CA_CERTIFICATES",
        "additional certificate authorities for steps and downloads: `host`, or PEM files separated by colons",
    ),
    (
        "ROCKENV_HTTP_TIMEOUT",
        "how long a server may send almost nothing, such as `60s`, before a download, login or request fails",
    ),
    (
        trust::VARIABLE,
        "directories separated by `:` whose `rockenv.toml`, `profiles/`, `images/` and `hooks/` are trusted without `rockenv trust`, including subdirectories",
    ),
    (
        trust::DIGEST_VARIABLE,
        "digest by which these files of the current directory are trusted: set by `rockenv on` on the other machine",
    ),
    (
        "ROCKENV_REGISTRY",
        "repository that snapshots are pushed to and pulled from, such as `registry.example.org/rockenv`",
    ),
    (
        "ROCKENV_SIGN_KEY",
        "private key that signs pushed snapshots, as `cosign generate-key-pair` makes it",
    ),
    (
        "COSIGN_PASSWORD",
        "password of that key; empty if it has none",
    ),
    (
        "ROCKENV_VERIFY_KEY",
        "public key that pulled snapshots must be signed with",
    ),
    ("DOCKER_HOST", "socket of Docker, as `unix:///PATH`"),
    (
        "DOCKER_CONTEXT",
        "Docker's context, instead of the one chosen by `docker context use`; `DOCKER_HOST` wins",
    ),
    (
        "ROCKENV_SSH",
        "how `rockenv on` calls ssh, such as `ssh -i KEY` [default: `ssh`]",
    ),
    ("CONTAINER_HOST", "socket of Podman, as `unix:///PATH`"),
    (
        "ROCKENV_JOBS",
        "job slots of this machine for all envs together, instead of the number of cores",
    ),
    (
        "ROCKENV_BUILD_USER",
        "`UID:GID` that steps run as, instead of the invoking user",
    ),
    (
        "ROCKENV_GPU_ROOT",
        "directory whose `sys` and `dev` are searched for GPUs, to simulate another machine [default: `/`]",
    ),
    (
        "SUDO_UID, SUDO_GID, PKEXEC_UID",
        "the invoking user, on whose behalf root acts",
    ),
    (
        "HOME",
        "meaning of `~` in a profile if the user has no passwd entry",
    ),
    (
        "XDG_CONFIG_HOME",
        "directory of `rockenv/config.toml`, `profiles/`, `images/` and `hooks/`",
    ),
    (
        "REGISTRY_AUTH_FILE",
        "file with logins to registries, instead of those written by `podman login` and `docker login`",
    ),
    (
        "DOCKER_CONFIG",
        "directory of Docker's `config.json`, `~/.docker` otherwise",
    ),
    (
        "PATH",
        "search path for the credential helpers of an ordinary user, and for no other programs",
    ),
    (
        "CCACHE_REMOTE_STORAGE",
        "ccache's storage for several machines, like `ccache-remote` in the configuration: for profiles that name it in `env-from-host`",
    ),
    (
        "XDG_DATA_HOME",
        "parent directory of an ordinary user's store",
    ),
    (
        "http_proxy, https_proxy, ftp_proxy, no_proxy",
        "passed on to tools that fetch; upper case works too",
    ),
    ("NO_COLOR", "if set and not empty: no colour"),
    (
        "CLICOLOR_FORCE",
        "if set and not `0`: colour even without a terminal",
    ),
    (
        "TERM",
        "`dumb` or unset: no animation and no colour; passed on to commands at a terminal",
    ),
    ("SUDO_COMMAND", "set by sudo: hints then begin with `sudo`"),
    (
        "WT_SESSION, ConEmuANSI, TERM_PROGRAM, TERM_FEATURES",
        "name terminals that show progress and notifications of their own",
    ),
    ("CI", "if set and not `false` or `0`: no animation"),
    (
        "GITHUB_ACTIONS, GITLAB_CI",
        "if one is `true`: steps fold in the job's output, and GitHub annotates errors and warnings",
    ),
    (
        "GITHUB_STEP_SUMMARY",
        "file that `up` and `matrix up` append their report to, in GitHub Actions",
    ),
    (
        "COMPLETE",
        "the shell that asks for completions: set by its script",
    ),
];
