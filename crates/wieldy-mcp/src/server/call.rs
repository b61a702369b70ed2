//! Answers `tools/call` over both transports: makes a call of the executor's and returns its result.

use std::sync::Arc;

use rmcp::ErrorData;
use rmcp::model::{CallToolRequestParams, CallToolResponse};
use serde_json::Value;
use wieldy_core::{Call, CallError, Caller, Code, Confirmer, Options};

use super::follow::{CallRequest, RunningCall};
use super::meta::MetaTool;
use super::peer::{AskMode, PeerClient};
use super::questions::{AskedCall, ReturnedInput};
use super::request_options::{RequestOptions, WrongOptions};
use super::{Shared, batch_tool};
use crate::convert;

pub(crate) type CallResult = Result<CallToolResponse, ErrorData>;

/// Answers a `tools/call` request.
pub(crate) async fn answer(
    shared: &Shared,
    caller: &Arc<Caller>,
    mut params: CallToolRequestParams,
    client: &PeerClient,
) -> CallResult {
    // `tool_call`, one of our own tools, becomes a call of another tool.
    match MetaTool::named(&params.name, shared, caller) {
        None => {}
        Some(MetaTool::Batch) => return Box::pin(batch_tool::answer(shared, caller, params, client)).await,
        Some(own) => {
            // The options beside `tool_call` are those of the call that it makes.
            if let Err(wrong) = &client.options
                && own != MetaTool::Call
            {
                let arguments = params.arguments.take().map_or(Value::Null, Value::Object);
                let error = wrong.error.clone();
                return Box::pin(refuse_own(shared, caller, &params.name, arguments, error, client)).await;
            }
            match Box::pin(own.answer(shared, params.arguments.take(), caller, client)).await {
                Ok((tool, arguments)) => {
                    params.name = tool.into();
                    params.arguments = arguments;
                }
                Err(answer) => return Ok(answer.into()),
            }
        }
    }
    let arguments = Arc::new(params.arguments.take().map_or(Value::Null, Value::Object));
    let RequestOptions { options, context, metadata, notes } = match &client.options {
        Ok(options) => options.clone(),
        Err(wrong) => return Box::pin(refuse(shared, caller, &params.name, arguments, wrong, client)).await,
    };
    let asked = AskedCall { caller, tool: &params.name, arguments: &arguments, context: context.as_deref() };
    let request = CallRequest { shared, client, asked };
    if params.request_state.is_some() {
        return Box::pin(answer_repeated(request, &params)).await;
    }
    let confirmer = (client.ask_mode != AskMode::None).then(|| Arc::clone(&shared.questions) as Arc<dyn Confirmer>);
    let begun = shared.executor.begin(Call {
        tool: (*params.name).into(),
        arguments: Arc::clone(&arguments),
        call_id: None,
        caller: Arc::clone(caller),
        options: Options { confirmer, ..options },
        context: context.clone(),
        metadata,
        notes,
    });
    request.follow(RunningCall::Own(begun)).await
}

/// Refuses a call for its options. The call is recorded.
async fn refuse(
    shared: &Shared,
    caller: &Arc<Caller>,
    tool: &str,
    arguments: Arc<Value>,
    wrong: &WrongOptions,
    client: &PeerClient,
) -> CallResult {
    let call = Call { arguments, ..Call::new(tool, Value::Null).by(Arc::clone(caller)) };
    let result = shared.executor.refuse_unread(client.with_objects(call), wrong.error.clone()).await;
    Ok(convert::call_result(result, client.is_modern).into())
}

/// Refuses and records a request for one of our own tools.
pub(crate) async fn refuse_own(
    shared: &Shared,
    caller: &Arc<Caller>,
    tool: &str,
    arguments: Value,
    error: CallError,
    client: &PeerClient,
) -> CallResult {
    let call = client.with_objects(Call::new(tool, arguments).by(Arc::clone(caller)));
    let result = shared.executor.refuse_own(call, error).await;
    Ok(convert::call_result(result, client.is_modern).into())
}

/// Refuses and records a call whose message was too large to be parsed.
pub(crate) async fn refuse_oversized(
    shared: &Shared,
    caller: &Arc<Caller>,
    tool: &str,
    told: &str,
    is_modern: bool,
) -> CallResult {
    let advice = "write large values to a file in the workspace, and pass its path";
    let error = CallError::new(Code::ValidationFailed, told).suggest(advice);
    let call = Call::new(tool, Value::Null).by(Arc::clone(caller));
    let result = shared.executor.refuse_unread(call, error).await;
    Ok(convert::call_result(result, is_modern).into())
}

/// Continues a call with the answer to its question.
async fn answer_repeated(request: CallRequest<'_>, params: &CallToolRequestParams) -> CallResult {
    let questions = &request.shared.questions;
    let sealed = params.request_state.as_deref().unwrap_or_default();
    match questions.open_returned(sealed, &request.asked, params.input_responses.as_ref())? {
        ReturnedInput::Answered(id) => {
            let work = RunningCall::task(request.shared, id, request.asked.caller);
            request.follow(work).await
        }
        ReturnedInput::Nothing(question) => Ok(questions.input_required(&question, &request.asked).into()),
        ReturnedInput::TooLate(_) => {
            let error = CallError::new(Code::ConfirmationDenied, "the question is over: it was answered or expired")
                .suggest("call again and confirm the new call");
            Ok(convert::refusal(&error).into())
        }
    }
}
