//! A stand-in for Firecracker where no guest can boot. It serves Firecracker's API, checks the parts of the guest, and
//! instead of a guest starts the agent, which would be the guest's init, as a process of this machine with a folder of
//! its own. Everything except the virtual machine is real.
//!
//! It is this test binary, started by a script that the driver takes for Firecracker.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::Value;

/// The variable that makes this binary the stand-in, with the path of its API socket.
const API: &str = "WIELDY_TEST_FIRECRACKER_API";

/// Writes the script that starts the stand-in.
pub(super) fn write_program(path: &Path) {
    let binary = std::env::current_exe().unwrap();
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 'Firecracker v0, a stand-in' && exit\n\
         [ \"$1 $3\" = '--api-sock --id' ] || exit 9\n\
         {API}=\"$2\" exec '{}' --exact firecracker::stand_in::serves --nocapture\n",
        binary.display()
    );
    write_script(path, &script);
}

/// Writes an executable script, by another process: if this process wrote it, a child of another test could inherit it
/// open for writing, and it could not be executed.
pub(super) fn write_script(path: &Path, script: &str) {
    let text = path.with_extension("sh");
    fs::write(&text, script).unwrap();
    let copied = Command::new("install").args(["-m", "755"]).arg(&text).arg(path).status().unwrap();
    assert!(copied.success());
}

/// The stand-in, which the script of [`write_program`] runs. Without the variable it does nothing.
#[test]
fn serves() {
    if let Ok(socket) = std::env::var(API) {
        serve(Path::new(&socket));
    }
}

fn serve(socket: &Path) {
    let listener = UnixListener::bind(socket).unwrap();
    let (mut guest, mut is_started) = (serde_json::Map::new(), false);
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let Some((path, body)) = request(&stream) else { continue };
        let refusal = match path.as_str() {
            "/actions" if !is_started => start(&guest, socket.parent().unwrap()).err(),
            _ if is_started => Some("The requested operation is not supported after starting the microVM.".into()),
            _ => guest.insert(path.clone(), body).map(|_| "It was said already.".into()),
        };
        is_started |= path == "/actions" && refusal.is_none();
        let answer = match refusal {
            None => "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n".to_owned(),
            Some(reason) => {
                let body = serde_json::json!({ "fault_message": reason }).to_string();
                format!(
                    "HTTP/1.1 400 \r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                )
            }
        };
        let _ = stream.write_all(answer.as_bytes());
    }
}

/// Returns the path and the body of a request; `None` for a connection that only tested whether the socket is served.
fn request(stream: &UnixStream) -> Option<(String, Value)> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.strip_prefix("PUT ")?.strip_suffix(" HTTP/1.1\r\n")?.to_owned();
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        if line == "\r\n" {
            break;
        }
        if let Some(value) = line.strip_prefix("Content-Length: ") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path, serde_json::from_slice(&body).unwrap()))
}

/// Checks the parts of the guest, and starts the agent. The error is the one that Firecracker would return.
fn start(guest: &serde_json::Map<String, Value>, folder: &Path) -> Result<(), String> {
    let text = |path: &str, key: &str| guest.get(path)?.get(key)?.as_str().map(str::to_owned);
    let file = |path: &str, key: &str| text(path, key).map(PathBuf::from).filter(|path| path.is_file());
    let kernel = file("/boot-source", "kernel_image_path").ok_or("The kernel file cannot be opened.")?;
    let kernel = fs::read(kernel).unwrap();
    if kernel == b"broken" {
        return Err("Cannot load kernel due to invalid memory configuration or invalid kernel image.".into());
    }
    file("/drives/root", "path_on_host").ok_or("No root.")?;
    let arguments = text("/boot-source", "boot_args").unwrap_or_default();
    assert!(arguments.ends_with(" init=/sbin/wieldy-guest"), "{arguments}");
    let disk = fs::File::open(file("/drives/workspace", "path_on_host").ok_or("No disk.")?).unwrap();
    let mut magic = [0; 2];
    std::os::unix::fs::FileExt::read_exact_at(&disk, &mut magic, 0x438).unwrap();
    assert_eq!(magic, [0x53, 0xef], "the disk has no ext4 on it");
    let vsock = UnixListener::bind(text("/vsock", "uds_path").ok_or("No vsock.")?).unwrap();

    let (agent, copy) = (folder.join("agent"), folder.join("copy"));
    fs::create_dir(&copy).unwrap();
    let mut command = Command::new("/proc/self/exe");
    command.arg0("/sbin/wieldy-guest").arg(&agent).arg(&copy).env_clear();
    let mut process = command.spawn().unwrap();
    thread::spawn(move || panic!("the agent ended: {:?}", process.wait()));
    while UnixStream::connect(&agent).is_err() {
        thread::sleep(Duration::from_millis(1));
    }
    let (drips, marker) = (kernel == b"drips", folder.join("dripping"));
    thread::spawn(move || {
        for (number, stream) in vsock.incoming().enumerate() {
            let (stream, agent, marker) = (stream.unwrap(), agent.clone(), marker.clone());
            match drips && number > 0 {
                true => thread::spawn(move || drip(stream, &marker)),
                false => thread::spawn(move || pass_on(stream, &agent)),
            };
        }
    });
    Ok(())
}

/// Plays a guest that is never silent for long and never done: it sends a frame of 1 MiB byte by byte.
fn drip(mut host: UnixStream, marker: &Path) -> Option<()> {
    const ENTRY_OF_A_MEBIBYTE: [u8; 5] = [11, 0, 0, 16, 0];
    host.write_all(b"OK 1073741824\n").ok()?;
    host.write_all(&ENTRY_OF_A_MEBIBYTE).ok()?;
    fs::write(marker, "").unwrap();
    loop {
        host.write_all(b" ").ok()?;
        thread::sleep(Duration::from_millis(100));
    }
}

/// Plays Firecracker's side of a connection to a guest's virtual socket.
fn pass_on(mut host: UnixStream, agent: &Path) -> Option<()> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        host.read_exact(&mut byte).ok()?;
        line.extend(byte);
    }
    assert_eq!(line, b"CONNECT 1024\n");
    let guest = UnixStream::connect(agent).ok()?;
    host.write_all(b"OK 1073741824\n").ok()?;
    let (mut from, mut to) = (host.try_clone().ok()?, guest.try_clone().ok()?);
    thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    let (mut from, mut to) = (guest, host);
    let _ = std::io::copy(&mut from, &mut to);
    to.shutdown(Shutdown::Both).ok()
}
