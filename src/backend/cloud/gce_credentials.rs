//! Google's access tokens: for a service account's key in a file, else the instance's own.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use hyper::Request;
use hyper::header::CONTENT_TYPE;
use jiff::Timestamp;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use serde::Deserialize;
use serde_json::json;

use super::error::CloudError;
use super::http::{Http, variable};
use super::provider::Result;
use super::sign::encoded;
use crate::config::options::Secret;
use crate::control::own_thread::on_own_thread;

const SCOPE: &str = "https://www.googleapis.com/auth/compute";
const VARIABLE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
/// How long what is signed is valid: one round takes at most minutes.
const VALIDITY: Duration = Duration::from_secs(600);

#[derive(Deserialize)]
struct File {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    client_email: String,
    #[serde(default)]
    private_key: String,
    #[serde(default)]
    token_uri: String,
}

#[derive(Deserialize)]
struct Token {
    access_token: String,
}

#[derive(Deserialize)]
struct Failure {
    #[serde(default)]
    error: String,
    #[serde(default)]
    error_description: String,
}

/// A token of the account that the environment names a file of; else what the metadata service
/// gives.
pub(super) async fn token(
    http: &Http,
    of_instance: impl AsyncFnOnce() -> Result<String>,
) -> Result<Secret> {
    let text = match variable(VARIABLE) {
        Some(path) => of_file(http, path).await?,
        None => of_instance().await.map_err(|error| match error {
            CloudError::Unusable(_) => CloudError::Unusable(format!(
                "no credentials: {VARIABLE} names no file, and this instance has no service \
                 account. Give it one with the scope compute-rw"
            )),
            other @ (CloudError::NoAnswer { .. } | CloudError::Refused { .. }) => other,
        })?,
    };
    let token: Token = serde_json::from_str(&text).map_err(|_secret| {
        CloudError::of_stranger("the access token", "Google's token service", 200, &text)
    })?;
    Ok(Secret(token.access_token))
}

async fn of_file(http: &Http, path: String) -> Result<String> {
    let shown = path.clone();
    let unusable = |why: &str| CloudError::Unusable(format!("{VARIABLE} {shown}: {why}"));
    let read = on_own_thread(move || std::fs::read(path)).await.flatten();
    let bytes = read.map_err(|error| unusable(&error.to_string()))?;
    // Not the file's own text, which has the key.
    let file: File = serde_json::from_slice(&bytes)
        .map_err(|_secret| unusable("it is not the JSON of a credentials file"))?;
    if file.kind != "service_account" {
        return Err(unusable("weftd knows files of the type service_account only"));
    }
    let assertion = assertion(&file, Timestamp::now());
    let assertion = assertion.ok_or_else(|| unusable("its private_key can't be used"))?;
    let grant = encoded("urn:ietf:params:oauth:grant-type:jwt-bearer");
    let request =
        Request::post(&file.token_uri).header(CONTENT_TYPE, "application/x-www-form-urlencoded");
    let body = format!("grant_type={grant}&assertion={assertion}");
    let answer = http.ask("the access token", request, body).await?;
    if answer.status.is_success() {
        return Ok(answer.text());
    }
    let failed = serde_json::from_slice::<Failure>(&answer.body);
    let (code, message) =
        failed.map_or_else(|_not_told| Default::default(), |it| (it.error, it.error_description));
    let of = ("the access token", "iam.serviceAccounts.getAccessToken");
    Err(answer.refused(of, "Google's token service", (&code, &message)))
}

/// A JSON Web Token (RFC 7523) that the account's key has signed. `None` if that is no RSA key.
fn assertion(file: &File, now: Timestamp) -> Option<String> {
    let body = file.private_key.lines().filter(|line| !line.starts_with("-----"));
    let der = STANDARD.decode(body.collect::<String>()).ok()?;
    let key = RsaKeyPair::from_pkcs8(&der).ok()?;
    let claims = json!({
        "iss": file.client_email,
        "scope": SCOPE,
        "aud": file.token_uri,
        "iat": now.as_second(),
        "exp": now.as_second() + i64::try_from(VALIDITY.as_secs()).ok()?,
    });
    let encode = |text: String| URL_SAFE_NO_PAD.encode(text);
    let header = encode(json!({ "alg": "RS256", "typ": "JWT" }).to_string());
    let signed = format!("{header}.{}", encode(claims.to_string()));
    let mut signature = vec![0; key.public().modulus_len()];
    key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), signed.as_bytes(), &mut signature).ok()?;
    Some(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
}
