//! Decides which hosts may be reached: the allow-list, and the one parser of hosts.
//!
//! The list and the requests are read by the same [`Host::parse`], and its result is compared, resolved and connected
//! to. It knows one spelling per host and refuses the rest, so no two readers can differ about a host.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::addresses::is_public;

/// The ports of an entry without a port.
const WEB_PORTS: [u16; 2] = [80, 443];

/// The maximum number of characters of an unreadable host that a refusal repeats.
const SHOWN_CHARACTERS_MAX: usize = 255;

/// The hosts that may be reached; all others are refused.
///
/// An entry is a host, perhaps with a port, perhaps with `=private`:
///
/// - `example.com` is this name and no other; `*.example.com` is every name below it, but not `example.com` itself.
/// - Without a port, an entry means 80 and 443; `example.com:8080` is this port only, and `example.com:*` every port.
/// - `203.0.113.7` and `[2001:db8::1]:8080` are addresses. A name on the list does not permit its address, nor the
///   other way round.
/// - A name that leads to a private address (see [`Reason::Private`]) is refused all the same, unless the entry ends in
///   `=private`, as in `registry.corp.example=private`. An address on the list needs no such mark.
///
/// ```
/// use wieldy_sandbox::proxy::Allowed;
///
/// let allowed = Allowed::new(&["*.example.com".to_owned()])?;
/// assert!(allowed.decide("api.example.com", 443).is_ok());
/// assert!(allowed.decide("evilexample.com", 443).is_err());
/// # Ok::<(), wieldy_sandbox::proxy::InvalidEntry>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Allowed {
    entries: Vec<Entry>,
}

impl Allowed {
    /// Parses the entries of a `network` list.
    pub fn new(entries: &[String]) -> Result<Self, InvalidEntry> {
        let read = |text: &String| {
            Entry::parse(text).map_err(|reason| InvalidEntry { entry: shown(text), reason: reason.to_owned() })
        };
        Ok(Self { entries: entries.iter().map(read).collect::<Result<_, _>>()? })
    }

    /// Decides whether this host may be reached on this port, as far as possible before its name is resolved.
    pub fn decide(&self, host: &str, port: u16) -> Result<(), Refusal> {
        let refuse = |reason| Refusal { host: shown(host), port, reason };
        let host = Host::parse(host).map_err(|problem| refuse(Reason::Spelling(problem)))?;
        self.admit(&host, port).map(drop).map_err(refuse)
    }

    /// Decides about a parsed host, and returns whether it may lead to private addresses.
    pub(super) fn admit(&self, host: &Host, port: u16) -> Result<Reach, Reason> {
        let mut named = self.entries.iter().filter(|entry| entry.hosts.holds(host)).peekable();
        if named.peek().is_none() {
            return Err(match host {
                Host::Address(address) if !is_public(*address) => Reason::Private(*address),
                _ => Reason::NotListed,
            });
        }
        let reach = |entry: &Entry| if entry.private { Reach::Private } else { Reach::Public };
        named.filter(|entry| entry.ports.holds(port)).map(reach).max().ok_or(Reason::Port)
    }

    /// Checks the addresses of a name: if one of them is not permitted, none is used.
    pub(super) fn check(&self, addresses: &[IpAddr], port: u16, reach: Reach) -> Result<(), Reason> {
        let fits = |address: IpAddr| {
            reach == Reach::Private || is_public(address) || self.admit(&Host::Address(address), port).is_ok()
        };
        match addresses.iter().find(|address| !fits(**address)) {
            Some(address) => Err(Reason::Private(*address)),
            None => Ok(()),
        }
    }
}

/// The addresses that a permitted host may lead to, narrower first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reach {
    Public,
    Private,
}

/// An entry of an allow-list that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{entry}` cannot stand in a list of hosts: {reason}; write HOST, *.HOST, HOST:PORT or HOST=private")]
pub struct InvalidEntry {
    /// The entry.
    pub entry: String,
    /// The problem with it.
    pub reason: String,
}

/// A refused connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The requested host; if it could not be parsed, the text in its place.
    pub host: String,
    /// The port; 0 if it could not be parsed.
    pub port: u16,
    /// The reason.
    pub reason: Reason,
}

/// The reason why a connection was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// No entry of the list names the host.
    NotListed,
    /// The list names the host, but not with this port.
    Port,
    /// The host is, or led to, this address, which is not one of the public internet: loopback, a private network,
    /// link-local (where clouds keep their credentials), multicast, reserved, or an IPv4 address in disguise.
    Private(IpAddr),
    /// The host or port is not in the one accepted spelling.
    Spelling(&'static str),
}

impl Reason {
    /// Returns the reason in one word, as in the header `x-wieldy-refused`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::NotListed => "not-listed",
            Self::Port => "port",
            Self::Private(_) => "private-address",
            Self::Spelling(_) => "spelling",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, reason } = self;
        write!(f, "{host}:{port} was refused: ")?;
        let port_as_entry = if WEB_PORTS.contains(port) { String::new() } else { format!(":{port}") };
        match reason {
            Reason::NotListed => {
                write!(f, "the `network` list does not name it; to allow it, add `{host}{port_as_entry}` to the list")
            }
            Reason::Port => {
                write!(f, "the `network` list does not name this port; to allow it, add `{host}:{port}` to the list")
            }
            Reason::Private(address) if matches!(Host::parse(host), Ok(Host::Name(_))) => write!(
                f,
                "it leads to {address}, which is not a public address; to allow that, add `{host}{port_as_entry}=private` \
                 to the `network` list"
            ),
            Reason::Private(_) => write!(
                f,
                "this is not a public address; to allow it all the same, add `{host}{port_as_entry}` to the `network` list"
            ),
            Reason::Spelling(problem) => {
                write!(f, "{problem}; write the host in the plain way, as it is or could be in the `network` list")
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    hosts: Hosts,
    ports: Ports,
    private: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Hosts {
    One(Host),
    /// Every name that ends in this one, which begins with a dot.
    Below(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ports {
    Web,
    One(u16),
    All,
}

impl Entry {
    fn parse(text: &str) -> Result<Self, &'static str> {
        let (place, private) = match text.split_once('=') {
            Some((place, "private")) => (place, true),
            Some(_) => return Err("after `=` only `private` can stand"),
            None => (text, false),
        };
        if place.contains("://") {
            return Err("this is a URL, not a host");
        }
        // An address of IPv6 needs no brackets if no port follows.
        if let Ok(address) = place.parse::<Ipv6Addr>() {
            let host = Host::parse(&format!("[{address}]"))?;
            return Ok(Self { hosts: Hosts::One(host), ports: Ports::Web, private });
        }
        let (host, port) = split_port(place)?;
        let ports = match port {
            None => Ports::Web,
            Some("*") => Ports::All,
            Some(port) => Ports::One(parse_port(port)?),
        };
        let hosts = match host.strip_prefix("*.") {
            None if host == "*" => return Err("`*` would be every host; for that, ask for the network `open`"),
            None => Hosts::One(Host::parse(host)?),
            Some(parent) => match Host::parse(parent)? {
                Host::Name(parent) => Hosts::Below(format!(".{parent}")),
                Host::Address(_) => return Err("an address has nothing below it"),
            },
        };
        Ok(Self { hosts, ports, private })
    }
}

impl Hosts {
    fn holds(&self, host: &Host) -> bool {
        match (self, host) {
            (Self::One(one), host) => one == host,
            // No name begins with a dot, so at least one whole label comes before `parent`.
            (Self::Below(parent), Host::Name(name)) => name.ends_with(parent),
            (Self::Below(_), Host::Address(_)) => false,
        }
    }
}

impl Ports {
    fn holds(self, port: u16) -> bool {
        match self {
            Self::Web => WEB_PORTS.contains(&port),
            Self::One(one) => one == port,
            Self::All => true,
        }
    }
}

/// A host in its only accepted spelling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Host {
    /// A name in lower case, without a dot at the end.
    Name(String),
    Address(IpAddr),
}

impl Host {
    /// Parses a host as in a URL: an address of IPv6 is in brackets.
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        if let Some(inner) = text.strip_prefix('[') {
            let address = inner.strip_suffix(']').and_then(|inner| inner.parse::<Ipv6Addr>().ok());
            let address = address.ok_or("this is not an address of IPv6 in brackets")?;
            if address.to_ipv4_mapped().is_some() {
                return Err("this is an IPv4 address in disguise");
            }
            return Ok(Self::Address(address.into()));
        }
        if let Ok(address) = text.parse::<Ipv4Addr>() {
            return Ok(Self::Address(address.into()));
        }
        if text.is_empty() || text.len() > 253 {
            return Err("a name has 1 to 253 characters");
        }
        for label in text.split('.') {
            if label.is_empty() || label.len() > 63 {
                return Err("each part of a name has 1 to 63 characters, and no dot stands at its end");
            }
            if !label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
                return Err("a name holds ASCII letters, digits and hyphens only");
            }
            if label.starts_with('-') || label.ends_with('-') {
                return Err("a part of a name neither begins nor ends with a hyphen");
            }
        }
        let name = text.to_ascii_lowercase();
        // The system's resolver reads `127.1`, `0x7f000001` and `2130706433` as addresses; a name never ends like that.
        let last = name.rsplit('.').next().unwrap_or_default();
        let digits = last.strip_prefix("0x").filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        if digits.is_some() || last.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err("this is an address in a form other than four decimal numbers");
        }
        Ok(Self::Name(name))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(IpAddr::V4(address)) => write!(f, "{address}"),
            Self::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
        }
    }
}

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Authority {
    pub(super) host: Host,
    pub(super) port: u16,
}

impl Authority {
    /// Parses `HOST:PORT`; without a default the port must be there.
    pub(super) fn parse(text: &str, default: Option<u16>) -> Result<Self, Refusal> {
        let refuse =
            |host: &str, port, problem| Err(Refusal { host: shown(host), port, reason: Reason::Spelling(problem) });
        let (host, port) = match split_port(text) {
            Ok(parts) => parts,
            Err(problem) => return refuse(text, 0, problem),
        };
        let port = match port.map(parse_port).or(default.map(Ok)) {
            Some(Ok(port)) => port,
            Some(Err(problem)) => return refuse(text, 0, problem),
            None => return refuse(text, 0, "the port is missing"),
        };
        match Host::parse(host) {
            Ok(host) => Ok(Self { host, port }),
            Err(problem) => refuse(host, port, problem),
        }
    }

    /// Returns the refusal of this host and port.
    pub(super) fn refuse(&self, reason: Reason) -> Refusal {
        Refusal { host: self.host.to_string(), port: self.port, reason }
    }
}

fn split_port(text: &str) -> Result<(&str, Option<&str>), &'static str> {
    let end = match text.find(']') {
        Some(end) if text.starts_with('[') => end + 1,
        _ => text.find(':').unwrap_or(text.len()),
    };
    match text.split_at(end) {
        (host, "") => Ok((host, None)),
        (host, rest) => match rest.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None => Err("something stands between `]` and the port"),
        },
    }
}

fn parse_port(text: &str) -> Result<u16, &'static str> {
    // Rust would also read `+80` and `080`.
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| plain).ok_or("a port is a number from 1 to 65535")
}

/// Returns text from outside with a limited length and escaped, so that it can be shown.
fn shown(text: &str) -> String {
    text.chars().take(SHOWN_CHARACTERS_MAX).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests;
