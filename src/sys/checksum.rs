//! Owns checksums that a file must match, limited to secure algorithms.

use std::fmt;
use std::io::{self, Read, Write};

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

/// Hashes and counts the bytes that are read or written through it.
pub(crate) struct Hashed<T> {
    inner: T,
    sha256: Sha256,
    size: u64,
}

impl<T> Hashed<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self {
            inner,
            sha256: Sha256::default(),
            size: 0,
        }
    }

    fn count(&mut self, bytes: &[u8]) -> usize {
        Digest::update(&mut self.sha256, bytes);
        self.size += bytes.len() as u64;
        bytes.len()
    }

    /// Returns the digest of the bytes so far, in hexadecimal digits.
    pub(crate) fn digest(&self) -> String {
        hex::encode(Digest::finalize(self.sha256.clone()))
    }

    pub(crate) fn finish(self) -> (T, String, u64) {
        let digest = self.digest();
        (self.inner, digest, self.size)
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let amount = self.inner.read(buffer)?;
        Ok(self.count(&buffer[..amount]))
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let amount = self.inner.write(bytes)?;
        Ok(self.count(&bytes[..amount]))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
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
