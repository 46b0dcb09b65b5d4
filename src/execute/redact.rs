//! Owns redacting credentials in a step's output. Passwords in URLs and values of variables such as `HF_TOKEN`, from
//! `env-from-host`, are `***` on the screen and in the log.

use std::borrow::Cow;
use std::path::Path;

use crate::sys::address::is_secret;
use crate::ui::event::Stream;

const SHOWN: &[u8] = b"***";
/// Shorter secrets would match by chance in many lines.
const SHORTEST: usize = 4;
/// Minimum length of a line of a secret variable: `CACHE_KEY=main` is no secret.
const SHORTEST_VALUE: usize = 8;

/// The secrets, and for each stream held-back output that may be the beginning of one.
#[derive(Debug, Default)]
pub(crate) struct Redactor {
    secrets: Vec<Vec<u8>>,
    /// Whether a secret begins with a byte, for each byte. This makes the search fast: a key has dozens of lines, and a
    /// build prints gigabytes.
    first_bytes: Vec<bool>,
    held: [Vec<u8>; 2],
}

impl Redactor {
    /// Hides the credentials in these variables, given by name and value.
    pub(crate) fn of<'a>(variables: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let mut secrets: Vec<Vec<u8>> = variables
            .flat_map(|(name, value)| {
                // Programs print a private key line by line.
                let lines = value.lines().filter(move |_| is_secret(name));
                let long = lines
                    .map(str::trim)
                    .filter(|line| line.len() >= SHORTEST_VALUE);
                let whole = long.filter(|line| !is_file(line));
                whole.chain(credentials(name, value))
            })
            .flat_map(|secret| [secret.as_bytes().to_vec(), decoded(secret)])
            .filter(|secret| secret.len() >= SHORTEST)
            .collect();
        // Longest first, because a shorter secret may be the beginning of a longer one.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        secrets.dedup();
        let mut first_bytes = vec![false; 256];
        for secret in &secrets {
            first_bytes[usize::from(secret[0])] = true;
        }
        Self {
            secrets,
            first_bytes,
            held: Default::default(),
        }
    }

    /// Returns the part of the stream that can be shown now.
    pub(crate) fn redact<'a>(&mut self, stream: Stream, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        if self.secrets.is_empty() {
            return Cow::Borrowed(bytes);
        }
        let mut text = std::mem::take(&mut self.held[stream as usize]);
        text.extend_from_slice(bytes);
        let (shown, held) = self.split(&text, false);
        self.held[stream as usize] = held.to_vec();
        Cow::Owned(shown)
    }

    /// Returns held-back output when the stream has ended.
    pub(crate) fn rest(&mut self, stream: Stream) -> Vec<u8> {
        let text = std::mem::take(&mut self.held[stream as usize]);
        self.split(&text, true).0
    }

    /// Returns redacted text, and what may be the beginning of a secret unless the text has `ended`.
    fn split<'a>(&self, text: &'a [u8], ended: bool) -> (Vec<u8>, &'a [u8]) {
        let mut shown = Vec::with_capacity(text.len());
        let mut rest = text;
        loop {
            let is_first = |byte: &u8| self.first_bytes[usize::from(*byte)];
            let plain = rest.iter().position(is_first).unwrap_or(rest.len());
            shown.extend_from_slice(&rest[..plain]);
            rest = &rest[plain..];
            let Some(first) = rest.first() else { break };
            // A secret that is the beginning of a longer one waits for more output.
            let begins = |secret: &Vec<u8>| secret.len() > rest.len() && secret.starts_with(rest);
            if !ended && self.secrets.iter().any(begins) {
                break;
            }
            if let Some(secret) = self.secrets.iter().find(|secret| rest.starts_with(secret)) {
                shown.extend_from_slice(SHOWN);
                rest = &rest[secret.len()..];
            } else {
                shown.push(*first);
                rest = &rest[1..];
            }
        }
        (shown, rest)
    }
}

/// Decodes a percent-encoded password, because some programs print the decoded one.
fn decoded(secret: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = secret.as_bytes();
    while let [first, after @ ..] = rest {
        let digits = after.get(..2).filter(|_| *first == b'%');
        match digits.and_then(|digits| hex::decode(digits).ok()) {
            Some(byte) => {
                bytes.extend(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

/// Returns whether a value is the path of a file, as in `SIGN_KEY=/etc/keys/mine`. The file must exist, because secrets
/// may begin with `/` too.
fn is_file(value: &str) -> bool {
    value.starts_with('/') && Path::new(value).exists()
}

/// Returns the password of a URL, `scheme://user:password@host`, for Redis also `redis://password@host`, and the
/// token of ccache's `|bearer-token=`. A proxy needs no scheme, but `debian:13.1@sha256:...` has no password.
fn credentials<'a>(name: &str, value: &'a str) -> Vec<&'a str> {
    let is_proxy = name.to_ascii_lowercase().ends_with("proxy");
    let mut found = Vec::new();
    for word in value.split_whitespace() {
        let mut parts = word.split('|');
        let url = parts.next().unwrap_or_default();
        let bare = if is_proxy { url } else { "" };
        let (scheme, rest) = url.split_once("://").unwrap_or(("", bare));
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        // A password may contain an unescaped `@`.
        let user = authority.rsplit_once('@').map(|(user, _)| user);
        found.extend(user.and_then(|user| match user.split_once(':') {
            Some((_, password)) => Some(password),
            // ccache reads a single word before the `@` as the Redis password.
            None => scheme.starts_with("redis").then_some(user),
        }));
        found.extend(parts.filter_map(|attribute| attribute.strip_prefix("bearer-token=")));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(urls: &[&str]) -> Redactor {
        Redactor::of(urls.iter().map(|url| ("URL", *url)))
    }

    fn shown(redactor: &mut Redactor, pieces: &[&str]) -> String {
        let mut text = Vec::new();
        for piece in pieces {
            text.extend_from_slice(&redactor.redact(Stream::Stdout, piece.as_bytes()));
        }
        text.extend(redactor.rest(Stream::Stdout));
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn credentials_are_the_passwords_of_urls() {
        for (value, secrets) in [
            ("redis://:hunter22@cache:6379", &["hunter22"][..]),
            ("redis://hunter22@cache", &["hunter22"]),
            ("http://me@cache", &[]),
            ("redis://me:a:b@c@cache|share-hits=false", &["a:b@c"]),
            ("http://cache/dir|bearer-token=t0ken", &["t0ken"]),
            ("http://me:one1@a http://me:two2@b/x?@", &["one1", "two2"]),
            ("redis://cache:6379", &[]),
            ("me:one1@proxy:3128", &["one1"]),
            ("git@host:a/b", &[]),
            ("http://cache/a:b@c", &[]),
            ("plain", &[]),
        ] {
            assert_eq!(credentials("https_proxy", value), secrets, "{value}");
        }
        assert!(credentials("IMAGE", "debian:13.1@sha256:00").is_empty());
    }

    #[test]
    fn what_is_hidden_is_hidden_wherever_it_is_cut() {
        let text = "say hunter22 and hunter2, hunhunter22";
        for cut in 0..text.len() {
            let mut redactor = of(&["redis://:hunter22@cache", "http://x:h@y"]);
            let (first, second) = text.split_at(cut);
            let shown = shown(&mut redactor, &[first, second]);
            assert_eq!(shown, "say *** and hunter2, hun***");
        }
        let mut redactor = of(&["redis://:hunter22@cache"]);
        assert_eq!(shown(&mut redactor, &["ends in hunt"]), "ends in hunt");
        // The beginning of a longer secret is not shown, and neither is what follows it.
        let both = ["redis://:hunter22@a", "redis://:hunter22secretlong@a"];
        for text in ["say hunter22secretlong", "say hunter22sec", "say hunter22"] {
            let wanted = text.replace("hunter22secretlong", "***");
            let wanted = wanted.replace("hunter22", "***");
            for cut in 0..text.len() {
                let mut redactor = of(&both);
                let (first, second) = text.split_at(cut);
                assert_eq!(shown(&mut redactor, &[first, second]), wanted, "{cut}");
            }
        }
        // Streams do not mix.
        assert_eq!(&*redactor.redact(Stream::Stderr, b"hunter"), b"");
        assert_eq!(&*redactor.redact(Stream::Stdout, b"22"), b"22");
        assert_eq!(redactor.rest(Stream::Stderr), b"hunter");
    }

    #[test]
    fn a_decoded_password_and_the_value_of_a_secret_variable_are_hidden() {
        let variables = [
            ("http_proxy", "http://me:p%40ss%zz%4@proxy"),
            ("HF_TOKEN", "hf_secret"),
            ("SIGN_KEY", "-----KEY\n  MIIEvQIB\n          \n=\n"),
            ("FILE_KEY", "/dev/null"),
            ("CACHE_KEY", "main"),
            ("PLACE", "a_place_to_be"),
        ];
        let mut redactor = Redactor::of(variables.into_iter());
        let text = "p%40ss%zz%4 p@ss%zz%4 hf_secret -----KEY\r\nMIIEvQIB = main \
            a_place_to_be >/dev/null";
        assert_eq!(
            shown(&mut redactor, &[text]),
            "*** *** *** ***\r\n*** = main a_place_to_be >/dev/null"
        );
    }

    #[test]
    fn without_secrets_nothing_is_copied() {
        let mut redactor = of(&["plain"]);
        assert!(matches!(
            redactor.redact(Stream::Stdout, b"text"),
            Cow::Borrowed(b"text")
        ));
    }
}
