//! Explains why the kernel refuses to make namespaces: the setting that forbids it, and the command that changes it.

use std::fs;
use std::io;

/// Returns the value of a kernel setting (sysctl).
pub(crate) fn kernel_setting(setting: &str) -> Option<String> {
    let path = format!("/proc/sys/{}", setting.replace('.', "/"));
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Kernel settings that can forbid user namespaces to users other than root, or to all: name, forbidding value, value
/// to set instead, and true if the kernel's error is then that there are too many (`ENOSPC`, `EUSERS`) instead of a
/// missing permission.
const FORBIDDING: [(&str, &str, &str, bool); 3] = [
    ("kernel.unprivileged_userns_clone", "0", "1", false),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0", false),
    ("user.max_user_namespaces", "0", "65536", true),
];

/// Returns the setting that causes this error, if one does, and a hint how to change it.
pub(crate) fn forbidden_by(error: &io::Error, read: &dyn Fn(&str) -> Option<String>) -> Option<(String, String)> {
    let too_many = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EUSERS));
    let mut settings = FORBIDDING.into_iter().filter(|(.., counts)| *counts == too_many);
    let (setting, value, instead, _) =
        settings.find(|(setting, value, ..)| read(setting).is_some_and(|found| found == *value))?;
    Some((format!("`{setting}` is {value}"), format!("as root: `sysctl -w {setting}={instead}`")))
}

/// Adds to an error of making namespaces the setting that causes it, if one does, and a hint how to change it.
pub(crate) fn explained(error: io::Error) -> io::Error {
    match forbidden_by(&error, &kernel_setting) {
        Some((told, hint)) => io::Error::new(error.kind(), format!("{error}, as {told}; {hint}")),
        None => error,
    }
}
