//! Tests of MCP servers over TLS: a trusted server is called, and an untrusted one gets no data.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::login::Server;
use crate::world::World;

/// Makes a self-signed certificate for this name, and its key.
fn certificate(name: &str) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let (key, certificate) = (folder.path().join("key"), folder.path().join("certificate"));
    let mut made = Command::new("openssl");
    made.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]);
    made.args(["-subj", "/CN=test", "-addext", &format!("subjectAltName={name}")]);
    made.args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout"]).arg(&key).arg("-out").arg(&certificate);
    let made = made.output().unwrap();
    assert!(made.status.success(), "{made:?}");
    (std::fs::read_to_string(certificate).unwrap(), std::fs::read_to_string(key).unwrap())
}

/// Serves the same server behind TLS.
fn encrypted(server: &Server, certificate: &str, key: &str) -> SocketAddr {
    let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<_, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let config =
        ServerConfig::builder_with_provider(Arc::new(default_provider())).with_safe_default_protocol_versions();
    let config = config.unwrap().with_no_client_auth().with_single_cert(chain, key).unwrap();
    let (acceptor, plain) = (TlsAcceptor::from(Arc::new(config)), server.address);
    let listener = server.runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    server.runtime.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let mut outer = acceptor.accept(stream).await?;
                let mut inner = tokio::net::TcpStream::connect(plain).await?;
                tokio::io::copy_bidirectional(&mut outer, &mut inner).await
            });
        }
    });
    address
}

/// Makes a world that knows the server at this address, and trusts this certificate.
fn world(address: SocketAddr, trusted: &str) -> World {
    let config = format!(
        "[mcp.servers.mail]\nurl = \"https://{address}/mcp\"\nheaders = {{ Authorization = \"Bearer ${{MAIL}}\" }}\n"
    );
    let world = World::new().file("wieldy.toml", &config).file("roots.pem", trusted);
    let roots = world.path("roots.pem").display().to_string();
    world.variable("SSL_CERT_FILE", &roots).variable("MAIL", "a-token-for-mail")
}

/// Tries the server and returns the error about its certificate.
fn refusal(world: &World) -> String {
    let told = world.run(&["mcp", "test", "mail"]);
    let why = told.split_once("cannot be reached: no connection could be made: invalid peer certificate: ");
    why.unwrap_or_else(|| panic!("{told}")).1.lines().next().unwrap().to_owned()
}

#[test]
fn a_server_over_tls_is_called_where_its_certificate_is_trusted() {
    let server = Server::new(None);
    let (trusted, key) = certificate("IP:127.0.0.1");
    let address = encrypted(&server, &trusted, &key);
    insta::assert_snapshot!(world(address, &trusted).run(&["call", "mail__count"]), @"
    exit: 0
    ----- stdout -----
    3 letters
    ----- stderr -----
    ");
    // Another certificate with the same name.
    assert_eq!(refusal(&world(address, &certificate("IP:127.0.0.1").0)), "BadSignature");
}

#[test]
fn a_trusted_certificate_of_another_name_is_refused() {
    let server = Server::new(None);
    let (trusted, key) = certificate("DNS:elsewhere.example");
    let address = encrypted(&server, &trusted, &key);
    let why = refusal(&world(address, &trusted));
    assert!(why.starts_with("certificate not valid for name \"127.0.0.1\""), "{why}");
}
