//! Owns finding the addresses of servers, in the C library's order: its own code loads libraries, which a static
//! program cannot do.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{LookupIpStrategy, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::lookup_ip::LookupIp;
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr;
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
            let (config, options) = parsed(text);
            let found = lookup(name.as_str(), config, options).await?;
            let addresses: Vec<_> = found.iter().map(|ip| SocketAddr::new(ip, 0)).collect();
            let addresses: Addrs = Box::new(addresses.into_iter());
            Ok(addresses)
        })
    }
}

fn parsed(mut text: Vec<u8>) -> (ResolverConfig, ResolverOpts) {
    let mut outcome = parse_resolv_conf(&text);
    if outcome.is_err() {
        // A search domain that is no name hides the name servers. The last list counts.
        text.extend(b"\nsearch\n");
        outcome = parse_resolv_conf(&text);
    }
    let (config, mut options) = outcome.unwrap_or_else(|_| {
        // Without a server, only TCP is refused at once.
        let own = NameServerConfig::tcp(Ipv4Addr::LOCALHOST.into());
        let config = ResolverConfig::from_name_servers(vec![own]);
        (config, ResolverOpts::default())
    });
    options.ip_strategy = LookupIpStrategy::Ipv6AndIpv4;
    options.timeout = options.timeout.max(Duration::from_secs(1));
    (config, options)
}

/// Also looks into `/etc/hosts`. All servers are asked for one name before the first one is asked for the next name: it
/// may refuse a public name, and know that its own domain has no such name.
async fn lookup(
    name: &str,
    config: ResolverConfig,
    mut options: ResolverOpts,
) -> Result<LookupIp, NetError> {
    let (domain, search, servers) = config.into_parts();
    let rounds = std::mem::take(&mut options.attempts).clamp(1, 5);
    let names = candidates(name, domain, search, options.ndots)?;
    let mut resolvers = Vec::new();
    for server in servers {
        let config = ResolverConfig::from_name_servers(vec![server]);
        let builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        resolvers.push(builder.with_options(options.clone()).build()?);
    }
    let mut outcome = Err(NetError::NoConnections);
    for name in names {
        for resolver in resolvers.iter().cycle().take(rounds * resolvers.len()) {
            outcome = resolver.lookup_ip(name.clone()).await;
            // Another error may be that of the IPv6 address alone.
            if outcome.as_ref().err().is_none_or(NetError::is_nx_domain) {
                break;
            }
        }
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// Returns the absolute names that `name` may stand for, in the order of resolv.conf(5).
fn candidates(
    name: &str,
    domain: Option<rr::Name>,
    mut search: Vec<rr::Name>,
    ndots: usize,
) -> Result<Vec<rr::Name>, NetError> {
    let name = rr::Name::from_str_relaxed(name)?;
    if name.is_fqdn() {
        return Ok(vec![name]);
    }
    if search.is_empty() {
        search.extend(domain);
    }
    let inside = search.iter().filter(|domain| !domain.is_root());
    let mut names: Vec<_> = inside
        .filter_map(|domain| name.clone().append_domain(domain).ok())
        .collect();
    let is_first = usize::from(name.num_labels()) > ndots || name.is_localhost();
    let place = if is_first { 0 } else { names.len() };
    names.insert(place, name.append_domain(&rr::Name::root())?);
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::image::fetch;

    const NO_SUCH_NAME: u8 = 3;
    const REFUSED: u8 = 5;

    /// Serves a name's only address, or an error. There is no such name in `office.example`. Returns the port.
    fn serve(answer: Result<[u8; 4], u8>, delay: Duration) -> u16 {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let mut buffer = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let query = &buffer[..length];
                std::thread::sleep(delay);
                // An empty label ends the name; a type and a class follow.
                let name = query[12..].iter().position(|byte| *byte == 0);
                let end = 12 + name.unwrap() + 5;
                let answer = match query.windows(6).any(|label| label == b"office") {
                    true => Err(NO_SUCH_NAME),
                    false => answer,
                };
                let found = answer.ok().filter(|_| query[end - 3] == 1);
                let status = 0x80 | answer.err().unwrap_or(0);
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
        let search = vec![rr::Name::from_ascii("office.example").unwrap()];
        let config = ResolverConfig::from_parts(None, search, servers.to_vec());
        let (_, mut options) = parsed(Vec::new());
        options.timeout = Duration::from_secs(1);
        let work = async { Ok(lookup("registry.corp.example", config, options).await.ok()) };
        let found = fetch::run(&AtomicBool::new(false), work).unwrap();
        found.and_then(|found| found.iter().next().map(|ip| ip.to_string()))
    }

    #[test]
    fn name_servers_are_asked_one_after_the_other() {
        let company = serve(Ok([192, 0, 2, 1]), Duration::from_millis(50));
        let public = serve(Err(NO_SUCH_NAME), Duration::ZERO);
        let refusing = serve(Err(REFUSED), Duration::ZERO);
        let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = Some("192.0.2.1".to_owned());
        assert_eq!(find([company, public]), address);
        assert_eq!(find([refusing, company]), address);
        let port = silent.local_addr().unwrap().port();
        assert_eq!(find([port, company]), address);
        assert_eq!(find([public, company]), None);
    }

    #[test]
    fn names_with_enough_dots_come_before_those_in_search_domains() {
        let found = |name, search: &[&str], ndots| {
            let domain = rr::Name::from_ascii("lab.example").ok();
            let search = search.iter().map(|one| rr::Name::from_ascii(one).unwrap());
            let names = candidates(name, domain, search.collect(), ndots).unwrap();
            let names: Vec<_> = names.iter().map(ToString::to_string).collect();
            names.join(" ")
        };
        let search = [".", "a.example", "b.example"];
        assert_eq!(
            found("x.y", &search, 1),
            "x.y. x.y.a.example. x.y.b.example."
        );
        assert_eq!(
            found("x.y", &search, 2),
            "x.y.a.example. x.y.b.example. x.y."
        );
        assert_eq!(found("x", &[], 1), "x.lab.example. x.");
        assert_eq!(found("x.y.", &search, 2), "x.y.");
        assert_eq!(
            found("localhost", &["a.example"], 1),
            "localhost. localhost.a.example."
        );
    }

    #[test]
    fn without_name_servers_this_machine_is_asked() {
        let servers = |text: &[u8]| {
            let (config, _) = parsed(text.to_vec());
            let servers = config.name_servers().iter();
            servers
                .map(|server| server.ip.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(servers(b""), ["127.0.0.1"]);
        assert_eq!(servers(b"search example.com\n"), ["127.0.0.1"]);
        assert_eq!(servers(b"nameserver 192.0.2.53\n"), ["192.0.2.53"]);
        // One line that means nothing hides no other one.
        let damaged = b"nameserver 192.0.2.53\nsearch a..example\nnameserver of ours\n\xff";
        assert_eq!(servers(damaged), ["192.0.2.53"]);
    }
}
