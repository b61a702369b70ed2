//! Makes network namespaces for containers that may reach listed hosts only: each has nothing but a loopback device, on
//! which the proxy listens.
//!
//! The namespace is made here and given to the runtime, which would make one without the proxy.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use wieldy_core::SandboxRef;

use crate::denials::network::{ProxyDenials, serve};
use crate::proxy::{self, Allowed, Proxy};
use crate::supervise::host_process::blocking;
use crate::sys;

/// A network namespace with a proxy in it. It exists until this is dropped and the last process in it has ended.
pub(super) struct ProxiedNetns {
    namespace: File,
    /// The variables that send programs to the proxy.
    pub(super) environment: Vec<(String, String)>,
    /// The denials that the proxy reports.
    pub(super) proxy_denials: Arc<ProxyDenials>,
    _proxy: Proxy,
}

impl ProxiedNetns {
    /// Makes a network namespace for a sandbox, with a proxy to these hosts.
    pub(super) async fn open(made: &SandboxRef, hosts: &[String]) -> io::Result<Self> {
        let allowed = Allowed::new(hosts).map_err(io::Error::other)?;
        let (namespace, listener) = blocking(network).await?;
        let port = listener.local_addr()?.port();
        let proxy_denials = Arc::new(ProxyDenials::new(made.clone()));
        let proxy = serve(listener.into(), allowed, &proxy_denials)?;
        let environment = proxy::environment(port).into_iter().collect();
        Ok(Self { namespace, environment, proxy_denials, _proxy: proxy })
    }

    /// Returns the path by which a runtime finds the network namespace.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_raw_fd()).into()
    }
}

/// Makes a network namespace and a listener in it. Blocks.
fn network() -> io::Result<(File, TcpListener)> {
    // In a separate thread, which cannot return to the old namespace.
    let made = std::thread::spawn(|| {
        sys::leave_network()?;
        sys::raise_loopback()?;
        Ok((File::open("/proc/thread-self/ns/net")?, TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?))
    });
    made.join().unwrap_or_else(|_| Err(io::Error::other("making a network failed")))
}
