//! The HTTP client of OAuth logins, guarded against SSRF. The server names the URLs, so each is checked first: no
//! private or loopback address and no plain HTTP, unless the server itself is there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use rmcp::transport::auth::{OAuthHttpClient, OAuthHttpClientFuture, OAuthHttpRequest};

use super::super::http_setup;

/// The longest time for one request.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a response.
const BYTES_MAX: usize = 1024 * 1024;

/// An HTTP client that checks every URL and every resolved address.
pub(super) struct GuardedClient {
    client: reqwest::Client,
    rules: UrlRules,
}

impl GuardedClient {
    pub(super) fn new(server: &Url, private: bool) -> Result<Self, String> {
        let rules = UrlRules::new(server, private);
        let builder = http_setup::builder()?.timeout(TIMEOUT).redirect(reqwest::redirect::Policy::none());
        let client = builder.dns_resolver(rules.clone()).build();
        Ok(Self { client: client.map_err(|error| format!("no HTTP client can be made: {error}"))?, rules })
    }
}

impl OAuthHttpClient for GuardedClient {
    fn execute(&self, request: OAuthHttpRequest) -> OAuthHttpClientFuture<'_> {
        Box::pin(async move {
            let request = reqwest::Request::try_from(request.request)?;
            self.rules.check(request.url().as_str())?;
            let mut response = self.client.execute(request).await.map_err(reqwest::Error::without_url)?;
            let mut answer = ::http::Response::builder().status(response.status());
            for (name, value) in response.headers() {
                answer = answer.header(name, value);
            }
            let mut body = Vec::new();
            while let Some(piece) = response.chunk().await? {
                if body.len() + piece.len() > BYTES_MAX {
                    return Err("the answer is larger than a megabyte".into());
                }
                body.extend_from_slice(&piece);
            }
            Ok(answer.body(body)?)
        })
    }
}

/// The rules for URLs and addresses.
#[derive(Clone)]
pub(super) struct UrlRules {
    /// The server's own URL, which the operator configured.
    server: Url,
    /// True if private addresses are allowed.
    private: bool,
}

/// The kind of an IP address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AddressKind {
    Public,
    Private,
    Loopback,
    /// Reserved ranges (link-local, multicast, benchmarking, …): always refused.
    Special,
}

impl UrlRules {
    pub(super) fn new(server: &Url, private: bool) -> Self {
        Self { server: server.clone(), private }
    }

    /// Checks a URL before it is requested or opened in a browser.
    pub(super) fn check(&self, text: &str) -> Result<(), String> {
        let shown: String = text.chars().take(200).flat_map(char::escape_default).collect();
        let url = Url::parse(text).map_err(|_| format!("`{shown}` is not a URL"))?;
        match url.scheme() {
            "https" => {}
            "http" if self.server.scheme() == "http" => {}
            "http" => return Err(format!("`{shown}` is not encrypted")),
            _ => return Err(format!("`{shown}` begins with neither http:// nor https://")),
        }
        let Some(host) = url.host_str() else { return Err(format!("`{shown}` has no host")) };
        if !url.username().is_empty() || url.password().is_some() {
            return Err(format!("`{shown}` contains a user name"));
        }
        let is_allowed = match literal(host) {
            Some(ip) => self.allows(host, ip),
            None => !is_localhost(host) || self.allows(host, Ipv4Addr::LOCALHOST.into()),
        };
        if is_allowed { Ok(()) } else { Err(format!("`{shown}` is not a public address")) }
    }

    /// Returns true if this address of a host may be used.
    fn allows(&self, host: &str, ip: IpAddr) -> bool {
        let server = self.server.host_str().unwrap_or_default();
        let kind_of_server = literal(server).map(kind).or(is_localhost(server).then_some(AddressKind::Loopback));
        match kind(ip) {
            AddressKind::Public => true,
            AddressKind::Private if self.private => true,
            AddressKind::Special => false,
            kind => Some(kind) == kind_of_server || host.eq_ignore_ascii_case(server),
        }
    }
}

impl Resolve for UrlRules {
    fn resolve(&self, name: Name) -> Resolving {
        let rules = self.clone();
        Box::pin(async move {
            let host = name.as_str();
            let found: Vec<SocketAddr> = tokio::net::lookup_host((host, 0)).await?.collect();
            let allowed: Vec<SocketAddr> = found.into_iter().filter(|found| rules.allows(host, found.ip())).collect();
            if allowed.is_empty() {
                return Err(format!("`{host}` is not a public address").into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

fn literal(host: &str) -> Option<IpAddr> {
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

fn is_localhost(host: &str) -> bool {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    host == "localhost" || host.ends_with(".localhost")
}

fn kind(ip: IpAddr) -> AddressKind {
    match ip {
        IpAddr::V4(ip) => kind_of_v4(ip),
        IpAddr::V6(ip) => kind_of_v6(ip),
    }
}

fn kind_of_v4(ip: Ipv4Addr) -> AddressKind {
    let [a, b, ..] = ip.octets();
    let is_shared = a == 100 && (64..128).contains(&b);
    let is_for_measuring = a == 198 && (18..20).contains(&b);
    if ip.is_loopback() {
        AddressKind::Loopback
    } else if ip.is_private() || is_shared {
        AddressKind::Private
    } else if a == 0 || a >= 224 || ip.is_link_local() || is_for_measuring {
        AddressKind::Special
    } else {
        AddressKind::Public
    }
}

fn kind_of_v6(ip: Ipv6Addr) -> AddressKind {
    let [a, b, c, d, e, f, g, h] = ip.segments();
    let v4 = |high: u16, low: u16| kind_of_v4(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low)));
    match [a, b, c, d, e, f] {
        _ if ip.is_loopback() => AddressKind::Loopback,
        _ if ip.is_unspecified() || ip.is_multicast() => AddressKind::Special,
        // IPv4 addresses embedded in IPv6.
        [0, 0, 0, 0, 0, 0 | 0xffff] | [0x64, 0xff9b, 0, 0, 0, 0] => v4(g, h),
        [0x2002, ..] => v4(b, c),
        [0x64, 0xff9b, 1, ..] | [0x2001, 0, ..] => AddressKind::Special,
        _ if a & 0xffc0 == 0xfe80 => AddressKind::Special,
        _ if a & 0xfe00 == 0xfc00 => AddressKind::Private,
        _ => AddressKind::Public,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(server: &str, private: bool, urls: &[&str]) -> Vec<String> {
        let rules = UrlRules::new(&Url::parse(server).unwrap(), private);
        urls.iter().filter(|url| rules.check(url).is_err()).map(|url| (*url).to_owned()).collect()
    }

    #[test]
    fn urls_of_a_server_may_not_point_at_private_addresses() {
        let bad = [
            "javascript:alert(1)",
            "file:///etc/passwd",
            "data:text/html,x",
            "http://login.example/authorize",
            "https://user:secret@login.example/",
            "https://127.0.0.1/",
            "https://2130706433/",
            "https://[::1]/",
            "https://[::ffff:127.0.0.1]/",
            "https://localhost/",
            "https://x.localhost./",
            "https://10.0.0.1/",
            "https://192.168.1.1/",
            "https://100.64.0.1/",
            "https://[fd00::1]/",
            "https://169.254.169.254/latest/meta-data",
            "https://[fe80::1]/",
            "https://0.0.0.0/",
            "https://[64:ff9b::a00:1]/",
            "https://[2002:7f00:1::]/",
            "not an address",
        ];
        assert_eq!(refused("https://hub.example/mcp", false, &bad), bad);
        let good = ["https://login.example/authorize?a=b", "https://8.8.8.8/", "https://[2606:4700::1111]/"];
        assert_eq!(refused("https://hub.example/mcp", false, &good), [""; 0]);
    }

    #[test]
    fn addresses_like_the_servers_are_allowed() {
        let urls = ["http://127.0.0.1:9/", "http://localhost/", "http://10.0.0.1/", "http://169.254.169.254/"];
        assert_eq!(refused("http://127.0.0.1:8/mcp", false, &urls), urls[2..]);
        assert_eq!(refused("http://hub.example/mcp", true, &urls), [urls[0], urls[1], urls[3]]);
    }

    #[tokio::test]
    async fn host_names_are_checked_by_their_addresses() {
        let rules = UrlRules::new(&Url::parse("https://hub.example/mcp").unwrap(), false);
        let error = rules.resolve("localhost".parse().unwrap()).await.err().unwrap();
        assert_eq!(error.to_string(), "`localhost` is not a public address");
        let rules = UrlRules::new(&Url::parse("http://127.0.0.1/mcp").unwrap(), false);
        assert!(rules.resolve("localhost".parse().unwrap()).await.is_ok());
    }
}
