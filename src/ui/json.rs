//! Owns `--progress json`: one event per line, each with the schema version and the time.

use jiff::Timestamp;

use super::event::{Event, SCHEMA};
use super::text::escape_json;

/// Returns a value that serializes as a JSON object with the given fields, in the given order.
macro_rules! object {
    ($($(#[$attribute:meta])* $name:ident: $value:expr),* $(,)?) => {{
        #[expect(non_camel_case_types, reason = "the type of each field is named after it")]
        let object = {
            #[derive(serde::Serialize)]
            struct Object<$($name),*> {
                $($(#[$attribute])* $name: $name),*
            }
            Object { $($name: $value),* }
        };
        object
    }};
}
pub(crate) use object;

/// Returns the event's line with its newline. Control characters are escaped as well, because the stream often ends up
/// on a terminal.
pub(super) fn line(event: &Event, time: Timestamp) -> String {
    // Joins two objects as text: `#[serde(flatten)]` buffers values and loses integers above 64 bits.
    let stamp = serde_json::to_string(&object! { schema: SCHEMA, time: time });
    let event = serde_json::to_string(event);
    let (stamp, event) = (
        stamp.expect("plain values are always json"),
        event.expect("events have string keys only"),
    );
    let json = format!("{},{}", &stamp[..stamp.len() - 1], &event[1..]);
    format!("{}\n", escape_json(&json))
}

#[cfg(test)]
mod tests {
    use super::super::event::{Cost, Outcome, Stream};
    use super::*;

    #[test]
    fn an_event_is_one_line_and_reads_back() {
        let time: Timestamp = "2026-11-20T18:30:00.25Z".parse().unwrap();
        for (event, expected) in [
            (
                Event::Output {
                    index: 2,
                    stream: Stream::Stderr,
                    line: "a\n\u{9b}\"".to_owned(),
                },
                r#"{"schema":2,"time":"2026-11-20T18:30:00.25Z","event":"output","index":2,"stream":"stderr","line":"a\n\u009b\""}"#,
            ),
            (
                Event::StepFinished {
                    index: 1,
                    total: 2,
                    name: "packages".into(),
                    outcome: Outcome::Hit,
                    cost: Cost {
                        wall_ms: 3,
                        disk_delta: Some(-4096),
                        ..Cost::default()
                    },
                },
                r#"{"schema":2,"time":"2026-11-20T18:30:00.25Z","event":"step-finished","index":1,"total":2,"name":"packages","outcome":"hit","cost":{"wall_ms":3,"disk_delta":-4096}}"#,
            ),
        ] {
            let text = line(&event, time);
            assert_eq!(text, format!("{expected}\n"));
            let back: Event = serde_json::from_str(&text).unwrap();
            assert_eq!(back, event);
        }
    }
}
