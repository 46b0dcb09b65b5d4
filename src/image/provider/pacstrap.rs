//! Owns building Arch Linux images with pacstrap, on Arch and on hosts that package pacman.
//!
//! pacman reads a configuration made here, and nothing of the host's except its keys. Signatures are required. Only the
//! user's own configuration may waive them, and only for a repository on this machine's disk.

use std::path::{Path, PathBuf};

use crate::image::recipe::Pacstrap;
use crate::image::{BuildContext, BuildProgress, WORK, certificates};
use crate::sys::address::without_login;
use crate::sys::error::Result;
use crate::sys::process::{Event, Program};
use crate::sys::shell::quoted_path;
use crate::tree::root_fs::Tree;

const HOST_KEYS: &str = "/etc/pacman.d/gnupg";
const HOST_MIRRORS: &str = "/etc/pacman.d/mirrorlist";
/// pacman's configuration in the image.
const CONFIG: &str = "etc/pacman.conf";
/// Maximum length of it, in bytes.
const LONGEST_CONFIG: usize = 1 << 20;

pub(crate) fn build(table: &Pacstrap, source_date: i64, cx: &mut BuildContext<'_>) -> Result<()> {
    let program = Program::find("pacstrap", "Arch images")?;
    let work = cx.into.join(WORK);
    let server = Server::choose(table, cx, Path::new(HOST_MIRRORS))?;
    let keys = if !server.signed || Path::new(HOST_KEYS).join("pubring.gpg").exists() {
        PathBuf::from(HOST_KEYS)
    } else {
        work.join("gnupg")
    };
    let config = work.join("pacman.conf");
    let authorities = certificates::list(&work)?;
    fs_err::write(&config, server.config(table, &keys, authorities.as_deref()))?;
    if keys.starts_with(&work) {
        // A fresh pacman on Debian has no keyring, so a temporary keyring serves this build.
        fs_err::create_dir(&keys)?;
        for arguments in [&["--init"][..], &["--populate", "archlinux"]] {
            let program = Program::find("pacman-key", "the signatures of Arch packages")?
                .isolated()
                .arg("--config")
                .arg(&config)
                .arg("--gpgdir")
                .arg(&keys)
                .args(arguments);
            run(&program, cx)?;
        }
    }
    let program = super::prepared(program, source_date, cx)
        // The tree may be a btrfs subvolume. systemd's hooks would then make subvolumes in it.
        .env("SYSTEMD_TMPFILES_FORCE_SUBVOL", "0")
        .args(["-G", "-M", "-C"])
        .arg(&config)
        .arg(cx.into)
        .args(&table.packages);
    run(&program, cx)?;
    let tree = Tree::open(cx.into)?;
    if let Some(text) = tree.read(CONFIG, LONGEST_CONFIG)? {
        let text = for_containers(&String::from_utf8_lossy(&text));
        tree.rewrite(CONFIG, text.as_bytes())?;
    }
    // All lines of the package's own mirrorlist are commented out, but later installations need a mirror.
    tree.rewrite(
        "etc/pacman.d/mirrorlist",
        &server.mirrorlist(Path::new(HOST_MIRRORS))?,
    )
}

fn run(program: &Program, cx: &mut BuildContext<'_>) -> Result<()> {
    let progress = &mut *cx.task.progress;
    program.stream(
        cx.task.cancel,
        &mut |event| {
            if let Event::Line(line) = event {
                progress(BuildProgress::Line(line));
            }
        },
        // The tools' stdout is informative too, but errors are only on stderr.
        |mut stdout| {
            drop(std::io::copy(&mut stdout, &mut std::io::sink()));
            Ok(())
        },
    )
}

/// The source of packages.
struct Server {
    /// `None` for the host's own list.
    line: Option<String>,
    signed: bool,
}

impl Server {
    fn choose(table: &Pacstrap, cx: &BuildContext<'_>, host_mirrors: &Path) -> Result<Self> {
        let (key, example) = match &table.snapshot {
            Some(_) => ("arch-snapshot", "https://.../@DATE@"),
            None => ("arch", "https://.../archlinux"),
        };
        let help = format!("set `{key} = \"{example}\"` under [mirror] in config.toml");
        let mirror = match (cx.task.mirrors.get(key), &table.snapshot) {
            (Some(mirror), Some(id)) => expand(mirror, id),
            (Some(mirror), None) => mirror.clone(),
            (None, None) if host_mirrors.exists() => {
                return Ok(Self {
                    line: None,
                    signed: true,
                });
            }
            (None, Some(id)) => {
                return Err(
                    unavailable!("snapshot {id} of Arch needs a configured archive").help(help),
                );
            }
            (None, None) => {
                return Err(unavailable!("no mirror for Arch packages is configured").help(help));
            }
        };
        if mirror.contains(char::is_whitespace) {
            return Err(invalid!(
                "mirror `{key}` is not an address: `{}`",
                without_login(&mirror)
            )
            .help(help));
        }
        let signed = match cx.task.mirrors.get("arch-signatures").map(String::as_str) {
            None | Some("required") => true,
            Some("never") if mirror.starts_with("file://") => false,
            Some("never") => {
                return Err(
                    invalid!("`arch-signatures = \"never\"` is for file:// mirrors only").help(
                        format!("remove it, or set `{key}` to a directory of this machine"),
                    ),
                );
            }
            Some(other) => {
                return Err(invalid!("unknown value `arch-signatures = \"{other}\"`")
                    .help("required, never"));
            }
        };
        let line = match mirror.contains("$repo") {
            true => mirror,
            false => format!("{}/$repo/os/$arch", mirror.trim_end_matches('/')),
        };
        Ok(Self {
            line: Some(line),
            signed,
        })
    }

    /// Returns the image's list of mirrors.
    fn mirrorlist(&self, host_mirrors: &Path) -> Result<Vec<u8>> {
        Ok(match &self.line {
            Some(line) => format!("Server = {line}\n").into_bytes(),
            None => fs_err::read(host_mirrors)?,
        })
    }

    fn config(&self, table: &Pacstrap, keys: &Path, authorities: Option<&Path>) -> String {
        let level = if self.signed {
            "Required DatabaseOptional"
        } else {
            "Never"
        };
        let mut lines = vec![
            "[options]".to_string(),
            "HoldPkg = pacman glibc".into(),
            format!("SigLevel = {level}"),
            format!("GPGDir = {}", keys.display()),
        ];
        let mut own = table.pacman_conf.iter();
        if !own.any(|line| line.trim_start().starts_with("Architecture")) {
            lines.push("Architecture = auto".into());
        }
        if let Some(list) = authorities {
            // pacman itself uses only the machine's list.
            let list = quoted_path(list);
            lines.push(format!(
                "XferCommand = /usr/bin/curl --silent --show-error --fail --location --cacert {list} --output %o %u"
            ));
        }
        lines.extend(table.pacman_conf.iter().cloned());
        for repository in &table.repositories {
            lines.push(format!("[{repository}]"));
            lines.push(match &self.line {
                Some(line) => format!("Server = {line}"),
                None => format!("Include = {HOST_MIRRORS}"),
            });
        }
        lines.join("\n") + "\n"
    }
}

/// Turns off the part of pacman's sandbox that needs more rights than root has in a container: without them, pacman 7.1
/// and later download nothing. Arch's own container image has the same setting.
fn for_containers(config: &str) -> String {
    let name = "DisableSandboxFilesystem";
    config.replace(&format!("\n#{name}\n"), &format!("\n{name}\n"))
}

/// Replaces `@DATE@` by the directory that Arch's archive has for a day, and `@SNAPSHOTID@` by the id.
fn expand(mirror: &str, id: &str) -> String {
    let date = format!("{}/{}/{}", &id[..4], &id[4..6], &id[6..8]);
    mirror.replace("@DATE@", &date).replace("@SNAPSHOTID@", id)
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_mirrors;
    use super::*;
    use crate::image::recipe::Source;

    fn choose(recipe: &str, mirrors: &[(&str, &str)]) -> Result<String> {
        with_mirrors("pacstrap", recipe, mirrors, |source, cx| {
            let Source::Pacstrap(table) = source else {
                panic!()
            };
            let server = Server::choose(&table, cx, Path::new("/nonexistent"))?;
            let list = Path::new("/my store/list");
            Ok(server.config(&table, Path::new("/keys"), Some(list)))
        })
    }

    #[test]
    fn signatures_are_required_unless_a_local_mirror_waives_them() {
        let config = choose("", &[("arch", "https://m.invalid/arch/")]).unwrap();
        assert_has!(
            config,
            "SigLevel = Required DatabaseOptional\nGPGDir = /keys\nArchitecture = auto\n"
        );
        assert_has!(
            config,
            " --cacert '/my store/list' --output %o %u\n[core]\n"
        );
        assert!(config.contains("Server = https://m.invalid/arch/$repo/os/$arch\n[extra]\n"));
        let never = ("arch-signatures", "never");
        assert_has!(
            choose("", &[("arch", "file:///srv"), never]).unwrap(),
            "SigLevel = Never"
        );
        assert!(choose("", &[("arch", "https://m.invalid"), never]).is_err());
    }

    #[test]
    fn an_image_installs_from_the_mirrors_that_it_was_built_from() {
        let host = tempfile::NamedTempFile::new().unwrap();
        fs_err::write(host.path(), "Server = https://h.invalid/$repo/os/$arch\n").unwrap();
        for (line, expected) in [
            (None, "Server = https://h.invalid/$repo/os/$arch\n"),
            (Some("file:///m".to_owned()), "Server = file:///m\n"),
        ] {
            let server = Server { line, signed: true };
            let list = server.mirrorlist(host.path()).unwrap();
            assert_eq!(String::from_utf8_lossy(&list), expected);
        }
    }

    #[test]
    fn pacman_can_download_in_a_container() {
        let config =
            "[options]\nDownloadUser = alpm\n#DisableSandboxFilesystem\n#DisableSandboxSyscalls\n";
        let wanted =
            "[options]\nDownloadUser = alpm\nDisableSandboxFilesystem\n#DisableSandboxSyscalls\n";
        assert_eq!(for_containers(config), wanted);
        // Older releases do not know the setting, and download without these rights.
        let old = "[options]\n#DisableSandbox\n";
        assert_eq!(for_containers(old), old);
    }

    #[test]
    fn a_missing_mirror_says_what_to_configure() {
        let error = choose("", &[("arch", "https://me:secret@m.invalid/a b")]).unwrap_err();
        let message = "mirror `arch` is not an address: `https://m.invalid/a b`";
        assert_eq!(error.message(), message);
        let error = choose("", &[]).unwrap_err();
        assert!(error.help_text().unwrap().contains("`arch = "));
        let error = choose(
            "snapshot = \"20260102T000000Z\"",
            &[("arch", "https://m.invalid")],
        )
        .unwrap_err();
        assert!(error.help_text().unwrap().contains("`arch-snapshot = "));
    }

    #[test]
    fn snapshots_become_the_archive_s_path() {
        let mirrors = [(
            "arch-snapshot",
            "https://m.invalid/repos/@DATE@/$repo/os/$arch",
        )];
        let config = choose("snapshot = \"20260102T000000Z\"", &mirrors).unwrap();
        assert!(config.contains("Server = https://m.invalid/repos/2026/01/02/$repo/os/$arch\n"));
    }
}
