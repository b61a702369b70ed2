//! [`Owners`]: the callers that a project of the configuration belongs to.

use crate::call::Caller;

/// The callers that share a project: its notes, or its threads.
///
/// A caller must fit all three lists; an empty list of users or agents fits every one. Tenants are apart: a caller with
/// a tenant fits only if the tenant is named, and a caller without one only if no tenant is named. Without any name the
/// project is shared with no caller.
///
/// ```
/// use wieldy_core::{Caller, Owners};
///
/// let owners = Owners { users: vec!["ann".into()], ..Owners::default() };
/// let ann = Caller { user: Some("ann".into()), ..Caller::local() };
/// assert!(owners.admits(&ann));
/// assert!(!owners.admits(&Caller { tenant: Some("acme".into()), ..ann }));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owners {
    /// The tenants.
    pub tenants: Vec<String>,
    /// The users; all if empty.
    pub users: Vec<String>,
    /// The agents; all if empty.
    pub agents: Vec<String>,
}

impl Owners {
    /// Returns true if no caller is named.
    pub fn is_empty(&self) -> bool {
        self.tenants.is_empty() && self.users.is_empty() && self.agents.is_empty()
    }

    /// Returns true if the project belongs to this caller, too.
    pub fn admits(&self, caller: &Caller) -> bool {
        let is_among = |names: &[String], name: Option<&str>| name.is_some_and(|name| names.iter().any(|n| n == name));
        let fits = |names: &[String], name: Option<&str>| names.is_empty() || is_among(names, name);
        let fits_tenant = match caller.tenant.as_deref() {
            None => self.tenants.is_empty(),
            tenant => is_among(&self.tenants, tenant),
        };
        !self.is_empty()
            && fits_tenant
            && fits(&self.users, caller.user.as_deref())
            && fits(&self.agents, Some(&caller.agent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(tenant: Option<&str>, user: Option<&str>, agent: &str) -> Caller {
        let (tenant, user) = (tenant.map(str::to_owned), user.map(str::to_owned));
        Caller { tenant, user, ..Caller::agent(agent) }
    }

    #[test]
    fn a_caller_must_fit_all_lists_and_its_tenant_must_be_named() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let owners = |tenants: &[&str], users: &[&str], agents: &[&str]| Owners {
            tenants: names(tenants),
            users: names(users),
            agents: names(agents),
        };
        let callers = [
            caller(None, None, "a"),
            caller(None, Some("ann"), "a"),
            caller(None, Some("bob"), "b"),
            caller(Some("one"), Some("ann"), "a"),
            caller(Some("one"), Some("bob"), "b"),
            caller(Some("two"), Some("ann"), "a"),
        ];
        for (owners, expected) in [
            (owners(&[], &[], &[]), [false; 6]),
            (owners(&[], &["ann"], &[]), [false, true, false, false, false, false]),
            (owners(&[], &[], &["a"]), [true, true, false, false, false, false]),
            (owners(&["one"], &[], &[]), [false, false, false, true, true, false]),
            (owners(&["one", "two"], &["ann"], &[]), [false, false, false, true, false, true]),
            (owners(&["one"], &["ann"], &["b"]), [false; 6]),
            (owners(&[""], &[], &[]), [false; 6]),
        ] {
            let admitted = callers.each_ref().map(|caller| owners.admits(caller));
            assert_eq!(admitted, expected, "{owners:?}");
        }
    }
}
