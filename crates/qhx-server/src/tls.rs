//! https to other servers. Trusted are those that this system trusts, with the certificates of its administrator. A build without the
//! feature `tls` has no https.

use ureq::{config::ConfigBuilder, typestate::AgentScope};

/// Gives an agent https. The system's certificates are read at once, or the files that `SSL_CERT_FILE` and `SSL_CERT_DIR` name instead.
pub fn enable(agent: ConfigBuilder<AgentScope>) -> ConfigBuilder<AgentScope> {
    #[cfg(feature = "tls")]
    return agent.tls_config(trust::system());
    #[cfg(not(feature = "tls"))]
    agent
}

/// What to do about a failed request, if https is the reason.
pub fn hint(error: &ureq::Error) -> Option<&'static str> {
    match error {
        ureq::Error::TlsRequired => Some("this build has no https: it was made without the feature `tls`"),
        #[cfg(feature = "tls")]
        error if trust::is_missing(error) => Some(
            "this system does not know the authority that signed its certificate: add it to the system's, or name a file of authorities in SSL_CERT_FILE",
        ),
        _ => None,
    }
}

#[cfg(feature = "tls")]
mod trust {
    use rustls::{CertificateError, crypto::ring};
    use std::sync::Arc;
    use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsProvider};

    pub(super) fn system() -> TlsConfig {
        // A file of them that cannot be read is as good as none: what it would have vouched for is refused.
        let certificates = rustls_native_certs::load_native_certs().certs;
        let certificates = certificates.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect();
        TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .root_certs(RootCerts::Specific(Arc::new(certificates)))
            .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
            .build()
    }

    /// Whether nobody who is trusted vouches for a server.
    pub(super) fn is_missing(error: &ureq::Error) -> bool {
        let cause = match error {
            ureq::Error::Rustls(cause) => Some(cause),
            ureq::Error::Io(error) => error.get_ref().and_then(|cause| cause.downcast_ref()),
            _ => None,
        };
        matches!(cause, Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)))
    }
}

#[cfg(all(test, feature = "tls"))]
mod tests {
    use super::*;
    use rustls::{
        ServerConfig, ServerConnection, StreamOwned,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    };
    use std::{
        env,
        io::{Read, Write},
        net::{SocketAddr, TcpListener},
        path::{Path, PathBuf},
        process::Command,
        sync::Arc,
        thread,
    };

    /// Tells the other process whom to ask.
    const ADDRESS: &str = "QHX_TEST_TLS_ADDRESS";

    /// `authority.pem` has signed `server.pem`, for 127.0.0.1. No system knows it.
    fn file(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls").join(name)
    }

    /// A server that says hello to everyone who trusts it.
    fn server() -> SocketAddr {
        let chain = CertificateDer::pem_file_iter(file("server.pem")).unwrap().collect::<Result<_, _>>().unwrap();
        let key = PrivateKeyDer::from_pem_file(file("server.key")).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider())).with_safe_default_protocol_versions().unwrap();
        let config = Arc::new(config.with_no_client_auth().with_single_cert(chain, key).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let mut stream = StreamOwned::new(ServerConnection::new(config.clone()).unwrap(), client);
                // A client that does not trust it hangs up.
                let _ = stream.read(&mut [0; 4096]).and_then(|_| stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"));
            }
        });
        address
    }

    /// What a process with these authorities, or those of the system, gets from a server.
    fn answer(address: SocketAddr, authorities: Option<&Path>) -> String {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "--nocapture", "tls::tests::asks"]).env(ADDRESS, address.to_string());
        command.env_remove("SSL_CERT_DIR").env_remove("SSL_CERT_FILE");
        if let Some(file) = authorities {
            command.env("SSL_CERT_FILE", file);
        }
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }

    #[test]
    #[ignore = "is a process of authorities_are_those_of_the_system"]
    fn asks() {
        let agent: ureq::Agent = enable(ureq::Agent::config_builder()).build().into();
        match agent.get(format!("https://{}/", env::var(ADDRESS).unwrap())).call() {
            Ok(mut response) => println!("said: {}", response.body_mut().read_to_string().unwrap()),
            Err(error) => println!("refused: {error}: {:?}", hint(&error)),
        }
    }

    #[test]
    fn authorities_are_those_of_the_system() {
        let address = server();
        let refused = answer(address, None);
        assert!(refused.contains("refused: ") && refused.contains("name a file of authorities in SSL_CERT_FILE"), "{refused}");
        let trusted = answer(address, Some(&file("authority.pem")));
        assert!(trusted.contains("said: hello"), "{trusted}");
        // Others do not vouch for it: a certificate of a server is no authority for others.
        let other = answer(address, Some(&file("server.key")));
        assert!(other.contains("refused: "), "{other}");
    }
}
