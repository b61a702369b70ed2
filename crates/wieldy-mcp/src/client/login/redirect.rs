//! The local HTTP listener for the OAuth redirect of one login.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};

use super::Login;

/// The longest time for one request to arrive.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum size of a request head.
const HEAD_BYTES_MAX: usize = 16 * 1024;
/// Maximum number of open connections.
const TRIES_MAX: usize = 16;
const PATH: &str = "/callback";

/// A local listener that waits for the OAuth redirect of a login.
pub struct LoginRedirect {
    listener: TcpListener,
    redirect: String,
}

impl LoginRedirect {
    /// Listens on loopback, at this port or at any free one.
    pub async fn bind(port: Option<u16>) -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port.unwrap_or_default())).await?;
        let redirect = format!("http://{}{PATH}", listener.local_addr()?);
        Ok(Self { listener, redirect })
    }

    /// Returns the redirect URI.
    pub fn redirect(&self) -> &str {
        &self.redirect
    }

    /// Waits for the redirect of this login and returns its URL. Other requests are answered with 404 and ignored.
    pub async fn wait(&self, login: &Login) -> std::io::Result<String> {
        let (tell, mut told) = mpsc::channel(1);
        let (tries, state) = (Arc::new(Semaphore::new(TRIES_MAX)), Arc::<str>::from(login.state.as_str()));
        let mut tasks = tokio::task::JoinSet::new();
        loop {
            tokio::select! {
                Some(answer) = told.recv() => return Ok(answer),
                accepted = self.listener.accept() => {
                    let stream = accepted?.0;
                    let Ok(permit) = Arc::clone(&tries).try_acquire_owned() else { continue };
                    let (redirect, state, tell) = (self.redirect.clone(), Arc::clone(&state), tell.clone());
                    tasks.spawn(async move {
                        let heard = tokio::time::timeout(PATIENCE, hear(stream, &redirect, &state)).await;
                        drop(permit);
                        if let Ok(Ok(Some(answer))) = heard {
                            let _ = tell.send(answer).await;
                        }
                    });
                }
            }
        }
    }
}

/// Reads one request. Returns the redirect URL if the request has the login's `state`.
async fn hear(mut stream: TcpStream, redirect: &str, state: &str) -> std::io::Result<Option<String>> {
    let mut head = Vec::new();
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        if head.len() > HEAD_BYTES_MAX || stream.read_buf(&mut head).await? == 0 {
            return Ok(None);
        }
    }
    let head = String::from_utf8_lossy(&head);
    let target = head.strip_prefix("GET ").and_then(|rest| rest.split(' ').next()).unwrap_or_default();
    let query = target.strip_prefix(PATH).and_then(|rest| rest.strip_prefix('?'));
    let answer = query.map(|query| format!("{redirect}?{query}"));
    let is_the_one = answer.as_ref().and_then(|answer| reqwest::Url::parse(answer).ok()).is_some_and(|url| {
        let mut states = url.query_pairs().filter(|(name, _)| name == "state");
        states.next().is_some_and(|(_, theirs)| theirs == state)
    });
    let (status, page) = match is_the_one {
        true => ("200 OK", "wieldy has the answer. You can close this window."),
        false => ("404 Not Found", "This is not the answer that wieldy waits for."),
    };
    let length = page.len();
    let response = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {length}\r\ncache-control: no-store\r\n\
         referrer-policy: no-referrer\r\nconnection: close\r\n\r\n{page}"
    );
    stream.write_all(response.as_bytes()).await?;
    stream.shutdown().await?;
    Ok(answer.filter(|_| is_the_one))
}
