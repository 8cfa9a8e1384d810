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
