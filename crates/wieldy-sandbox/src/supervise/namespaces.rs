//! Explains why the kernel refuses to make namespaces: the setting that forbids it, and how to change that.

use std::fs;
use std::io;

/// What a setting of the kernel says.
pub(crate) fn kernel_setting(setting: &str) -> Option<String> {
    let path = format!("/proc/sys/{}", setting.replace('.', "/"));
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// What can be set such that nobody but root, or nobody at all, may make user namespaces: the value that forbids it, what to set instead, and
/// whether the kernel then says that there may be no more of them, rather than that it is not permitted.
const FORBIDDING: [(&str, &str, &str, bool); 3] = [
    ("kernel.unprivileged_userns_clone", "0", "1", false),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0", false),
    ("user.max_user_namespaces", "0", "65536", true),
];

/// The setting that is the reason for this error, if one is, and what to do about it.
pub(crate) fn forbidden_by(error: &io::Error, read: &dyn Fn(&str) -> Option<String>) -> Option<(String, String)> {
    let too_many = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EUSERS));
    let mut settings = FORBIDDING.into_iter().filter(|(.., counts)| *counts == too_many);
    let (setting, value, instead, _) =
        settings.find(|(setting, value, ..)| read(setting).is_some_and(|found| found == *value))?;
    Some((format!("`{setting}` is {value}"), format!("as root: `sysctl -w {setting}={instead}`")))
}

/// Why no namespaces could be made, with the setting that is the reason, if one is, and what to do about it.
pub(crate) fn explained(error: io::Error) -> io::Error {
    match forbidden_by(&error, &kernel_setting) {
        Some((told, hint)) => io::Error::new(error.kind(), format!("{error}, as {told}; {hint}")),
        None => error,
    }
}
