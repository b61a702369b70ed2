//! Finds out which hosts a command was refused.
//!
//! If the network is limited to a list of hosts, the proxy refuses connections and reports each one to every command
//! that runs at that time. It knows a connection and not the process behind it, so a denial is a command's own only
//! while no other command runs in the sandbox.
//!
//! Without a network there is no proxy. When a command has failed, the end of its error output is searched for messages
//! about names and addresses that could not be reached. A program that prints such messages falsely deceives only the
//! reader of its own result.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wieldy_core::{Denial, Network, OutputSink, SandboxRef};

use crate::proxy::{self, Allowed, Proxy, Refusal};

/// Error messages of the C library, of programs with their own wording, and of runtimes that show the error's name.
const WORDS: [&str; 11] = [
    "could not resolve hostname",
    "could not resolve host",
    "temporary failure in name resolution",
    "temporary failure resolving",
    "unable to resolve host address",
    "name or service not known",
    "network is unreachable",
    "no route to host",
    "getaddrinfo eai_again",
    "getaddrinfo enotfound",
    "connect enetunreach",
];

/// The maximum length of a host name.
const NAME_BYTES_MAX: usize = 253;

/// The host to report if a message names none.
const UNNAMED: &str = "a host without a name";

/// Returns the hosts that a failed command could not reach because of its network, by its error output.
pub(crate) fn denials(text: &str, network: &Network) -> Vec<Denial> {
    let reason = match network {
        Network::None => "no-network",
        Network::Hosts(_) => "not-by-the-proxy",
        Network::Open => return Vec::new(),
    };
    let mut hosts: Vec<String> = text.lines().filter_map(host_of).collect();
    // Most programs repeat the message, but name the host only once.
    if hosts.iter().any(|host| host != UNNAMED) {
        hosts.retain(|host| host != UNNAMED);
    }
    hosts.dedup();
    let denial = |host| Denial::Network { host, port: None, reason: reason.into(), shared: false };
    hosts.into_iter().map(denial).collect()
}

/// Returns the host that a line reports as unreachable, if it does.
fn host_of(line: &str) -> Option<String> {
    // The lower-case text has the same length, so positions are the same in both.
    let small = line.to_ascii_lowercase();
    let (at, words) = WORDS.iter().find_map(|words| Some((small.find(words)?, words)))?;
    let (before, after) = (line.get(..at)?, line.get(at + words.len()..)?);
    let behind = after.trim_start_matches(':').split_whitespace().next();
    let ahead = before.strip_suffix(": ").and_then(|before| before.split_whitespace().next_back());
    let looked_up = before.split_once("lookup ").and_then(|(_, rest)| rest.split_whitespace().next());
    let named = [behind, looked_up, ahead].into_iter().flatten().find_map(name);
    Some(named.unwrap_or(UNNAMED).to_owned())
}

/// Returns the host name or address in a word, if there is one.
fn name(word: &str) -> Option<&str> {
    let word = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    let is_name = |word: &str| {
        let of_letters =
            |label: &str| !label.is_empty() && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        let last = word.rsplit('.').next().unwrap_or_default();
        word.len() <= NAME_BYTES_MAX
            && word.contains('.')
            && word.split('.').all(of_letters)
            && last.chars().any(|c| c.is_ascii_alphabetic())
    };
    (word.parse::<IpAddr>().is_ok() || is_name(word)).then_some(word)
}

/// The maximum number of refusals that are reported to a command.
const BREACHES_MAX: usize = 64;

/// The running commands of a sandbox, to which refusals are reported.
pub(crate) struct ProxyDenials {
    sandbox: SandboxRef,
    running: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    begun: u64,
    commands: BTreeMap<u64, Listener>,
}

struct Listener {
    output: Arc<dyn OutputSink>,
    denials: Vec<Denial>,
}

/// A running command, to which refusals are reported until this is dropped.
pub(crate) struct DenialListener<'a> {
    proxy_denials: &'a ProxyDenials,
    number: u64,
}

impl ProxyDenials {
    pub(crate) fn new(sandbox: SandboxRef) -> Self {
        Self { sandbox, running: Mutex::default() }
    }

    /// Adds a command: refusals from now on are reported to its `output`.
    pub(crate) fn listen(&self, output: &Arc<dyn OutputSink>) -> DenialListener<'_> {
        let mut running = self.running();
        running.begun += 1;
        let number = running.begun;
        running.commands.insert(number, Listener { output: Arc::clone(output), denials: Vec::new() });
        DenialListener { proxy_denials: self, number }
    }

    /// Reports a refusal to all running commands.
    pub(crate) fn tell(&self, refusal: Refusal) {
        let mut running = self.running();
        let Refusal { host, port, reason } = refusal;
        let shared = running.commands.len() > 1;
        let denial = Denial::Network { host, port: Some(port), reason: reason.as_str().into(), shared };
        for listener in running.commands.values_mut().filter(|listener| listener.denials.len() < BREACHES_MAX) {
            listener.output.refused(&self.sandbox, &denial);
            listener.denials.push(denial.clone());
        }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the proxy of a sandbox, which reports its denials here.
pub(crate) fn serve(listener: OwnedFd, allowed: Allowed, proxy_denials: &Arc<ProxyDenials>) -> io::Result<Proxy> {
    let listener = std::net::TcpListener::from(listener);
    listener.set_nonblocking(true)?;
    let proxy_denials = Arc::clone(proxy_denials);
    let refused = move |refusal: Refusal| proxy_denials.tell(refusal);
    let listener = tokio::net::TcpListener::from_std(listener)?;
    Ok(Proxy::serve(listener, allowed, Arc::new(proxy::SystemResolver), Arc::new(refused)))
}

impl DenialListener<'_> {
    /// Returns all refusals so far.
    pub(crate) fn denials(&self) -> Vec<Denial> {
        self.proxy_denials
            .running()
            .commands
            .get(&self.number)
            .map(|listener| listener.denials.clone())
            .unwrap_or_default()
    }
}

impl Drop for DenialListener<'_> {
    fn drop(&mut self) {
        self.proxy_denials.running().commands.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(text: &str) -> Vec<String> {
        let denials = denials(text, &Network::None);
        denials.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn error_messages_about_unreachable_hosts_are_parsed() {
        for line in [
            "curl: (6) Could not resolve host: a.example",
            "wget: unable to resolve host address ‘a.example’",
            "fatal: unable to access 'https://a.example/x/': Could not resolve host: a.example",
            "ssh: Could not resolve hostname a.example: Temporary failure in name resolution",
            "ping: a.example: Temporary failure in name resolution",
            "W: Failed to fetch http://a.example/x  Temporary failure resolving 'a.example'",
            "npm error request failed, reason: getaddrinfo EAI_AGAIN a.example",
            "Get \"https://a.example/\": dial tcp: lookup a.example on [::1]:53: dial udp: connect: network is unreachable",
            "nc: a.example: Name or service not known",
        ] {
            assert_eq!(hosts(&format!("trying\n{line}\nit failed\n")), ["network: a.example: no-network"], "{line}");
        }
        assert_eq!(hosts("connect to 192.0.2.1: Network is unreachable"), ["network: 192.0.2.1: no-network"]);
        let unnamed = "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>";
        assert_eq!(hosts(unnamed), ["network: a host without a name: no-network"]);
        assert_eq!(
            hosts(&format!("{unnamed}\nping: b.example: Name or service not known")),
            ["network: b.example: no-network"]
        );
    }

    #[test]
    fn other_failures_are_no_breach() {
        for text in ["", "Connection refused", "a.example: 404", "FileNotFoundError: [Errno 2] x"] {
            assert_eq!(hosts(text), Vec::<String>::new(), "{text}");
        }
        let line = "curl: (6) Could not resolve host: a.example";
        assert_eq!(denials(line, &Network::Open), Vec::new());
        let told = denials(line, &Network::Hosts(vec!["b.example".into()]));
        assert_eq!(told[0].to_string(), "network: a.example: not-by-the-proxy");
    }
}
