//! Owns hiding secrets in addresses, and in texts that contain addresses.

use std::ops::Range;

/// Lower-case suffixes of names whose values are secret.
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

/// Returns a text with stars in place of logins and secret parameters in addresses. Every other character keeps its
/// place, so a caret in the text still points at the same one. The user name in an SSH address is not secret.
pub(crate) fn hide_secrets(text: &str) -> String {
    let mut hidden = text.to_owned();
    let mut hide = |place: Range<usize>| {
        let stars = "*".repeat(place.len());
        hidden.replace_range(place, &stars);
    };
    for (scheme, _) in text.match_indices("://") {
        let start = scheme + "://".len();
        let mut words = text[start..].split(|c: char| c.is_whitespace() || c == '"');
        let address = words.next().unwrap_or_default();
        let end = address.find(['/', '?', '#']).unwrap_or(address.len());
        if let Some(at) = address[..end].rfind('@')
            && (address[..at].contains(':') || !text[..scheme].ends_with("ssh"))
        {
            hide(start..start + at);
        }
        let mut at = start;
        // A `|` precedes the attributes of an address for ccache.
        for parameter in address.split(['?', '&', '#', '|']) {
            if let Some((name, value)) = parameter.split_once('=')
                && is_secret(name)
            {
                let begin = at + name.len() + 1;
                let quote = value.find(['\'', '`']).unwrap_or(value.len());
                hide(begin..begin + quote);
            }
            at += parameter.len() + 1;
        }
    }
    hidden
}

/// Returns the value of a parameter or variable, with stars in place of secrets.
pub(crate) fn shown_value(name: &str, value: &str) -> String {
    match is_secret(name) {
        true => "***".to_owned(),
        false => hide_secrets(value),
    }
}

pub(crate) fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET.iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_and_a_secret_parameter_are_not_shown() {
        for (url, shown) in [
            ("https://me:token@host/a/b@c", "https://host/a/b@c"),
            ("https://host/a", "https://host/a"),
            ("https://token@host", "https://host"),
            ("https://host?a=b@c", "https://host?a=b@c"),
            ("git@host:a/b", "git@host:a/b"),
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

    #[test]
    fn secrets_in_a_text_are_stars_in_the_same_place() {
        for (text, hidden) in [
            (
                "fatal: no Password for 'https://t0ken@host': prompts disabled",
                "fatal: no Password for 'https://*****@host': prompts disabled",
            ),
            (
                "git = \"https://me:a'b@c@host/x\", rev = \"a@b\"",
                "git = \"https://********@host/x\", rev = \"a@b\"",
            ),
            (
                "`http://a:é@b?token=x&c=d`,`http://b?c=d&key=x`",
                "`http://****@b?token=*&c=d`,`http://b?c=d&key=*`",
            ),
            (
                "redis://x@h|bearer-token=x y@z",
                "redis://*@h|bearer-token=* y@z",
            ),
            ("ssh://me@h ssh://me:x@h", "ssh://me@h ssh://****@h"),
            ("https://h/a@b me:x@h: ://", "https://h/a@b me:x@h: ://"),
        ] {
            assert_eq!(hide_secrets(text), hidden);
        }
    }
}
