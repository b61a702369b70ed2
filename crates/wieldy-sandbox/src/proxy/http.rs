//! Parses the heads of requests and responses strictly, and writes them anew.
//!
//! A head that two readers could understand in two ways is refused. The head for the other side is written from what
//! was parsed: the host, the length of the body and the end of the connection are never the client's own spelling.

use httparse::{EMPTY_HEADER, Header};

use super::names::{Authority, Refusal};

/// The maximum length of a head, of a request or of a response.
pub(super) const HEAD_BYTES_MAX: usize = 16 * 1024;

/// The maximum number of headers in one head.
const HEADERS_MAX: usize = 128;

/// Headers that are about one connection and not about the message, and those that the proxy writes itself.
const NOT_PASSED_ON: [&str; 12] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authorization",
    "proxy-authenticate",
    "te",
    "trailer",
    "upgrade",
    "http2-settings",
    "host",
    "content-length",
    "transfer-encoding",
];

/// A client's request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) target: Authority,
    pub(super) order: Order,
}

/// The action to take with the target.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// `CONNECT`: pass bytes in both directions.
    Tunnel,
    /// Send this head and body, and pass on the response.
    Forward { head: Vec<u8>, body: Body, is_head: bool },
}

/// The length of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    Length(u64),
    Chunked,
    UntilEnd,
}

/// The reason why a request is not passed on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Rejected {
    /// Two readers could understand it differently: 400.
    Malformed(&'static str),
    /// Its target is not in the one accepted spelling: 403.
    Refused(Refusal),
}

impl From<&'static str> for Rejected {
    fn from(problem: &'static str) -> Self {
        Self::Malformed(problem)
    }
}

impl Request {
    /// Parses a whole head, with the empty line at its end.
    pub(super) fn parse(head: &[u8]) -> Result<Self, Rejected> {
        check_lines(head)?;
        let mut headers = [EMPTY_HEADER; HEADERS_MAX];
        let mut parsed = httparse::Request::new(&mut headers);
        match parsed.parse(head) {
            Ok(httparse::Status::Complete(length)) if length == head.len() => {}
            Err(httparse::Error::TooManyHeaders) => return Err("the request has too many headers".into()),
            _ => return Err("this is not a request of HTTP/1.0 or HTTP/1.1".into()),
        }
        let (Some(method), Some(target), Some(version)) = (parsed.method, parsed.path, parsed.version) else {
            return Err("the first line of the request is not whole".into());
        };
        let headers = Headers(parsed.headers);
        let body = headers.body(version)?;
        if method == "CONNECT" {
            let target = Authority::parse(target, None).map_err(Rejected::Refused)?;
            headers.agree_on_host(&target, target.port, version)?;
            if !matches!(body, None | Some(Body::Length(0))) {
                return Err("a CONNECT request has no body".into());
            }
            return Ok(Self { target, order: Order::Tunnel });
        }
        let (target, path) = split_url(target)?;
        headers.agree_on_host(&target, 80, version)?;
        let body = body.unwrap_or(Body::Length(0));
        let head = headers.request_head(method, &path, version, &target);
        Ok(Self { target, order: Order::Forward { head, body, is_head: method == "HEAD" } })
    }
}

/// The head of a response, as the client gets it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Response {
    pub(super) head: Vec<u8>,
    /// The length of the body; `None` if this is not the final response yet (`100 Continue` and the like).
    pub(super) body: Option<Body>,
}

impl Response {
    /// Parses a whole head, with the empty line at its end.
    pub(super) fn parse(head: &[u8], to_head_request: bool) -> Result<Self, &'static str> {
        check_lines(head)?;
        let mut headers = [EMPTY_HEADER; HEADERS_MAX];
        let mut parsed = httparse::Response::new(&mut headers);
        match parsed.parse(head) {
            Ok(httparse::Status::Complete(length)) if length == head.len() => {}
            _ => return Err("the host did not answer by HTTP/1.0 or HTTP/1.1"),
        }
        let (Some(status), Some(version)) = (parsed.code, parsed.version) else {
            return Err("the first line of the response is not whole");
        };
        let headers = Headers(parsed.headers);
        let body = match status {
            0..100 | 101 => return Err("the host changed to another protocol"),
            100..200 => None,
            _ => Some(headers.body(version)?.unwrap_or(Body::UntilEnd)),
        };
        let mut out = format!("HTTP/1.1 {status} {}\r\n", parsed.reason.unwrap_or_default()).into_bytes();
        headers.write_passed_on(&mut out);
        // A length is also written if no body follows: it is the one that a GET would have had.
        if let Some(body) = body.filter(|_| status != 204) {
            write_body(&mut out, body);
        }
        out.extend_from_slice(if body.is_some() { b"connection: close\r\n\r\n" } else { b"\r\n" });
        let has_no_body = to_head_request || matches!(status, 204 | 304);
        Ok(Self { head: out, body: body.map(|body| if has_no_body { Body::Length(0) } else { body }) })
    }
}

struct Headers<'a, 'b>(&'a [Header<'b>]);

impl<'b> Headers<'_, 'b> {
    fn values(&self, name: &str) -> impl Iterator<Item = &'b [u8]> {
        self.0.iter().filter(move |header| header.name.eq_ignore_ascii_case(name)).map(|header| header.value)
    }

    /// Returns the length of the body, if it is given; it must be given only once.
    fn body(&self, version: u8) -> Result<Option<Body>, &'static str> {
        let mut lengths = self.values("content-length");
        let mut encodings = self.values("transfer-encoding");
        match (lengths.next(), encodings.next()) {
            _ if lengths.next().is_some() || encodings.next().is_some() => Err("the length of the body is said twice"),
            (Some(_), Some(_)) => Err("both Content-Length and Transfer-Encoding are there"),
            (None, None) => Ok(None),
            (Some(length), None) => parse_number(length, 10).map(|length| Some(Body::Length(length))),
            (None, Some(encoding)) if encoding.eq_ignore_ascii_case(b"chunked") && version == 1 => {
                Ok(Some(Body::Chunked))
            }
            (None, Some(_)) => Err("the only Transfer-Encoding is `chunked`, and of HTTP/1.1"),
        }
    }

    /// Checks that the header `Host` equals the target.
    fn agree_on_host(&self, target: &Authority, default_port: u16, version: u8) -> Result<(), &'static str> {
        let mut hosts = self.values("host");
        match (hosts.next(), hosts.next()) {
            (None, _) if version == 0 => Ok(()),
            (None, _) => Err("the header Host is missing"),
            (Some(_), Some(_)) => Err("there are two headers Host"),
            (Some(host), None) => {
                let host = str::from_utf8(host).ok().and_then(|host| Authority::parse(host, Some(default_port)).ok());
                if host.as_ref() == Some(target) { Ok(()) } else { Err("the header Host differs from the target") }
            }
        }
    }

    fn request_head(&self, method: &str, path: &str, version: u8, target: &Authority) -> Vec<u8> {
        let port = if target.port == 80 { String::new() } else { format!(":{}", target.port) };
        let mut out = format!("{method} {path} HTTP/1.{version}\r\nhost: {}{port}\r\n", target.host).into_bytes();
        self.write_passed_on(&mut out);
        if let Ok(Some(body)) = self.body(version) {
            write_body(&mut out, body);
        }
        out.extend_from_slice(b"connection: close\r\n\r\n");
        out
    }

    /// Writes all headers except those about the connection, such as the ones that `Connection` names.
    fn write_passed_on(&self, out: &mut Vec<u8>) {
        let named: Vec<&[u8]> = self
            .values("connection")
            .flat_map(|value| value.split(|byte| *byte == b','))
            .map(<[u8]>::trim_ascii)
            .collect();
        for Header { name, value } in self.0 {
            let stays = NOT_PASSED_ON.iter().any(|other| name.eq_ignore_ascii_case(other))
                || named.iter().any(|other| other.eq_ignore_ascii_case(name.as_bytes()));
            if !stays {
                for part in [name.as_bytes(), b": ", value, b"\r\n"] {
                    out.extend_from_slice(part);
                }
            }
        }
    }
}

fn write_body(out: &mut Vec<u8>, body: Body) {
    match body {
        Body::Length(length) => out.extend_from_slice(format!("content-length: {length}\r\n").as_bytes()),
        Body::Chunked => out.extend_from_slice(b"transfer-encoding: chunked\r\n"),
        Body::UntilEnd => {}
    }
}

/// Splits `http://HOST:PORT/PATH`.
fn split_url(url: &str) -> Result<(Authority, String), Rejected> {
    const SCHEME: &str = "http://";
    let rest = match url.get(..SCHEME.len()) {
        Some(scheme) if scheme.eq_ignore_ascii_case(SCHEME) => &url[SCHEME.len()..],
        _ => return Err("this proxy takes `CONNECT HOST:PORT` and `METHOD http://HOST/PATH`, nothing else".into()),
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let authority = Authority::parse(authority, Some(80)).map_err(Rejected::Refused)?;
    if !path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#') {
        return Err("the path holds characters that must be percent-encoded".into());
    }
    let slash = if path.starts_with('/') { "" } else { "/" };
    Ok((authority, format!("{slash}{path}")))
}

/// Refuses syntax on which HTTP parsers are known to differ: line ends other than CR LF, and continued lines.
fn check_lines(head: &[u8]) -> Result<(), &'static str> {
    let mut rest = head;
    while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n' | 0)) {
        rest = rest[end..].strip_prefix(b"\r\n").ok_or("a line does not end with CR LF, or holds a zero byte")?;
        if matches!(rest, [b' ' | b'\t', ..]) {
            return Err("a header is continued on the next line");
        }
    }
    Ok(())
}

/// Parses a number in its plain spelling: digits, and nothing else.
pub(super) fn parse_number(text: &[u8], radix: u32) -> Result<u64, &'static str> {
    let plain = |text: &&str| text.chars().all(|character| character.is_digit(radix));
    let text = str::from_utf8(text).ok().filter(plain);
    text.and_then(|text| u64::from_str_radix(text, radix).ok()).ok_or("a length is not a number")
}

#[cfg(test)]
mod tests;
