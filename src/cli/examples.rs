//! Owns the examples at the end of each command's help and manual page.

/// For each command: lines to type, each with its purpose.
pub(super) const EXAMPLES: &[(&str, &[(&str, &str)])] = &[
    (
        "",
        &[
            ("rockenv doctor", "check this machine"),
            ("rockenv plan 780m", "show what a build needs"),
            ("rockenv up 780m", "build ROCm and PyTorch for a GPU"),
            ("rockenv shell gfx1103", "work inside"),
        ],
    ),
    (
        "up",
        &[
            ("rockenv up hip-smoke", "a first env, in minutes"),
            (
                "rockenv up 780m --from wheels",
                "start from released wheels",
            ),
            ("rockenv up mine --until configure", "stop after a step"),
            (
                "rockenv up mine.toml --target gfx1201",
                "a file, for another target",
            ),
        ],
    ),
    (
        "plan",
        &[
            ("rockenv plan 780m", "what runs, what it needs, and why"),
            (
                "rockenv plan mine --rerun build --json",
                "the same as JSON, if a step runs again",
            ),
        ],
    ),
    (
        "down",
        &[("rockenv down gfx1103", "stop a build or a shell")],
    ),
    (
        "rm",
        &[
            ("rockenv rm hip-smoke", "outputs, sources and caches stay"),
            (
                "rockenv rm --force gfx1103 gfx1201",
                "also if something runs in them",
            ),
        ],
    ),
    ("ls", &[("rockenv ls --json", "for scripts")]),
    (
        "status",
        &[
            ("rockenv status", "of the only env"),
            (
                "rockenv status gfx1103 --check",
                "exit with 8 unless it is complete",
            ),
        ],
    ),
    (
        "shell",
        &[
            ("rockenv shell gfx1103", "as the build user"),
            ("rockenv shell --failed gfx1103", "where a step failed"),
        ],
    ),
    (
        "exec",
        &[
            (
                "rockenv exec gfx1103 make -j8",
                "a command and its arguments",
            ),
            ("rockenv exec -- make -j8", "the same in the only env"),
            ("rockenv exec --gpu gfx1103 rocminfo", "with a GPU"),
        ],
    ),
    (
        "env",
        &[(
            "rockenv env gfx1103",
            "use it with: eval \"$(rockenv env gfx1103)\"",
        )],
    ),
    (
        "logs",
        &[
            ("rockenv logs gfx1103", "of the last step"),
            ("rockenv logs -f gfx1103 build", "of one step, as it comes"),
        ],
    ),
    (
        "snapshot create",
        &[(
            "rockenv snapshot create gfx1103 before-tuning",
            "a name of your own",
        )],
    ),
    (
        "snapshot ls",
        &[("rockenv snapshot ls gfx1103", "newest last")],
    ),
    (
        "snapshot diff",
        &[(
            "rockenv snapshot diff gfx1103 before-tuning",
            "changes since then",
        )],
    ),
    (
        "snapshot rm",
        &[(
            "rockenv snapshot rm gfx1103 before-tuning",
            "the env stays as it is",
        )],
    ),
    (
        "verify",
        &[("rockenv verify gfx1103 compiler", "is a step reproducible?")],
    ),
    (
        "rollback",
        &[(
            "rockenv rollback gfx1103 before-tuning",
            "the present state is kept as a snapshot",
        )],
    ),
    (
        "fork",
        &[(
            "rockenv fork gfx1103 experiment",
            "shares all data until it changes",
        )],
    ),
    (
        "push",
        &[(
            "rockenv push gfx1103 registry.example.org/rocm/envs",
            "to a registry",
        )],
    ),
    ("pull", &[("rockenv pull gfx1103", "from a registry")]),
    (
        "du",
        &[
            ("rockenv du", "the whole store"),
            (
                "rockenv du gfx1103 --sort size",
                "one env, the largest first",
            ),
        ],
    ),
    (
        "report",
        &[(
            "rockenv report gfx1103 -o build.html",
            "a page for a browser",
        )],
    ),
    (
        "gc",
        &[
            ("rockenv gc -n", "what would be removed, and why"),
            ("rockenv gc --free 50G", "until this much more is free"),
        ],
    ),
    ("cache ls", &[("rockenv cache ls", "sizes and limits")]),
    (
        "cache clear",
        &[("rockenv cache clear ccache", "steps fill it again")],
    ),
    ("image ls", &[("rockenv image ls", "recipes, built or not")]),
    (
        "image build",
        &[(
            "rockenv image build debian-forky",
            "`up` does it when needed",
        )],
    ),
    (
        "image verify",
        &[(
            "rockenv image verify debian-forky",
            "is an image reproducible?",
        )],
    ),
    (
        "profile ls",
        &[("rockenv profile ls", "built in, and of this directory")],
    ),
    (
        "profile show",
        &[
            ("rockenv profile show hip-smoke", "as it is written"),
            (
                "rockenv profile show hip-smoke --resolved -t gfx1201",
                "with nothing left to decide",
            ),
        ],
    ),
    (
        "profile check",
        &[(
            "rockenv profile check mine.toml",
            "every mistake with its place",
        )],
    ),
    (
        "profile new",
        &[("rockenv profile new mine", "writes profiles/mine.toml")],
    ),
    (
        "hook ls",
        &[("rockenv hook ls", "hooks and what they change")],
    ),
    (
        "hook check",
        &[(
            "rockenv hook check --hook torch-without-rccl",
            "against itself",
        )],
    ),
    (
        "on",
        &[(
            "rockenv on ssh://build.example.org up 780m",
            "on another machine",
        )],
    ),
    (
        "matrix up",
        &[("rockenv matrix up gfx1103 gfx1201", "common steps run once")],
    ),
    (
        "matrix json",
        &[("rockenv matrix json gfx1103 gfx1201", "for any CI system")],
    ),
    (
        "matrix github",
        &[("rockenv matrix github gfx1103 gfx1201", "a workflow")],
    ),
    (
        "matrix gitlab",
        &[("rockenv matrix gitlab gfx1103 gfx1201", "a pipeline")],
    ),
    (
        "matrix slurm",
        &[(
            "rockenv matrix slurm gfx942 gfx950",
            "a script for a cluster",
        )],
    ),
    (
        "matrix kubernetes",
        &[(
            "rockenv matrix kubernetes --image IMAGE --claim ENVS gfx942",
            "jobs for a cluster",
        )],
    ),
    (
        "target ls",
        &[("rockenv target ls", "every target and its products")],
    ),
    (
        "target show",
        &[("rockenv target show 780m", "by a product's name")],
    ),
    (
        "target detect",
        &[("rockenv target detect", "the GPUs here")],
    ),
    (
        "target check",
        &[(
            "rockenv target check --source TheRock",
            "what a newer checkout changed",
        )],
    ),
    (
        "target learn",
        &[("rockenv target learn --source TheRock", "use its targets")],
    ),
    (
        "target forget",
        &[("rockenv target forget", "undo `target learn`")],
    ),
    (
        "lock",
        &[("rockenv lock mine", "for `rockenv up mine --locked`")],
    ),
    (
        "lock diff",
        &[("rockenv lock diff old.lock new.lock", "what changed")],
    ),
    (
        "export",
        &[
            ("rockenv export gfx1103 dist", "outputs with a manifest"),
            (
                "rockenv export gfx1103 --snapshots gfx1103.oci.tar",
                "snapshots, for `import`",
            ),
        ],
    ),
    (
        "import",
        &[(
            "rockenv import gfx1103.oci.tar",
            "then `rockenv up gfx1103` finds them",
        )],
    ),
    (
        "trust",
        &[
            ("rockenv trust", "this directory"),
            ("rockenv trust --show", "what is trusted"),
        ],
    ),
    (
        "setup",
        &[("rockenv setup --dry-run", "what would be installed")],
    ),
    ("doctor", &[("rockenv doctor --json", "for a bug report")]),
    ("fsck", &[("rockenv fsck --repair", "repair what can be")]),
    (
        "completions",
        &[("rockenv completions bash", "read it with: source <(...)")],
    ),
    (
        "man",
        &[
            ("rockenv man gc", "read it with: rockenv man gc | man -l -"),
            ("rockenv man --dir man1", "all pages, as files"),
        ],
    ),
    ("schema", &[("rockenv schema profile", "for an editor")]),
    (
        "help",
        &[("rockenv help snapshot diff", "as `snapshot diff --help`")],
    ),
];
