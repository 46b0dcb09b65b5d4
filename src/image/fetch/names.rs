//! Owns finding the addresses of servers, in the C library's order: its own code loads libraries, which a static
//! program cannot do.

use std::net::{Ipv4Addr, SocketAddr};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{LookupIpStrategy, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::lookup_ip::LookupIp;
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::system_conf::parse_resolv_conf;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// Unlike reqwest's resolver, it asks one name server after the other, because only the first may know the names of a
/// company's network. If none is configured, it asks this machine instead of Google's servers.
#[derive(Debug)]
pub(super) struct Names;

impl Resolve for Names {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let text = fs_err::read("/etc/resolv.conf").unwrap_or_default();
            let (config, options) = parsed(&text);
            let found = lookup(name.as_str(), config, options).await?;
            let addresses: Vec<_> = found.iter().map(|ip| SocketAddr::new(ip, 0)).collect();
            let addresses: Addrs = Box::new(addresses.into_iter());
            Ok(addresses)
        })
    }
}

fn parsed(text: &[u8]) -> (ResolverConfig, ResolverOpts) {
    let (config, mut options) = parse_resolv_conf(text).unwrap_or_else(|_| {
        let own = NameServerConfig::udp_and_tcp(Ipv4Addr::LOCALHOST.into());
        let config = ResolverConfig::from_name_servers(vec![own]);
        (config, ResolverOpts::default())
    });
    options.ip_strategy = LookupIpStrategy::Ipv6AndIpv4;
    (config, options)
}

/// Also looks into `/etc/hosts`.
async fn lookup(
    name: &str,
    config: ResolverConfig,
    mut options: ResolverOpts,
) -> Result<LookupIp, NetError> {
    let (domain, search, servers) = config.into_parts();
    let rounds = std::mem::take(&mut options.attempts).max(1);
    let mut outcome = Err(NetError::NoConnections);
    for server in servers.iter().cycle().take(rounds * servers.len()) {
        let server = vec![server.clone()];
        let config = ResolverConfig::from_parts(domain.clone(), search.clone(), server);
        let mut resolver =
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        *resolver.options_mut() = options.clone();
        outcome = resolver.build()?.lookup_ip(name).await;
        if outcome.as_ref().err().is_none_or(NetError::is_nx_domain) {
            break;
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;
    use crate::image::fetch;

    /// Serves a name's only address, or the answer that there is no such name. Returns the port.
    fn serve(address: Option<[u8; 4]>, delay: Duration) -> u16 {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let mut query = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut query) {
                std::thread::sleep(delay);
                // An empty label ends the name; a type and a class follow.
                let name = query[12..length].iter().position(|byte| *byte == 0);
                let end = 12 + name.unwrap() + 5;
                let found = address.filter(|_| query[end - 3] == 1);
                let status = if address.is_some() { 0x80 } else { 0x83 };
                let mut reply = query[..2].to_vec();
                let count = u8::from(found.is_some());
                reply.extend([0x81, status, 0, 1, 0, count, 0, 0, 0, 0]);
                reply.extend(&query[12..end]);
                if let Some(address) = found {
                    reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4]);
                    reply.extend(address);
                }
                socket.send_to(&reply, from).unwrap();
            }
        });
        port
    }

    fn find(ports: [u16; 2]) -> Option<String> {
        let servers = ports.map(|port| {
            let mut server = NameServerConfig::udp_and_tcp(Ipv4Addr::LOCALHOST.into());
            for connection in &mut server.connections {
                connection.port = port;
            }
            server
        });
        let config = ResolverConfig::from_name_servers(servers.to_vec());
        let (_, mut options) = parsed(b"");
        options.timeout = Duration::from_secs(1);
        let work = async { Ok(lookup("registry.corp.example", config, options).await.ok()) };
        let found = fetch::run(&AtomicBool::new(false), work).unwrap();
        found.and_then(|found| found.iter().next().map(|ip| ip.to_string()))
    }

    #[test]
    fn name_servers_are_asked_one_after_the_other() {
        let company = serve(Some([192, 0, 2, 1]), Duration::from_millis(50));
        let public = serve(None, Duration::ZERO);
        let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let silent = (silent.local_addr().unwrap().port(), silent);
        let address = Some("192.0.2.1".to_owned());
        assert_eq!(find([company, public]), address);
        assert_eq!(find([silent.0, company]), address);
        assert_eq!(find([public, company]), None);
    }

    #[test]
    fn without_name_servers_this_machine_is_asked() {
        for text in ["", "search example.com\n"] {
            let (config, _) = parsed(text.as_bytes());
            assert_eq!(config.name_servers()[0].ip, Ipv4Addr::LOCALHOST);
        }
        let (config, _) = parsed(b"nameserver 192.0.2.53\n");
        assert_eq!(config.name_servers().len(), 1);
    }
}
