//! How programs are attached on kernels without TCX. This kernel has both ways.
#![allow(clippy::unwrap_used, reason = "what a test cannot go on without, it unwraps")]

use std::os::fd::AsFd;

use weft::fast_path::{IN, Maps};
use weft::host::netlink::filters::{Filter, FilterPlace, Side};

use crate::support::lab::Namespace;

#[test]
fn filters_come_go_and_are_missed() {
    let namespace = Namespace::new("filters");
    namespace.exec(&["ip", "link", "add", "wire0", "type", "veth"]);
    let device: u32 =
        namespace.exec(&["cat", "/sys/class/net/wire0/ifindex"]).trim().parse().unwrap();
    let place = |side| FilterPlace { device, side, handle: 8285 };
    let shown = |side: &str| namespace.exec(&["tc", "filter", "show", "dev", "wire0", side]);
    let maps = Maps::create().unwrap();
    let program = maps.load("weft_in", IN).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    namespace.enter(|| {
        runtime.block_on(async {
            let attach = async |side| {
                let program = program.as_fd();
                Filter::attach(place(side), "weft_in", program).await.unwrap()
            };
            let (inward, out) = (attach(Side::Ingress).await, attach(Side::Egress).await);
            for side in ["ingress", "egress"] {
                let text = shown(side);
                assert!(text.contains("weft_in direct-action"), "{side}: {text}");
            }
            assert!(inward.is_there().await.unwrap());
            // The next weftd's takes the place of one that was left, or clears it.
            inward.leave();
            let inward = attach(Side::Ingress).await;
            assert_eq!(shown("ingress").matches("weft_in direct-action").count(), 1);
            inward.leave();
            place(Side::Ingress).clear().await.unwrap();
            assert_eq!(shown("ingress"), "", "a filter that was left stays for ever");
            place(Side::Ingress).clear().await.unwrap();
            let inward = attach(Side::Ingress).await;

            namespace.exec(&["tc", "filter", "del", "dev", "wire0", "ingress"]);
            assert!(!inward.is_there().await.unwrap(), "who looks would not notice");
            assert!(out.is_there().await.unwrap());
            drop((inward, out));
            assert_eq!(shown("egress"), "", "a filter outlives its owner");
        });
    });
}
