//! Owns the request: the arguments that `up`, `plan` and `lock` share, and how to type them again.

use clap::Args;

use crate::sys::shell::quoted;

/// Heading of the options that select what is built.
pub(crate) const WHAT: &str = "What to build";

/// Arguments that select what is built.
#[derive(Debug, Default, Args)]
pub(crate) struct SelectArgs {
    /// Profile, target or profile file [default: what `--target` names, or this machine's GPU]
    #[arg(value_name = "PROFILE|TARGET|FILE.toml")]
    pub(crate) what: Option<String>,
    /// Target to build for; may be given again
    #[arg(short, long, value_name = "GFX", help_heading = WHAT)]
    pub(crate) target: Vec<String>,
    /// Variant of the profile to build
    #[arg(long, value_name = "NAME", help_heading = WHAT)]
    pub(crate) variant: Option<String>,
    /// Release to build, of those that the profile lists
    #[arg(long, value_name = "VERSION", help_heading = WHAT)]
    pub(crate) release: Option<String>,
    /// Starting point: `source`, or prebuilt parts that the profile offers, such as `compiler`, `rocm` or `wheels`
    #[arg(long, value_name = "START", help_heading = WHAT)]
    pub(crate) from: Option<String>,
    /// Set a parameter of the profile
    #[arg(short, long, value_name = "NAME=VALUE", help_heading = WHAT)]
    pub(crate) param: Vec<String>,
    /// Engine to use: auto, nspawn, docker or podman
    #[arg(short, long, help_heading = WHAT)]
    pub(crate) engine: Option<String>,
}

impl SelectArgs {
    /// Returns the request: without a GPU, and with the defaults for name and jobs.
    pub(crate) fn request(&self, verb: &'static str) -> UpRequest<'_> {
        UpRequest {
            verb,
            what: self.what.as_deref(),
            select: self,
            name: None,
            jobs: None,
            gpu: "none",
            locked: verb == "lock",
        }
    }
}

#[derive(Debug)]
pub(crate) struct UpRequest<'a> {
    pub(crate) verb: &'static str,
    /// Profile, target or file, instead of the one in `select`.
    pub(crate) what: Option<&'a str>,
    pub(crate) select: &'a SelectArgs,
    pub(crate) name: Option<&'a str>,
    pub(crate) jobs: Option<u32>,
    pub(crate) gpu: &'a str,
    /// Whether a lock file may decide parameters, and with them the env.
    pub(crate) locked: bool,
}

impl UpRequest<'_> {
    /// Returns `rockenv VERB` for the same env, quoted for a shell, with those of `flags` that have a value.
    pub(crate) fn command(&self, verb: &str, flags: &[(&str, Option<&str>)]) -> String {
        let select = self.select;
        let mut words = vec!["rockenv", verb];
        words.extend(self.what);
        words.extend(select.target.iter().flat_map(|name| ["--target", name]));
        words.extend(select.param.iter().flat_map(|param| ["--param", param]));
        let own = [
            ("--variant", select.variant.as_deref()),
            ("--release", select.release.as_deref()),
            ("--from", select.from.as_deref()),
            ("--engine", select.engine.as_deref()),
        ];
        let given = own.iter().chain(flags);
        words.extend(
            given
                .filter_map(|(flag, value)| Some([*flag, (*value)?]))
                .flatten(),
        );
        let words: Vec<_> = words.into_iter().map(quoted).collect();
        words.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_again_means_the_same() {
        let select = SelectArgs {
            what: Some("my profile.toml".to_owned()),
            target: vec!["gfx1103".to_owned()],
            variant: Some("lean".to_owned()),
            release: Some("7.14".to_owned()),
            param: vec!["component=two words".to_owned()],
            ..SelectArgs::default()
        };
        let flags = [("--gpu", Some("none")), ("--name", None)];
        let text = select.request("plan").command("up", &flags);
        assert_eq!(
            text,
            "rockenv up 'my profile.toml' --target gfx1103 --param 'component=two words' --variant lean --release 7.14 --gpu none"
        );
        let words = shlex::split(&text).expect("words");
        assert_eq!(words[5..7], ["--param", "component=two words"]);
    }
}
