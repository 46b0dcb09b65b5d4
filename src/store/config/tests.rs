//! Tests of the sources of the configuration.

use fs_err as fs;

use super::*;

#[test]
fn the_documentation_names_every_variable() {
    let known: Vec<&str> = variables()
        .flat_map(|(names, _)| names.split(", "))
        .collect();
    let is_name = |text: &&str| {
        let is_word = (text.bytes()).all(|byte| byte.is_ascii_uppercase() || byte == b'_');
        text.len() > 1 && is_word && !text.ends_with('_')
    };
    let texts = [
        include_str!("../config.rs"),
        include_str!("settings.rs"),
        include_str!("../../up/mod.rs"),
        include_str!("../../up/registry.rs"),
        include_str!("../../up/matrix/jobs.rs"),
    ];
    let named = texts
        .iter()
        .flat_map(|text| text.split('"').filter(is_name));
    for name in named.chain([trust::VARIABLE, trust::DIGEST_VARIABLE]) {
        assert!(known.contains(&name), "{name}");
    }
}

#[test]
fn a_variable_of_rockenv_is_used_or_refused() {
    use std::os::unix::ffi::OsStringExt as _;
    let given = [
        ("ROCKENV_HOME", &b"/caf\xe9"[..]),
        ("LS_COLORS", b"\xe9"),
        ("A", b"b"),
    ];
    let given = given.map(|(name, value)| (name.into(), OsString::from_vec(value.to_vec())));
    let (found, errors) = readable(given.into_iter());
    assert_eq!(found, BTreeMap::from([("A".to_owned(), "b".to_owned())]));
    let said: Vec<&str> = errors.iter().map(Error::message).collect();
    assert_eq!(said, ["ROCKENV_HOME: the value is not UTF-8"]);
}

fn of(environment: BTreeMap<String, String>, working: &Path) -> Result<Config> {
    let (config, mut invalid) = Config::of(environment, Some(working))?;
    invalid.pop().map_or(Ok(config), Err)
}

/// Makes a working directory and a user's configuration file. Also returns the variables.
fn place(variables: &[(&str, &str)], file: &str) -> (tempfile::TempDir, BTreeMap<String, String>) {
    let directory = tempfile::tempdir().unwrap();
    let user = directory.path().join("user");
    fs::create_dir_all(user.join("rockenv")).unwrap();
    fs::write(user.join("rockenv/config.toml"), file).unwrap();
    let variables = variables.iter().copied();
    let all = variables.chain([("XDG_CONFIG_HOME", user.to_str().unwrap())]);
    let all = all.map(|(name, value)| (name.to_owned(), value.to_owned()));
    (directory, all.collect())
}

fn read(variables: &[(&str, &str)], file: &str) -> Result<Config> {
    let (directory, environment) = place(variables, file);
    of(environment, directory.path())
}

#[test]
fn the_environment_wins_over_a_file() {
    let file = "home = '/srv/a'\njobs = 3\n[mirror]\ndebian = 'file:///m'\n\
                buildserver = 'file:///m'\n'debiian.org' = 'file:///m'\n";
    assert_eq!(read(&[], file).unwrap().home, Path::new("/srv/a"));
    let [home, jobs] = [("ROCKENV_HOME", "/srv/b"), ("ROCKENV_JOBS", "7")];
    let config = read(&[home, jobs, ("CI", "true")], file).unwrap();
    assert_eq!(config.home, Path::new("/srv/b"));
    assert_eq!((config.jobs, config.terminal.ci), (Some(7), true));
    assert_eq!(config.mirrors["debian"], "file:///m");
}

#[test]
fn an_empty_list_replaces_that_of_a_farther_file() {
    let (directory, environment) = place(&[], "targets = ['gfx1103']\njobs = 3\n");
    let targets = || of(environment.clone(), directory.path()).unwrap().targets;
    fs::write(directory.path().join("rockenv.toml"), "jobs = 2\n").unwrap();
    assert_eq!(targets(), ["gfx1103"]);
    fs::write(directory.path().join("rockenv.toml"), "targets = []\n").unwrap();
    assert!(targets().is_empty());
}

#[test]
fn relative_paths_in_a_file_start_from_it_and_a_tilde_is_the_home() {
    let file = "home = '~/a'\nninja = 'b'\nsign-key = '~/c'\nverify-key = 'd'\n\
                profile-dirs = ['profiles', '~', '/e']\nimage-dirs = ['~/f']\nhook-dirs = ['../g']\n";
    let config = read(&[], file).unwrap();
    let (own, home) = (&config.user_dir, &config.host_home);
    assert_eq!(config.home, home.join("a"));
    assert_eq!(config.ninja, Some(own.join("b")));
    assert_eq!(config.sign_key, Some(home.join("c")));
    assert_eq!(config.verify_key, Some(own.join("d")));
    let paths = |dirs: &[Directory]| dirs.iter().map(|one| one.path.clone()).collect::<Vec<_>>();
    let first = [own.join("profiles"), home.clone(), "/e".into()];
    assert!(paths(&config.profile_dirs).starts_with(&first));
    assert!(paths(&config.image_dirs).starts_with(&[home.join("f")]));
    assert!(paths(&config.hook_dirs).starts_with(&[own.join("../g")]));
}

/// Trusts a directory with its current files.
fn trust_as_it_is(work: &Path, user_dir: &Path) {
    let trusted = trust::Trusted {
        path: work.to_owned(),
        digest: Some(trust::digest(work).unwrap()),
        writes: Vec::new(),
    };
    trusted.write(user_dir).unwrap();
}

#[test]
fn the_current_directory_counts_as_far_as_it_is_trusted() {
    let place = tempfile::tempdir().unwrap();
    let work = fs::canonicalize(place.path()).unwrap().join("work");
    fs::create_dir_all(work.join("profiles")).unwrap();
    let file = "home = '/srv/evil'\nninja = '/srv/evil'\njobs = 3\ntargets = ['gfx1103']\nidle = 'never'\n[mirror]\ndebian = 'file:///evil'\n";
    fs::write(work.join("rockenv.toml"), file).unwrap();
    fs::write(work.join("profiles/own.toml"), "schema = 1\n").unwrap();
    let user = place.path().join("user");
    let read = |listed: Option<&Path>| {
        let mut environment: BTreeMap<String, String> =
            [("XDG_CONFIG_HOME".into(), user.display().to_string())].into();
        if let Some(listed) = listed {
            let listed = format!("/nowhere:{}", listed.display());
            environment.insert(trust::VARIABLE.into(), listed);
        }
        of(environment, &work).unwrap()
    };
    let own = |config: &Config| config.profile_dirs.iter().any(|one| one.current);
    let never = |config: &Config| {
        assert!(config.home != Path::new("/srv/evil") && config.ninja.is_none());
        assert!(config.mirrors.is_empty());
        assert_eq!((config.jobs, config.targets.len()), (Some(3), 1));
    };
    let config = read(None);
    never(&config);
    assert!(!own(&config) && config.idle == IDLE);
    let notice = config.current.notice().unwrap();
    for part in ["profiles/", "`home`", "`idle`", "`mirror`", "rockenv trust"] {
        assert_has!(notice, part);
    }
    assert!(!notice.contains("`jobs`"), "{notice}");

    trust_as_it_is(&work, &config.user_dir);
    let config = read(None);
    never(&config);
    assert!(own(&config) && config.idle == Duration::ZERO);
    let notice = config.current.notice().unwrap();
    assert_has!(notice, "`ninja`");
    assert!(!notice.contains("`idle`"), "{notice}");

    fs::write(work.join("profiles/new.sh"), "").unwrap();
    let config = read(None);
    assert!(!own(&config) && config.current.notice().unwrap().contains("has changed"));
    assert!(own(&read(Some(&work))) && own(&read(work.parent())));
    assert!(!own(&read(Some(&work.join("profiles")))));
    assert!(trust::Trusted::forget(&config.user_dir, &work).unwrap());
    assert!(!own(&read(None)));
    fs::remove_file(work.join("rockenv.toml")).unwrap();
    nix::unistd::mkfifo(&work.join("rockenv.toml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let error = of(BTreeMap::new(), &work).unwrap_err();
    assert_has!(error.message(), "not a regular file");
    // A link may lead to a file that only the caller can read.
    fs::remove_file(work.join("rockenv.toml")).unwrap();
    fs::write(place.path().join("secret"), "a secret\n").unwrap();
    std::os::unix::fs::symlink("../secret", work.join("rockenv.toml")).unwrap();
    let notice = read(None).current.notice().unwrap();
    assert_has!(notice, "profiles/, rockenv.toml");
}

/// A trusted directory that another user may write to, and one with the same file names and other content.
struct Shared(tempfile::TempDir);

impl Shared {
    fn new() -> Self {
        let shared = Self(tempfile::tempdir().unwrap());
        let [work, evil, user] = ["work", "evil", "user"].map(|name| shared.at(name));
        let step = "[[step]]\nname = 'a'\ncopy = [{ from = 'files', to = '/opt' }]\n";
        let head = "schema = 1\ndescription = 'd'\n";
        let image = "provider = 'directory'\n[directory]\npath = '/srv'\n";
        let files = [
            ("rockenv.toml", "jobs = 3\nengine = 'nspawn'\n".to_owned()),
            ("profiles/base.toml", format!("{head}image = 'x'\n{step}")),
            ("profiles/own.toml", format!("{head}extends = 'base'\n")),
            (
                "profiles/near.toml",
                format!("{head}extends = 'base.toml'\n"),
            ),
            ("profiles/files/tool", "tool".to_owned()),
            ("profiles/files/sub/text", "text".to_owned()),
            (
                "hooks/h/hook.toml",
                format!("{head}why = 'w'\nvolume = 'v'\n[[patch]]\nfile = 'p.patch'\n"),
            ),
            ("hooks/h/p.patch", "patch".to_owned()),
            ("images/x.toml", format!("{head}{image}")),
        ];
        for (top, more) in [(&work, ""), (&evil, "# evil\n")] {
            for (name, text) in &files {
                let path = top.join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, format!("{text}{more}")).unwrap();
            }
        }
        std::os::unix::fs::symlink("tool", work.join("profiles/files/link")).unwrap();
        trust_as_it_is(&work, &user.join("rockenv"));
        shared
    }

    fn at(&self, name: &str) -> PathBuf {
        fs::canonicalize(self.0.path()).unwrap().join(name)
    }

    /// Returns the configuration, read while the directory is still as the user trusted it.
    fn config(&self) -> Config {
        let user = self.at("user").display().to_string();
        let environment = [("XDG_CONFIG_HOME".into(), user)].into();
        let config = of(environment, &self.at("work")).unwrap();
        assert!(config.current.counts());
        config
    }
}

fn load_profile(config: &Config, name: &str) -> Result<()> {
    let dirs = &config.profile_dirs;
    let profile = crate::profile::load(dirs, name)?;
    crate::profile::copy_files(dirs, &profile).map(drop)
}

#[test]
fn what_changes_after_it_was_checked_is_refused() {
    type Reads<'a> = &'a dyn Fn(&Config) -> Result<()>;
    let own: Reads<'_> = &|config| load_profile(config, "own");
    let near: Reads<'_> = &|config| load_profile(config, "near");
    let hook: Reads<'_> = &|config| crate::profile::hook::load(&config.hook_dirs, "h").map(drop);
    let image: Reads<'_> = &|config| crate::image::catalog::find(&config.image_dirs, "x").map(drop);
    let rows = [
        ("profiles/own.toml", own),
        ("profiles/base.toml", own),
        ("profiles/base.toml", near),
        ("profiles/near.toml", near),
        ("profiles", own),
        ("profiles", near),
        ("profiles/files/tool", own),
        ("profiles/files/sub/text", own),
        ("profiles/files/sub", own),
        ("hooks/h/hook.toml", hook),
        ("hooks/h/p.patch", hook),
        ("hooks/h", hook),
        ("hooks", hook),
        ("images/x.toml", image),
        ("images", image),
    ];
    let shared = Shared::new();
    let [work, evil, aside] = ["work", "evil", "aside"].map(|name| shared.at(name));
    for (name, reads) in rows {
        for link in [false, true] {
            let config = shared.config();
            reads(&config).unwrap();
            let path = work.join(name);
            fs::rename(&path, &aside).unwrap();
            match link {
                true => std::os::unix::fs::symlink(evil.join(name), &path).unwrap(),
                false => fs::rename(evil.join(name), &path).unwrap(),
            }
            let error = reads(&config).expect_err(name);
            assert!(!error.message().is_empty());
            match link {
                true => fs::remove_file(&path).unwrap(),
                false => fs::rename(&path, evil.join(name)).unwrap(),
            }
            fs::rename(&aside, &path).unwrap();
        }
    }
}

#[test]
fn what_appears_or_disappears_after_it_was_checked_is_refused() {
    let shared = Shared::new();
    let (work, aside) = (shared.at("work"), shared.at("aside"));
    let at = |name: &str| work.join("profiles/files").join(name);
    // A new file, a missing file and another link target are each refused.
    let config = shared.config();
    fs::write(at("new"), "").unwrap();
    load_profile(&config, "own").unwrap_err();
    fs::rename(at("new"), &aside).unwrap();
    load_profile(&config, "own").unwrap();
    fs::rename(at("sub"), at("new")).unwrap();
    load_profile(&config, "own").unwrap_err();
    fs::rename(at("new"), at("sub")).unwrap();
    fs::remove_file(at("link")).unwrap();
    load_profile(&config, "own").unwrap_err();
    std::os::unix::fs::symlink("sub", at("link")).unwrap();
    load_profile(&config, "own").unwrap_err();
    let profile = "schema = 1\ndescription = 'd'\nimage = 'x'\n";
    fs::write(work.join("profiles/new.toml"), profile).unwrap();
    load_profile(&config, "new").unwrap_err();
}

/// The same files, reached through a link into a directory with other files beside them.
#[test]
fn where_links_lead_is_part_of_what_is_trusted() {
    let place = tempfile::tempdir().unwrap();
    let (work, other) = (place.path().join("work"), place.path().join("other"));
    for directory in [&work.join("profiles"), &other] {
        fs::create_dir_all(directory).unwrap();
        fs::write(directory.join("own.toml"), "extends = 'base.toml'\n").unwrap();
    }
    let before = trust::digest(&work).unwrap();
    let own = work.join("profiles/own.toml");
    fs::remove_file(&own).unwrap();
    std::os::unix::fs::symlink(other.join("own.toml"), &own).unwrap();
    let linked = trust::digest(&work).unwrap();
    assert_ne!(before, linked);
    fs::rename(&other, place.path().join("third")).unwrap();
    std::os::unix::fs::symlink("third", &other).unwrap();
    assert_ne!(linked, trust::digest(&work).unwrap());
}

#[test]
fn ci_systems_are_known_by_their_variables() {
    let of = |variables: &[(&str, &str)]| read(variables, "").unwrap().terminal;
    let summary = ("GITHUB_STEP_SUMMARY", "/srv/summary");
    let github = of(&[("GITHUB_ACTIONS", "true"), summary]);
    assert_eq!(github.ci_system, Some(System::Github));
    assert!(github.ci && github.step_summary.is_some());
    let gitlab = of(&[("GITLAB_CI", "true"), summary]);
    assert_eq!(gitlab.ci_system, Some(System::Gitlab));
    assert_eq!(gitlab.step_summary, None);
    // A caller that wraps rockenv sets them like this.
    let none = of(&[("GITHUB_ACTIONS", ""), ("GITLAB_CI", "false")]);
    assert_eq!((none.ci_system, none.ci), (None, false));
}

#[test]
fn logins_are_the_invoking_user_s_or_in_the_file_that_is_named() {
    let config = read(&[("DOCKER_CONFIG", "/srv/docker")], "").unwrap();
    let last = config.logins.files.last().unwrap();
    assert_eq!(last, Path::new("/srv/docker/config.json"));
    // As root in a container of CI has it.
    let has_roots = (config.logins.files).contains(&"/run/containers/0/auth.json".into());
    assert_eq!(has_roots, nix::unistd::geteuid().is_root());
    let config = read(&[("REGISTRY_AUTH_FILE", "/srv/auth.json")], "").unwrap();
    assert_eq!(config.logins.files, [Path::new("/srv/auth.json")]);
}

#[test]
fn an_invalid_value_is_named_by_file_line_and_key() {
    for (text, key, line) in [
        ("idle = 'soon'", "idle", 1),
        ("\nhttp-timeout = '10'", "http-timeout", 2),
        ("disk-floor = '2'", "disk-floor", 1),
        ("# x\nlog-max = 'much'", "log-max", 2),
        ("jobs = 0", "jobs", 1),
        ("jobs = 4097", "jobs", 1),
        ("home = ''", "home", 1),
        ("\nverify-key = ''", "verify-key", 2),
        ("profile-dirs = ['/srv', '']", "profile-dirs", 1),
        ("image-dirs = ['']", "image-dirs", 1),
        ("[mirror]\ndebain = 'file:///m'", "mirror.debain", 2),
        (
            "mirror.ubuntu-snapshots = 'file:///m'",
            "mirror.ubuntu-snapshots",
            1,
        ),
        (
            "mirror.debian = 'mirror.example.org/debian'",
            "mirror.debian",
            1,
        ),
        (
            "mirror.arch-signatures = 'nevr'",
            "mirror.arch-signatures",
            1,
        ),
        ("jobs = 1\ntargets = ['gfx1103', 'gfx1130']", "targets", 2),
        ("[gc]\nmin-free = '101%'", "gc.min-free", 2),
        ("[gc]\n\nkeep-at-most = '3'", "gc.keep-at-most", 3),
        ("gc.keep-at-least = 'x'", "gc.keep-at-least", 1),
        ("[gc]\nolder-than = '3w'", "gc.older-than", 2),
        ("[gc.cache.'a.b']\nmax = '1Q'", "gc.cache.a.b.max", 2),
        ("ccache-remote = 'redis://secret@h'\njobs = 0", "jobs", 2),
    ] {
        let error = read(&[], text).unwrap_err();
        assert_eq!(error.kind().exit_code(), 3);
        let message = error.message();
        assert!(message.starts_with("configuration `"), "{message}");
        for part in [
            format!("× `{key}`: "),
            format!("config.toml:{line}:"),
            "help: ".to_owned(),
        ] {
            assert_has!(message, &part);
        }
        // The lines around the value are shown too.
        assert!(!message.contains("secret"), "{message}");
    }
}

#[test]
fn all_mistakes_are_named_at_once_and_the_rest_counts() {
    let file = "homee = '/x'\njobs = 'four'\nengine = 'dokcer'\nbuild-user = 'me'\n\
                ca-certificates = 'hots'\nlog-max = 1\nidle = '5m'\n\
                [gc]\nmin-free = '101%'\nkeep-at-least = 'much'\nkeep-last = 7\npreset = 'lapdog'\n";
    let variables = [
        ("ROCKENV_JOBS", "4097"),
        ("ROCKENV_LOG_MAX", "33"),
        ("ROCKENV_HTTP_TIMEOUT", "60"),
        ("ROCKENV_DISK_FLOOR", "2G"),
    ];
    let (directory, environment) = place(&variables, file);
    let current = "targets = 'gfx1103'\nhome = 3\n";
    fs::write(directory.path().join("rockenv.toml"), current).unwrap();
    let (config, errors) = Config::of(environment, Some(directory.path())).unwrap();
    let messages: Vec<&str> = errors.iter().map(Error::message).collect();
    let [current, own, variables @ ..] = messages.as_slice() else {
        panic!("{messages:?}");
    };
    // Keys that do not apply to an untrusted directory are not checked.
    assert!(current.contains("help: write `[\"gfx1103\"]`") && !current.contains("errors"));
    for part in [
        "config.toml` is invalid: 9 errors",
        "did you mean `home`?",
        "`jobs` must be a whole number",
        "`engine`: unknown engine `dokcer`",
        "`build-user`: ",
        "`ca-certificates`: ",
        "help: write `\"1G\"`",
        "`gc.min-free`: ",
        "`gc.keep-at-least`: ",
        "`preset` cannot be `lapdog`",
    ] {
        assert_has!(own, part);
    }
    for name in ["ROCKENV_JOBS", "ROCKENV_LOG_MAX", "ROCKENV_HTTP_TIMEOUT"] {
        assert!(variables.iter().any(|one| one.starts_with(name)), "{name}");
    }
    assert_eq!(variables.len(), 3);
    let helps: Vec<_> = errors.iter().filter_map(Error::help_text).collect();
    assert!(helps.contains(&"ROCKENV_JOBS=4"), "{helps:?}");
    assert_eq!(config.idle, Duration::from_secs(300));
    assert_eq!(config.disk_floor, 2 << 30);
    assert_eq!((config.gc.keep_last, config.jobs), (Some(7), None));
}

#[test]
fn directories_in_variables_are_absolute_and_those_of_this_user() {
    let user_dir = |name: &str, value: &str| {
        let given = [(name, "1234"), ("XDG_CONFIG_HOME", value)];
        let given = given.map(|(name, value)| (name.to_owned(), value.to_owned()));
        of(given.into(), Path::new("/")).unwrap().user_dir
    };
    assert_eq!(user_dir("NONE", "/srv/c"), Path::new("/srv/c/rockenv"));
    assert!(user_dir("NONE", "c").is_absolute());
    // Without root, this is left from a user who called `sudo -u`, whose own variables sudo has removed.
    let is_root = nix::unistd::geteuid().is_root();
    for name in ["SUDO_UID", "PKEXEC_UID"] {
        let is_own = user_dir(name, "/srv/c") == Path::new("/srv/c/rockenv");
        assert_eq!(is_own, !is_root, "{name}");
    }
}

#[test]
fn sudo_names_the_build_user() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let config = read(&[("SUDO_UID", "1234"), ("SUDO_GID", "99")], "").unwrap();
    assert_eq!(
        (config.user.uid, config.user.gid, config.user.name.as_str()),
        (1234, 99, "builder")
    );
    assert!(read(&[("SUDO_UID", "nobody")], "").is_err());
    for (command, through_sudo) in [
        ("/usr/bin/rockenv exec e -- bash", true),
        ("/usr/bin/sh -c rockenv ls", true),
        ("/bin/bash -s", true),
        ("/home/ann/build.sh", true),
        ("/bin/bash", false),
        ("/usr/bin/su", false),
        ("/usr/bin/zsh -l", false),
    ] {
        let config = read(&[("SUDO_COMMAND", command)], "").unwrap();
        assert_eq!(config.through_sudo, through_sudo, "{command}");
    }
    // doas gives a name.
    let nobody = ("DOAS_USER", "nobody");
    assert_eq!(read(&[nobody], "").unwrap().user.uid, 65534);
    let both = read(&[nobody, ("SUDO_UID", "1234")], "").unwrap();
    assert_eq!(both.user.uid, 1234);
    let error = read(&[("DOAS_USER", "nobody-at-all")], "").unwrap_err();
    assert_eq!(error.help_text(), Some("unset DOAS_USER"));
}
