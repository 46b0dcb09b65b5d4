//! Owns finding hooks by name, and reading them.

use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::{Edit, Hook, Patch, Script, Work, file};
use crate::profile::references::LONGEST;
use crate::profile::value::{self, Refused};
use crate::profile::{SHELL, shorten};
use crate::rocm::target::{self, Target};
use crate::sys::address::{hide_secrets, without_login};
use crate::sys::catalog::{CatalogEntry, Directory};
use crate::sys::error::{Error, Result, named_path};
use crate::sys::span::{self, At, Place};
use crate::sys::{builtin, catalog, trusted_files};

/// Maximum size of a patch: reviewers read it, so a larger file is a mistake.
pub(crate) const MAX_PATCH: u64 = 16 << 20;

/// Returns every hook, sorted. A user's hook comes before a built-in hook of the same name.
pub fn list(directories: &[Directory]) -> Result<Vec<CatalogEntry>> {
    let builtin = builtin::HOOKS.dirs();
    let names = builtin.filter_map(|directory| directory.path().to_str());
    catalog::list(directories, names, |directory| {
        let path = directory.join("hook.toml");
        let name = directory.file_name()?.to_str()?;
        path.is_file().then(|| (name.to_owned(), path))
    })
}

/// Reads the hook of that name, with its patches.
pub fn load(directories: &[Directory], name: &str) -> Result<Hook> {
    let listed = list(directories)?;
    let path = &catalog::named(&listed, "hook", name)?.path;
    let beside = |file: &str| match path {
        Some(path) => read(directories, &path.with_file_name(file)),
        None => {
            let found = builtin::HOOKS.get_file(format!("{name}/{file}"));
            let found = found.map(|file| file.contents().to_vec());
            found.ok_or_else(|| not_found!("no file `{file}` beside it"))
        }
    };
    let shown = match path {
        Some(path) => path.display().to_string(),
        None => format!("hooks/{name}/hook.toml (built in)"),
    };
    let text = String::from_utf8(beside("hook.toml")?);
    let text = text.map_err(|_| invalid!("`{shown}` is not UTF-8"))?;
    let hook = parse(name, &text, &shown, &beside)?;
    Ok(Hook {
        path: path.clone(),
        ..hook
    })
}

/// Reads a regular file of limited size; refuses anything else, including a link.
fn read(directories: &[Directory], path: &Path) -> Result<Vec<u8>> {
    let found = path.symlink_metadata().map_err(named_path(path))?;
    if found.is_symlink() {
        let error = invalid!("`{}` is a symbolic link", path.display());
        return Err(error.help("copy the file itself there: links are not read"));
    }
    let found = trusted_files::read(directories, path, MAX_PATCH + 1)?;
    let found = found.filter(|found| found.bytes.len() as u64 <= MAX_PATCH);
    let found = found.ok_or_else(|| {
        invalid!(
            "`{}` is not a regular file of at most {MAX_PATCH} bytes",
            path.display()
        )
    })?;
    Ok(found.bytes)
}

/// Parses a path below a volume: relative, and without a part that leads out. The error completes "`PATH` ...".
pub(super) fn below(text: &str) -> std::result::Result<PathBuf, &'static str> {
    let path = PathBuf::from(text);
    if text.is_empty() || text.ends_with('/') || text.contains('\0') {
        return Err("names no file");
    }
    if path
        .components()
        .any(|part| !matches!(part, Component::Normal(_)))
    {
        return Err("leaves the volume");
    }
    if path.components().any(|part| part.as_os_str() == ".git") {
        return Err("belongs to git");
    }
    Ok(path)
}

/// Checks a hook's text; `shown` is its name in errors, `beside` reads a file of its directory.
fn parse(
    name: &str,
    text: &str,
    shown: &str,
    beside: &dyn Fn(&str) -> Result<Vec<u8>>,
) -> Result<Hook> {
    // An edit would put the carriage returns of an editor on Windows into the source, and a script would run them.
    let text = text.replace("\r\n", "\n");
    let text = text.as_str();
    let raw: file::File = toml::from_str(text).map_err(|error| {
        invalid!("`{shown}` is not a valid hook")
            .source(hide_secrets(error.to_string().trim_end()))
            .help("rockenv schema hook")
    })?;
    let check = Check {
        text,
        shown,
        beside,
    };
    check.accepted(&(0..0), value::name("hook", name))?;
    if raw.schema.value != 1 {
        let message = format!(
            "this version of rockenv does not support schema {}",
            raw.schema
        );
        return Err(check.error(&raw.schema.place, message));
    }
    check.accepted(&raw.volume.place, value::name("volume", &raw.volume))?;
    let from_step = raw.from_step.as_ref();
    let from_step = from_step.map(|step| check.accepted(&step.place, value::step_name(step)));
    let from_step = from_step.transpose()?;
    for target in &raw.applies.targets {
        let known = target::family(target).is_some();
        if !known && Target::parse(target).is_err() {
            let message = format!("`{}` is neither a target nor a family", shorten(target));
            return Err(check.error(&target.place, message));
        }
    }
    for commit in [&raw.applies.since, &raw.applies.until]
        .into_iter()
        .flatten()
    {
        check.digits(commit, 40)?;
    }
    let edits = raw.edit.iter().map(|edit| check.edit(edit));
    let edits = edits.collect::<Result<Vec<_>>>()?;
    let patches = raw.patch.iter().map(|patch| check.patch(patch));
    let patches = patches.collect::<Result<Vec<_>>>()?;
    let script = raw.script.map(|script| check.script(script)).transpose()?;
    if edits.is_empty() && patches.is_empty() && script.is_none() {
        return Err(check.error(
            &raw.volume.place,
            "it changes nothing: no edit, patch or script",
        ));
    }
    Ok(Hook {
        name: name.to_owned(),
        description: raw.description,
        why: raw.why,
        links: raw.links,
        path: None,
        applies: raw.applies,
        work: Work {
            volume: raw.volume.value,
            from_step,
            patches,
            edits,
            script,
        },
    })
}

struct Check<'a> {
    text: &'a str,
    shown: &'a str,
    beside: &'a dyn Fn(&str) -> Result<Vec<u8>>,
}

impl Check<'_> {
    fn error(&self, place: &Place, message: impl std::fmt::Display) -> Error {
        let line = span::line(self.text, place.start);
        invalid!("{}:{line}: {message}", self.shown).help("rockenv schema hook")
    }

    fn accepted<T>(&self, place: &Place, checked: std::result::Result<T, Refused>) -> Result<T> {
        checked.map_err(|refused| self.error(place, refused.message))
    }

    fn digits(&self, text: &At<String>, count: usize) -> Result<()> {
        let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        match text.len() == count && text.bytes().all(digit) {
            true => Ok(()),
            false => Err(self.error(
                &text.place,
                format!("not {count} lower-case hexadecimal digits"),
            )),
        }
    }

    fn below(&self, path: &At<String>) -> Result<PathBuf> {
        below(path)
            .map_err(|why| self.error(&path.place, format!("`{}` {why}", path.escape_debug())))
    }

    fn edit(&self, edit: &file::Edit) -> Result<Edit> {
        let (find, whole_lines) = match (&edit.find, &edit.find_line) {
            (Some(find), None) => (find, false),
            (None, Some(line)) => (line, true),
            _ => {
                return Err(
                    self.error(&edit.file.place, "an edit has either `find` or `find-line`")
                );
            }
        };
        if find.trim().is_empty() && (whole_lines || find.is_empty()) {
            return Err(self.error(&find.place, "the text must not be empty"));
        }
        if whole_lines && (find.trim() != find.value || find.contains('\n')) {
            let message = "`find-line` is one line, without blanks around it";
            return Err(self.error(&find.place, message));
        }
        if find.value == edit.replace {
            return Err(self.error(&find.place, "the edit changes nothing"));
        }
        let wrong = "the count must be at least 1";
        let count = self.number(edit.count.as_ref(), 1..=usize::MAX, wrong)?;
        Ok(Edit {
            file: self.below(&edit.file)?,
            find: find.value.clone(),
            whole_lines,
            replace: edit.replace.clone(),
            count,
        })
    }

    /// Returns a number, or 1 if there is none; `wrong` describes one out of range.
    fn number(
        &self,
        number: Option<&At<i64>>,
        range: RangeInclusive<usize>,
        wrong: &str,
    ) -> Result<usize> {
        let Some(number) = number else { return Ok(1) };
        let good = usize::try_from(number.value).ok();
        let good = good.filter(|number| range.contains(number));
        good.ok_or_else(|| self.error(&number.place, wrong))
    }

    fn script(&self, script: file::Script) -> Result<Script> {
        let changes = script.changes.iter().map(|path| self.below(path));
        let mut changes = changes.collect::<Result<Vec<_>>>()?;
        if changes.is_empty() {
            let message = "a script must declare which files it changes";
            return Err(self.error(&script.changes.place, message));
        }
        if script.run.len() >= LONGEST {
            let message = "the script is longer than 128 KiB";
            return Err(self.error(&script.run.place, message));
        }
        changes.sort();
        let given = script.shell.filter(|shell| !shell.is_empty());
        let shell = given.unwrap_or_else(|| SHELL.map(str::to_owned).to_vec());
        let has_nul = |word: &String| word.contains('\0');
        if shell.iter().any(has_nul) || has_nul(&script.run) {
            let message = "no argument can have a NUL character";
            return Err(self.error(&script.run.place, message));
        }
        Ok(Script {
            run: script.run.value,
            shell,
            changes,
        })
    }

    fn patch(&self, patch: &At<file::Patch>) -> Result<Patch> {
        let directory = match &patch.directory {
            Some(directory) => self.below(directory)?,
            None => PathBuf::new(),
        };
        let wrong = "0 to 16 parts can be stripped";
        let strip = self.number(patch.strip.as_ref(), 0..=16, wrong)?;
        let (name, sha256, bytes) = match (&patch.file, &patch.url, &patch.sha256) {
            (Some(file), None, None) => {
                let name = &file.value;
                if name.contains('/') || name.starts_with('.') {
                    return Err(
                        self.error(&file.place, "not the name of a file beside `hook.toml`")
                    );
                }
                let bytes = (self.beside)(name).map_err(|cause| {
                    let name = name.escape_debug();
                    self.error(&file.place, format!("cannot read patch `{name}`"))
                        .source(cause)
                })?;
                (
                    name.clone(),
                    hex::encode(Sha256::digest(&bytes)),
                    Some(bytes),
                )
            }
            (None, Some(url), Some(sha256)) => {
                if !url.starts_with("https://") {
                    return Err(self.error(&url.place, "the address must begin with `https://`"));
                }
                self.digits(sha256, 64)?;
                (without_login(url), sha256.value.clone(), None)
            }
            (None, Some(at), None) => {
                return Err(self.error(&at.place, "an address needs a `sha256`"));
            }
            (file, _, sha256) => {
                let place = file.as_ref().or(sha256.as_ref()).map(|at| &at.place);
                let message = "a patch has either `file`, or `url` with `sha256`";
                return Err(self.error(place.unwrap_or(&patch.place), message));
            }
        };
        Ok(Patch {
            name,
            url: patch.url.as_ref().map(|url| url.value.clone()),
            sha256,
            directory,
            strip,
            bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::tests::cases;

    const HEAD: &str = "schema = 1\ndescription = \"d\"\nwhy = \"w\"\nvolume = \"src\"\n";

    fn read_text(text: &str) -> Result<Hook> {
        parse("h", text, "hooks/h/hook.toml", &|name| match name {
            "a.patch" => Ok(b"content".to_vec()),
            _ => Err(not_found!("no such file")),
        })
    }

    #[test]
    fn every_built_in_hook_is_valid() {
        let hooks = list(&[]).unwrap().into_iter();
        let names: Vec<String> = hooks.map(|hook| hook.name).collect();
        assert_eq!(names, ["torch-without-rccl"]);
        for name in names {
            let hook = load(&[], &name).unwrap();
            assert!(!hook.why.is_empty() && hook.digest().unwrap().len() == 64);
        }
    }

    #[test]
    fn a_link_and_a_missing_patch_are_named_as_such() {
        let directory = tempfile::tempdir().unwrap();
        let hooks = Directory::from(directory.path().to_owned());
        let hook = directory.path().join("h/hook.toml");
        fs_err::create_dir(hook.parent().unwrap()).unwrap();
        let text = format!("{HEAD}[[patch]]\nfile = \"away.patch\"\n");
        fs_err::write(directory.path().join("real"), &text).unwrap();
        for (is_link, want) in [
            (true, "is a symbolic link"),
            (false, "away.patch` does not exist"),
        ] {
            match is_link {
                true => fs_err::os::unix::fs::symlink("../real", &hook).unwrap(),
                false => fs_err::rename(directory.path().join("real"), &hook).unwrap(),
            }
            let error = load(std::slice::from_ref(&hooks), "h").unwrap_err();
            assert_has!(error.chain().join(": "), want);
        }
    }

    #[test]
    fn mistakes_have_a_line() {
        for (rest, words) in cases(
            r#"
        => :4: it changes nothing
        [[edit]]; file = "../f"; find = "a"; replace = "" => :6: `../f` leaves the volume
        [[edit]]; file = "/f"; find = "a"; replace = "" => :6: `/f` leaves the volume
        [[edit]]; file = "a/.git/config"; find = "a"; replace = "" => :6: `a/.git/config` belongs to git
        [[edit]]; file = "f"; find = ""; replace = "" => :7: the text must not be empty
        [[edit]]; file = "f"; replace = "" => :6: an edit has either `find` or `find-line`
        [[edit]]; file = "f"; find-line = " a"; replace = "" => :7: `find-line` is one line
        [[edit]]; file = "f"; find = "a"; replace = "a" => :7: the edit changes nothing
        [[edit]]; file = "f"; find = "a"; replace = ""; count = 0 => :9: the count must be at least 1
        [[patch]]; file = "away.patch" => cannot read patch `away.patch`
        [[patch]]; file = "../a.patch" => :6: not the name of a file
        [[patch]]; url = "https://example.org/p" => :6: an address needs
        [[patch]]; url = "http://example.org/p"; sha256 = "0" => :6: the address must begin
        [[patch]]; sha256 = "0" => :6: a patch has either `file`
        [[edit]]; file = "f"; find = "a"; replace = ""; [[patch]] => :9: a patch has either `file`
        [applies]; targets = ["gfx9999"] => :6: `gfx9999` is neither a target nor a family
        [applies]; since = "main" => :6: not 40
        [script]; run = "x"; changes = [] => :7: a script must declare which files it changes
        [script]; run = "x\u0000"; changes = ["f"] => :6: no argument can have a NUL character
        [script]; run = "x"; shell = ["/bin/sh\u0000"]; changes = ["f"] => :6: no argument can have a NUL character
        "#,
        ) {
            let error = read_text(&format!("{HEAD}{rest}")).unwrap_err();
            assert_has!(error.message(), words);
        }
        let script = |length: usize| {
            let run = "x".repeat(length);
            let text = format!("{HEAD}[script]\nchanges = [\"f\"]\nrun = \"{run}\"\n");
            read_text(&text)
        };
        let error = script(128 << 10).unwrap_err();
        assert_has!(error.message(), ":7: the script is longer than 128 KiB");
        script((128 << 10) - 1).unwrap();
        let error = read_text(&format!("{HEAD}edits = 1\n")).unwrap_err();
        assert!(error.chain().join("\n").contains("unknown field `edits`"));
    }

    #[test]
    fn an_address_is_shown_without_secrets() {
        let url = "https://me:TOKEN@example.org/p.patch?token=TOKEN";
        let sha256 = "0".repeat(64);
        let text = format!("{HEAD}[[patch]]\nurl = \"{url}\"\nsha256 = \"{sha256}\"\n");
        let patch = read_text(&text).unwrap().work.patches.remove(0);
        assert_eq!(patch.name, "https://example.org/p.patch?token=***");
        assert_eq!(patch.url.as_deref(), Some(url));
    }

    #[test]
    fn the_digest_is_of_what_it_does() {
        let one = format!("{HEAD}[[patch]]\nfile = \"a.patch\"\n");
        let digest = |text: &str| read_text(text).unwrap().digest().unwrap();
        let described = one.replace("\"d\"", "\"other words\"");
        let applies = format!("{one}[applies]\ntargets = [\"gfx1103\"]\n");
        for same in [described, applies] {
            assert_eq!(digest(&one), digest(&same));
        }
        assert_ne!(digest(&one), digest(&format!("{one}strip = 0\n")));
        assert_ne!(digest(&one), digest(&one.replace("\"src\"", "\"other\"")));
        let script = format!("{HEAD}[script]\nchanges = [\"f\"]\nrun = '''\ntrue\n'''\n");
        assert_eq!(digest(&script), digest(&script.replace('\n', "\r\n")));
    }
}
