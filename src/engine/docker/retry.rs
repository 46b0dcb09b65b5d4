//! Owns repeating requests. An unanswered request may be lost because the service restarted, or may still be in
//! progress, so it is sent again in parallel with the first one.

use std::future::Future;
use std::time::Duration;

use bollard::errors::Error as Refusal;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

/// Number of periods of `patience` that a service may stay silent: ten minutes with [`PATIENCE`](super::PATIENCE). A
/// service that is still working refuses to begin the same work again.
const SILENCE: u32 = 60;

/// Sends a request until one is answered; after `patience`, a second one may be on the way. `is_under_way` recognizes
/// the refusal of work in progress; `look` then checks whether the work is done.
pub(super) async fn retry<T, F: Future<Output = Result<T, Refusal>>>(
    patience: Duration,
    request: impl Fn() -> F,
    is_under_way: impl Fn(&Refusal) -> bool,
    look: impl AsyncFn() -> Result<Option<T>, Refusal>,
) -> Result<T, Refusal> {
    let mut silence = 0;
    let mut requests = FuturesUnordered::new();
    requests.push(request());
    let (mut retry, mut under_way) = (false, false);
    loop {
        tokio::select! {
            Some(answer) = requests.next() => match answer {
                Err(refusal) if retry && is_under_way(&refusal) => under_way = true,
                answer => return answer,
            },
            () = tokio::time::sleep(patience) => {
                if requests.len() < 2 {
                    requests.push(request());
                    retry = true;
                }
                silence += 1;
                if !under_way && silence > SILENCE {
                    return Err(Refusal::RequestTimeoutError);
                }
            }
        }
        if under_way && let Some(done) = look().await? {
            return Ok(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn busy() -> Refusal {
        Refusal::DockerResponseServerError {
            status_code: 409,
            message: "under way".to_owned(),
        }
    }

    /// Simulates a service whose n-th answer comes from `answers`.
    fn ask(
        answers: impl Fn(u32) -> Option<Result<u32, Refusal>>,
        done: impl Fn(u32) -> bool,
    ) -> Result<u32, Refusal> {
        let (asked, looked) = (Cell::new(0), Cell::new(0));
        let request = || {
            asked.set(asked.get() + 1);
            let answer = answers(asked.get());
            async move {
                match answer {
                    Some(answer) => answer,
                    None => std::future::pending().await,
                }
            }
        };
        let look = async || {
            looked.set(looked.get() + 1);
            Ok(done(looked.get()).then_some(100))
        };
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
            .block_on(retry(Duration::from_millis(1), request, |_| true, look))
    }

    #[test]
    fn a_lost_request_is_made_again_and_what_is_under_way_is_waited_for() {
        let never = |_| false;
        assert!(matches!(ask(|n| Some(Ok(n)), never), Ok(1)));
        assert!(matches!(ask(|n| (n > 1).then_some(Ok(n)), never), Ok(2)));
        // The first request is in progress, and `look` then finds it done.
        let second = |n| (n > 1).then(|| Err(busy()));
        assert!(matches!(ask(second, |looked| looked > 3), Ok(100)));
        // Refused at once, because of another client's work.
        assert!(ask(|_| Some(Err(busy())), never).is_err());
        let silent = ask(|_| None, never);
        assert!(matches!(silent, Err(Refusal::RequestTimeoutError)));
    }
}
