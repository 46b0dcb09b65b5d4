//! Owns keeping containers away from the host's abstract sockets, such as those of X servers and D-Bus daemons. These
//! belong to a network namespace, not to a directory, so a container in the host's network sees them.

use landlock::{
    CompatLevel, Compatible as _, Ruleset, RulesetAttr as _, RulesetCreated,
    RulesetCreatedAttr as _, Scope,
};

use crate::sys::error::Result;

/// Rules that keep a process and its children from connecting to abstract sockets other than their own. They need Linux
/// 6.12; an older kernel ignores them.
pub(crate) struct SocketRules(Option<RulesetCreated>);

impl SocketRules {
    pub(crate) fn new() -> Result<Self> {
        let rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .scope(Scope::AbstractUnixSocket)
            .and_then(Ruleset::create)
            .map_err(|error| unexpected!("cannot restrict sockets").source(error))?;
        Ok(Self(Some(rules.no_new_privs(false))))
    }

    /// Restricts the calling process, which needs CAP_SYS_ADMIN or `no_new_privs`. Safe between fork and exec: it takes
    /// no lock, and allocates only for an error.
    pub(crate) fn enforce(&mut self) -> std::io::Result<()> {
        let enforced = self.0.take().map(RulesetCreated::restrict_self);
        enforced
            .transpose()
            .map(drop)
            .map_err(std::io::Error::other)
    }
}
