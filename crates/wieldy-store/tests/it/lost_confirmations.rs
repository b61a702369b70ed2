//! Lost confirmations: the server commits, and its answer does not arrive.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use wieldy_core::Call;
use wieldy_store::{GroupBy, Query, Store};
use wieldy_testkit::{Act, Puppet};

use crate::outage::assert_history_agrees;
use crate::world::{TestHistory, executor, until};

/// A TCP proxy to the server that can cut a connection between a request and its response.
struct CuttingProxy {
    port: u16,
    /// True if the next response is to be lost; reset when it is.
    lose: Arc<AtomicBool>,
    lost: Arc<AtomicUsize>,
}

impl CuttingProxy {
    fn to(url: &str) -> Self {
        let (_, rest) = url.split_once('@').unwrap();
        let server = rest.split_once('/').unwrap().0.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self { port: listener.local_addr().unwrap().port(), lose: Arc::default(), lost: Arc::default() };
        let (lose, lost) = (Arc::clone(&proxy.lose), Arc::clone(&proxy.lost));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
                let (asking, asked) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || copy_bytes(asking, asked, || false));
                let (lose, lost) = (Arc::clone(&lose), Arc::clone(&lost));
                std::thread::spawn(move || {
                    copy_bytes(server, client, || {
                        let cut = lose.swap(false, Ordering::SeqCst);
                        lost.fetch_add(usize::from(cut), Ordering::SeqCst);
                        cut
                    });
                });
            }
        });
        proxy
    }
}

/// Copies bytes until the connection is cut.
fn copy_bytes(mut from: TcpStream, mut to: TcpStream, cut: impl Fn() -> bool) {
    let mut bytes = [0; 64 * 1024];
    while let Ok(count) = from.read(&mut bytes) {
        if count == 0 || cut() || to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_confirmation_is_lost_is_written_once() {
    let Some(history) = TestHistory::postgres() else { return };
    let proxy = CuttingProxy::to(&history.url());
    let store = Store::open(&history.through(proxy.port)).unwrap();
    let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Take(Duration::from_millis(15)))]);
    let mut told = Vec::new();
    for number in 0..20 {
        // The lost response is about the opening, the start or the end of a call.
        let calls = (0..4).map(|_| executor.call(Call::new("write", json!({"number": number}))));
        let calls = futures_util::future::join_all(calls);
        let cut = async {
            tokio::time::sleep(Duration::from_millis(number)).await;
            proxy.lose.store(true, Ordering::SeqCst);
        };
        let (results, ()) = tokio::join!(calls, cut);
        told.extend(results);
        until("the answer is lost", || async {
            !proxy.lose.load(Ordering::SeqCst) || executor.call(Call::new("write", json!({}))).await.is_success()
        })
        .await;
        until("all is well", || async { journal.flush().await.is_ok() && journal.failure().is_none() }).await;
    }
    proxy.lose.store(false, Ordering::SeqCst);
    assert!(proxy.lost.load(Ordering::SeqCst) >= 15, "{}", proxy.lost.load(Ordering::SeqCst));
    assert_history_agrees(&history.store(), &told);
    let stats = history.store().stats(&Query::default(), GroupBy::Tool).unwrap();
    assert_eq!(stats.len(), 1);
}
