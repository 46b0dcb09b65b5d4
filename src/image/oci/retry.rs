//! Owns retrying requests that a registry, its token server or a proxy before them puts off, as `Retry-After` says.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use reqwest::header::RETRY_AFTER;
use reqwest::{Response, StatusCode};

use crate::image::fetch::long_patience;
use crate::ui::size;

/// Waits in seconds, if the registry does not say how long to wait.
const DEFAULT: [u64; 3] = [1, 2, 4];

/// The reason why the user has to wait. The network thread sets it, and the thread that shows progress takes it.
#[derive(Clone, Debug, Default)]
pub struct Notice(Arc<Mutex<Option<String>>>);

impl Notice {
    pub(crate) fn take(&self) -> Option<String> {
        self.0.lock().ok()?.take()
    }

    fn tell(&self, text: String) {
        if let Ok(mut place) = self.0.lock() {
            *place = Some(text);
        }
    }
}

/// How long a request has waited so far.
#[derive(Debug, Default)]
pub(super) struct Patience {
    waited: Duration,
    /// Number of waits without a `Retry-After`.
    guessed: usize,
}

impl Patience {
    /// Waits if the registry asks for it, and tells the user. Returns false without a wait, or if it is too long.
    pub(super) async fn waits(&mut self, response: &Response, who: &str, notice: &Notice) -> bool {
        let Some(wait) = self.next(response.status(), asked(response), long_patience()) else {
            return false;
        };
        notice.tell(format!(
            "{who} answered {}; waiting {} before the next attempt",
            response.status(),
            size::duration(wait)
        ));
        tokio::time::sleep(wait).await;
        true
    }

    fn next(
        &mut self,
        status: StatusCode,
        asked: Option<Duration>,
        limit: Duration,
    ) -> Option<Duration> {
        if !is_put_off(status) {
            return None;
        }
        let wait = match asked {
            // Even "0" means that the registry wants fewer requests.
            Some(asked) => asked.max(Duration::from_secs(1)),
            None => {
                self.guessed += 1;
                Duration::from_secs(*DEFAULT.get(self.guessed - 1)?)
            }
        };
        self.waited = self.waited.saturating_add(wait);
        (self.waited <= limit).then_some(wait)
    }
}

fn is_put_off(status: StatusCode) -> bool {
    [
        StatusCode::TOO_MANY_REQUESTS,
        StatusCode::BAD_GATEWAY,
        StatusCode::SERVICE_UNAVAILABLE,
        StatusCode::GATEWAY_TIMEOUT,
    ]
    .contains(&status)
}

/// Returns how long the registry asks to wait.
pub(super) fn asked(response: &Response) -> Option<Duration> {
    if !is_put_off(response.status()) {
        return None;
    }
    parse(
        response.headers().get(RETRY_AFTER)?.to_str().ok()?,
        Timestamp::now(),
    )
}

/// Parses `Retry-After`: seconds, or a date.
fn parse(text: &str, now: Timestamp) -> Option<Duration> {
    let text = text.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let then = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
    Some(Duration::try_from(then.duration_since(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now: Timestamp = "2026-11-25T03:00:00Z".parse().unwrap();
        let seconds = |text| parse(text, now).map(|wait| wait.as_secs());
        assert_eq!(seconds("30"), Some(30));
        assert_eq!(seconds(" 0 "), Some(0));
        assert_eq!(seconds("Wed, 25 Nov 2026 03:01:40 GMT"), Some(100));
        assert_eq!(seconds("Wed, 25 Nov 2026 02:00:00 GMT"), Some(0));
        for not in ["", "-1", "soon", "1.5", "2026-11-25T03:01:40Z"] {
            assert_eq!(seconds(not), None, "{not}");
        }
    }

    #[test]
    fn waiting_ends() {
        let busy = StatusCode::TOO_MANY_REQUESTS;
        let limit = Duration::from_secs(600);
        let seconds = |wait: Option<Duration>| wait.map(|wait| wait.as_secs());
        // Without `Retry-After`, only a few attempts.
        let mut patience = Patience::default();
        let mut next = |status, asked| seconds(patience.next(status, asked, limit));
        assert_eq!(next(StatusCode::OK, None), None);
        assert_eq!(next(StatusCode::INTERNAL_SERVER_ERROR, None), None);
        assert_eq!(next(busy, None), Some(1));
        assert_eq!(next(StatusCode::SERVICE_UNAVAILABLE, None), Some(2));
        assert_eq!(next(busy, Some(Duration::ZERO)), Some(1));
        assert_eq!(next(StatusCode::BAD_GATEWAY, None), Some(4));
        assert_eq!(next(StatusCode::GATEWAY_TIMEOUT, None), None);
        // With `Retry-After`, as long as the total wait stays below the limit.
        let mut patience = Patience::default();
        let mut next =
            |asked| seconds(patience.next(busy, Some(Duration::from_secs(asked)), limit));
        assert_eq!(next(400), Some(400));
        assert_eq!(next(200), Some(200));
        assert_eq!(next(1), None);
        assert_eq!(next(u64::MAX), None);
    }
}
