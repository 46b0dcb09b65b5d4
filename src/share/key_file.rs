//! Owns key files as cosign writes them: ECDSA on P-256, the private key encrypted with a password.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use poly1305::Poly1305;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _,
    UnparsedPublicKey,
};
use salsa20::XSalsa20;
use salsa20::cipher::{KeyIvInit as _, StreamCipher as _};
use serde::Deserialize;

use crate::sys::error::{Result, ResultExt as _, named_path};

/// Key files have less than a kilobyte.
const MAX_FILE: u64 = 64 << 10;
const PUBLIC: &str = "PUBLIC KEY";
/// Help for a file that is not a key.
const MAKE: &str = "cosign generate-key-pair makes `cosign.key` and `cosign.pub`";
/// Older versions of cosign, and Podman, write the second name.
const PRIVATE: [&str; 2] = [
    "ENCRYPTED SIGSTORE PRIVATE KEY",
    "ENCRYPTED COSIGN PRIVATE KEY",
];
/// DER prefix of the point in a P-256 public key.
const P256: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// cosign uses N = 2^16. N = 2^20 already takes a gigabyte.
const MAX_LOG_N: u32 = 20;
const MAX_R: u32 = 8;
const MAX_P: u32 = 16;

pub(crate) struct SigningKey {
    pair: EcdsaKeyPair,
    public: VerifyingKey,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VerifyingKey {
    /// The file's path, for messages.
    path: PathBuf,
    /// An uncompressed point.
    point: Vec<u8>,
}

#[derive(Deserialize)]
struct Sealed {
    kdf: Kdf,
    cipher: Cipher,
    ciphertext: String,
}

#[derive(Deserialize)]
struct Kdf {
    name: String,
    params: Parameters,
    salt: String,
}

#[derive(Deserialize)]
struct Parameters {
    #[serde(rename = "N")]
    n: u32,
    r: u32,
    p: u32,
}

#[derive(Deserialize)]
struct Cipher {
    name: String,
    nonce: String,
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.public.fmt(f)
    }
}

impl SigningKey {
    /// Reads a private key. `password`: the file's password, if the user gave one.
    pub(crate) fn read(path: &Path, password: Option<&str>) -> Result<Self> {
        let text = read(path)?;
        let Some(password) = password else {
            return Err(usage!("no password for the key `{}`", path.display())
                .help("set COSIGN_PASSWORD; sudo --preserve-env=COSIGN_PASSWORD passes it on"));
        };
        Self::parse(path, &text, password)
    }

    fn parse(path: &Path, text: &str, password: &str) -> Result<Self> {
        let wrong = |what: &str| invalid!("`{}` {what}", path.display()).help(MAKE);
        let sealed = PRIVATE.iter().find_map(|label| pem(text, label));
        let sealed = sealed.and_then(|bytes| serde_json::from_slice::<Sealed>(&bytes).ok());
        let sealed = sealed.ok_or_else(|| wrong("is not a private key of cosign"))?;
        if (sealed.kdf.name.as_str(), sealed.cipher.name.as_str()) != ("scrypt", "nacl/secretbox") {
            return Err(wrong("is encrypted in a way that cosign does not use"));
        }
        let key = sealed
            .key(password)
            .ok_or_else(|| wrong("has invalid parameters"))?;
        let plain = sealed.open(&key).ok_or_else(|| {
            invalid!("the password of `{}` is wrong", path.display())
                .help("set COSIGN_PASSWORD to the one of `cosign generate-key-pair`")
        })?;
        let algorithm = &ECDSA_P256_SHA256_ASN1_SIGNING;
        let pair = EcdsaKeyPair::from_pkcs8(algorithm, &plain, &SystemRandom::new())
            .map_err(|_| wrong("is not an ECDSA key on P-256"))?;
        let public = VerifyingKey {
            path: path.to_owned(),
            point: pair.public_key().as_ref().to_vec(),
        };
        Ok(Self { pair, public })
    }

    /// Signs bytes; returns the signature in base64.
    pub(super) fn sign(&self, bytes: &[u8]) -> Result<String> {
        let signature = self.pair.sign(&SystemRandom::new(), bytes);
        let signature = signature.map_err(|_| unexpected!("cannot sign"))?;
        Ok(STANDARD.encode(signature))
    }

    pub(super) fn public(&self) -> &VerifyingKey {
        &self.public
    }
}

impl Sealed {
    fn key(&self, password: &str) -> Option<[u8; 32]> {
        let Parameters { n, r, p } = self.kdf.params;
        if !n.is_power_of_two() || n.ilog2() > MAX_LOG_N || r > MAX_R || p > MAX_P {
            return None;
        }
        let parameters = scrypt::Params::new(u8::try_from(n.ilog2()).ok()?, r, p).ok()?;
        let salt = STANDARD.decode(&self.kdf.salt).ok()?;
        let mut key = [0; 32];
        scrypt::scrypt(password.as_bytes(), &salt, &parameters, &mut key).ok()?;
        Some(key)
    }

    /// Decrypts a NaCl secretbox: the first bytes of the stream are the key of the leading tag.
    fn open(&self, key: &[u8; 32]) -> Option<Vec<u8>> {
        let nonce: [u8; 24] = STANDARD.decode(&self.cipher.nonce).ok()?.try_into().ok()?;
        let sealed = STANDARD.decode(&self.ciphertext).ok()?;
        let (tag, sealed) = sealed.split_at_checked(16)?;
        let mut stream = XSalsa20::new(key.into(), &nonce.into());
        let mut once = [0; 32];
        stream.apply_keystream(&mut once);
        let found = <Poly1305 as poly1305::universal_hash::KeyInit>::new(&once.into())
            .compute_unpadded(sealed);
        if found.as_slice() != tag {
            return None;
        }
        let mut plain = sealed.to_vec();
        stream.apply_keystream(&mut plain);
        Some(plain)
    }
}

impl VerifyingKey {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Self::parse(path, &read(path)?)
    }

    fn parse(path: &Path, text: &str) -> Result<Self> {
        let key = pem(text, PUBLIC).unwrap_or_default();
        match key.strip_prefix(&P256) {
            Some(point) if point.len() == 65 => Ok(Self {
                path: path.to_owned(),
                point: point.to_vec(),
            }),
            _ => {
                let path = path.display();
                Err(invalid!("`{path}` is not a public ECDSA key on P-256").help(MAKE))
            }
        }
    }

    /// Returns whether a base64 signature matches these bytes.
    pub(super) fn verifies(&self, bytes: &[u8], signature: &str) -> bool {
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.point);
        let signature = STANDARD.decode(signature);
        signature.is_ok_and(|signature| key.verify(bytes, &signature).is_ok())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns the content of the first PEM block with a label.
fn pem(text: &str, label: &str) -> Option<Vec<u8>> {
    let (_, rest) = text.split_once(&format!("-----BEGIN {label}-----"))?;
    let (body, _) = rest.split_once(&format!("-----END {label}-----"))?;
    let body: String = body.split_ascii_whitespace().collect();
    STANDARD.decode(body).ok()
}

fn read(path: &Path) -> Result<String> {
    let mut text = String::new();
    let file = fs_err::File::open(path);
    file.and_then(|file| file.take(MAX_FILE).read_to_string(&mut text))
        .map_err(|error| named_path(path)(error).help(MAKE))
        .context(|| format!("cannot read the key `{}`", path.display()))?;
    Ok(text)
}

#[cfg(test)]
mod tests;
