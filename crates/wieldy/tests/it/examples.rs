//! Tests that the examples print the output that they promise.

#[path = "../../examples/batch.rs"]
#[expect(dead_code, reason = "an example's `main` is not called here")]
mod batch;
#[path = "../../examples/cancel.rs"]
#[expect(dead_code, reason = "an example's `main` is not called here")]
mod cancel;
#[path = "../../examples/confirm.rs"]
#[expect(dead_code, reason = "an example's `main` is not called here")]
mod confirm;
#[path = "../../examples/custom_tool.rs"]
#[expect(dead_code, reason = "an example's `main` is not called here")]
mod custom_tool;
#[path = "../../examples/history.rs"]
#[expect(dead_code, reason = "an example's `main` is not called here")]
mod history;
#[path = "../../examples/observe.rs"]
#[expect(dead_code, reason = "an example's `main` is not called here")]
mod observe;

// Shows: C2.1
#[tokio::test]
async fn a_custom_tool_greets() {
    insta::assert_snapshot!(custom_tool::run().await.unwrap(), @"hello, Ada");
}

#[tokio::test]
async fn a_batch_runs_in_order_of_need() {
    insta::assert_snapshot!(batch::run().await.unwrap(), @"
    write: success
    search: success
    copy: success
    missing: failed
    3 of 4 succeeded
    ");
}

// Shows: D2.1
#[tokio::test]
async fn a_call_is_observed_from_its_first_event_on() {
    insta::assert_snapshot!(observe::run().await.unwrap(), @"
    tool.call.pending
    tool.call.started
    tool.call.progress
    tool.call.progress
    tool.call.progress
    tool.call.success
    ");
}

#[tokio::test]
async fn calls_are_recorded_and_proved() {
    insta::assert_snapshot!(history::run().await.unwrap(), @r#"
    send: failed {"text":"lost"}
    send: success {"to":"Ada","password":"[redacted]"}
    tool.call.pending
    tool.call.started
    tool.call.success
    2 calls, 1 of them failed
    8 records, problem: None
    "#);
}

#[tokio::test]
async fn a_person_confirms_one_call_and_refuses_another() {
    insta::assert_snapshot!(confirm::run().await.unwrap(), @"
    dropped scratch
    E3005 CONFIRMATION_DENIED: the call was not confirmed
    ");
}

#[tokio::test]
async fn a_cancelled_call_has_its_cause_and_its_output() {
    insta::assert_snapshot!(cancel::run().await.unwrap(), @"
    cancelled: working, tidied up
    E3109 CANCELLED: the call was cancelled
    ");
}
