//! Owns the request: the arguments that `up`, `plan` and `lock` share, and how to type them again.

use clap::Args;

use crate::sys::shell::quoted;

/// Heading of the options that select what is built.
pub(crate) const WHAT: &str = "What to build";

/// Arguments that select what is built.
#[derive(Debug, Args)]
pub(crate) struct SelectArgs {
    /// Profile, target or profile file [default: what `--target` names, or this machine's GPU]
    #[arg(value_name = "PROFILE|TARGET|FILE.toml")]
    what: Option<String>,
    /// Target to build for; may be given again
    #[arg(short, long, value_name = "GFX", help_heading = WHAT)]
    target: Vec<String>,
    /// Variant of the profile to build
    #[arg(long, value_name = "NAME", help_heading = WHAT)]
    variant: Option<String>,
    /// Release to build, of those that the profile lists
    #[arg(long, value_name = "VERSION", help_heading = WHAT)]
    release: Option<String>,
    /// Starting point: `source`, or prebuilt parts that the profile offers, such as `compiler`, `rocm` or `wheels`
    #[arg(long, value_name = "START", help_heading = WHAT)]
    from: Option<String>,
    /// Set a parameter of the profile
    #[arg(short, long, value_name = "NAME=VALUE", help_heading = WHAT)]
    param: Vec<String>,
    /// Engine to use: auto, nspawn, docker or podman
    #[arg(short, long, help_heading = WHAT)]
    engine: Option<String>,
}

impl SelectArgs {
    /// Returns the request: without a GPU, and with the defaults for name and jobs.
    pub(crate) fn request(&self, verb: &'static str) -> UpRequest<'_> {
        UpRequest {
            verb,
            what: self.what.as_deref(),
            targets: &self.target,
            name: None,
            variant: self.variant.as_deref(),
            release: self.release.as_deref(),
            from: self.from.as_deref(),
            params: &self.param,
            engine: self.engine.as_deref(),
            jobs: None,
            gpu: "none",
            inspects: verb != "up",
            locked: verb == "lock",
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct UpRequest<'a> {
    pub(crate) verb: &'static str,
    /// Profile, target or file.
    pub(crate) what: Option<&'a str>,
    /// Targets to build for instead of the profile's.
    pub(crate) targets: &'a [String],
    pub(crate) name: Option<&'a str>,
    pub(crate) variant: Option<&'a str>,
    pub(crate) release: Option<&'a str>,
    /// Starting point.
    pub(crate) from: Option<&'a str>,
    /// Parameters as `NAME=VALUE`.
    pub(crate) params: &'a [String],
    pub(crate) engine: Option<&'a str>,
    pub(crate) jobs: Option<u32>,
    pub(crate) gpu: &'a str,
    /// Whether the command starts nothing, and so needs no engine.
    pub(crate) inspects: bool,
    /// Whether a lock file may decide parameters, and with them the env.
    pub(crate) locked: bool,
}

impl UpRequest<'_> {
    /// Returns `rockenv VERB` for the same env, quoted for a shell, with those of `flags` that have a value.
    pub(crate) fn command(&self, verb: &str, flags: &[(&str, Option<&str>)]) -> String {
        let mut text = format!("rockenv {verb}");
        let mut add = |words: &[&str]| {
            for word in words {
                text.push(' ');
                text.push_str(&quoted(word));
            }
        };
        if let Some(what) = self.what {
            add(&[what]);
        }
        for target in self.targets {
            add(&["--target", target]);
        }
        for param in self.params {
            add(&["--param", param]);
        }
        let own = [
            ("--variant", self.variant),
            ("--release", self.release),
            ("--from", self.from),
            ("--engine", self.engine),
        ];
        for (flag, value) in own.iter().chain(flags) {
            if let Some(value) = value {
                add(&[flag, value]);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_again_means_the_same() {
        let params = ["component=two words".to_owned()];
        let request = UpRequest {
            verb: "plan",
            what: Some("my profile.toml"),
            targets: &["gfx1103".to_owned()],
            variant: Some("lean"),
            release: Some("7.14"),
            params: &params,
            gpu: "none",
            inspects: true,
            ..UpRequest::default()
        };
        let text = request.command("up", &[("--gpu", Some("none")), ("--name", None)]);
        assert_eq!(
            text,
            "rockenv up 'my profile.toml' --target gfx1103 --param 'component=two words' --variant lean --release 7.14 --gpu none"
        );
        assert_eq!(
            shlex::split(&text).expect("words")[5..7],
            ["--param", "component=two words"]
        );
    }
}
