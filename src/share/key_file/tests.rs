//! Keys and a signature that Python's `cryptography` and `PyNaCl` made in cosign's formats.

use super::*;

/// Has the older label and the password `se:cret`.
const KEY: &str = include_str!("../../../tests/it/share/keys/one.key");
const PUB: &str = include_str!("../../../tests/it/share/keys/one.pub");
/// Signs `payload`.
const SIGNATURE: &str = "MEUCIB+brFJF785Og6Jd3LmipHk+WgMAa8iFvU38b38SyQI3AiEAjw+C3Kl/RydIhRGIgE37N+jn9jjF9RYajKikbTtgRek=";
/// Has an empty password.
const OTHER_KEY: &str = include_str!("../../../tests/it/share/keys/other.key");
const OTHER_PUB: &str = include_str!("../../../tests/it/share/keys/other.pub");
/// Uses another curve.
const P384_PUB: &str = include_str!("../../../tests/it/share/keys/p384.pub");

fn private(text: &str, password: &str) -> Result<SigningKey> {
    SigningKey::parse(Path::new("cosign.key"), text, password)
}

fn public(text: &str) -> Result<VerifyingKey> {
    VerifyingKey::parse(Path::new("cosign.pub"), text)
}

#[track_caller]
fn refused<T: fmt::Debug>(outcome: Result<T>, why: &str) {
    let error = outcome.unwrap_err();
    assert_has!(error.message(), why);
    assert!(!format!("{error:?}").contains("se:cret"));
}

#[test]
fn a_key_signs_for_its_public_key_only() {
    let one = private(KEY, "se:cret").unwrap();
    let other = private(OTHER_KEY, "").unwrap();
    let (one_pub, other_pub) = (public(PUB).unwrap(), public(OTHER_PUB).unwrap());
    assert_eq!(one.public().point, one_pub.point);
    assert_eq!(other.public().point, other_pub.point);
    let signature = one.sign(b"payload").unwrap();
    assert!(one_pub.verifies(b"payload", &signature));
    assert!(one_pub.verifies(b"payload", SIGNATURE));
    for (key, bytes, signature) in [
        (&other_pub, b"payload".as_slice(), signature.as_str()),
        (&one_pub, b"Payload", &signature),
        (&one_pub, b"payload", ""),
        (&one_pub, b"payload", "not base64"),
        (&one_pub, b"payload", &STANDARD.encode(b"not a signature")),
    ] {
        assert!(!key.verifies(bytes, signature), "{signature}");
    }
}

#[test]
fn what_is_not_a_key_is_refused_by_name() {
    refused(public(P384_PUB), "`cosign.pub` is not a public ECDSA key");
    // Extra bytes in the sealed key, and parameters that would exhaust memory.
    let sealed = String::from_utf8(pem(KEY, PRIVATE[1]).unwrap()).unwrap();
    let label = PRIVATE[1];
    let pem = |json: &str| {
        let body = STANDARD.encode(json);
        format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n")
    };
    assert!(private(&pem(&sealed), "se:cret").is_ok());
    let flipped = sealed.replacen("\"ciphertext\":\"", "\"ciphertext\":\"AAAA", 1);
    refused(private(&pem(&flipped), "se:cret"), "the password of");
    for n in ["1", "0", "1000", "2147483648"] {
        let large = sealed.replacen("\"N\":32768", &format!("\"N\":{n}"), 1);
        let error = private(&pem(&large), "se:cret").unwrap_err();
        assert!(
            error.message().contains("invalid parameters") || error.message().contains("password"),
            "{}",
            error.message()
        );
    }
    let other = sealed.replacen("nacl/secretbox", "aes", 1);
    refused(private(&pem(&other), "se:cret"), "is encrypted in a way");
}
