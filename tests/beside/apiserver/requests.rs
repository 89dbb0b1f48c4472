//! Requests by the thousand, for which kubectl is too slow: kube's client.

use std::path::Path;

use http_body_util::BodyExt;
use hyper::{Method, Request};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::Value;

use crate::plane::Plane;

/// Runs `work` with a client of `user`, on a thread of its own on the switch of the cluster.
pub(crate) fn with_client<T: Send>(
    plane: &Plane,
    user: &str,
    work: impl AsyncFnOnce(Client) -> T + Send,
) -> T {
    let path = plane.kubeconfig(user);
    plane.cluster.switch.enter(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(async { work(client(&path).await).await })
    })
}

async fn client(kubeconfig: &Path) -> Client {
    let file = Kubeconfig::read_from(kubeconfig).unwrap();
    let options = KubeConfigOptions::default();
    let mut config = Config::from_custom_kubeconfig(file, &options).await.unwrap();
    // What the server answers is what the test wants to know.
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

/// Sends one request and gives the code of its answer, which is read to its end.
pub(crate) async fn send(
    client: &Client,
    method: Method,
    path: &str,
    content_type: &str,
    body: Option<&Value>,
) -> u16 {
    let body = body.map(Value::to_string).unwrap_or_default().into_bytes();
    let request = Request::builder().method(method).uri(path).header("content-type", content_type);
    let request = request.body(kube::client::Body::from(body)).unwrap();
    let Ok(answer) = client.send(request).await else { return 0 };
    let code = answer.status().as_u16();
    answer.into_body().collect().await.ok();
    code
}
