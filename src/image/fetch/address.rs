//! Owns displaying addresses without their secrets.

/// Lower-case suffixes of parameter names whose values are secret.
const SECRET: [&str; 9] = [
    "token",
    "secret",
    "password",
    "passwd",
    "signature",
    "credential",
    "auth",
    "key",
    "sig",
];

/// Returns an address without its user and password, and without secrets in its parameters.
pub(crate) fn without_login(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let host = rest[..end].rfind('@').map_or(0, |at| at + 1);
    let rest = &rest[host..];
    let Some((place, parameters)) = rest.split_once('?') else {
        return format!("{scheme}://{rest}");
    };
    let end = parameters.find('#').unwrap_or(parameters.len());
    let (parameters, fragment) = parameters.split_at(end);
    let shown = |parameter: &str| match parameter.split_once('=') {
        Some((name, _)) if is_secret(name) => format!("{name}=***"),
        _ => parameter.to_owned(),
    };
    let shown: Vec<String> = parameters.split('&').map(shown).collect();
    format!("{scheme}://{place}?{}{fragment}", shown.join("&"))
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET.iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_is_not_shown() {
        for (url, shown) in [
            ("https://me:token@host/a/b@c", "https://host/a/b@c"),
            ("https://host/a", "https://host/a"),
            ("https://token@host", "https://host"),
            ("https://host?a=b@c", "https://host?a=b@c"),
            ("git@host:a/b", "git@host:a/b"),
        ] {
            assert_eq!(without_login(url), shown);
        }
    }

    #[test]
    fn a_secret_parameter_is_not_shown() {
        for (url, shown) in [
            ("https://host/a?token=x", "https://host/a?token=***"),
            (
                "https://me@host/a?raw=1&private_token=x/y&b#c",
                "https://host/a?raw=1&private_token=***&b#c",
            ),
            (
                "https://host?X-Amz-Signature=x&X-Amz-Date=d",
                "https://host?X-Amz-Signature=***&X-Amz-Date=d",
            ),
            ("https://host/?keys&author=a", "https://host/?keys&author=a"),
        ] {
            assert_eq!(without_login(url), shown);
        }
    }
}
