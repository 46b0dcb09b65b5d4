//! Owns building Debian and Ubuntu images with mmdebstrap, whose tar stream goes through rockenv's own extraction.
//!
//! No mirror is hard-coded: mmdebstrap's default or the configured mirror is used.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::image::recipe::{Distribution, Mmdebstrap};
use crate::image::tar::unpack::{UnpackOptions, unpack};
use crate::image::{BuildContext, BuildProgress, WORK, certificates};
use crate::sys::address::without_login;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::process::{Event, Program};
use crate::sys::shell::quoted;

/// First apt version that supports snapshots (`APT::Snapshot`) without further configuration.
const APT_WITH_SNAPSHOTS: (u32, u32) = (2, 9);

pub(crate) fn build(table: &Mmdebstrap, source_date: i64, cx: &mut BuildContext<'_>) -> Result<()> {
    let name = table.distribution.name();
    let program = Program::find("mmdebstrap", "Debian and Ubuntu images").map_err(|error| {
        // Most distributions have no package of it.
        error.help(format!(
            "rockenv setup; if there is no package of it, name the container image docker.io/{name}:{} in a recipe in \
             /etc/rockenv/images",
            table.suite
        ))
    })?;
    let mut options: Vec<String> = table.apt_options.clone();
    let lines = match &table.snapshot {
        None => sources(table, cx, "", None)?,
        Some(id) => match sources(table, cx, "-snapshot", Some(id))? {
            lines if !lines.is_empty() => lines,
            _ => {
                let version = apt_version(cx)?;
                if version < APT_WITH_SNAPSHOTS {
                    let (major, minor) = version;
                    return Err(unavailable!("snapshot {id} of {name} needs apt 2.9 or a configured archive; this host has apt {major}.{minor}")
                    .help(format!("set `{name}-snapshot = \"https://.../@SNAPSHOTID@/\"` under [mirror] in config.toml")));
                }
                // The option stays in the image, so that packages installed later come from the same snapshot.
                options.push(format!("APT::Snapshot \"{id}\""));
                sources(table, cx, "", None)?
            }
        },
    };
    if table.snapshot.is_some() {
        // The Release file of a past snapshot has expired by definition.
        options.push("Acquire::Check-Valid-Until \"false\"".into());
    }
    let work = cx.into.join(WORK);
    let host = Path::new("/");
    let trusted = match lines.is_empty() {
        // mmdebstrap finds the keys for its own addresses.
        true => keyring(table.distribution, host).map(|_| Vec::new())?,
        false => trusted(table.distribution, cx.task.mirrors, &work, host)?,
    };
    let mut program = super::prepared(program, source_date, cx)
        .args(["--mode=root", "--format=tar"])
        .arg(format!("--variant={}", table.variant))
        .arg(format!("--components={}", table.components.join(",")))
        // mmdebstrap copies the host's files, which packages read. postfix adds the domain of resolv.conf to the name.
        .arg(
            "--setup-hook=cd \"$1/etc\" && echo rockenv > hostname && \
             { [ ! -e resolv.conf ] || sed -i -E '/^(search|domain)/d' resolv.conf; }",
        )
        .args(trusted)
        .env("TMPDIR", &work);
    if !table.packages.is_empty() {
        program = program.arg(format!("--include={}", table.packages.join(",")));
    }
    if let Some(architecture) = &table.architecture {
        program = program.arg(format!("--architectures={architecture}"));
    }
    for option in options {
        program = program.arg(format!("--aptopt={option}"));
    }
    if let Some(list) = certificates::list(&work)? {
        // Only for the host's apt during the build, because the image does not contain the list.
        let place = "\"$1/etc/apt/apt.conf.d/00rockenv-authorities\"";
        let setting = format!("Acquire::https::CAInfo \"{}\";", list.display());
        let setting = quoted(&setting);
        program = program
            .arg(format!("--setup-hook=echo {setting} > {place}"))
            .arg(format!("--customize-hook=rm {place}"));
    }
    program = program.args(["--", table.suite.as_str(), "-"]).args(lines);
    unpack_output(program, name, cx)
}

/// Runs the program and unpacks the archive that it writes.
fn unpack_output(program: Program, name: &str, cx: &mut BuildContext<'_>) -> Result<()> {
    let written = AtomicU64::new(0);
    let (into, cancel, progress) = (cx.into, cx.task.cancel, &mut *cx.task.progress);
    let mut seen = 0;
    let mut refusal = None;
    let outcome = program.stream(
        cancel,
        &mut |event| match event {
            Event::Line(line) => {
                refusal = refusal.take().or_else(|| refused(line).map(str::to_owned));
                progress(BuildProgress::Line(line));
            }
            Event::Tick => {
                let done = written.load(Ordering::Relaxed);
                if done != seen {
                    seen = done;
                    progress(BuildProgress::Bytes { done, total: None });
                }
            }
        },
        |stdout| {
            let mut report = |done| written.store(done, Ordering::Relaxed);
            unpack(stdout, into, &UnpackOptions::default(), cancel, &mut report).map(drop)
        },
    );
    outcome.map_err(|error| match refusal {
        Some(refusal) if !matches!(error.kind(), Kind::Signal(_)) => explain(name, &refusal, error),
        _ => error,
    })
}

/// Returns apt's error message if a line contains one. It is kept, because later lines may push it out of the output.
fn refused(line: &str) -> Option<&str> {
    // Since 2.9.32, apt names the standard instead of the program.
    let unverified = ["GPG error", "OpenPGP signature verification failed"];
    let said = line.strip_prefix("E: ").or_else(|| {
        line.strip_prefix("W: ")
            .filter(|said| unverified.iter().any(|begin| said.starts_with(begin)))
    })?;
    // mmdebstrap's own messages are never the cause.
    let mut own = ["apt", "mmdebstrap", "setup"].iter();
    let is_own = own.any(|begin| said.starts_with(begin));
    (!is_own).then_some(said)
}

fn explain(name: &str, refusal: &str, error: Error) -> Error {
    let explained = Error::new(error.kind(), format!("apt says: {refusal}")).source(error);
    // gpgv says the first, and sqv, which apt 3 prefers, the second.
    match ["NO_PUBKEY", "Missing key"].iter().any(|word| refusal.contains(word)) {
        true => explained.help(format!(
            "set `{name}-signed-by = \"/etc/apt/keyrings/....gpg\"` under [mirror] in config.toml, if it is your mirror's key"
        )),
        false => explained,
    }
}

/// Returns the options for the keys of configured mirrors: the user's, or the distribution's. For these addresses
/// mmdebstrap trusts only what the host's apt trusts, and that may be another distribution's keys.
fn trusted(
    distribution: Distribution,
    mirrors: &BTreeMap<String, String>,
    work: &Path,
    host: &Path,
) -> Result<Vec<String>> {
    if let Some(keys) = keys(distribution.name(), mirrors, work)? {
        // The image's own apt must trust the mirror too, when steps install packages.
        return Ok(vec![
            format!("--keyring={keys}"),
            format!("--customize-hook=copy-in {} /etc/apt", quoted(&keys)),
        ]);
    }
    let mut file = keyring(distribution, host)?;
    // The file is trusted in addition to the keys in the host's `trusted.gpg.d`, but in place of its `trusted.gpg`. apt
    // ignores one that it cannot read, or that is not in OpenPGP's binary format.
    let more = fs_err::read(host.join("etc/apt/trusted.gpg")).unwrap_or_default();
    if more.first().is_some_and(|tag| tag & 0x80 != 0) {
        let keys = [fs_err::read(&file)?, more].concat();
        file = work.join("trusted.gpg");
        fs_err::write(&file, keys)?;
        fs_err::set_permissions(&file, Permissions::from_mode(0o644))?;
    }
    Ok(vec![format!("--keyring={}", file.display())])
}

/// Copies the key of the user's mirrors to a directory in apt's layout; returns the directory, or `None` without a key.
fn keys(name: &str, mirrors: &BTreeMap<String, String>, work: &Path) -> Result<Option<String>> {
    let setting = format!("{name}-signed-by");
    let Some(path) = mirrors.get(&setting).map(Path::new) else {
        return Ok(None);
    };
    let cannot = || format!("cannot read the key that `{setting}` under [mirror] names");
    if !path.is_absolute() {
        return Err(invalid!(
            "`{setting}` under [mirror] is not an absolute path: `{}`",
            path.display()
        )
        .help(format!("{setting} = \"/etc/apt/keyrings/....gpg\"")));
    }
    let key = fs_err::read(path).context(cannot)?;
    // apt determines the key's format by its file extension.
    let is_text = key.starts_with(b"-----BEGIN PGP");
    let form = if is_text { "asc" } else { "gpg" };
    let directory = work.join("trusted.gpg.d");
    fs_err::create_dir(&directory)?;
    let file = directory.join(format!("rockenv-{name}.{form}"));
    fs_err::write(&file, key)?;
    for (path, mode) in [(&directory, 0o755), (&file, 0o644)] {
        fs_err::set_permissions(path, Permissions::from_mode(mode))?;
    }
    match directory.to_str() {
        Some(directory) => Ok(Some(directory.to_owned())),
        None => Err(unavailable!(
            "the store's path is not UTF-8: `{}`",
            directory.display()
        )),
    }
}

/// Returns sources.list lines for the configured mirrors. Empty for the tool's default.
fn sources(
    table: &Mmdebstrap,
    cx: &BuildContext<'_>,
    kind: &str,
    id: Option<&str>,
) -> Result<Vec<String>> {
    let name = table.distribution.name();
    let mirror = |key: String| cx.task.mirrors.get(&key).map(|mirror| (key, mirror));
    let line = |(key, mirror): (String, &String), suite: &str| -> Result<String> {
        let mirror = match id {
            Some(id) => mirror.replace("@SNAPSHOTID@", id),
            None => mirror.clone(),
        };
        let is_wrong = |character: char| character.is_whitespace() || "[]\"".contains(character);
        if mirror.contains(is_wrong) {
            let shown = without_login(&mirror);
            return Err(invalid!("mirror `{key}` is not an address: `{shown}`"));
        }
        let option = id.map_or("", |_| "[check-valid-until=no] ");
        let components = table.components.join(" ");
        Ok(format!("deb {option}{mirror} {suite} {components}"))
    };
    let Some(main) = mirror(format!("{name}{kind}")) else {
        return Ok(Vec::new());
    };
    let suite = &table.suite;
    let mut lines = vec![line(main.clone(), suite)?];
    // Debian's unstable has no pockets, and testing's pockets do not matter.
    if ["sid", "unstable", "testing", "experimental", "devel"].contains(&suite.as_str()) {
        return Ok(lines);
    }
    lines.push(line(main.clone(), &format!("{suite}-updates"))?);
    match table.distribution {
        Distribution::Ubuntu => lines.push(line(main, &format!("{suite}-security"))?),
        // Debian's security updates are in a separate archive.
        Distribution::Debian => {
            if let Some(security) = mirror(format!("debian-security{kind}")) {
                lines.push(line(security, &format!("{suite}-security"))?);
            }
        }
    }
    Ok(lines)
}

fn apt_version(cx: &mut BuildContext<'_>) -> Result<(u32, u32)> {
    let program = Program::find("apt-get", "Debian and Ubuntu images")?.arg("--version");
    let text = program.output(64 << 10, cx.task.cancel, &mut |_| {})?;
    parse_version(&String::from_utf8_lossy(&text))
        .ok_or_else(|| unexpected!("cannot read apt's version"))
}

/// Parses `apt 2.9.8 (amd64)`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_whitespace().nth(1)?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns the file with the distribution's keys. Other distributions may lack it, and apt's own message does not name
/// the package that contains it.
fn keyring(distribution: Distribution, host: &Path) -> Result<PathBuf> {
    let (package, file) = match distribution {
        Distribution::Debian => ("debian-archive-keyring", "debian-archive-keyring"),
        Distribution::Ubuntu => ("ubuntu-keyring", "ubuntu-archive-keyring"),
    };
    let place = |end| host.join(format!("usr/share/keyrings/{file}.{end}"));
    let mut places = ["gpg", "pgp"].into_iter().map(place);
    places.find(|place| place.exists()).ok_or_else(|| {
        unavailable!(
            "the signing keys of {} are missing (`{}`, package `{package}`)",
            distribution.name(),
            place("gpg").display()
        )
        .help("rockenv setup")
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_mirrors;
    use super::*;
    use crate::image::recipe::Source;
    use crate::sys::error::Kind;

    fn lines(recipe: &str, mirrors: &[(&str, &str)], kind: &str, id: Option<&str>) -> Vec<String> {
        with_mirrors("mmdebstrap", recipe, mirrors, |source, cx| {
            let Source::Mmdebstrap(table) = source else {
                panic!()
            };
            sources(&table, cx, kind, id).unwrap()
        })
    }

    #[test]
    fn without_a_configured_mirror_the_tool_chooses() {
        let debian = "distribution=\"debian\"\nsuite=\"trixie\"";
        let mirrors = [("ubuntu", "http://u.invalid")];
        assert!(lines(debian, &mirrors, "", None).is_empty());
    }

    #[test]
    fn configured_mirrors_and_snapshots() {
        let debian = "distribution=\"debian\"\nsuite=\"trixie\"\ncomponents=[\"main\",\"contrib\"]";
        let mirrors = [
            ("debian", "http://m.invalid/debian"),
            ("debian-security", "http://s.invalid"),
        ];
        assert_eq!(
            lines(debian, &mirrors, "", None),
            [
                "deb http://m.invalid/debian trixie main contrib",
                "deb http://m.invalid/debian trixie-updates main contrib",
                "deb http://s.invalid trixie-security main contrib",
            ]
        );
        let ubuntu = "distribution=\"ubuntu\"\nsuite=\"noble\"";
        let mirrors = [("ubuntu-snapshot", "https://m.invalid/@SNAPSHOTID@/")];
        assert_eq!(
            lines(ubuntu, &mirrors, "-snapshot", Some("20260101T000000Z"))[2],
            "deb [check-valid-until=no] https://m.invalid/20260101T000000Z/ noble-security main"
        );
        let sid = "distribution=\"debian\"\nsuite=\"sid\"";
        assert_eq!(lines(sid, &[("debian", "file:/x")], "", None).len(), 1);
    }

    #[test]
    fn apt_versions() {
        assert_eq!(parse_version("apt 2.9.8 (amd64)\nSupported"), Some((2, 9)));
        assert_eq!(parse_version("apt 3.0"), Some((3, 0)));
    }

    #[test]
    fn apt_s_reason_is_told_from_mmdebstrap_s_messages() {
        let lines = [
            "E: Failed to fetch http://m.invalid/a.deb  Hash Sum mismatch",
            "W: GPG error: http://m.invalid trixie InRelease: NO_PUBKEY 12",
            "W: OpenPGP signature verification failed: http://m.invalid trixie InRelease: Sub-process /usr/bin/sqv \
             returned an error code (1), error message is: Missing key 12, which is needed to verify signature.",
        ];
        for line in lines {
            let said = refused(line).unwrap();
            assert_eq!(said, &line[3..]);
            let explained = explain("debian", said, unexpected!("`mmdebstrap` failed"));
            let names_key = explained.help_text().is_some();
            assert_eq!(names_key, line.starts_with('W'), "{line}");
        }
        for line in [
            "I: running apt-get update...",
            "W: Download is performed unsandboxed",
            "E: apt-get update --error-on=any failed",
            "E: mmdebstrap failed to run",
        ] {
            assert_eq!(refused(line), None, "{line}");
        }
    }

    #[test]
    fn a_mirror_is_signed_by_the_distribution_and_missing_keys_name_the_package() {
        let dir = tempfile::tempdir().unwrap();
        let error = keyring(Distribution::Ubuntu, dir.path()).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        assert!(error.message().contains("`ubuntu-keyring`"));
        let keys = dir.path().join("usr/share/keyrings");
        fs_err::create_dir_all(&keys).unwrap();
        fs_err::write(keys.join("ubuntu-archive-keyring.pgp"), "ours").unwrap();
        let option = || {
            let (mirrors, host) = (BTreeMap::new(), dir.path());
            trusted(Distribution::Ubuntu, &mirrors, host, host).unwrap()
        };
        let own = format!("--keyring={}/ubuntu-archive-keyring.pgp", keys.display());
        assert_eq!(option(), [own]);
        // The keys that the host trusts stay trusted.
        fs_err::create_dir_all(dir.path().join("etc/apt")).unwrap();
        fs_err::write(dir.path().join("etc/apt/trusted.gpg"), [0x99_u8, 1]).unwrap();
        let both = dir.path().join("trusted.gpg");
        assert_eq!(option(), [format!("--keyring={}", both.display())]);
        assert_eq!(fs_err::read(both).unwrap(), b"ours\x99\x01");
    }
}
