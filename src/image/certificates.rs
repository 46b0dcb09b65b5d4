//! Owns the configured certificate authorities, which are trusted in addition to those of an image and of the machine:
//! collecting them in one PEM file, and mounting it where programs in a container look for it. They are part of no key
//! and no tree.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::sys::account::path_in_file;
use crate::sys::error::{Result, ResultExt as _, named_path};
use crate::sys::host::system_text;
use crate::sys::process::TEMPORARY;
use crate::sys::shell::quoted_path;
use crate::tree::file;

/// Path of the list in a container.
pub(crate) const INSIDE: &str = "/run/rockenv/ca-certificates.crt";

/// Variables that replace a program's own list: for OpenSSL and Go, requests, pip, curl, Node and git.
const VARIABLES: [&str; 6] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
];

/// Paths of distributions' lists, with links resolved: Debian, Ubuntu and Alpine; Fedora and RHEL; older releases of
/// these; Arch; openSUSE.
const PLACES: [&str; 5] = [
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/ca-certificates/extracted/tls-ca-bundle.pem",
    "var/lib/ca-certificates/ca-bundle.pem",
];

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

const EXAMPLE: &str = "ca-certificates = \"host\", or a list of PEM files";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Authorities {
    Host,
    /// Additional authorities in PEM files.
    Files(Vec<PathBuf>),
}

/// The same as written in a configuration: `"host"`, or paths.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(untagged)]
pub enum Written {
    /// One word.
    Word(String),
    /// Paths.
    Files(Vec<PathBuf>),
}

impl Written {
    /// Parses the environment variable: `host`, or paths separated by colons.
    pub(crate) fn variable(text: &str) -> Self {
        match text {
            "host" => Self::Word(text.to_owned()),
            paths => Self::Files(paths.split(':').map(PathBuf::from).collect()),
        }
    }

    /// Resolves the setting. Relative paths start from `directory`, and `~` is `home`.
    pub(crate) fn resolve(&self, directory: &Path, home: &Path) -> Result<Authorities> {
        let paths = match self {
            Self::Word(word) if word == "host" => return Ok(Authorities::Host),
            Self::Word(word) => {
                let word = word.escape_debug();
                let error = invalid!("invalid `ca-certificates` in the configuration: `{word}`");
                return Err(error.help(EXAMPLE));
            }
            Self::Files(paths) => paths,
        };
        let full = |path: &PathBuf| path_in_file(path, directory, home);
        Ok(Authorities::Files(paths.iter().map(full).collect()))
    }
}

static CONFIGURED: OnceLock<Option<Authorities>> = OnceLock::new();

/// Sets the configured authorities, once for this process.
pub(crate) fn configure(authorities: Option<Authorities>) {
    // Only tests set them twice, to the same value.
    drop(CONFIGURED.set(authorities));
}

pub(crate) fn configured() -> Option<&'static Authorities> {
    CONFIGURED.get()?.as_ref()
}

impl Authorities {
    /// Returns the certificates in PEM form, without other content of the files.
    pub(crate) fn pem(&self) -> Result<String> {
        match self {
            Self::Host => host().ok_or_else(|| {
                unavailable!("no certificate authorities found on this machine")
                    .help("install ca-certificates")
            }),
            Self::Files(paths) => {
                let mut pem = String::new();
                for path in paths {
                    let bytes = fs::read(path).map_err(|error| {
                        let shown = path.display();
                        invalid!("cannot read `{shown}`, which `ca-certificates` in the configuration names")
                            .source(named_path(path)(error))
                            .help(EXAMPLE)
                    })?;
                    let found = certificates(&String::from_utf8_lossy(&bytes));
                    if found.is_empty() {
                        let (shown, file) = (path.display(), quoted_path(path));
                        let error = invalid!("`{shown}` has no certificate in PEM form");
                        let help = format!("openssl x509 -inform der -in {file} -out {file}.pem");
                        return Err(error.help(help));
                    }
                    pem.push_str(&found);
                }
                Ok(pem)
            }
        }
    }

    /// Returns additional certificates for rockenv's own connections, which also trust the machine's authorities.
    pub(crate) fn of_clients() -> Result<Vec<reqwest::Certificate>> {
        match configured() {
            None | Some(Self::Host) => Ok(Vec::new()),
            Some(files @ Self::Files(_)) => {
                reqwest::Certificate::from_pem_bundle(files.pem()?.as_bytes()).map_err(|error| {
                    invalid!("a file of `ca-certificates` in the configuration is damaged")
                        .source(error)
                })
            }
        }
    }
}

fn host() -> Option<String> {
    let read = |place| system_text(Path::new("/").join(place)).ok();
    let mut found = PLACES.into_iter().filter_map(read);
    found.find_map(|text| Some(certificates(&text)).filter(|pem| !pem.is_empty()))
}

/// Returns the certificates in a text, without the text around them.
fn certificates(text: &str) -> String {
    let mut found = String::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(BEGIN) {
        let Some((body, behind)) = after.split_once(END) else {
            break;
        };
        found.extend([BEGIN, body, END, "\n"]);
        rest = behind;
    }
    found
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ContainerAuthorities {
    /// The certificates, in PEM form.
    pem: String,
    /// The image's tree, if a service keeps the container's own.
    tree: Option<PathBuf>,
    /// Whether a package manager runs. It replaces its distribution's list, which a mount would prevent, so it gets an
    /// option instead.
    packages: bool,
}

impl ContainerAuthorities {
    /// Returns the configured authorities for a container. `packages`: a package manager runs in it. `tree`: the
    /// image's tree, if a service keeps the container's own.
    pub(crate) fn new(packages: bool, tree: Option<PathBuf>) -> Result<Option<Self>> {
        let pem = configured().map(Authorities::pem).transpose()?;
        Ok(pem.map(|pem| Self {
            pem,
            tree,
            packages,
        }))
    }

    /// Writes a container's list to its runtime directory; returns the file and its read-only mount points.
    pub(crate) fn install(self, tree: Option<&Path>, run: &Path) -> Result<(PathBuf, Vec<String>)> {
        let tree = tree.or(self.tree.as_deref());
        let mut own = String::new();
        let mut targets = vec![INSIDE.to_owned()];
        for place in PLACES {
            // A list that cannot be read safely is unused or an attack.
            if let Some(tree) = tree
                && let Ok(file::FoundEntry::File { bytes, .. }) = file::read(tree, Path::new(place))
            {
                own.push_str(&certificates(&String::from_utf8_lossy(&bytes)));
                // Arch's hook tolerates a list that it cannot replace. Other package managers get an option.
                if !self.packages || place.starts_with("etc/ca-certificates/") {
                    targets.push(format!("/{place}"));
                }
            }
        }
        if own.is_empty() {
            own = host().unwrap_or_default();
        }
        let source = run.join("ca-certificates.crt");
        fs::write(&source, own + &self.pem)?;
        fs::set_permissions(&source, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        Ok((source, targets))
    }
}

/// Returns the list for programs on the host; `None` if they already trust the authorities.
fn for_host() -> Result<Option<String>> {
    match configured() {
        None | Some(Authorities::Host) => Ok(None),
        Some(files) => Ok(Some(host().unwrap_or_default() + &files.pem()?)),
    }
}

/// Returns the help for a connection to a server whose certificate nobody here trusts: another attempt fails too.
pub(crate) fn help(error: &reqwest::Error) -> Option<&'static str> {
    let first: &dyn std::error::Error = error;
    let mut causes = std::iter::successors(Some(first), |cause| cause.source());
    causes
        .any(|cause| cause.to_string().ends_with("certificate: UnknownIssuer"))
        .then_some(
            "for a proxy or mirror of your company, in config.toml: ca-certificates = [\"FILE.pem\"]",
        )
}

/// Writes the list for programs on the host to a directory; `None` if they already trust the authorities.
pub(crate) fn list(directory: &Path) -> Result<Option<PathBuf>> {
    let Some(pem) = for_host()? else {
        return Ok(None);
    };
    let path = directory.join("ca-certificates.crt");
    fs::write(&path, pem)?;
    // apt downloads as an unprivileged user.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(&path, mode)?;
    Ok(Some(path))
}

/// Writes the same list to a temporary file that every user can read, because git runs as the build user.
pub(crate) fn list_for_anybody() -> Result<Option<tempfile::NamedTempFile>> {
    let Some(pem) = for_host()? else {
        return Ok(None);
    };
    let cannot = || "cannot write the list of certificate authorities for git".to_owned();
    let mut file = tempfile::NamedTempFile::new_in(TEMPORARY).context(cannot)?;
    file.write_all(pem.as_bytes()).context(cannot)?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    file.as_file().set_permissions(mode).context(cannot)?;
    Ok(Some(file))
}

/// Sets the variables for the list, except those that the profile sets. `image` has the image's variables; `env` also
/// has the profile's.
pub(crate) fn set_variables(
    variables: &mut BTreeMap<String, String>,
    env: &BTreeMap<String, String>,
    image: &BTreeMap<String, String>,
) {
    if configured().is_none() {
        return;
    }
    for name in VARIABLES {
        if env.get(name) == image.get(name) {
            variables.insert(name.to_owned(), INSIDE.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_certificates_are_taken_of_a_file() {
        let text = format!(
            "key\n# CA\n{BEGIN}\nAAAA\n{END}\n-----BEGIN PRIVATE KEY-----\nBBBB\n{BEGIN}\nCCCC\n{END}{BEGIN}\nDD"
        );
        let expected = format!("{BEGIN}\nAAAA\n{END}\n{BEGIN}\nCCCC\n{END}\n");
        assert_eq!(certificates(&text), expected);
    }

    #[test]
    fn a_file_without_certificates_is_named_for_a_shell() {
        let empty = tempfile::Builder::new().prefix("a b").tempfile().unwrap();
        let error = Authorities::Files(vec![empty.path().into()])
            .pem()
            .unwrap_err();
        let named = format!("-in '{}' -out", empty.path().display());
        assert!(error.help_text().unwrap().contains(&named), "{error:?}");
    }

    #[test]
    fn a_list_is_shown_where_the_tree_has_one_and_nowhere_else() {
        let tree = tempfile::tempdir().unwrap();
        let run = tempfile::tempdir().unwrap();
        let at = |path: &str| tree.path().join(path);
        fs::create_dir_all(at("etc/ssl/certs")).unwrap();
        fs::create_dir_all(at("etc/pki/tls/certs")).unwrap();
        fs::write(at(PLACES[0]), format!("{BEGIN}\nOWN\n{END}\n")).unwrap();
        // Following the link would mount the list over a file of the host.
        fs_err::os::unix::fs::symlink("/etc/passwd", at(PLACES[2])).unwrap();
        for (packages, expected) in [
            (false, vec![INSIDE, "/etc/ssl/certs/ca-certificates.crt"]),
            (true, vec![INSIDE]),
        ] {
            let given = ContainerAuthorities {
                pem: format!("{BEGIN}\nMORE\n{END}\n"),
                tree: None,
                packages,
            };
            let (source, targets) = given.install(Some(tree.path()), run.path()).unwrap();
            assert_eq!(targets, expected);
            let list = fs::read_to_string(&source).unwrap();
            assert!(list.contains("OWN") && list.contains("MORE"), "{list}");
        }
    }

    #[test]
    fn a_profile_that_says_otherwise_wins_and_an_image_does_not() {
        let written = Written::Files(vec!["ca.pem".into(), "~/b.pem".into(), "/c.pem".into()]);
        let found = written.resolve(Path::new("/etc/rockenv"), Path::new("/home/me"));
        let paths = ["/etc/rockenv/ca.pem", "/home/me/b.pem", "/c.pem"];
        assert_eq!(
            found.unwrap(),
            Authorities::Files(paths.map(PathBuf::from).into())
        );
        let none = Path::new("/");
        assert!(Written::Word("hots".into()).resolve(none, none).is_err());
        assert_eq!(
            Written::variable("host").resolve(none, none).unwrap(),
            Authorities::Host
        );
    }
}
