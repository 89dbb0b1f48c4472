//! Where AWS's credentials are, in the order of the SDK that flannel has: environment, web identity
//! (EKS), files, container, instance. They are looked for in each round, for most are valid for
//! hours.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use hyper::{Method, Request, Uri};
use roxmltree::Document;
use serde::Deserialize;

use super::aws_answers::{refusal, text_of};
use super::aws_metadata::{Metadata, endpoint_of};
use super::error::{CloudError, visible};
use super::http::{Http, variable};
use super::provider::Result;
use super::sign::query;
use crate::config::network::AccessKey;
use crate::config::options::Secret;
use crate::control::own_thread::on_own_thread;

/// Where a container's relative path leads.
const CONTAINER: &str = "http://169.254.170.2";

/// What requests are signed with.
#[derive(Debug)]
pub(super) struct Credentials {
    pub(super) key: AccessKey,
    /// Comes with those that expire.
    pub(super) token: Option<Secret>,
}

impl Credentials {
    fn of(id: String, secret: String, token: Option<String>) -> Self {
        let token = token.filter(|token| !token.is_empty()).map(Secret);
        Self { key: AccessKey { id, secret: Secret(secret) }, token }
    }
}

/// As container and instance tell them.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Told {
    access_key_id: String,
    secret_access_key: String,
    token: Option<String>,
}

/// The credentials that come first.
pub(super) async fn find(
    http: &Http,
    metadata: &Metadata<'_>,
    place: (&str, &str),
) -> Result<Credentials> {
    let key = variable("AWS_ACCESS_KEY_ID").zip(variable("AWS_SECRET_ACCESS_KEY"));
    if let Some((id, secret)) = key {
        return Ok(Credentials::of(id, secret, variable("AWS_SESSION_TOKEN")));
    }
    if let Some(file) = variable("AWS_WEB_IDENTITY_TOKEN_FILE") {
        return of_web_identity(http, place, file).await;
    }
    if let Some(found) = of_files().await? {
        return Ok(found);
    }
    if let Some(found) = of_container(http).await? {
        return Ok(found);
    }
    const ROLES: &str = "iam/security-credentials/";
    let role = metadata.find(ROLES).await?;
    let role = role.and_then(|roles| roles.lines().next().map(str::to_owned));
    let Some(role) = role.filter(|role| !role.is_empty()) else {
        return Err(CloudError::Unusable(
            "no credentials: not in the environment, nor in ~/.aws, nor has this instance a role. \
             Give it an IAM role (docs/configuration.md has the policy)"
                .to_owned(),
        ));
    };
    told("the instance's role", metadata.find(&format!("{ROLES}{role}")).await?.as_deref())
}

/// Why there are none.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Failed {
    code: String,
    #[serde(default)]
    message: String,
}

/// Reads JSON that must not be shown: it has the secret.
fn told(of: &str, json: Option<&str>) -> Result<Credentials> {
    let failed: Option<Failed> = json.and_then(|json| serde_json::from_str(json).ok());
    if let Some(Failed { code, message }) = failed.filter(|failed| failed.code != "Success") {
        let [code, message] = [code, message].map(|text| visible(&text));
        let text = format!("there are no credentials of {of}: {code}: {message}");
        return Err(CloudError::Unusable(text));
    }
    let told: Option<Told> = json.and_then(|json| serde_json::from_str(json).ok());
    let Some(Told { access_key_id, secret_access_key, token }) = told else {
        return Err(CloudError::Unusable(format!("the credentials of {of} can't be read")));
    };
    Ok(Credentials::of(access_key_id, secret_access_key, token))
}

/// What the profile says in the shared files.
async fn of_files() -> Result<Option<Credentials>> {
    let home = variable("HOME").map(PathBuf::from).unwrap_or_default();
    let path = |name: &str, otherwise: &str| {
        variable(name).map_or_else(|| home.join(".aws").join(otherwise), PathBuf::from)
    };
    let paths =
        [path("AWS_SHARED_CREDENTIALS_FILE", "credentials"), path("AWS_CONFIG_FILE", "config")];
    let read = on_own_thread(move || paths.map(|path| text_of_file(&path))).await;
    let [credentials, config] = read.map_err(|error| {
        CloudError::Unusable(format!("no thread reads AWS's shared files: {error}"))
    })?;
    let (credentials, config) = (credentials?, config?);
    let named = variable("AWS_PROFILE");
    of_profile(&credentials, &config, named.as_deref())
}

/// Empty if there is no such file.
fn text_of_file(path: &Path) -> Result<String> {
    match std::fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        read => read.map_err(|error| {
            CloudError::Unusable(format!("{} can't be read: {error}", path.display()))
        }),
    }
}

/// The keys of the profile that is `named`, else of the default one. Pure.
fn of_profile(credentials: &str, config: &str, named: Option<&str>) -> Result<Option<Credentials>> {
    let name = named.unwrap_or("default");
    let mut all = section(config, &format!("profile {name}"));
    if name == "default" {
        all.extend(section(config, name));
    }
    all.extend(section(credentials, name));
    let taken = |key: &str| all.get(key).cloned().filter(|value| !value.is_empty());
    if let Some((id, secret)) = taken("aws_access_key_id").zip(taken("aws_secret_access_key")) {
        return Ok(Some(Credentials::of(id, secret, taken("aws_session_token"))));
    }
    let unbuilt = ["credential_process", "role_arn", "sso_session", "sso_account_id"];
    if let Some(key) = unbuilt.iter().find(|key| all.contains_key(**key)) {
        return Err(CloudError::Unusable(format!(
            "the AWS profile {name} has {key}, which weftd does not know: give it an access key, \
             or the instance a role"
        )));
    }
    match named {
        Some(name) => Err(CloudError::Unusable(format!(
            "AWS_PROFILE is {name}, and the shared files have no access key of that name"
        ))),
        None => Ok(None),
    }
}

fn section(text: &str, wanted: &str) -> BTreeMap<String, String> {
    let (mut all, mut is_wanted) = (BTreeMap::new(), false);
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            is_wanted = name.trim() == wanted;
        } else if let Some((key, value)) = line.split_once('=').filter(|_| is_wanted) {
            all.insert(key.trim().to_owned(), value.trim().to_owned());
        }
    }
    all
}

/// Of a pod's service account: STS gives credentials of a role for its token.
async fn of_web_identity(
    http: &Http,
    (region, domain): (&str, &str),
    file: String,
) -> Result<Credentials> {
    const ACTION: &str = "AssumeRoleWithWebIdentity";
    let Some(role) = variable("AWS_ROLE_ARN") else {
        let text = "AWS_WEB_IDENTITY_TOKEN_FILE is given without AWS_ROLE_ARN";
        return Err(CloudError::Unusable(text.to_owned()));
    };
    let session = variable("AWS_ROLE_SESSION_NAME").unwrap_or_else(|| "weftd".to_owned());
    let path = file.clone();
    let token = on_own_thread(move || std::fs::read_to_string(path)).await.flatten();
    let token = token.map_err(|error| {
        CloudError::Unusable(format!("AWS_WEB_IDENTITY_TOKEN_FILE {file} can't be read: {error}"))
    })?;
    let parameters = BTreeMap::from([
        ("Action", ACTION.to_owned()),
        ("RoleArn", role),
        ("RoleSessionName", session),
        ("Version", "2011-06-15".to_owned()),
        ("WebIdentityToken", token.trim().to_owned()),
    ]);
    let endpoint = endpoint_of("STS", &format!("https://sts.{region}.{domain}"));
    let request = Request::post(format!("{endpoint}/"))
        .header("content-type", "application/x-www-form-urlencoded; charset=utf-8");
    let answer = http.ask(ACTION, request, query(&parameters)).await?;
    let text = answer.text();
    if !answer.status.is_success() {
        let (code, message) = refusal(&text).unwrap_or_default();
        let of = (ACTION, "sts:AssumeRoleWithWebIdentity");
        return Err(answer.refused(of, "STS", (&code, &message)));
    }
    let unread = || CloudError::of_stranger(ACTION, "STS", answer.status.as_u16(), &text);
    let document = Document::parse(&text).map_err(|_not_xml| unread())?;
    let given = document.descendants().find(|it| it.tag_name().name() == "Credentials");
    let given = given.ok_or_else(unread)?;
    let [id, secret, token] =
        ["AccessKeyId", "SecretAccessKey", "SessionToken"].map(|name| text_of(given, name));
    Ok(Credentials::of(id, secret, Some(token)))
}

/// Of ECS or EKS Pod Identity.
async fn of_container(http: &Http) -> Result<Option<Credentials>> {
    let relative = variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
    let relative = relative.map(|path| format!("{CONTAINER}{path}"));
    let Some(url) = relative.or_else(|| variable("AWS_CONTAINER_CREDENTIALS_FULL_URI")) else {
        return Ok(None);
    };
    let mut token = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN");
    if let Some(file) = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE") {
        let read = on_own_thread(move || std::fs::read_to_string(file)).await.flatten();
        token = read.ok().map(|text| text.trim().to_owned()).or(token);
    }
    if !is_near(&url) {
        return Err(CloudError::Unusable(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI is neither https nor on this host: a token in the \
             clear is sent nowhere else"
                .to_owned(),
        ));
    }
    let token = token.as_deref().map(|token| ("authorization", token));
    let of = "the container's credentials";
    let json = http.metadata_named(of, Method::GET, &url, token).await?;
    told("the container", json.as_deref()).map(Some)
}

/// Whether a token may go there: encrypted, or to the addresses that AWS has for this.
fn is_near(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else { return false };
    let host = uri.host().unwrap_or_default();
    let address: Option<IpAddr> = host.trim_matches(['[', ']']).parse().ok();
    uri.scheme_str() == Some("https")
        || ["localhost", "169.254.170.2", "169.254.170.23"].contains(&host)
        || address.is_some_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# a comment\n[default]\naws_access_key_id = AKID1\n\
                        aws_secret_access_key=s3cret1\n[other]\naws_access_key_id=AKID2\n\
                        aws_secret_access_key = s3cret2\naws_session_token = t0ken\n";

    #[test]
    fn a_profile_has_its_keys() {
        let of = |named| of_profile(FILE, "", named).unwrap().unwrap();
        assert_eq!(
            (of(None).key.id.as_str(), of(None).key.secret.0.as_str()),
            ("AKID1", "s3cret1")
        );
        assert!(of(None).token.is_none());
        let other = of(Some("other"));
        assert_eq!(other.key.id, "AKID2");
        assert_eq!(other.token.as_ref().map(|token| token.0.as_str()), Some("t0ken"));
        let shown = format!("{other:?}");
        assert!(!shown.contains("s3cret") && !shown.contains("t0ken"), "{shown}");
    }

    #[test]
    fn a_profile_without_keys_is_passed_by_or_named() {
        assert!(of_profile("", "", None).unwrap().is_none(), "the next place is not looked at");
        let error = of_profile(FILE, "", Some("absent")).unwrap_err().to_string();
        assert!(error.contains("absent"), "{error}");
        for key in ["credential_process = /bin/cat", "role_arn = arn:aws:iam::1:role/r"] {
            let config = format!("[profile p]\n{key}\n");
            let error = of_profile("", &config, Some("p")).unwrap_err().to_string();
            assert!(error.contains(key.split(' ').next().unwrap()), "{error}");
        }
        let config = "[profile p]\naws_access_key_id=A\naws_secret_access_key=s\n";
        assert_eq!(of_profile("", config, Some("p")).unwrap().unwrap().key.id, "A");
    }

    #[test]
    fn a_file_that_can_not_be_read_is_named() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(text_of_file(&directory.path().join("absent")), Ok(String::new()));
        let error = text_of_file(directory.path()).unwrap_err().to_string();
        assert!(error.contains(&directory.path().display().to_string()), "{error}");
    }

    #[test]
    fn a_token_goes_to_this_host_or_encrypted() {
        assert!(
            is_near("https://example.org/x") && is_near("http://169.254.170.23/v1/credentials")
        );
        for far in ["http://example.org/x", "http://10.0.0.1/", "http://localhost.example.org/"] {
            assert!(!is_near(far), "{far}");
        }
    }

    #[test]
    fn what_can_not_be_read_is_not_shown() {
        let error = told("the instance's role", Some(r#"{"SecretAccessKey":"s3cret"}"#));
        assert!(!error.unwrap_err().to_string().contains("s3cret"));
        let failed = r#"{"Code":"AssumeRoleUnauthorizedAccess","Message":"n0t-trusted"}"#;
        let error = told("the instance's role", Some(failed)).unwrap_err().to_string();
        for part in ["AssumeRoleUnauthorizedAccess", "n0t-trusted"] {
            assert!(error.contains(part), "the role's own words are not told: {error}");
        }
    }
}
