//! Owns keeping a container from the host's abstract sockets, those of X11 and of D-Bus among them. They belong to a
//! network and not to a directory, so where a container has the host's network, no mount hides them.

use landlock::{
    CompatLevel, Compatible as _, Ruleset, RulesetAttr as _, RulesetCreated,
    RulesetCreatedAttr as _, Scope,
};

use crate::sys::error::Result;

/// Returns rules for a process and all that it starts: they connect to no abstract socket but their own. Linux has had
/// such rules since 6.12; before it, these do nothing. Whoever enforces them has CAP_SYS_ADMIN or `no_new_privs`.
pub(crate) fn own_abstract_sockets() -> Result<RulesetCreated> {
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .scope(Scope::AbstractUnixSocket)
        .and_then(Ruleset::create)
        .map_err(|error| unexpected!("cannot make rules for sockets").source(error))?;
    Ok(rules.no_new_privs(false))
}
