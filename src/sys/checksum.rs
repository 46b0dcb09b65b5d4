//! Owns checksums that a file must match, limited to secure algorithms.

use std::fmt;
use std::io::{self, Read};

use sha2::digest::DynDigest;
use sha2::{Digest, Sha256, Sha512};

use super::signals;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// Identifies files in rockenv itself.
    Sha256,
    /// Some upstreams publish only this one.
    Sha512,
}

impl Algorithm {
    /// Returns the algorithm's name, which also names its directory among the downloads.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    pub(crate) fn hasher(self) -> Box<dyn DynDigest + Send> {
        match self {
            Self::Sha256 => Box::new(Sha256::default()),
            Self::Sha512 => Box::new(Sha512::default()),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sha256 => "SHA-256",
            Self::Sha512 => "SHA-512",
        })
    }
}

/// A digest with its algorithm; shown as `sha256:DIGITS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Checksum {
    pub algorithm: Algorithm,
    /// Lower-case hexadecimal digits, as many as the algorithm has.
    pub digits: String,
}

impl Checksum {
    /// Parses CMake's notation: `SHA256` and digits, in either case. `None` for another algorithm.
    pub(crate) fn new(algorithm: &str, digits: &str) -> Option<Self> {
        let (algorithm, length) = match algorithm.to_ascii_uppercase().as_str() {
            "SHA256" => (Algorithm::Sha256, 64),
            "SHA512" => (Algorithm::Sha512, 128),
            _ => return None,
        };
        let fits = digits.len() == length && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        fits.then(|| Self {
            algorithm,
            digits: digits.to_ascii_lowercase(),
        })
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.digits)
    }
}

/// Number of bytes hashed between checks for a signal.
const LOOK: u64 = 64 << 20;

/// Returns the SHA-256 and size of the rest of a file. A signal interrupts it: a sparse file can exceed any disk.
pub(crate) fn sha256(mut from: impl Read) -> io::Result<([u8; 32], u64)> {
    let mut hash = Sha256::default();
    let mut size = 0;
    let mut buffer = vec![0; 256 << 10];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok((Digest::finalize(hash).into(), size)),
            count => {
                Digest::update(&mut hash, &buffer[..count]);
                let before = size;
                size += count as u64;
                if before / LOOK != size / LOOK && signals::is_pending() {
                    return Err(io::Error::other("interrupted"));
                }
            }
        }
    }
}

pub(crate) fn is_sha256(digits: &str) -> bool {
    digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns whether a text is a SHA-256 in the lower-case form that rockenv and registries use.
pub(crate) fn is_lower_sha256(digits: &str) -> bool {
    is_sha256(digits) && !digits.bytes().any(|byte| byte.is_ascii_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_digests_of_known_algorithms() {
        let digits = "AB".repeat(32);
        let read = Checksum::new("SHA256", &digits).unwrap();
        assert_eq!(read.to_string(), format!("sha256:{}", "ab".repeat(32)));
        assert!(Checksum::new("sha512", &digits.repeat(2)).is_some());
        for (algorithm, digits) in [
            ("SHA512", digits.as_str()),
            ("SHA256", &digits[1..]),
            ("MD5", &digits[..32]),
            ("SHA256", &"g".repeat(64)),
        ] {
            assert_eq!(Checksum::new(algorithm, digits), None);
        }
    }
}
