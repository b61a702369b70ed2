//! TLS and passwords: a connection is as secure as its address asks for, and no message contains a secret.

use std::process::Command;

use wieldy_store::{Address, Store};

use crate::server::Server;
use crate::world::{TestHistory, sql};

/// Returns a self-signed certificate for this machine, and its key.
fn certificate() -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let (key, certificate) = (folder.path().join("key"), folder.path().join("certificate"));
    let mut made = Command::new("openssl");
    made.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]);
    made.args(["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]);
    made.args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout"]).arg(&key).arg("-out").arg(&certificate);
    let made = made.output().unwrap();
    assert!(made.status.success(), "{made:?}");
    (std::fs::read_to_string(certificate).unwrap(), std::fs::read_to_string(key).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_gets_the_security_that_it_asks_for() {
    let Some(mut server) = Server::start() else { return };
    let Address::Postgres(admin) = server.address() else { unreachable!() };
    sql(&admin, "CREATE ROLE ann LOGIN PASSWORD 'hunter2'");
    sql(&admin, "GRANT CREATE ON DATABASE postgres TO ann");
    server.crash();
    let (certificate, key) = certificate();
    server.add("server.crt", &certificate);
    server.add("server.key", &key);
    server.add("postgresql.auto.conf", "ssl = on\n");
    server.add("pg_hba.conf", "host all ann all scram-sha-256\nhost all wieldy all trust\n");
    server.begin();
    let folder = tempfile::tempdir().unwrap();
    let roots = folder.path().join("roots.pem");
    std::fs::write(&roots, &certificate).unwrap();
    let roots = roots.display().to_string().replace('/', "%2F");

    let open = |password: &str, options: &str| {
        let url = format!("postgres://ann:{password}@127.0.0.1:{}/postgres?{options}", server.port());
        let address: Address = url.parse().unwrap();
        assert!(!format!("{address} {address:?}").contains(password));
        let store = Store::open(&address).map_err(|error| error.to_string())?;
        let is_encrypted = "SELECT ssl FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) WHERE a.usename = 'ann'";
        let found = sql(&admin, is_encrypted).into_iter().flatten().collect::<String>();
        drop(store);
        while !sql(&admin, is_encrypted).is_empty() {}
        Ok::<_, String>(found)
    };
    let verified = format!("sslmode=verify-full&sslrootcert={roots}");
    let start = format!("cannot use the history `postgres://ann@127.0.0.1:{}/postgres`: ", server.port());
    assert_eq!(open("hunter2", &verified), Ok("t".into()));
    assert_eq!(open("hunter2", &format!("sslrootcert={roots}")), Ok("t".into()));
    assert_eq!(open("hunter2", "sslmode=disable"), Ok("f".into()));
    assert_eq!(open("hunter2", "sslmode=prefer"), Ok("f".into()));
    let refused = open("hunter2", "sslmode=require").unwrap_err();
    assert!(refused.starts_with(&start) && refused.contains("invalid peer certificate: UnknownIssuer"), "{refused}");
    let refused = open("hunter3", &verified).unwrap_err();
    assert_eq!(refused, format!("{start}the server says: password authentication failed for user \"ann\""));
}

#[tokio::test(flavor = "multi_thread")]
async fn required_tls_refuses_a_server_without_it() {
    let Some(history) = TestHistory::postgres() else { return };
    let address: Address = format!("{}?sslmode=require", history.url()).parse().unwrap();
    let refused = Store::open(&address).err().unwrap().to_string();
    assert!(refused.ends_with("error performing TLS handshake: server does not support TLS"), "{refused}");
}
