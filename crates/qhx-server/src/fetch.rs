//! Images and sounds that messages name by address: fetched from hosts that the operator allows, and from nowhere else.

use crate::{error::ApiError, tls};
use qhx::{Cancel, messages::FileAccess, runtime::Error as RunError};
use serde_json::Value;
use std::{io::Read, time::Duration};
use ureq::http::Uri;

/// How long a host may take in all.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Where the media of messages may come from, beside the messages themselves.
pub(crate) struct MediaAccess {
    pub(crate) files: FileAccess,
    pub(crate) fetcher: Fetcher,
}

/// Where media may be fetched from, and how large each may be.
#[derive(Clone, Debug)]
pub(crate) struct Fetcher {
    /// `HOST` for the scheme's own port, or `HOST:PORT`.
    hosts: Vec<String>,
    max_bytes: u64,
    agent: ureq::Agent,
}

impl Fetcher {
    pub(crate) fn new(hosts: &[String], max_bytes: usize) -> Self {
        // A redirect could lead to a host that is not allowed.
        let mut agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).max_redirects(0).http_status_as_error(false);
        if !hosts.is_empty() {
            agent = tls::enable(agent);
        }
        let agent = agent.build().into();
        Self { hosts: hosts.iter().map(|host| host.to_ascii_lowercase()).collect(), max_bytes: max_bytes as u64, agent }
    }

    /// Puts the media that messages name by address into them, as data.
    pub(crate) fn inline(&self, messages: &mut [Value], cancel: &Cancel) -> Result<(), ApiError> {
        for (number, message) in messages.iter_mut().enumerate() {
            let Some(parts) = message.get_mut("content").and_then(Value::as_array_mut) else { continue };
            for (place, part) in parts.iter_mut().enumerate() {
                let Some(address) = address(part) else { continue };
                if cancel.is_cancelled() {
                    return Err(RunError::Cancelled.into());
                }
                let data = self.fetch(address.as_str().unwrap_or_default()).map_err(|problem| {
                    let shown: String = address.as_str().unwrap_or_default().chars().take(80).collect();
                    ApiError::field(format!("messages[{number}].content[{place}]"), format!("names {shown}, {problem}"))
                })?;
                *address = format!("data:;base64,{}", base64::encode(data)).into();
            }
        }
        Ok(())
    }

    fn fetch(&self, address: &str) -> Result<Vec<u8>, String> {
        let uri: Uri = address.parse().map_err(|error| format!("which is no address: {error}"))?;
        if !self.allows(&uri) {
            return Err(match self.hosts.is_empty() {
                true => "but this server fetches nothing: send it as a data URI".to_owned(),
                false => format!("but this server fetches from these hosts only: {}", self.hosts.join(", ")),
            });
        }
        let failed = |error: &dyn std::fmt::Display| format!("which could not be fetched: {error}");
        let mut response = self.agent.get(uri).call().map_err(|error| match tls::hint(&error) {
            Some(hint) => failed(&hint),
            None => failed(&error),
        })?;
        if !response.status().is_success() {
            return Err(failed(&format!("its host answered with status {}", response.status().as_u16())));
        }
        let mut data = Vec::new();
        response.body_mut().as_reader().take(self.max_bytes + 1).read_to_end(&mut data).map_err(|error| failed(&error))?;
        match data.len() as u64 > self.max_bytes {
            true => Err(format!("which is larger than {} MiB", self.max_bytes >> 20)),
            false => Ok(data),
        }
    }

    fn allows(&self, uri: &Uri) -> bool {
        let (Some(host), Some(own_port)) = (uri.host(), uri.scheme_str().and_then(own_port)) else { return false };
        let (host, port) = (host.to_ascii_lowercase(), uri.port_u16().unwrap_or(own_port));
        self.hosts.contains(&format!("{host}:{port}")) || port == own_port && self.hosts.contains(&host)
    }
}

/// The types of parts that name a medium.
const MEDIA: [&str; 4] = ["image", "image_url", "audio", "audio_url"];

fn own_port(scheme: &str) -> Option<u16> {
    match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

/// The address in a part of a content, if it names one: under any of the names that [`qhx::messages`] reads.
fn address(part: &mut Value) -> Option<&mut Value> {
    let own = part["type"].as_str().filter(|own| MEDIA.contains(own))?.to_owned();
    let places = ["/url".to_owned(), format!("/{own}"), format!("/{own}/url")];
    let is_address = |value: &Value| value.as_str().is_some_and(|text| text.starts_with("http://") || text.starts_with("https://"));
    let place = places.iter().find(|place| part.pointer(place).is_some_and(is_address))?;
    part.pointer_mut(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn hosts_are_allowed_by_name_and_port() {
        let fetcher = Fetcher::new(&["Pictures.example".to_owned(), "127.0.0.1:9000".to_owned()], 1 << 20);
        let allows = |address: &str| fetcher.allows(&address.parse().unwrap());
        for address in [
            "http://pictures.example/a.png",
            "https://PICTURES.example/a.png",
            "https://pictures.example:443/",
            "http://127.0.0.1:9000/x?y",
        ] {
            assert!(allows(address), "{address}");
        }
        for address in [
            "http://pictures.example:8080/a.png",
            "https://pictures.example:80/",
            "http://127.0.0.1/",
            "http://pictures.example@127.0.0.1/",
            "http://pictures.example.evil.example/",
            "http://evil.example/?pictures.example",
            "ftp://pictures.example/",
        ] {
            assert!(!allows(address), "{address}");
        }
    }

    #[test]
    fn addresses_are_found_under_every_name() {
        let found = |mut part: Value| address(&mut part).map(|address| address.clone());
        let there = Some(json!("http://h/a"));
        assert_eq!(found(json!({ "type": "image_url", "image_url": { "url": "http://h/a" } })), there);
        assert_eq!(found(json!({ "type": "image_url", "image_url": "http://h/a" })), there);
        assert_eq!(found(json!({ "type": "image", "url": "http://h/a" })), there);
        assert_eq!(found(json!({ "type": "audio", "audio": "http://h/a" })), there);
        assert_eq!(found(json!({ "type": "text", "text": "http://h/a is a page" })), None);
        assert_eq!(found(json!({ "type": "image", "path": "a.png" })), None);
    }
}
