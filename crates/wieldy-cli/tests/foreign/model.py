"""A scripted model on loopback. It speaks the wire formats of Anthropic's Messages and of OpenAI's Responses and Chat
Completions, makes the calls of its script one after the other, and writes down the text that came back for each.

python model.py SCRIPT SEEN: prints its port, then serves until its standard input ends.
SCRIPT: JSON, a list of {"id", "tool", "arguments"}. SEEN: the file for what reached the model, JSON by the ids.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

script = json.load(open(sys.argv[1]))
seen = {}
lock = threading.Lock()


def record(outputs):
    """Keeps the outputs of calls, and returns the first call that has none yet."""
    with lock:
        for call_id, output in outputs.items():
            if call_id.startswith("call_"):
                seen.setdefault(call_id.removeprefix("call_"), output)
        with open(sys.argv[2] + ".new", "w") as file:
            json.dump(seen, file)
        os.replace(sys.argv[2] + ".new", sys.argv[2])
    return next((call for call in script if f"call_{call['id']}" not in outputs), None)


def listed(tools):
    """The client's names for the tools of the script, each with its namespace. A client's own tools may be named alike."""
    names = {}
    for tool in tools or []:
        tool = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        namespace = tool["name"] if tool.get("type") == "namespace" else None
        for one in tool["tools"] if namespace else [tool]:
            name = one.get("name", "")
            plain = name.replace("-", "_")
            for call in script:
                wanted = call["tool"].replace("-", "_")
                is_ours = "wieldy" in name or "wieldy" in (namespace or "")
                if plain == wanted and (namespace or call["tool"] not in names) or is_ours and plain.endswith(f"_{wanted}"):
                    names[call["tool"]] = (name, namespace)
    return names


class Model(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(b"", "text/plain")

    def do_GET(self):
        self.answer(b'{"data":[],"models":[]}', "application/json")

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.headers.get("content-encoding"):
            return self.answer(b"{}", "application/json", 415)
        request = json.loads(body or b"{}")
        path = self.path.split("?")[0]
        if path.endswith("/messages"):
            self.anthropic_messages(request)
        elif path.endswith("/responses"):
            self.openai_responses(request)
        elif path.endswith("/chat/completions"):
            self.openai_completions(request)
        else:
            self.answer(b'{"input_tokens":1}', "application/json")

    def answer(self, body, kind, status=200):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def events(self, events, named=True):
        lines = [(f"event: {e['type']}\n" if named else "") + f"data: {json.dumps(e)}\n\n" for e in events]
        self.answer(("".join(lines) + ("" if named else "data: [DONE]\n\n")).encode(), "text/event-stream")

    def next_call(self, request, outputs):
        """The next call of the script with the client's name of its tool, where the client offers the tools at all."""
        names = listed(request.get("tools"))
        if not names:
            return None
        call = record(outputs)
        if call is None:
            return None
        name, namespace = names.get(call["tool"], (call["tool"], None))
        return {"id": f"call_{call['id']}", "name": name, "namespace": namespace, "arguments": call["arguments"]}

    def anthropic_messages(self, request):
        outputs = {}
        for message in request.get("messages", []):
            for block in message["content"] if isinstance(message["content"], list) else []:
                if block.get("type") == "tool_result":
                    outputs[block["tool_use_id"]] = block.get("content", "")
        call = self.next_call(request, outputs)
        if call:
            block = {"type": "tool_use", "id": call["id"], "name": call["name"], "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(call["arguments"])}
            full = {**block, "input": call["arguments"]}
        else:
            block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": "done"}
            full = {"type": "text", "text": "done"}
        stop = "tool_use" if call else "end_turn"
        usage = {"input_tokens": 1, "output_tokens": 1}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": request.get("model", "m")}
        message |= {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        if not request.get("stream"):
            message |= {"content": [full], "stop_reason": stop}
            return self.answer(json.dumps(message).encode(), "application/json")
        self.events([
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": usage},
            {"type": "message_stop"},
        ])

    def openai_responses(self, request):
        inputs = request.get("input")
        outputs = {
            item["call_id"]: item["output"]
            for item in (inputs if isinstance(inputs, list) else [])
            if item.get("type") in ("function_call_output", "mcp_tool_call_output")
        }
        call = self.next_call(request, outputs)
        if call:
            item = {"type": "function_call", "id": "fc_" + call["id"], "call_id": call["id"], "name": call["name"]}
            item |= {"arguments": json.dumps(call["arguments"]), "status": "completed"}
            if call["namespace"]:
                item["namespace"] = call["namespace"]
        else:
            content = [{"type": "output_text", "text": "done", "annotations": []}]
            item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        response = {"id": "resp_1", "object": "response", "created_at": 0, "status": "completed", "output": [item]}
        response |= {"model": request.get("model", "m"), "usage": usage, "error": None, "parallel_tool_calls": False}
        response |= {"tool_choice": "auto", "tools": []}
        if not request.get("stream"):
            return self.answer(json.dumps(response).encode(), "application/json")
        self.events([
            {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": response},
        ])

    def openai_completions(self, request):
        outputs = {m["tool_call_id"]: m["content"] for m in request["messages"] if m.get("role") == "tool"}
        call = self.next_call(request, outputs)
        if call:
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls = [{"index": 0, "id": call["id"], "type": "function", "function": function}]
            message, reason = {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
        else:
            message, reason = {"role": "assistant", "content": "done"}, "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        whole = {"id": "c1", "created": 0, "model": request.get("model", "m"), "usage": usage}
        if not request.get("stream"):
            choices = [{"index": 0, "message": message, "finish_reason": reason}]
            body = {**whole, "object": "chat.completion", "choices": choices}
            return self.answer(json.dumps(body).encode(), "application/json")
        chunk = {**whole, "object": "chat.completion.chunk"}
        self.events([
            {**chunk, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        ], named=False)


server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
print(server.server_port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
