//! Which servers are trusted over https: those that this system trusts, with the certificates of its administrator.

use rustls::{CertificateError, crypto::ring};
use std::sync::Arc;
use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsProvider};

/// The settings of every agent that may use https. The system's certificates are read at once, or the files that `SSL_CERT_FILE` and
/// `SSL_CERT_DIR` name instead.
pub fn config() -> TlsConfig {
    // A file of them that cannot be read is as good as none: what it would have vouched for is refused.
    let certificates = rustls_native_certs::load_native_certs().certs;
    let certificates = certificates.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect();
    TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .root_certs(RootCerts::Specific(Arc::new(certificates)))
        .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
        .build()
}

/// What to do about a failed request, if its server was not trusted.
pub fn hint(error: &ureq::Error) -> Option<&'static str> {
    let cause = match error {
        ureq::Error::Rustls(cause) => Some(cause),
        ureq::Error::Io(error) => error.get_ref().and_then(|cause| cause.downcast_ref()),
        _ => None,
    };
    matches!(cause, Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer))).then_some(
        "this system does not know the authority that signed its certificate: add it to the system's, or name a file of authorities in SSL_CERT_FILE",
    )
}
