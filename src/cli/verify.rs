//! Owns `verify`: rebuilds steps of an env from clean in a scratch env, and compares the results.

use clap::Args;
use sha2::{Digest as _, Sha256};

use crate::plan::ids::EnvName;
use crate::store::lock;
use crate::sys::error::{Error, Kind, Result};
use crate::ui::event::Outcome;
use crate::ui::{Reporter, object, size, text};
use crate::up::context::Context;
use crate::up::downloads::Fetching;
use crate::up::ephemeral;
use crate::up::segments::segments;
use crate::up::task::Task;
use crate::up::verify::{Rebuild, StepReport, VerifyOptions};

/// Maximum length of the scratch env's name without its suffix.
const STEM: usize = 40;

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The env
    env: EnvName,
    /// The steps [default: all that have a snapshot]
    steps: Vec<String>,
    #[command(flatten)]
    options: VerifyOptions,
}

/// Rebuilds steps of an env and compares them; returns the exit code.
pub(crate) fn verify(cx: &Context, args: &VerifyArgs) -> Result<u8> {
    let store = cx.store_to_change("building steps again")?;
    let env = store.lock_known(&args.env, "verify", lock::WAIT)?;
    env.check_owner()?;
    let spec = store.spec(&args.env)?;
    let segments = segments(&store, &spec, env.known_record()?, &args.steps)?;
    let task = Task::start(cx)?;
    let name = scratch_name(&args.env)?;
    let with = Fetching {
        task: &task,
        store: &store,
        offline: false,
    };
    let rebuild = Rebuild::prepare(with, args.options, &env, spec, &name, &segments)?;
    let claim = store.create_ephemeral(&name, "verify")?;
    let outcome = rebuild.all(&name, &segments);
    let removed = ephemeral::end(&store, &name, claim);
    drop(env);
    cx.tidy(&store)?;
    let steps = match (outcome, task.signals.pending()?) {
        (Err(_), Some(signal)) => return Err(Error::new(Kind::Signal(signal), "interrupted")),
        (outcome, _) => outcome?,
    };
    removed.map_err(|error| error.help("to remove the rest, run: rockenv gc"))?;
    say(cx, &task.reporter, &args.env, &steps)
}

/// Returns the name of the env's scratch env. Every verification uses the same name, because the lock of a removed env
/// stays, and every command reads all locks.
fn scratch_name(env: &EnvName) -> Result<EnvName> {
    let stem: String = env.chars().take(STEM).collect();
    let digest = hex::encode(Sha256::digest(env.as_bytes()));
    let name = format!("{}-verify-{}", stem.trim_end_matches('.'), &digest[..16]);
    Ok(name.try_into()?)
}

fn say(cx: &Context, reporter: &Reporter, env: &str, steps: &[StepReport]) -> Result<u8> {
    let differing = steps.iter().filter(|step| !step.same).count();
    let (outcome, message) = match differing {
        0 => (Outcome::Done, format!("{env}: reproduced")),
        count => {
            let all = size::count(steps.len(), "step");
            let differ = if count == 1 { "differs" } else { "differ" };
            let message = format!("{env}: {count} of {all} {differ}");
            (Outcome::Failed, message)
        }
    };
    reporter.finish(outcome, message);
    let same = differing == 0;
    let code = super::code_of(same, Kind::Drift);
    if cx.json {
        cx.ui.json(&object! {
            schema: "rockenv/verify/1",
            env: env,
            same: same,
            steps: steps,
        })?;
        return Ok(code);
    }
    for step in steps {
        let StepReport { compared, .. } = step;
        let count = compared.differences.len() + compared.more;
        cx.ui.data(&match count {
            0 => format!("{}: the same\n", step.step),
            1 => format!("{}: 1 path differs\n", step.step),
            _ => format!("{}: {count} paths differ\n", step.step),
        });
        for difference in &compared.differences {
            let path = text::os(&difference.path);
            cx.ui.data(&format!("  {path}: {}\n", difference.what));
        }
        if compared.more > 0 {
            cx.ui.data(&format!("  and {} more\n", compared.more));
        }
        for what in &compared.not_compared {
            cx.ui.data(&format!("  not compared: {what}\n"));
        }
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_env_has_one_scratch_env() {
        let long = "a".repeat(STEM);
        let [one, other] = ["x", "y"].map(|end| EnvName::from(format!("{long}{end}").as_str()));
        let name = |env| scratch_name(env).unwrap();
        assert_eq!(name(&one), name(&one));
        assert_ne!(name(&one), name(&other));
    }
}
