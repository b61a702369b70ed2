//! The account that runs this process.

use std::fs::File;
use std::io::Read;

/// Maximum size of the list of accounts that is read.
const PASSWD_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Returns the account's name by its number, because a caller can set `$USER`. An account that is not in `/etc/passwd`,
/// such as one of a directory service, is named by its number.
pub(crate) fn name() -> String {
    let uid = rustix::process::getuid().as_raw();
    let mut bytes = Vec::new();
    let read = File::open("/etc/passwd").and_then(|file| file.take(PASSWD_BYTES_MAX).read_to_end(&mut bytes));
    let name = read.ok().and_then(|_| name_in(&String::from_utf8_lossy(&bytes), uid).map(str::to_owned));
    name.unwrap_or_else(|| format!("uid-{uid}"))
}

fn name_in(passwd: &str, uid: u32) -> Option<&str> {
    let mut entries = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let entry = entries.find(|fields| fields.get(2).is_some_and(|number| number.parse() == Ok(uid)))?;
    entry.first().copied().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_found_by_its_number() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nada:x:1000:1000::/home/ada:/bin/sh\n:x:7:7\nbroken\n";
        let names = [0, 1000, 7, 5].map(|uid| name_in(passwd, uid));
        assert_eq!(names, [Some("root"), Some("ada"), None, None]);
    }
}
