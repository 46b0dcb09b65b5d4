//! Names of Docker Hub.

use super::make::Registry;
use super::place::{Place, sample};

#[test]
fn an_official_image_of_docker_hub_is_in_its_library() {
    let mut place = Place::new();
    let registry = Registry::start(false);
    registry.push("library/sample", "1", &sample());
    let mirror = ("docker.io".into(), format!("http://{}", registry.host));
    place.mirrors.extend([mirror]);
    place.build("ref = \"docker.io/sample:1\"", "a").unwrap();
}
