//! The way out of a container to listed hosts only: a network of its own, in which there is nothing but the loopback with the proxy's door.
//!
//! The network is made here and handed to the runtime, which would make one without a door.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use wieldy_core::Breach;

use crate::native::standing::serve;
use crate::proxy::{self, Allowed, Proxy};
use crate::sys;

/// A network with a proxy in it. It ends when this is dropped and nobody is in it any more.
pub(super) struct Outlet {
    namespace: File,
    /// What sends programs to the proxy.
    pub(super) environment: Vec<(String, String)>,
    breaches: Arc<Mutex<Vec<Breach>>>,
    _proxy: Proxy,
}

impl Outlet {
    /// Makes one that leads to these hosts.
    pub(super) async fn open(hosts: &[String]) -> io::Result<Self> {
        let allowed = Allowed::new(hosts).map_err(io::Error::other)?;
        let (namespace, listener) = super::container::blocking(network).await?;
        let port = listener.local_addr()?.port();
        let breaches = Arc::default();
        let proxy = serve(listener.into(), allowed, &breaches)?;
        let environment = proxy::environment(port).into_iter().collect();
        Ok(Self { namespace, environment, breaches, _proxy: proxy })
    }

    /// Where a runtime finds the network.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_raw_fd()).into()
    }

    /// What the proxy has refused since it was last asked.
    pub(super) fn breaches(&self) -> Vec<Breach> {
        std::mem::take(&mut *self.breaches.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A new network and a listener in it. Blocks.
fn network() -> io::Result<(File, TcpListener)> {
    // By a thread of its own, which goes there and never comes back.
    let made = std::thread::spawn(|| {
        sys::leave_network()?;
        sys::raise_loopback()?;
        Ok((File::open("/proc/thread-self/ns/net")?, TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?))
    });
    made.join().unwrap_or_else(|_| Err(io::Error::other("making a network failed")))
}
