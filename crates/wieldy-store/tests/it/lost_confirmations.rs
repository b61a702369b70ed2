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

use crate::outage::agree;
use crate::world::{Place, executor, until};

/// A TCP proxy to the server that can cut a connection between a request and its response.
struct Line {
    port: u16,
    /// True if the next response is to be lost; reset when it is.
    lose: Arc<AtomicBool>,
    lost: Arc<AtomicUsize>,
}

impl Line {
    fn to(url: &str) -> Self {
        let (_, rest) = url.split_once('@').unwrap();
        let server = rest.split_once('/').unwrap().0.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let line = Self { port: listener.local_addr().unwrap().port(), lose: Arc::default(), lost: Arc::default() };
        let (lose, lost) = (Arc::clone(&line.lose), Arc::clone(&line.lost));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
                let (asking, asked) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || pass(asking, asked, || false));
                let (lose, lost) = (Arc::clone(&lose), Arc::clone(&lost));
                std::thread::spawn(move || {
                    pass(server, client, || {
                        let cut = lose.swap(false, Ordering::SeqCst);
                        lost.fetch_add(usize::from(cut), Ordering::SeqCst);
                        cut
                    });
                });
            }
        });
        line
    }
}

/// Copies bytes until the connection is cut.
fn pass(mut from: TcpStream, mut to: TcpStream, cut: impl Fn() -> bool) {
    let mut bytes = [0; 64 * 1024];
    while let Ok(count) = from.read(&mut bytes) {
        if count == 0 || cut() || to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_written_though_nobody_heard_is_written_once() {
    let Some(place) = Place::postgres() else { return };
    let line = Line::to(&place.url());
    let store = Store::open(&place.through(line.port)).unwrap();
    let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Take(Duration::from_millis(15)))]);
    let mut told = Vec::new();
    for number in 0..20 {
        // The lost response is about the opening, the start or the end of a call.
        let calls = (0..4).map(|_| executor.call(Call::new("write", json!({"number": number}))));
        let calls = futures_util::future::join_all(calls);
        let cut = async {
            tokio::time::sleep(Duration::from_millis(number)).await;
            line.lose.store(true, Ordering::SeqCst);
        };
        let (results, ()) = tokio::join!(calls, cut);
        told.extend(results);
        until("the answer is lost", || async {
            !line.lose.load(Ordering::SeqCst) || executor.call(Call::new("write", json!({}))).await.is_success()
        })
        .await;
        until("all is well", || async { journal.flush().await.is_ok() && journal.failure().is_none() }).await;
    }
    line.lose.store(false, Ordering::SeqCst);
    assert!(line.lost.load(Ordering::SeqCst) >= 15, "{}", line.lost.load(Ordering::SeqCst));
    agree(&place.store(), &told);
    let stats = place.store().stats(&Query::default(), GroupBy::Tool).unwrap();
    assert_eq!(stats.len(), 1);
}
