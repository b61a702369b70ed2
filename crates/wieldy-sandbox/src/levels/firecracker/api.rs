//! Starts a guest by requests to Firecracker's API, each a `PUT` with a JSON body over its Unix socket.
//!
//! Firecracker answers a request that it accepts with 204, and one that it refuses with a body that has the reason in
//! `fault_message`.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Maximum number of bytes of an answer that are read.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// The description of a guest for Firecracker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Guest {
    pub(super) processors: u64,
    pub(super) memory_mib: u64,
    pub(super) kernel: PathBuf,
    pub(super) kernel_arguments: String,
    /// The root file system, which is never written to.
    pub(super) rootfs: PathBuf,
    /// The disk that the workspace is on.
    pub(super) disk: PathBuf,
    /// The path at which Firecracker listens for connections to the guest's virtual socket.
    pub(super) vsock: PathBuf,
}

/// The guest's address on its virtual socket. Each Firecracker has one guest only, so all use the same.
const CID: u32 = 3;

impl Guest {
    /// Returns the requests that describe this guest and start it, in order.
    fn requests(&self) -> [(&'static str, Value); 6] {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let drive = |id: &str, path: &Path, is_root: bool| json!({"drive_id": id, "path_on_host": text(path), "is_root_device": is_root, "is_read_only": is_root});
        [
            ("/machine-config", json!({"vcpu_count": self.processors, "mem_size_mib": self.memory_mib})),
            ("/boot-source", json!({"kernel_image_path": text(&self.kernel), "boot_args": self.kernel_arguments})),
            ("/drives/root", drive("root", &self.rootfs, true)),
            ("/drives/workspace", drive("workspace", &self.disk, false)),
            ("/vsock", json!({"guest_cid": CID, "uds_path": text(&self.vsock)})),
            ("/actions", json!({"action_type": "InstanceStart"})),
        ]
    }

    /// Makes the Firecracker at this socket start the guest.
    pub(super) async fn start(&self, socket: &Path) -> Result<(), ApiError> {
        for (path, body) in self.requests() {
            put(socket, path, &body).await?;
        }
        Ok(())
    }
}

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
#[error("Firecracker refused `PUT {request}`: {reason}")]
pub(super) struct ApiError {
    request: String,
    reason: String,
}

/// Sends one request, and fails if it is not accepted.
async fn put(socket: &Path, path: &str, body: &Value) -> Result<(), ApiError> {
    let error = |reason: String| ApiError { request: path.into(), reason };
    let (status, answer) = exchange(socket, path, body).await.map_err(|problem| error(problem.to_string()))?;
    if status == 204 {
        return Ok(());
    }
    let told = serde_json::from_slice::<Value>(&answer).ok();
    let fault = told.as_ref().and_then(|told| told.get("fault_message")?.as_str());
    Err(error(fault.map_or_else(|| format!("it answered with the status {status}"), str::to_owned)))
}

/// Sends a request and reads the status and the body of its answer.
async fn exchange(socket: &Path, path: &str, body: &Value) -> io::Result<(u16, Vec<u8>)> {
    let mut stream = UnixStream::connect(socket).await?;
    let body = body.to_string();
    let request = format!(
        "PUT {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    loop {
        if let Some(parsed) = parse(&answer)? {
            return Ok(parsed);
        }
        if answer.len() > ANSWER_BYTES_MAX {
            return Err(invalid("its answer is too long"));
        }
        if stream.read_buf(&mut answer).await? == 0 {
            return Err(invalid("it hung up before it had answered"));
        }
    }
}

/// Returns the status and the body, if the answer is complete. Firecracker always sends the length of a body.
fn parse(answer: &[u8]) -> io::Result<Option<(u16, Vec<u8>)>> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut response = httparse::Response::new(&mut headers);
    let parsed = response.parse(answer).map_err(|error| invalid(&format!("its answer is no HTTP: {error}")))?;
    let httparse::Status::Complete(start) = parsed else { return Ok(None) };
    let length = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let length = match length.map(|header| str::from_utf8(header.value).ok().and_then(|text| text.trim().parse().ok()))
    {
        None => 0,
        Some(Some(length)) if length <= ANSWER_BYTES_MAX => length,
        Some(_) => return Err(invalid("its answer has no proper length")),
    };
    let body = answer.get(start..start + length).map(<[u8]>::to_vec);
    Ok(body.map(|body| (response.code.unwrap_or_default(), body)))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    fn guest() -> Guest {
        Guest {
            processors: 2,
            memory_mib: 512,
            kernel: "/k/vmlinux".into(),
            kernel_arguments: "console=ttyS0 init=/sbin/wieldy-guest".into(),
            rootfs: "/k/root.ext4".into(),
            disk: "/m/disk".into(),
            vsock: "/m/vsock".into(),
        }
    }

    /// Answers each connection's request with the next of `answers`, and returns the requests.
    async fn serve(listener: UnixListener, answers: Vec<&'static str>) -> Vec<String> {
        let mut requests = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"}") {
                assert_ne!(stream.read_buf(&mut request).await.unwrap(), 0, "a request was cut");
            }
            // In two pieces, as a socket may deliver it.
            let (first, second) = answer.split_at(answer.len() / 2);
            stream.write_all(first.as_bytes()).await.unwrap();
            stream.flush().await.unwrap();
            tokio::task::yield_now().await;
            // The client may have hung up already.
            let _ = stream.write_all(second.as_bytes()).await;
            requests.push(String::from_utf8(request).unwrap());
        }
        requests
    }

    async fn start(answers: Vec<&'static str>) -> (Result<(), String>, Vec<String>) {
        let world = tempfile::tempdir().unwrap();
        let socket = world.path().join("api");
        let served = tokio::spawn(serve(UnixListener::bind(&socket).unwrap(), answers));
        let started = guest().start(&socket).await.map_err(|error| error.to_string());
        (started, served.await.unwrap())
    }

    const OBEYED: &str = "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n";

    #[tokio::test]
    async fn a_guest_is_described_and_started_by_these_requests() {
        let (started, requests) = start(vec![OBEYED; 6]).await;
        assert_eq!(started, Ok(()));
        insta::assert_snapshot!(requests.join("\n\n").replace('\r', ""), @r#"
        PUT /machine-config HTTP/1.1
        Host: localhost
        Accept: application/json
        Content-Type: application/json
        Content-Length: 35

        {"vcpu_count":2,"mem_size_mib":512}

        PUT /boot-source HTTP/1.1
        Host: localhost
        Accept: application/json
        Content-Type: application/json
        Content-Length: 86

        {"kernel_image_path":"/k/vmlinux","boot_args":"console=ttyS0 init=/sbin/wieldy-guest"}

        PUT /drives/root HTTP/1.1
        Host: localhost
        Accept: application/json
        Content-Type: application/json
        Content-Length: 91

        {"drive_id":"root","path_on_host":"/k/root.ext4","is_root_device":true,"is_read_only":true}

        PUT /drives/workspace HTTP/1.1
        Host: localhost
        Accept: application/json
        Content-Type: application/json
        Content-Length: 93

        {"drive_id":"workspace","path_on_host":"/m/disk","is_root_device":false,"is_read_only":false}

        PUT /vsock HTTP/1.1
        Host: localhost
        Accept: application/json
        Content-Type: application/json
        Content-Length: 37

        {"guest_cid":3,"uds_path":"/m/vsock"}

        PUT /actions HTTP/1.1
        Host: localhost
        Accept: application/json
        Content-Type: application/json
        Content-Length: 31

        {"action_type":"InstanceStart"}
        "#);
    }

    #[tokio::test]
    async fn a_refused_request_is_reported_in_firecrackers_own_words() {
        let refused = "HTTP/1.1 400 \r\nServer: Firecracker API\r\nContent-Type: application/json\r\n\
                       Content-Length: 35\r\n\r\n{\"fault_message\":\"No such kernel.\"}";
        let (started, requests) = start(vec![OBEYED, refused]).await;
        assert_eq!(started, Err("Firecracker refused `PUT /boot-source`: No such kernel.".into()));
        assert_eq!(requests.len(), 2);
    }

    #[tokio::test]
    async fn invalid_answers_are_reported() {
        let told = async |answer| start(vec![answer]).await.0.unwrap_err();
        let begin = "Firecracker refused `PUT /machine-config`: ";
        assert_eq!(
            told("HTTP/1.1 500 \r\nContent-Length: 2\r\n\r\n{}").await,
            format!("{begin}it answered with the status 500")
        );
        assert_eq!(told("SSH-2.0 hello\r\n").await, format!("{begin}its answer is no HTTP: invalid HTTP version"));
        assert_eq!(
            told("HTTP/1.1 400 \r\nContent-Length: 99\r\n\r\n{").await,
            format!("{begin}it hung up before it had answered")
        );
        assert_eq!(
            told("HTTP/1.1 400 \r\nContent-Length: 99999999\r\n\r\n").await,
            format!("{begin}its answer has no proper length")
        );
        let nobody = guest().start(Path::new("/no/socket")).await.unwrap_err().to_string();
        assert_eq!(nobody, format!("{begin}No such file or directory (os error 2)"));
    }
}
