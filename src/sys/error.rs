//! Owns the library's one error type: a kind (which determines the exit code), a message that names the object, the
//! cause, and a `help:` line with something to type.

use std::fmt;
use std::path::Path;

use crate::sys::signals;

/// The meaning of an error for the caller; each kind has one documented exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A bug, or a machine failure without a kind of its own.
    Unexpected,
    Usage,
    /// A profile, recipe, hook, archive or configuration file is invalid, or a newer rockenv wrote the store or file.
    Invalid,
    /// An engine, device, tool or server is not available, the store cannot be used, rights are missing, or another
    /// process stopped a container.
    Unavailable,
    StepFailed,
    /// Another command holds the env, image or store, or files that the command needs keep changing.
    Busy,
    /// No profile, image or snapshot has that name.
    NotFound,
    NoEnv,
    /// A layer does not exist: the store is damaged, or another command has just removed the layer.
    NoLayer,
    /// The current state differs from the locked or recorded one, or content does not match its digest.
    Drift,
    /// The machine does not meet the profile's needs.
    Preflight,
    /// Out of disk or memory.
    OutOfSpace,
    Signal(i32),
    /// A user's command could not be run; the code is the one that shells use.
    Command(u8),
}

impl Kind {
    /// Returns the process exit code documented in `docs/reference/exit-codes.md`.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Unexpected => 1,
            Self::Usage => 2,
            Self::Invalid => 3,
            Self::Unavailable => 4,
            Self::StepFailed => 5,
            Self::Busy => 6,
            Self::NotFound | Self::NoEnv | Self::NoLayer => 7,
            Self::Drift => 8,
            Self::Preflight => 9,
            Self::OutOfSpace => 10,
            Self::Command(code) => code,
            Self::Signal(number) => u8::try_from(128 + number).unwrap_or(1),
        }
    }

    /// Returns the error kind that another rockenv's exit code stands for.
    pub fn of_exit_code(code: u8) -> Self {
        let kinds = [
            Self::Usage,
            Self::Invalid,
            Self::Unavailable,
            Self::StepFailed,
            Self::Busy,
            Self::NotFound,
            Self::Drift,
            Self::Preflight,
            Self::OutOfSpace,
        ];
        let stopped = signals::STOP.map(|signal| Self::Signal(signal as i32));
        let mut kinds = kinds.into_iter().chain(stopped);
        kinds
            .find(|kind| kind.exit_code() == code)
            .unwrap_or(Self::Unexpected)
    }
}

/// The exit codes and their meaning, for the documentation.
pub fn exit_codes() -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = include_str!("exit_codes.txt").lines();
    lines.filter_map(|line| line.split_once(": "))
}

/// Defines macros for errors of the frequent kinds: `usage!` and the others take the arguments of `format!`.
macro_rules! kinds {
    ($dollar:tt $($name:ident: $kind:ident,)*) => {$(
        macro_rules! $name {
            ($dollar($dollar message:tt)*) => {
                $crate::sys::error::Error::new(
                    $crate::sys::error::Kind::$kind,
                    format!($dollar($dollar message)*),
                )
            };
        }
    )*};
}
kinds! {
    $
    unexpected: Unexpected,
    usage: Usage,
    invalid: Invalid,
    unavailable: Unavailable,
    step_failed: StepFailed,
    busy: Busy,
    not_found: NotFound,
    drift: Drift,
}

type Source = Box<dyn std::error::Error + Send + Sync + 'static>;

/// An error to show to a user: lower case, no full stop, names the object and the path.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    message: String,
    help: Option<String>,
    source: Option<Source>,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Makes an error of `kind`; `message` completes "error: ".
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            help: None,
            source: None,
        }
    }

    /// Adds the command to type next.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds the command to type next, if given.
    #[must_use]
    pub(crate) fn help_if(self, help: Option<impl Into<String>>) -> Self {
        match help {
            Some(help) => self.help(help),
            None => self,
        }
    }

    #[must_use]
    pub(crate) fn of_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// Turns a usage error into an invalid profile: the profile names the path, not the command line.
    #[must_use]
    pub(crate) fn of_profile(self) -> Self {
        match self.kind {
            Kind::Usage => self.of_kind(Kind::Invalid),
            _ => self,
        }
    }

    #[must_use]
    pub fn source(mut self, source: impl Into<Source>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Makes this error the cause of one with its kind and help.
    #[must_use]
    pub(crate) fn explained(self, message: impl Into<String>) -> Self {
        let (kind, help) = (self.kind, self.help.clone());
        Self::new(kind, message).source(self).help_if(help)
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn help_text(&self) -> Option<&str> {
        self.help.as_deref()
    }

    /// Returns whether the help is a known name similar to the given one.
    pub(crate) fn names_another(&self) -> bool {
        let help = self.help.as_deref();
        help.is_some_and(|help| help.starts_with("did you mean"))
    }

    /// Returns the message followed by its causes, one string each.
    pub fn chain(&self) -> Vec<String> {
        let mut lines = vec![self.message.clone()];
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let line = error.to_string();
            if lines.last() != Some(&line) {
                lines.push(line);
            }
            cause = error.source();
        }
        lines
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// Classifies an I/O error: a full disk and damaged data have their own exit codes wherever they occur.
fn io_kind(error: &std::io::Error) -> Kind {
    match error.kind() {
        _ if is_full(error) => Kind::OutOfSpace,
        // Damaged bytes, such as in an archive.
        std::io::ErrorKind::InvalidData => Kind::Invalid,
        _ => Kind::Unexpected,
    }
}

/// Returns whether the disk is full or the user's quota is used up.
pub(crate) fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

// `fs_err` messages contain the operation and the path, so they can stand alone.
impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        let kind = io_kind(&error);
        let help = "rockenv gc, if it is the store's disk; rockenv du shows disk use";
        Self {
            kind,
            message: error.to_string(),
            help: (kind == Kind::OutOfSpace).then(|| help.to_owned()),
            // The inner error has the same message, which the chain shows once.
            source: error.into_inner(),
        }
    }
}

/// Returns `None` if the path does not exist or leads through a file.
pub(crate) fn if_exists<T>(result: std::io::Result<T>) -> Result<Option<T>> {
    match result {
        Err(error) if is_absent(&error) => Ok(None),
        other => Ok(Some(other?)),
    }
}

/// Returns whether an error means that a path does not exist or leads through a file.
pub(crate) fn is_absent(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory)
}

/// Returns whether a path exists. Unlike [`Path::exists`], fails if that is not known.
pub(crate) fn exists(path: &Path) -> Result<bool> {
    if_exists(fs_err::metadata(path)).map(|found| found.is_some())
}

/// Explains a failure with a path that the user named: it is missing, or of another kind.
pub(crate) fn named_path(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    use std::io::ErrorKind;
    move |error| match error.kind() {
        ErrorKind::NotFound => not_found!("`{}` does not exist", path.display()),
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            usage!("`{}` is not a directory", path.display())
        }
        ErrorKind::IsADirectory => usage!("`{}` is a directory", path.display()),
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            Error::from(error).of_kind(Kind::Usage)
        }
        _ => error.into(),
    }
}

/// Names what could not be encoded, such as "a manifest".
pub(crate) fn encoded<T>(
    result: std::result::Result<T, impl Into<Source>>,
    what: &str,
) -> Result<T> {
    result.map_err(|error| unexpected!("cannot encode {what}").source(error))
}

/// Explains a failure to parse one of the store's files.
pub(crate) fn damaged<E: Into<Source>>(path: &Path) -> impl FnOnce(E) -> Error {
    move |error| {
        unexpected!("`{}` is damaged", path.display())
            .source(error)
            .help("rockenv fsck")
    }
}

/// Adds a message about the failed operation, keeping the cause and its kind.
pub trait ResultExt<T> {
    /// Wraps the error: `message` names the failure ("cannot freeze `gfx1103`"), the original error becomes its cause.
    fn context(self, message: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<Error>> ResultExt<T> for std::result::Result<T, E> {
    fn context(self, message: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| error.into().explained(message()))
    }
}

impl From<nix::Error> for Error {
    fn from(error: nix::Error) -> Self {
        std::io::Error::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exit_code_of_another_rockenv_has_its_kind() {
        for code in (1..=10).chain([129, 130, 131, 143]) {
            assert_eq!(Kind::of_exit_code(code).exit_code(), code);
        }
    }

    #[test]
    fn a_full_disk_has_its_exit_code_and_what_to_type_wherever_it_is_met() {
        let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
        let failed: std::result::Result<(), _> = Err(full());
        let named = failed.context(|| "cannot write `x`".to_owned());
        for error in [Error::from(full()), named.unwrap_err()] {
            assert_eq!(error.kind(), Kind::OutOfSpace);
            assert!(error.help_text().unwrap().starts_with("rockenv gc"));
        }
        let other = Error::from(std::io::Error::from(std::io::ErrorKind::NotFound));
        assert_eq!(other.help_text(), None);
    }
}
