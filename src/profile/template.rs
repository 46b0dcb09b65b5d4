//! Owns the output of `rockenv profile new`: a complete example with the reason for each line.

use super::{shorten, value};
use crate::sys::error::Result;

/// Returns a new profile; `directory` of its file ends with a slash if it is not empty.
pub(crate) fn template(name: &str, directory: &str) -> Result<String> {
    if let Some(stem) = name.strip_suffix(".toml") {
        let error = usage!("`{}` is a file's name, not a profile's", shorten(name));
        return Err(error.help(format!("leave out `.toml`: `{}`", shorten(stem))));
    }
    match value::name("profile", name) {
        Ok(()) => Ok(include_str!("template.toml")
            .replace("DIRECTORY/", directory)
            .replace("NAME", name)),
        Err(refused) => Err(usage!("{}", refused.message).help(refused.help.unwrap_or_default())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::from_text;
    use super::*;

    #[test]
    fn is_a_valid_profile() {
        let text = template("mine", "profiles/").unwrap();
        let profile = from_text("mine", &text).unwrap();
        assert_eq!(profile.steps.len(), 5);
        // These are names in the text too.
        for name in ["build", "ccache", "result", "src"] {
            from_text(name, &template(name, "").unwrap()).unwrap();
        }
        assert_has!(&text, "`rockenv profile check profiles/mine.toml`");
        assert_has!(&text, "export CCACHE_EXTRAFILES=");
        assert_eq!(text.lines().find(|line| line.chars().count() > 120), None);
        for bad in ["../x", "mine.toml"] {
            let error = template(bad, "").unwrap_err();
            assert_eq!(error.kind(), crate::sys::error::Kind::Usage, "{bad}");
        }
    }
}
