"""Runs the examples of the documents that wieldy was built from, over MCP: the same names, arguments and options.

python3 documents.py WIELDY

The working folder is the workspace, and paths of the examples are set to it. Tools of the documents that wieldy
does not have are stand-ins here: programs that print the arguments they were given.
"""

import json
import os
import signal
import subprocess
import sys
import time
import unittest

WIELDY = sys.argv[1]
WORKSPACE = os.path.realpath(".")
REVISION = "2025-06-18"

# The tools of the second document, each with its timeout in seconds, its scopes, and the arguments of its table.
BOTH, ORACLE, LIBRARIAN = ["oracle", "librarian"], ["oracle"], ["librarian"]
INVENTORY = {
    "search_code": (30, BOTH, {"query": "auth", "limit": 5, "language": "rust"}),
    "find_definition": (30, ORACLE, {"symbol": "main", "scope": "src", "kind": "function"}),
    "find_references": (30, ORACLE, {"symbol": "main", "limit": 5}),
    "get_repo_map": (45, ORACLE, {"scope": "src", "max_tokens": 1000}),
    "vault_write": (10, BOTH, {"path": "a.md", "body": "text", "title": "A", "project_id": "default"}),
    "vault_search": (15, BOTH, {"query": "a", "limit": 5, "project_id": "default"}),
    "vault_list": (10, BOTH, {"folder": "notes", "project_id": "default"}),
    "vault_move": (10, LIBRARIAN, {"path": "a.md", "new_path": "b.md"}),
    "vault_create_index": (20, LIBRARIAN, {"folder": "."}),
    "thread_push": (10, ORACLE, {"thread_id": "t", "content": "c", "entry_type": "note"}),
    "thread_read": (10, ORACLE, {"thread_id": "t", "limit": 5}),
    "thread_seek": (15, ORACLE, {"query": "q", "limit": 5, "project_id": "default"}),
    "thread_list": (10, ORACLE, {"status": "open", "project_id": "default"}),
    "web_fetch": (60, BOTH, {"url": "https://example.com/", "max_tokens": 1000}),
    "delegate_librarian": (1200, ORACLE, {"task": "tidy", "task_type": "index", "files": ["a.md"], "folder": "notes"}),
    "notify_self": (5, ORACLE, {"message": "hi", "priority": "low", "category": "reminder"}),
    "github_read": (30, BOTH, {"repo": "a/b", "path": "c", "branch": "main"}),
    "github_search": (45, ORACLE, {"query": "q", "repo": "a/b", "language": "rust", "limit": 5}),
    "deep_research": (1800, ORACLE, {"query": "q", "depth": 2, "save_to_vault": True, "output_folder": "notes"}),
}

# The tools of the inventory that wieldy does not have yet. The answers of the others are tested elsewhere.
STAND_INS = {"web_fetch", "delegate_librarian", "github_read", "github_search", "deep_research"}

CONFIGURATION = """
limits.calls-running-per-agent-max = 4
timeouts.default = "30s"
serve.mcp.batch = "all"
serve.mcp.task-after = "200ms"
vault.root = "."
[resources]
cpu-millicores = 500
memory-mb = 1024
[resources.tools.Bash]
cpu-millicores = 1000
memory-mb = 2048
"""

# `npm` for machines without one. A build for production lasts until the test has seen that it runs.
NPM = """#!/bin/sh
[ "$*" != "run production" ] || until [ -e go ]; do sleep 0.05; done
echo "npm $*"
"""


def manifest():
    """Returns the manifest of the stand-ins. Those of the inventory print their arguments."""

    def tool(name, timeout, scopes, arguments, **more):
        kinds = {str: "string", int: "integer", bool: "boolean", list: "array"}
        properties = {argument: {"type": kinds[type(value)]} for argument, value in arguments.items()}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        known = {"name": name, "description": f"stands in for {name}", "timeout": timeout, "scopes": scopes}
        return {**known, "read-only": True, "input-schema": schema, **more}

    tools = [
        tool(name, timeout, scopes, arguments, command=["cat"], stdin="{args}", output="json")
        for name, (timeout, scopes, arguments) in INVENTORY.items()
        if name in STAND_INS
    ]
    tools.append(tool("web_search", 60, BOTH, {"query": ""}, command=["sh", "-c", "sleep 30"]))
    tools.append(tool("long_operation", 30, [], {"n": 1}, command=["echo", "done"]))
    return json.dumps({"tools": tools})


def write(path, text):
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
    return os.path.join(WORKSPACE, path)


def read(path):
    with open(path) as file:
        return file.read()


def wieldy(*arguments):
    return subprocess.run([WIELDY, *arguments], check=True, capture_output=True, text=True).stdout


def recorded(answer):
    """Returns the record of the call that gave this answer, and its events by name.

    The record of a call that only reads is on disk some time after the answer, so other processes wait for it.
    """
    command = [WIELDY, "history", "show", answer["_meta"]["wieldy/execution"], "--json"]
    while True:
        shown = subprocess.run(command, capture_output=True, text=True)
        record = json.loads(shown.stdout) if shown.returncode == 0 else None
        if record and record["execution"]["completed_at"]:
            return record, {event["name"]: event for event in record["events"]}
        time.sleep(0.05)


class Client:
    """A client of `wieldy mcp`, which it starts."""

    def __init__(self, *arguments, revision=REVISION, stderr=None):
        """Starts the server, and greets it unless there is no revision."""
        command = [WIELDY, "mcp", *arguments]
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True)
        self.id = 0
        if revision is None:
            return
        info = {"name": "documents", "version": "1"}
        self.ask("initialize", {"protocolVersion": revision, "capabilities": {}, "clientInfo": info})
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def send(self, message):
        self.server.stdin.write(json.dumps(message) + "\n")
        self.server.stdin.flush()

    def answer(self, message):
        """Sends a request and returns the whole answer."""
        self.send(message)
        while True:
            answer = json.loads(self.server.stdout.readline())
            if answer.get("id") == message["id"]:
                return answer

    def ask(self, method, params):
        self.id += 1
        return self.answer({"jsonrpc": "2.0", "id": self.id, "method": method, "params": params})

    def call(self, tool, arguments, **options):
        """Calls a tool with options in `_meta`, and returns its result."""
        meta = {f"wieldy/{name}": value for name, value in options.items()}
        answer = self.ask("tools/call", {"name": tool, "arguments": arguments, "_meta": meta})
        return answer.get("result", answer)

    def close(self):
        self.server.stdin.close()
        self.server.stdout.close()
        return self.server.wait()


def content_of(text):
    return [{"type": "text", "text": text}]


def batch_of(answer):
    """Returns id, tool and status of each result of a batch, in their order."""
    return [(result["id"], result["tool"], result["status"]) for result in answer["_meta"]["wieldy/batch"]["results"]]


class Example(unittest.TestCase):
    maxDiff = None
    options = []

    def setUp(self):
        self.client = Client(*self.options)
        self.addCleanup(lambda: self.assertEqual(self.client.close(), 0))

    def assert_text(self, answer, text):
        """Checks that a call succeeded, and the whole of what a model sees of it."""
        told = {key: value for key, value in answer.items() if key != "_meta"}
        self.assertEqual(told, {"content": content_of(text), "isError": False})

    def assert_error(self, answer, code, category, message, retryable=False):
        """Checks that a call failed, and everything that a program decides by."""
        self.assertEqual(answer["isError"], True)
        error = answer["_meta"]["wieldy/error"]
        told = [error[key] for key in ("code", "category", "message", "retryable")]
        self.assertEqual(told, [code, category, message, retryable])

    def assert_started(self, answer, seconds):
        """Checks the timeout with which a call was started."""
        self.assertEqual(recorded(answer)[1]["tool.call.started"]["data"]["timeout_ms"], seconds * 1000)


class Document001(Example):
    """The executor with sandboxes: agent contexts, resource limits, long-running tools."""

    options = ["--agent", "did:agent:abc123", "--tenant", "tenant-001", "--session", "session-456"]

    def test_execute_a_tool(self):
        path = write("project/src/modal.tsx", "export const Modal = 1\n")
        answer = self.client.call("Read", {"file_path": path})
        self.assert_text(answer, "export const Modal = 1\n")
        record, events = recorded(answer)
        caller = [record["execution"][key] for key in ("agent", "tenant", "session", "tool", "status", "parameters")]
        parameters = {"path": "project/src/modal.tsx"}
        self.assertEqual(
            caller, ["did:agent:abc123", "tenant-001", "session-456", "Read", "success", parameters]
        )
        self.assertEqual(list(events), ["tool.call.pending", "tool.call.started", "tool.call.success"])

    def test_execute_with_custom_resource_limits(self):
        answer = self.client.call("Bash", {"command": "npm run build"}, timeout_ms=300_000)
        self.assert_text(answer, "npm run build\n")
        self.assert_started(answer, 300)
        # A request over MCP cannot ask for limits. They are the operator's for the tool, or those of the command line.
        limits = ["--cpu", "1000", "--memory", "2048", "--timeout", "300s", "--json"]
        result = json.loads(wieldy("call", "Bash", "command=npm run build", *limits))
        held = [result["sandbox"]["limits"][key] for key in ("cpu_millicores", "memory_bytes")]
        self.assertEqual([result["content"], held], [content_of("npm run build\n"), [1000, 2048 << 20]])
        shown = json.loads(wieldy("tools", "show", "Bash", "--json"))["resources"][:2]
        self.assertEqual([limit["value"] for limit in shown], [1000, 2048 << 20])

    def test_execute_a_long_running_tool(self):
        write("package.json", '{"scripts": {"production": "build"}}')
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "documents", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}},
        }
        # A client of this revision greets nobody, so it has a server of its own.
        client = Client(*self.options, revision=None)
        build = {"name": "Build", "arguments": {"target": "production"}, "_meta": meta}
        task = client.ask("tools/call", build)["result"]
        self.assertEqual([task["resultType"], task["status"]], ["task", "working"])
        write("go", "")
        told = task
        while told["status"] == "working":
            time.sleep(0.05)
            told = client.ask("tasks/get", {"taskId": task["taskId"], "_meta": meta})["result"]
        self.assertEqual([told["status"], told["result"]["isError"]], ["completed", False])
        self.assertEqual(told["result"]["content"], content_of("npm run production\n"))
        self.assertEqual(client.close(), 0)

    def test_get_a_tool_definition(self):
        tools = {tool["name"]: tool for tool in self.client.ask("tools/list", {})["result"]["tools"]}
        definition = json.loads(wieldy("tools", "show", "Read", "--json"))
        told = [tools["Read"][key] for key in ("name", "description", "inputSchema")]
        self.assertEqual(told, [definition[key] for key in ("name", "description", "input_schema")])
        self.assertEqual(definition["constraints"]["timeout_ms"], 10_000)
        self.assertNotIn("Reed", tools)
        answer = self.client.ask("tools/call", {"name": "Reed", "arguments": {}})["error"]
        self.assertEqual(answer["message"], "there is no tool `Reed`; did you mean `Read`?")
        self.assertEqual(answer["data"]["code"], "E3001")

    def test_handle_execution_errors(self):
        answer = self.client.call("Bash", {"command": "sleep 30"}, timeout_ms=200)
        # The document calls every timeout retryable. This command may have had an effect, so it is not.
        self.assert_error(answer, "E3103", "timeout_error", "the run was stopped after 0.200 s")
        answer = self.client.call("Bash", {"command": "exit 3"})
        self.assert_error(answer, "E3108", "tool_error", "`bash` ended with exit code 3")

    def test_the_complete_workflow(self):
        readme = write("project/README.md", "# Project\n")
        self.assert_text(self.client.call("Read", {"file_path": readme}), "# Project\n")
        path = write("project/src/app.tsx", "old code\n")
        answer = self.client.call("Edit", {"file_path": path, "old_string": "old code", "new_string": "new code"})
        self.assertEqual([answer["isError"], read(path)], [False, "new code\n"])
        answer = self.client.call("Bash", {"command": "npm test"}, timeout_ms=120_000)
        self.assert_text(answer, "npm test\n")
        self.assert_started(answer, 120)

    def test_best_practices_for_timeouts(self):
        write("a.txt", "text")
        answer = self.client.call("Read", {"path": "a.txt"}, timeout_ms=10_000)
        self.assert_text(answer, "text")
        self.assert_started(answer, 10)
        answer = self.client.call("Bash", {"command": "npm install"}, timeout_ms=300_000)
        self.assert_text(answer, "npm install\n")
        self.assert_started(answer, 300)


class Document002(Example):
    """The inventory of tools, batches, timeouts, failures and stale sources."""

    options = ["--user", "test-user"]

    def test_the_inventory(self):
        told, expected = {}, {}
        for name, (timeout, _, arguments) in INVENTORY.items():
            answer = self.client.call(name, arguments)
            record, events = recorded(answer)
            structured = answer["_meta"].get("wieldy/structured")
            timeout_ms = events["tool.call.started"]["data"]["timeout_ms"]
            told[name] = [timeout_ms, record["execution"]["user"]]
            expected[name] = [timeout * 1000, "test-user"]
            if name in STAND_INS:
                told[name] += [answer["isError"], structured]
                expected[name] += [False, arguments]
        self.assertEqual(told, expected)

    def test_agent_scopes(self):
        librarian = Client("--scope", "librarian")
        listed = {tool["name"] for tool in librarian.ask("tools/list", {})["result"]["tools"]}
        self.assertEqual(librarian.close(), 0)
        scoped = {name for name, (_, scopes, _) in INVENTORY.items() if "librarian" in scopes}
        self.assertEqual(listed & set(INVENTORY), scoped)

    def test_the_input_of_a_batch(self):
        calls = [
            {"name": "search_code", "arguments": {"query": "auth"}, "id": "call_1"},
            {"name": "vault_list", "arguments": {}, "id": "call_2"},
        ]
        answer = self.client.call("batch", {"calls": calls})
        self.assertEqual(
            batch_of(answer), [("call_1", "search_code", "success"), ("call_2", "vault_list", "success")]
        )

    def test_single_tool_execution(self):
        write("test/note.md", "# A note\n")
        answer = self.client.call("vault_read", {"path": "test/note.md"})
        self.assert_text(answer, "# A note\n")
        self.assert_started(answer, 10)
        event = recorded(answer)[1]["tool.call.success"]
        self.assertEqual([event["severity"], event["data"]["status"]], ["debug", "success"])
        self.assertGreater(event["data"]["duration_ms"], 0)

    def test_batch_execution(self):
        calls = [
            {"name": "vault_list", "arguments": {}, "id": "list"},
            {"name": "thread_list", "arguments": {}, "id": "threads"},
        ]
        answer = self.client.call("batch", {"calls": calls})
        self.assertEqual(batch_of(answer), [("list", "vault_list", "success"), ("threads", "thread_list", "success")])

    def test_tool_timeout(self):
        answer = self.client.call("web_search", {"query": "test"}, timeout_ms=1, retries=0)
        self.assert_error(answer, "E3103", "timeout_error", "the run was stopped after 0.001 s", retryable=True)
        record, events = recorded(answer)
        event = events["tool.call.timeout"]
        told = [event["severity"], event["data"]["clock"], event["data"]["timeout_ms"], record["execution"]["tool"]]
        self.assertEqual(told, ["warning", "attempt", 1, "web_search"])

    def test_tool_failure(self):
        for tool in ("vault_read", "Read"):
            answer = self.client.call(tool, {"path": "nonexistent/path.md"})
            self.assert_error(answer, "E3302", "resource_error", "there is no `nonexistent/path.md`")

    def test_staleness_detection(self):
        write("test.md", "one\n")
        first = self.client.call("vault_read", {"path": "test.md"})
        self.assert_text(first, "one\n")
        write("test.md", "two\n")
        answer = self.client.call("vault_read", {"path": "test.md"})
        self.assert_text(answer, "two\n\n[the note changed since this session last read or wrote it]")
        event = recorded(answer)[1]["source.stale"]
        told = [event["severity"], event["data"]["path"], event["data"]["project_id"]]
        hashes = [event["data"][key] for key in ("previous_hash", "current_hash")]
        self.assertEqual(told, ["warning", "test.md", "default"])
        self.assertEqual(hashes, [read["_meta"]["wieldy/structured"]["metadata"]["hash"] for read in (first, answer)])


class Document004(Example):
    """Tool execution over MCP: requests, answers, timeouts and batches."""

    def test_the_request_and_its_response(self):
        path = write("path/to/file.txt", "File contents here...")
        request = {"name": "read_file", "arguments": {"path": path}}
        answer = self.client.answer({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": request})
        shown = recorded(answer["result"])[0]["execution"]
        del answer["result"]["_meta"]
        result = {"content": content_of("File contents here..."), "isError": False}
        self.assertEqual(answer, {"jsonrpc": "2.0", "id": 1, "result": result})
        self.assertEqual([shown["tool"], shown["parameters"]], ["Read", {"path": "path/to/file.txt"}])

    def test_execute_a_single_tool(self):
        path = write("etc/hosts", "127.0.0.1 localhost\n")
        self.assert_text(self.client.call("read_file", {"path": path}), "127.0.0.1 localhost\n")

    def test_execute_with_a_timeout(self):
        answer = self.client.call("long_operation", {"n": 1}, timeout_ms=60_000)
        self.assert_text(answer, "done\n")
        self.assert_started(answer, 60)
        self.assert_started(self.client.call("long_operation", {"n": 1}), 30)

    def test_batch_execution(self):
        write("a.txt", "a")
        write("b.txt", "b")
        calls = [{"tool": "read_file", "arguments": {"path": path}} for path in ("a.txt", "b.txt")]
        answer = self.client.call("batch", {"calls": calls})
        self.assertEqual(batch_of(answer), [(None, "Read", "success"), (None, "Read", "success")])
        results = answer["content"][0]["text"].split("\n=== ")[1:]
        self.assertEqual([result.split("\n")[1] for result in results], ["a", "b"])

    def test_the_log(self):
        path = write("etc/hosts", "127.0.0.1 localhost\n")
        client = Client("--log", "wieldy::call=debug", "--set", "log.format=json", stderr=subprocess.PIPE)
        self.assert_text(client.call("read_file", {"path": path}), "127.0.0.1 localhost\n")
        log = client.server.stderr
        self.assertEqual(client.close(), 0)
        lines = [json.loads(line) for line in log]
        log.close()
        keys = ("level", "message", "tool", "provider", "arguments", "status", "output_bytes")
        told = [[line[key] for key in keys if key in line] for line in lines]
        call = ["Read", "builtin"]
        accepted = ["DEBUG", "call accepted", *call, '{"path":"etc/hosts"}']
        ended = ["INFO", "call ended", *call, "success", 20]
        self.assertEqual(told, [accepted, ["INFO", "call started", *call], ["DEBUG", "call answered", *call], ended])
        self.assertGreater(lines[3]["duration_ms"], 0)

    def test_a_path_outside_of_the_workspace(self):
        # It is in the first document, whose examples are those of a library.
        calls = [{"tool": "ReadFile", "args": {"path": "/a.js"}}]
        error = self.client.call("batch", {"calls": calls})["_meta"]["wieldy/batch"]["results"][0]["error"]
        self.assertEqual(
            [error["code"], error["message"]], ["E3105", "`/a.js` is an absolute path outside the workspace"]
        )


if __name__ == "__main__":
    signal.alarm(150)
    write("wieldy.toml", CONFIGURATION)
    write(".wieldy/tools/stand_ins.json", manifest())
    os.chmod(write(os.path.join(os.environ["HOME"], ".local/bin/npm"), NPM), 0o755)
    wieldy("trust", "--yes")
    unittest.main(argv=sys.argv[:1], verbosity=2)
