//! Benchmark of MCP over HTTP: `tools/call` of 200 bytes to an echo server, directly and through gateways: wieldy with
//! validation, policy and audit on disk, and other installed gateways. Each server is a process of its own. The client
//! sessions are threads with a plain socket each, the same for all.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::harness::spread_of;
use super::table::{Figure, Goal, Row};

/// The numbers of concurrent sessions.
const SESSIONS: [usize; 3] = [1, 8, 64];
/// The number of bytes that are echoed.
const PAYLOAD: usize = 200;

/// Measures all rows and compares them with the goals.
pub(super) fn measure(quick: bool) -> Result<Vec<Row>> {
    let folder = tempfile::tempdir()?;
    let seconds = if quick { 1 } else { 5 };
    let rounds = if quick { 1 } else { 3 };
    let direct = Contestant::echo("direct")?;
    let mut contestants = vec![
        Contestant::wieldy_gateway(folder.path(), &direct)?,
        Contestant::wieldy_server(&folder.path().join("own"))?,
    ];
    contestants.extend(peers(folder.path(), &direct));
    contestants.insert(0, direct);
    let mut rows = Vec::new();
    for sessions in SESSIONS {
        // A peer that cannot serve this many sessions is left out from here on.
        contestants.retain(|contestant| {
            let tried = contestant.load(sessions, Duration::from_millis(500));
            let is_ours = contestant.name == "direct" || contestant.name == GATEWAY || contestant.name == SERVER;
            tried
                .map_err(|error| eprintln!("{} is left out at {sessions} sessions: {error:#}", contestant.name))
                .is_ok()
                || is_ours
        });
        let mut samples: Vec<Vec<Sample>> = contestants.iter().map(|_| Vec::new()).collect();
        // Contestants take turns in every round, so that noise affects all alike.
        for round in 0..rounds {
            for step in 0..contestants.len() {
                let index = (round + step) % contestants.len();
                samples[index].push(contestants[index].load(sessions, Duration::from_secs(seconds))?);
            }
        }
        rows.extend(rows_of(sessions, &contestants, &samples));
    }
    Ok(rows)
}

/// The measurements of one contestant in one round.
struct Sample {
    rate: f64,
    /// The latency of each call, in nanoseconds.
    latencies: Vec<f64>,
    /// The processor time of the contestant's process per call, in nanoseconds.
    cpu: f64,
    /// The resident memory afterwards, in bytes.
    resident: f64,
}

fn rows_of(sessions: usize, contestants: &[Contestant], samples: &[Vec<Sample>]) -> Vec<Row> {
    let median = |index: usize, of: fn(&Sample) -> f64| spread_of(samples[index].iter().map(of).collect()).p50;
    let mut rows = Vec::new();
    for (index, contestant) in contestants.iter().enumerate() {
        let (rate, direct) = (median(index, |sample| sample.rate), median(0, |sample| sample.rate));
        let latencies: Vec<f64> = samples[index].iter().flat_map(|sample| sample.latencies.iter().copied()).collect();
        let mut sorted = latencies.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| sorted[((sorted.len() - 1) as f64 * share) as usize];
        eprintln!(
            "{sessions:2} sessions  {:34} {rate:8.0} /s  p50 {:7.2} ms  p99 {:7.2} ms  {:6.0} µs CPU per call  {:6.1} MB",
            contestant.name,
            at(0.5) / 1e6,
            at(0.99) / 1e6,
            median(index, |sample| sample.cpu) / 1e3,
            median(index, |sample| sample.resident) / 1e6,
        );
        let is_gateway = contestant.name == GATEWAY;
        rows.push(Row {
            name: format!("{}, {sessions} sessions", contestant.name),
            ours: Figure::PerSecond(rate),
            floor: Some(("direct", Figure::PerSecond(direct))),
            ratio: Some(rate / direct),
            goal: (is_gateway && sessions > 1).then_some(Goal::RatioAtLeast(0.5)),
        });
        if is_gateway && sessions == 1 {
            let p50 =
                |index: usize| spread_of(samples[index].iter().flat_map(|s| s.latencies.iter().copied()).collect()).p50;
            let added = spread_of(vec![p50(index) - p50(0)]);
            rows.push(Row {
                name: "what the gateway adds to one call's time".into(),
                ours: Figure::Time(added),
                floor: None,
                ratio: None,
                goal: Some(Goal::TimeAtMost(250e3)),
            });
        }
        if is_gateway && sessions == 8 {
            let cpu = median(index, |sample| sample.cpu);
            rows.push(Row {
                name: "processor time of the gateway for a call".into(),
                ours: Figure::Time(spread_of(samples[index].iter().map(|sample| sample.cpu).collect())),
                floor: Some(("direct", Figure::Time(spread_of(samples[0].iter().map(|sample| sample.cpu).collect())))),
                ratio: Some(cpu / median(0, |sample| sample.cpu)),
                goal: Some(Goal::TimeAtMost(120e3)),
            });
        }
        if is_gateway && sessions == 64 {
            rows.push(Row {
                name: "the gateway's memory".into(),
                ours: Figure::Bytes(median(index, |sample| sample.resident)),
                floor: None,
                ratio: None,
                goal: Some(Goal::BytesAtMost(30.0 * 1024.0 * 1024.0)),
            });
        }
        if contestant.name == SERVER && sessions == 8 {
            let (cpu, floor) = (median(index, |sample| sample.cpu), median(0, |sample| sample.cpu));
            let spread = |of: usize| Figure::Time(spread_of(samples[of].iter().map(|sample| sample.cpu).collect()));
            rows.push(Row {
                name: "processor time of a tool of our own".into(),
                ours: spread(index),
                floor: Some(("direct", spread(0))),
                ratio: Some(cpu / floor),
                goal: Some(Goal::RatioAtMost(1.0)),
            });
        }
    }
    rows
}

const GATEWAY: &str = "through wieldy";
const SERVER: &str = "a tool of wieldy's own";

/// A server under test, in a process of its own.
struct Contestant {
    name: &'static str,
    address: SocketAddr,
    path: &'static str,
    tool: &'static str,
    process: Child,
}

impl Drop for Contestant {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Contestant {
    fn echo(name: &'static str) -> Result<Self> {
        Self::inner(name, &["--echo"])
    }

    /// Starts wieldy embedded in a program, with a tool that does no more than the echo server.
    fn wieldy_server(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        Self::inner(SERVER, &["--own", &folder.display().to_string()])
    }

    /// Starts a server that is part of this program.
    fn inner(name: &'static str, arguments: &[&str]) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["bench-inner", "mcp"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().context("its output is ours")?).read_line(&mut line)?;
        Ok(Self { name, address: line.trim().parse()?, path: "/mcp", tool: "echo", process })
    }

    /// Starts wieldy in front of the echo server. The tool is marked as read-only, so that its calls need not wait for
    /// the disk.
    fn wieldy_gateway(folder: &Path, echo: &Self) -> Result<Self> {
        let servers = format!(
            "[mcp.servers.echo]\nurl = \"http://{}/mcp\"\nstart = \"eager\"\ncalls-max = 256\n[mcp.servers.echo.tools.echo]\nread-only = true\n",
            echo.address
        );
        let folder = folder.join("gateway");
        std::fs::create_dir_all(folder.join("workspace"))?;
        let limits = "[limits]\ncalls-running-per-agent-max = 256\ncalls-running-max = 256\n";
        std::fs::write(
            folder.join("wieldy.toml"),
            format!("workspace = \"workspace\"\nstate = \"state\"\n{limits}{servers}"),
        )?;
        let (address, log) = (free_address()?, std::fs::File::create(folder.join("log"))?);
        let process = Command::new(wieldy_program()?)
            .current_dir(&folder)
            .args(["serve", "--config", "wieldy.toml", "--listen", &address.to_string(), "--log", "error"])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("cannot start wieldy")?;
        let contestant = Self { name: GATEWAY, address, path: "/mcp", tool: "echo__echo", process };
        contestant.wait_for_tool()?;
        Ok(contestant)
    }

    /// Waits until the tool answers.
    fn wait_for_tool(&self) -> Result<()> {
        let began = Instant::now();
        loop {
            let answer = Session::open(self.address, self.path).and_then(|mut session| session.call(self.tool));
            match answer {
                Ok(()) => return Ok(()),
                Err(error) if began.elapsed() > Duration::from_secs(60) => {
                    return Err(error.context(format!("{} does not answer", self.name)));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    /// Makes calls with this many sessions for this long.
    fn load(&self, sessions: usize, time: Duration) -> Result<Sample> {
        let over = Arc::new(AtomicBool::new(false));
        let opened = (0..sessions).map(|_| Session::open(self.address, self.path)).collect::<Result<Vec<_>>>()?;
        let (cpu_before, began) = (processor_time(self.process.id())?, Instant::now());
        let threads: Vec<_> = opened
            .into_iter()
            .map(|mut session| {
                let (over, tool) = (Arc::clone(&over), self.tool);
                std::thread::spawn(move || -> Result<Vec<f64>> {
                    let mut latencies = Vec::new();
                    while !over.load(Ordering::Relaxed) {
                        let began = Instant::now();
                        session.call(tool)?;
                        latencies.push(began.elapsed().as_secs_f64() * 1e9);
                    }
                    Ok(latencies)
                })
            })
            .collect();
        std::thread::sleep(time);
        over.store(true, Ordering::Relaxed);
        let mut latencies = Vec::new();
        for thread in threads {
            latencies.extend(thread.join().map_err(|_| anyhow::anyhow!("a session panicked"))??);
        }
        ensure!(!latencies.is_empty(), "{} answered nothing", self.name);
        let calls = latencies.len() as f64;
        let rate = calls / began.elapsed().as_secs_f64();
        let cpu = (processor_time(self.process.id())? - cpu_before).as_secs_f64() * 1e9 / calls;
        Ok(Sample { rate, latencies, cpu, resident: resident(self.process.id())? })
    }
}

/// Installs the peers from their registries, if they are not installed yet.
fn install_peers(folder: &Path) -> Result<()> {
    let run = |words: &[&str]| -> Result<()> {
        let output = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("cannot start `{}`", words[0]))?;
        ensure!(output.status.success(), "`{}`: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    };
    std::fs::create_dir_all(folder)?;
    let path = |name: &str| folder.join(name).display().to_string();
    if !folder.join("node_modules/.bin/supergateway").exists() {
        run(&["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", &path(""), "supergateway@4"])?;
    }
    // Their dependencies conflict, so each has an environment of its own.
    for (place, package) in [("fastmcp", "fastmcp==4.*"), ("mcp-proxy", "mcp-proxy==0.13.*")] {
        if !folder.join(place).join("bin").join(place).exists() {
            run(&["python3", "-m", "venv", &path(place)])?;
            run(&[&path(&format!("{place}/bin/pip")), "install", "--quiet", package])?;
        }
    }
    Ok(())
}

/// Starts the other gateways that can be installed and started.
fn peers(folder: &Path, echo: &Contestant) -> Vec<Contestant> {
    let script = folder.join("fastmcp_proxy.py");
    let url = format!("http://{}/mcp", echo.address);
    let proxy_script = format!(
        "import sys\nfrom fastmcp import FastMCP\nfrom fastmcp.server import create_proxy\ncreate_proxy({url:?}).run(transport='http', host='127.0.0.1', port=int(sys.argv[1]), show_banner=False)\n"
    );
    let _ = std::fs::write(&script, proxy_script);
    let tools = foreign_tools();
    if let Err(error) = install_peers(&tools) {
        eprintln!("not all gateways of others could be installed: {error:#}");
    }
    let program = |place: &str, name: &str| tools.join(place).join(name).display().to_string();
    let (python, proxy) = (program("fastmcp", "bin/python"), program("mcp-proxy", "bin/mcp-proxy"));
    let supergateway = program("node_modules", ".bin/supergateway");
    let words = |line: String| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let inner = format!("{supergateway} --streamableHttp {url} --logLevel none");
    let mut outer = words(format!(
        "{supergateway} --outputTransport streamableHttp --stateful --port PORT --logLevel none --stdio"
    ));
    outer.push(inner);
    let known = [
        ("through FastMCP", words(format!("{python} {} PORT", script.display()))),
        (
            "through mcp-proxy",
            words(format!(
                "{proxy} --transport streamablehttp --port PORT -- {proxy} --transport streamablehttp {url}"
            )),
        ),
        ("through supergateway", outer),
    ];
    let start = |(name, words): (&'static str, Vec<String>)| -> Result<Contestant> {
        let address = free_address()?;
        let words: Vec<String> =
            words.into_iter().map(|word| word.replace("PORT", &address.port().to_string())).collect();
        let quiet = || Stdio::null();
        let process =
            Command::new(&words[0]).args(&words[1..]).stdin(quiet()).stdout(quiet()).stderr(quiet()).spawn()?;
        let contestant = Contestant { name, address, path: "/mcp", tool: "echo", process };
        contestant.wait_for_tool()?;
        Ok(contestant)
    };
    known
        .into_iter()
        .filter_map(|peer| {
            let name = peer.0;
            start(peer).map_err(|error| eprintln!("{name} is left out: {error:#}")).ok()
        })
        .collect()
}

/// Returns the folder where the peers are installed.
fn foreign_tools() -> PathBuf {
    let target = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.parent()?.to_owned()));
    target.unwrap_or_else(|| PathBuf::from("target")).join("peers")
}

/// Returns the path of the `wieldy` command built with the same profile as this program.
fn wieldy_program() -> Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name("wieldy");
    ensure!(program.exists(), "`{}` is not there: `cargo build --profile dist` makes it", program.display());
    Ok(program)
}

fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// An MCP session over one connection.
struct Session {
    stream: BufReader<TcpStream>,
    head: String,
    next: u64,
    text: String,
}

impl Session {
    fn open(address: SocketAddr, path: &str) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nAccept: application/json, text/event-stream\r\nMCP-Protocol-Version: 2025-06-18\r\n"
        );
        let mut session = Self { stream: BufReader::new(stream), head, next: 1, text: "x".repeat(PAYLOAD) };
        let hello = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}});
        let (headers, _) = session.ask("initialize", &hello)?;
        if let Some(id) = headers.iter().find_map(|line| line.strip_prefix("mcp-session-id: ")) {
            session.head.push_str(&format!("Mcp-Session-Id: {id}\r\n"));
        }
        session.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))?;
        session.receive()?;
        Ok(session)
    }

    fn call(&mut self, tool: &str) -> Result<()> {
        let (_, answer) = self.ask("tools/call", &json!({"name": tool, "arguments": {"text": self.text}}))?;
        // The call counts only if the whole text comes back.
        ensure!(answer.contains(&self.text) && !answer.contains("\"isError\":true"), "{answer}");
        Ok(())
    }

    fn ask(&mut self, method: &str, params: &Value) -> Result<(Vec<String>, String)> {
        self.next += 1;
        self.send(&json!({"jsonrpc": "2.0", "id": self.next, "method": method, "params": params}))?;
        self.receive()
    }

    fn send(&mut self, message: &Value) -> Result<()> {
        let body = message.to_string();
        let request = format!("{}Content-Length: {}\r\n\r\n{body}", self.head, body.len());
        Ok(self.stream.get_mut().write_all(request.as_bytes())?)
    }

    /// Reads the headers, in lower case, and the body.
    fn receive(&mut self) -> Result<(Vec<String>, String)> {
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            ensure!(self.stream.read_line(&mut line)? > 0, "the connection was closed");
            match line.trim_end() {
                "" => break,
                line => headers.push(match line.split_once(": ") {
                    Some((name, value)) => format!("{}: {value}", name.to_ascii_lowercase()),
                    None => line.to_owned(),
                }),
            }
        }
        let status = headers.first().cloned().unwrap_or_default();
        let length = headers
            .iter()
            .find_map(|line| line.strip_prefix("content-length: "))
            .map(str::parse::<usize>)
            .transpose()?;
        let mut body = Vec::new();
        if let Some(length) = length {
            body.resize(length, 0);
            self.stream.read_exact(&mut body)?;
        } else if headers.iter().any(|line| line == "transfer-encoding: chunked") {
            loop {
                let mut line = String::new();
                self.stream.read_line(&mut line)?;
                let size = usize::from_str_radix(line.trim(), 16)?;
                let start = body.len();
                body.resize(start + size + 2, 0);
                self.stream.read_exact(&mut body[start..])?;
                body.truncate(start + size);
                if size == 0 {
                    break;
                }
            }
        }
        let body = String::from_utf8(body)?;
        if !status.contains(" 200 ") && !status.contains(" 202 ") {
            bail!("{status}: {body}");
        }
        Ok((headers, body))
    }
}

/// Returns the processor time of a process, of the children that it waited for, and of its running children.
fn processor_time(pid: u32) -> Result<Duration> {
    let mut ticks = 0;
    let mut waiting = vec![pid];
    while let Some(pid) = waiting.pop() {
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let fields: Vec<&str> =
            stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
        ticks += fields.iter().skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum::<u64>();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        waiting.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    // Every Linux uses ticks of a hundredth of a second here.
    Ok(Duration::from_millis(ticks * 10))
}

/// Returns how many bytes of a process and its children are resident.
fn resident(pid: u32) -> Result<f64> {
    let mut pages = 0.0;
    let mut waiting = vec![pid];
    while let Some(pid) = waiting.pop() {
        let Ok(statm) = std::fs::read_to_string(format!("/proc/{pid}/statm")) else { continue };
        pages += statm.split_whitespace().nth(1).and_then(|field| field.parse::<f64>().ok()).unwrap_or_default();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        waiting.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    Ok(pages * 4096.0)
}
